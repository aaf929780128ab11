"""Who steps a parameter: where a second optimizer is made for it, the first lets go of it.

A notebook's next cell makes a new trainer over the same model while the old one, interrupted, still lives. Two that
both took a parameter's gradients during backward would each send what the other left in `.grad`, which has no memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hf_offload.errors import StateError


class Owner(Protocol):
    """An engine."""

    def hand_over(self, params: Sequence[Tensor]) -> None:
        """Return when nothing of ours will be written to `params`, and take their gradients no more."""
        ...


_OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
"""By the parameter's id, which is its own as long as the owner, who holds it, lives."""


def own(params: Sequence[Tensor], owner: Owner) -> None:
    """`owner` steps these from now on.

    Raises:
        WaitTimeout: a step of the owner before did not end.
    """
    before = {id(o): o for p in params if (o := _OWNERS.get(id(p))) is not None and o is not owner}
    for other in before.values():
        with contextlib.suppress(StateError):  # that its step failed is for its own user to hear
            other.hand_over(params)
    for p in params:
        _OWNERS[id(p)] = owner
