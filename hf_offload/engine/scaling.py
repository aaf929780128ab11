"""What multiplies the gradients of the next step: the loss scale's inverse and the clip factor.

Neither touches `.grad`: both are folded into the one pass of the host step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_offload.engine.gradients import Gradient
from hf_offload.engine.norm import clip_factor, gradient_norm
from hf_offload.errors import ConfigError, StateError, explain

_TOKEN = "_hf_offload_seen"


@dataclass(frozen=True)
class Factor:
    """The multiplier of a step's gradients; `skip` says that the step must not be taken at all."""

    value: float
    skip: bool


class PendingScale:
    """What was asked for between backward and `step()`, tied to the very gradients it was asked for.

    Attributes:
        norm: L2 norm of the unscaled gradients, None as long as nobody computed it.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.clear()

    def clear(self) -> None:
        self._token: object | None = None
        self._versions: list[int] = []
        self._scaled_norm = 0.0
        self._inverse = 1.0
        self._bound = math.inf
        self.norm: float | None = None

    def measure(self, grads: Sequence[Gradient]) -> float:
        """The norm of the unscaled gradients, computed once; anything pending for older gradients is dropped."""
        if not self._matches(grads):
            self.clear()
            self._token = object()
            self._versions = [g.param.grad._version for g in grads]  # type: ignore[union-attr]
            for g in grads:
                setattr(g.param.grad, _TOKEN, self._token)
            self._scaled_norm = gradient_norm((g.value for g in grads), self._threads)
            self.norm = self._scaled_norm
        assert self.norm is not None
        return self.norm

    def unscale(self, grads: Sequence[Gradient], inverse: float) -> bool:
        """Fold the loss scale's inverse into the next step. Returns whether a gradient is inf or NaN."""
        self.measure(grads)
        self._inverse = inverse
        self.norm = self._scaled_norm * inverse
        return not math.isfinite(self._scaled_norm)

    def clip(self, grads: Sequence[Gradient], max_norm: float) -> float:
        """Fold clipping to `max_norm` into the next step; of several bounds the tightest holds. Returns the norm.

        Raises:
            ConfigError: a negative or NaN bound.
        """
        if not max_norm >= 0.0:
            raise ConfigError(explain("max_norm", max_norm, "not a bound for a norm", "Give 0 or more; inf only reads"))
        norm = self.measure(grads)
        self._bound = min(self._bound, max_norm)
        return norm

    def take(self, grads: Sequence[Gradient], skip_nonfinite: str) -> Factor:
        """The factor of the step that is taken now; nothing is pending afterwards.

        Raises:
            StateError: the gradients are not those that were clipped or unscaled.
        """
        if self._token is not None and not self._matches(grads):
            self.clear()
            raise StateError(
                "optimizer.step(): the gradients changed after clip_grad_norm_() or unscale_() measured them (a "
                "backward or an edit of .grad in between). Clip after the last backward, right before step()."
            )
        if self._token is None and skip_nonfinite == "always":
            self.measure(grads)
        norm, inverse, bound = self.norm, self._inverse, self._bound
        self.clear()
        if norm is None:
            return Factor(inverse, skip=False)
        skip = skip_nonfinite != "never" and not math.isfinite(norm)
        clip = 1.0 if bound == math.inf else clip_factor(bound, norm)
        return Factor(inverse * clip, skip)

    def _matches(self, grads: Sequence[Gradient]) -> bool:
        return (
            self._token is not None
            and len(grads) == len(self._versions)
            and all(_seen(g.param.grad, self._token, v) for g, v in zip(grads, self._versions))
        )


def _seen(grad: Tensor | None, token: object, version: int) -> bool:
    return grad is not None and getattr(grad, _TOKEN, None) is token and grad._version == version
