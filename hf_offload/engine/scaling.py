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

    @property
    def _changes_the_step(self) -> bool:
        return self._bound != math.inf or self._inverse != 1.0

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
        """Fold the loss scale's inverse into the next step. Returns whether a gradient is inf or NaN.

        Raises:
            ConfigError: an inverse that is not a positive number.
        """
        if not 0.0 < inverse < math.inf:
            raise ConfigError(explain("inv_scale", inverse, "not the inverse of a loss scale", "Give a number above 0"))
        self.measure(grads)
        self._bound *= inverse / self._inverse  # one given before was a bound for the scaled gradients
        self._inverse = inverse
        self.norm = self._scaled_norm * inverse
        return not math.isfinite(self._scaled_norm)

    def clip(self, grads: Sequence[Gradient], max_norm: float) -> float:
        """Fold clipping to `max_norm` into the next step; of several bounds the tightest holds. Returns the norm.

        Raises:
            ConfigError: a negative or NaN bound.
            StateError: a backward added to gradients that an earlier call was asked to clip or unscale.
        """
        if not max_norm >= 0.0:
            raise ConfigError(explain("max_norm", max_norm, "not a bound for a norm", "Give 0 or more; inf only reads"))
        if self._changes_the_step and not self._matches(grads) and self._among(grads):
            self.clear()
            raise StateError(_changed("clip_grad_norm_()"))
        norm = self.measure(grads)
        self._bound = min(self._bound, max_norm)
        return norm

    def take(self, grads: Sequence[Gradient], skip_nonfinite: str) -> Factor:
        """The factor of the step that is taken now; nothing is pending afterwards.

        Raises:
            StateError: the gradients are not those that were clipped or unscaled.
        """
        if self._token is not None and not self._matches(grads):
            lost = self._changes_the_step
            self.clear()  # a norm that was only read binds nobody
            if lost:
                raise StateError(_changed("step()"))
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

    def _among(self, grads: Sequence[Gradient]) -> bool:
        """Whether some of `grads` were measured, as they are or as they were before something was added to them."""
        return any(getattr(g.param.grad, _TOKEN, None) is self._token for g in grads)


def _seen(grad: Tensor | None, token: object, version: int) -> bool:
    return grad is not None and getattr(grad, _TOKEN, None) is token and grad._version == version


def _changed(call: str) -> str:
    return (
        f"optimizer.{call}: the gradients changed after clip_grad_norm_() or unscale_() measured them (a backward or "
        "an edit of .grad in between). Clip once, after the last backward and right before step(); "
        "optimizer.zero_grad() drops what is pending."
    )
