"""Steps that are not taken, since gradients are not finite: how many there were, and when to speak of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

SHOWN = 3
"""Names in a message; more are counted."""
ALARMING = 8
"""Skipped steps in a row from which a loss scale that is being sought is no longer the likely cause."""


class Skips:
    """Counts skipped steps.

    Attributes:
        count: since construction.
        in_a_row: since the last step that was taken.
    """

    def __init__(self) -> None:
        self.count = 0
        self.in_a_row = 0

    def add(self) -> None:
        self.count += 1
        self.in_a_row += 1

    def taken(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    @property
    def worth_a_warning(self) -> bool:
        """At the 1st, 2nd, 4th, 8th ... of all, and of those in a row once these are many: rising counts, no flood."""
        return _power_of_two(self.count) or self.alarming

    @property
    def alarming(self) -> bool:
        """At the 8th, 16th, 32nd ... in a row."""
        return self.in_a_row >= ALARMING and _power_of_two(self.in_a_row)


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def not_finite(
    params: Sequence[Tensor], sums: Sequence[float], root: nn.Module | None, groups: Sequence[Mapping[str, Any]]
) -> str:
    """The names of the first parameters whose gradients are not finite, for a message.

    Args:
        sums: of each parameter's squared gradients.
        root: the model that names them, if one is attached.
    """
    bad = [p for p, total in zip(params, sums) if not abs(total) < float("inf")]
    names = {id(p): name for name, p in root.named_parameters()} if root is not None else {}
    shown = [names.get(id(p)) or _place(p, groups) for p in bad[:SHOWN]]
    return ", ".join(shown) + (f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else "")


def _place(p: Tensor, groups: Sequence[Mapping[str, Any]]) -> str:
    """What torch calls it in `param_names`, where it was given names; else its place."""
    for n, group in enumerate(groups):
        for i, q in enumerate(group["params"]):
            if q is p:
                given = group.get("param_names")
                return str(given[i]) if given else f"parameter {i} of group {n}"
    return f"a parameter of shape {tuple(p.shape)}"
