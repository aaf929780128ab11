"""Which state stays on the device: `device_state_bytes`.

Chosen in the order in which forward needs the weights: the first of all are on the device when the step returns, so
forward begins at once, and while it runs through them the others arrive. Their gradients are the last that backward
makes, which have the least time to leave. A parameter that does not fit any more is passed over for smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_offload.engine.resident import STATE_BYTES

Room = Callable[[], int]


class Lot(NamedTuple):
    """Parameters whose state is one arena."""

    params: list[Tensor]
    resident: bool


class Share(Protocol):
    """How parameters that are to be bound are divided."""

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        """No lot is empty.

        Args:
            units: of each of `params`.
            rank: of each unit, its place in the order of forward.
            taken: bytes of state that are on the device already.
        """
        ...


class NoShare:
    """All state leaves."""

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        return [Lot(list(params), resident=False)]


class FixedShare:
    """So many bytes stay, whole parameters."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def lots(self, params: Sequence[Tensor], units: Sequence[int], rank: Mapping[int, int], taken: int) -> list[Lot]:
        order = sorted(range(len(params)), key=lambda i: rank[units[i]])
        sizes = [STATE_BYTES * params[i].numel() for i in order]
        stay = {order[n] for n in that_fit(sizes, self._nbytes - taken)}
        lots = [
            Lot([p for i, p in enumerate(params) if (i in stay) == resident], resident) for resident in (False, True)
        ]
        return [lot for lot in lots if lot.params]


def that_fit(sizes: Sequence[int], room: int) -> list[int]:
    """Which of `sizes`, taken in order, fit into `room` together; one that does not is passed over."""
    found = []
    for n, size in enumerate(sizes):
        if size <= room:
            found.append(n)
            room -= size
    return found


def make_share(device_state_bytes: int | str) -> Share:
    return FixedShare(int(device_state_bytes)) if device_state_bytes else NoShare()
