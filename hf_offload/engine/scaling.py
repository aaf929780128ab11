"""What multiplies the gradients of the next step: the loss scale's inverse and the clip factor.

Neither touches `.grad`: both are folded into the one pass of the host step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_offload.engine.gradients import GradientSet
from hf_offload.engine.norm import clip_factor
from hf_offload.errors import ConfigError, StateError, explain


@dataclass(frozen=True)
class Factor:
    """What multiplies a step's gradients: the loss scale's inverse and the clip factor.

    `skip` says that the step must not be taken at all.
    """

    inverse: float
    clip: float
    skip: bool

    @property
    def value(self) -> float:
        return self.inverse * self.clip


class PendingScale:
    """What was asked for between backward and `step()`, tied to the very gradients it was asked for.

    Attributes:
        norm: L2 norm of the unscaled gradients, None as long as nobody computed it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._memory: object | None = None
        self._scaled_norm = 0.0
        self._inverse = 1.0
        self._bound = math.inf
        self.norm: float | None = None

    def drop(self) -> float:
        """Nothing is pending any more. Returns the inverse of the loss scale that was."""
        inverse = self._inverse
        self.clear()
        return inverse

    @property
    def _changes_the_step(self) -> bool:
        return self._bound != math.inf or self._inverse != 1.0

    def measure(self, grads: GradientSet) -> float:
        """The norm of the unscaled gradients, computed once; anything pending for older gradients is dropped."""
        if not self._matches(grads):
            norm, memory = grads.norm(), grads.remember()
            self.clear()
            self.norm = self._scaled_norm = norm
            self._memory = memory  # last: an interrupted wait for the gradients leaves nothing pending
        assert self.norm is not None
        return self.norm

    def unscale(self, grads: GradientSet, inverse: float) -> bool:
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

    def clip(self, grads: GradientSet, max_norm: float) -> float:
        """Fold clipping to `max_norm` into the next step; of several bounds the tightest holds. Returns the norm.

        Raises:
            ConfigError: a negative or NaN bound.
            StateError: a backward added to gradients that an earlier call was asked to clip or unscale.
        """
        if not max_norm >= 0.0:
            raise ConfigError(explain("max_norm", max_norm, "not a bound for a norm", "Give 0 or more; inf only reads"))
        if self._changes_the_step and not self._matches(grads) and grads.overlaps(self._memory):
            self.clear()
            raise StateError(_changed("clip_grad_norm_()"))
        norm = self.measure(grads)
        self._bound = min(self._bound, max_norm)
        return norm

    def factor(self, grads: GradientSet, skip_nonfinite: str) -> Factor:
        """The factor of the step that is to be taken. It stays pending until `clear`, when the step has been taken.

        Raises:
            StateError: the gradients are not those that were clipped or unscaled.
        """
        if self._memory is not None and not self._matches(grads):
            lost = self._changes_the_step
            self.clear()  # a norm that was only read binds nobody
            if lost:
                raise StateError(_changed("step()"))
        if self._memory is None and skip_nonfinite == "always":
            self.measure(grads)
        norm, inverse, bound = self.norm, self._inverse, self._bound
        if norm is None:
            return Factor(inverse, 1.0, skip=False)
        skip = skip_nonfinite != "never" and not math.isfinite(norm)
        return Factor(inverse, 1.0 if bound == math.inf else clip_factor(bound, norm), skip)

    def _matches(self, grads: GradientSet) -> bool:
        return self._memory is not None and grads.same_as(self._memory)


def _changed(call: str) -> str:
    return (
        f"optimizer.{call}: the gradients changed after clip_grad_norm_() or unscale_() measured them (a backward or "
        "an edit of .grad in between). Clip once, after the last backward and right before step(); "
        "optimizer.zero_grad() drops what is pending."
    )
