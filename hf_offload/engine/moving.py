"""State that moves to the device, and back: `device_state_bytes="auto"`. Between steps, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.placement import Placement
from hf_offload.engine.share import Lot, Share
from hf_offload.engine.streaming import GradientStream
from hf_offload.errors import ConfigError, HostMemoryError, TransportError
from hf_offload.preflight import allocating

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Whose state it is: the engine."""

    arenas: list[Arena]
    share: Share
    placement: Placement
    stream: GradientStream | None

    def rank(self) -> Mapping[int, int]: ...
    def taken_bytes(self) -> int: ...
    def settle_state(self) -> None: ...
    def new_arena(self, lot: Lot, number: int) -> Arena: ...
    def replace(self, number: int, arena: Arena) -> None: ...


def share_out(owner: Owner, params: Sequence[Tensor]) -> None:
    """Between backward and the first look at the gradients of `params`: what is to be elsewhere moves."""
    if not owner.share.moves:
        return
    if any(p.grad is not None for p in params):
        going = owner.share.to_take(owner.arenas, owner.rank(), owner.placement.memory)
        for number in going:
            if not _to_device(owner, number):
                break
        if going and owner.stream is not None:
            owner.stream.cover()
    give_back(owner)


def give_back(owner: Owner) -> None:
    """Where the device's memory ran short, state moves to the host.

    Streamed: not while gradients of it stand in `.grad`, which would have to leave by hand. Then a later forward does.
    """
    if not owner.share.moves:
        return
    staying = (p for a in owner.arenas if a.resident for p in a.params)
    if owner.stream is not None and any(p.grad is not None for p in staying):
        return
    for number in reversed(owner.share.to_give_back(owner.arenas, owner.rank(), owner.placement.memory)):
        _to_host(owner, number)


def _to_device(owner: Owner, number: int) -> bool:
    """Returns False where it cannot go there, and stays on the host."""
    try:
        _move(owner, number, Lot(owner.arenas[number].params, resident=True))
    except (torch.OutOfMemoryError, TransportError, ConfigError) as error:
        logger.warning("hf_offload: no more state is kept on the device: %s", error)
        return False
    return True


def _to_host(owner: Owner, number: int) -> None:
    """Where the host has no room it stays on the device."""
    params, budget = owner.arenas[number].params, owner.placement.budget
    try:
        budget.check_binding(params, owner.taken_bytes())
        with allocating(budget.need(params)):
            _move(owner, number, Lot(params, resident=False))
    except HostMemoryError as error:
        logger.warning("hf_offload: state stays on the device, though its memory ran short: %s", error)


@torch.inference_mode(False)  # the forward before which it goes back may be an evaluation's
def _move(owner: Owner, number: int, lot: Lot) -> None:
    owner.settle_state()
    old, new = owner.arenas[number], owner.new_arena(lot, number)
    try:
        if owner.stream is not None:
            owner.stream.allocate(new)
        for i in range(len(old.params)):
            views = new.state_views(i)
            for name, value in old.state_views(i).items():
                views[name].copy_(value)
    except BaseException:
        if owner.stream is not None:
            owner.stream.release()
        raise
    owner.replace(number, new)
