"""Seeing that the model no longer trains what the optimizer steps: parameters that were replaced, lost or added.

torch's optimizers step the objects they were given. After `load_state_dict(assign=True)`, `resize_token_embeddings` or
an added adapter the model may have others, which then stay as they are for ever, without a word.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hf_offload.errors import StateError, explain

logger = logging.getLogger(__name__)

SHOWN = 3
"""Names in a message; more are counted."""


class Census:
    """The optimizer's parameters in one attached model.

    Where they and the modules around them sit is looked at in every step, at 60 ns each. The whole model is walked
    only where one has left its seat, where somebody outside may have rebuilt the model, and at every step whose number
    is a power of two.

    Args:
        root: the model; not kept.
        params: the optimizer's.
    """

    def __init__(self, root: nn.Module, params: Sequence[Tensor]) -> None:
        ours = {id(p) for p in params}
        theirs = _trainable(root)
        self._excused = {name for name, p in theirs.items() if id(p) not in ours}  # whoever made the groups knew them
        self._looks = 0
        self._sit(root, ours)
        seated = {id(p) for p in self._names.values()}
        lost = [p for p in params if p.requires_grad and id(p) not in seated]
        if lost and self._excused:
            logger.warning(
                "hf_offload: %d parameters of the optimizer (shapes %s) are not in the attached %s, which has others "
                "that no group has and no step changes: %s. If it was resized or adapters were added after the "
                "optimizer was made, make the optimizer afterwards.",
                len(lost), _some([str(tuple(p.shape)) for p in lost]), type(root).__name__,
                _some(sorted(self._excused)),
            )  # fmt: skip

    def check(self, root: nn.Module, params: Callable[[], Sequence[Tensor]], rebuilt: bool) -> None:
        """Look whether the model still trains what the optimizer steps.

        Args:
            params: gives all that the optimizer has now.
            rebuilt: whether somebody outside could have rebuilt the model since the last call.

        Raises:
            StateError: where a parameter of the optimizer was, the model has another that no group has.
        """
        self._looks += 1
        moved = not all(map(operator.is_, map(dict.get, self._tables, self._keys), self._seated))
        if not (moved or rebuilt or self._looks & (self._looks - 1) == 0):
            return
        ours = {id(p) for p in params()}
        strangers = [name for name, p in _trainable(root).items() if id(p) not in ours]
        if moved:
            self._look_at_seats(root, ours, set(strangers))
        fresh = [name for name in strangers if name not in self._excused]
        if fresh:
            self._excused.update(fresh)
            logger.warning(
                "hf_offload: the model has trainable parameters that no group of the optimizer has, so no step changes "
                "them: %s. Call optimizer.add_param_group for them, or freeze them with requires_grad_(False).",
                _some(fresh),
            )

    def _look_at_seats(self, root: nn.Module, ours: set[int], strangers: set[str]) -> None:
        here = {id(p) for p in root.parameters()}
        gone = [name for name, p in self._names.items() if id(p) in ours and id(p) not in here]
        replaced = [name for name in gone if name in strangers]
        if replaced:
            raise StateError(
                explain("params", _some(replaced), "the model has new parameters in their place, which no step would "
                        "change (load_state_dict(assign=True), resize_token_embeddings, or a new layer)",
                        "Make the optimizer after that, or put the new ones into optimizer.param_groups in place of "
                        "the old")
            )  # fmt: skip
        if gone:
            logger.warning("hf_offload: no longer in the model, and so no longer trained: %s.", _some(gone))
        self._sit(root, ours)

    def _sit(self, root: nn.Module, ours: set[int]) -> None:
        """Note where our parameters are, and each module on the way to them: whole modules are replaced, too."""
        self._names = {name: p for name, p in root.named_parameters(remove_duplicate=False) if id(p) in ours}
        seats = [(m._parameters, key, p) for m in root.modules() for key, p in m._parameters.items() if id(p) in ours]
        ways = [(m._modules, key, child) for m in root.modules() for key, child in m._modules.items()]
        self._tables: list[Any] = [table for table, _, _ in (*seats, *ways)]
        self._keys = [key for _, key, _ in (*seats, *ways)]
        self._seated: list[Any] = [child for _, _, child in (*seats, *ways)]


def _trainable(root: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in root.named_parameters() if p.requires_grad}


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
