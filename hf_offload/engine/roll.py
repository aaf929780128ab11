"""The optimizer's parameters in the order of `param_groups`, looked up once and not in every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_offload.engine.alike import alike


class Roll:
    """Every parameter once, and its group's number.

    Attributes:
        params: the parameters; one listed twice in a group counts once.
        groups: the number of each one's group.
        plain: dtype and bytes of each; of one that is not contiguous, a dtype that no gradient has.
        all_plain: whether as many gradients are, one by one, a plain tensor like the parameter: then there is nothing
            to be said of any. It may say False where that is so.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lists = [list(g["params"]) for g in groups]
        numbered = {id(p): (p, n) for n, listed in enumerate(self._lists) for p in listed}
        self.params: list[Tensor] = [p for p, _ in numbered.values()]
        self.groups: list[int] = [n for _, n in numbered.values()]
        self.plain = [(p.dtype, p.nbytes) if p.is_contiguous() else (None, 0) for p in self.params]
        values = [p.detach() for p in self.params]
        self.all_plain = alike(values if all(type(v) is Tensor for v in values) else ())

    def holds(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these are the groups and parameters it was made of."""
        if len(groups) != len(self._lists):
            return False
        return all(
            len(g["params"]) == len(mine) and all(map(operator.is_, g["params"], mine))
            for g, mine in zip(groups, self._lists)
        )
