"""Which state stays on the device: `device_state_bytes`.

Chosen in the order in which forward needs the weights: the first of all are on the device when the step returns, so
forward begins at once, and while it runs through them the others arrive. Their gradients are the last that backward
makes, which have the least time to leave. What does not fit any more is passed over for something smaller.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_offload.config import AUTO
from hf_offload.engine.arena import Arena
from hf_offload.engine.device_memory import DeviceMemory
from hf_offload.planner import STATE_BYTES

logger = logging.getLogger(__name__)

LOT_BYTES = 1 << 30
"""Of state that moves as one: of a unit, or, where no model says what belongs together, of whatever comes next."""


class Lot(NamedTuple):
    """Parameters whose state is one arena."""

    params: list[Tensor]
    resident: bool


class Share(Protocol):
    """What of the state is on the device.

    Attributes:
        moves: whether that changes.
    """

    moves: bool

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        """How parameters that are to be bound are divided; no lot is empty.

        Args:
            units: of each of `params`.
            rank: of each unit, its place in the order of forward.
            taken: bytes of state that are on the device already.
        """
        ...

    def to_take(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        """After a backward: the numbers of the arenas that are to move to the device now."""
        ...

    def to_give_back(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        """The numbers of those that are to move to the host now."""
        ...


class FixedShare:
    """So many bytes stay, whole parameters. 0: none."""

    moves = False

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        stay = set(self.that_stay(params, units, rank, taken))
        lots = [Lot([p for i, p in enumerate(params) if (i in stay) == kind], kind) for kind in (False, True)]
        return [lot for lot in lots if lot.params]

    def that_stay(
        self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int = 0
    ) -> list[int]:
        """The indices of those that stay."""
        order = sorted((i for i, p in enumerate(params) if p.numel()), key=lambda i: rank[units[i]])
        fit = that_fit([STATE_BYTES * params[i].numel() for i in order], self._nbytes - taken)
        return [order[n] for n in fit]

    def to_take(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        return []

    def to_give_back(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        return []


class AutoShare:
    """What is free after the first micro-batches, whole units; half of it goes back whenever memory runs short.

    Args:
        streamed: whether gradients leave during backward; those of what is on the device do not.
    """

    moves = True

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self._settled = False

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        """All on the host, each unit by itself; a large one, as all parameters are without a model, in several."""
        order = sorted(range(len(params)), key=lambda i: rank[units[i]])
        by_unit = (members for _, members in groupby(order, lambda i: units[i]))
        return [lot for members in by_unit for lot in _in_lots([params[i] for i in members])]

    def to_take(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        if self._settled or not arenas:
            return []
        self._settled = True
        free = memory.free_bytes()
        if free is None:
            logger.info(
                "hf_offload: device_state_bytes='auto': the device is this machine's CPU, whose memory is the host's. "
                "All state is on the host; a number of bytes would be kept apart."
            )
            return []
        free = max(0, free - memory.margin_bytes())
        order = in_order(arenas, rank)
        fit = [order[n] for n in that_fit([self._bytes(arenas[k]) for k in order], free)]
        logger.info(
            "hf_offload: device_state_bytes='auto': %.2f GB of the device are free, and take the state of %d of %d "
            "parameters.", free / 1e9, sum(arenas[k].plan.numel for k in fit), sum(a.plan.numel for a in arenas),
        )  # fmt: skip
        return fit

    def to_give_back(self, arenas: Sequence[Arena], rank: Mapping[int, int], memory: DeviceMemory) -> list[int]:
        if not any(a.resident for a in arenas) or not memory.ran_short():
            return []
        held = [k for k in in_order(arenas, rank) if arenas[k].resident]
        going = held[len(held) // 2 :]
        logger.warning(
            "hf_offload: the device's memory ran short: the state of %d parameters moves to the host.",
            sum(arenas[k].plan.numel for k in going),
        )  # fmt: skip
        return going

    def _bytes(self, arena: Arena) -> int:
        """What an arena would take of the device."""
        return STATE_BYTES * arena.plan.numel + (int(arena.param_bytes.sum()) if self._streamed else 0)


def _in_lots(params: Sequence[Tensor]) -> list[Lot]:
    """As many to a lot as LOT_BYTES hold, and at least one."""
    lots, held = [Lot([], resident=False)], 0
    for p in params:
        nbytes = STATE_BYTES * p.numel()
        if lots[-1].params and held + nbytes > LOT_BYTES:
            lots.append(Lot([], resident=False))
            held = 0
        lots[-1].params.append(p)
        held += nbytes
    return lots


def in_order(arenas: Sequence[Arena], rank: Mapping[int, int]) -> list[int]:
    """Numbers of the arenas that hold anything, as forward needs the first unit of each."""
    first = {k: min(rank[u] for units in a.bucket_units for u in units) for k, a in enumerate(arenas) if a.bucket_units}
    return sorted(first, key=first.__getitem__)


def that_fit(sizes: Sequence[int], room: int) -> list[int]:
    """Which of `sizes`, taken in order, fit into `room` together; one that does not is passed over."""
    found = []
    for n, size in enumerate(sizes):
        if size <= room:
            found.append(n)
            room -= size
    return found


def likely_to_stay(device_state_bytes: int | str, params: Sequence[Tensor]) -> list[Tensor]:
    """Before forward's order is known: parameters whose state takes about as much as will stay; none where that is not
    known, or may have to leave later."""
    share = FixedShare(0 if device_state_bytes == AUTO else int(device_state_bytes))
    return [params[i] for i in share.that_stay(params, [0] * len(params), {0: 0})]


def make_share(device_state_bytes: int | str, streamed: bool) -> Share:
    return AutoShare(streamed) if device_state_bytes == AUTO else FixedShare(int(device_state_bytes))
