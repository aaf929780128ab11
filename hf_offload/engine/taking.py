"""Taking a step: what the training thread freezes of gradients, weights and settings before it hands them over."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.gradients import Found
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.store import GradientStore
from hf_offload.engine.work import ArenaWork, DeviceGradients, StoredGradients, versions_of
from hf_offload.kernels import cpu


class Seats(NamedTuple):
    """The parameters that are stepped, of one arena.

    Attributes:
        indices: their indices in it.
        stepped: the same, int64.
        groups: int64[params of the arena], the group of each that is stepped.
        at: their places among the gradients of the step; None: these are all.
    """

    indices: list[int]
    stepped: np.ndarray
    groups: np.ndarray
    at: list[int] | None


class Seating:
    """Which parameters of which arena are stepped. Known for long: most steps have gradients of the same ones.

    Args:
        grads: of the first step.
        arenas: how many parameters each arena has.
        place_of: the (arena, index) of each parameter, by its id.
    """

    def __init__(self, grads: Found, arenas: Sequence[int], place_of: Mapping[int, tuple[int, int]]) -> None:
        self._params, self._groups = grads.params, grads.groups
        self._arenas = list(arenas)
        places = [place_of[id(p)] for p in self._params]
        by_arena: list[list[int]] = [[] for _ in self._arenas]
        for n, (arena, _) in enumerate(places):
            by_arena[arena].append(n)
        self.seats = [self._seats(at, count, places) for at, count in zip(by_arena, self._arenas)]

    def holds(self, grads: Found, arenas: Sequence[int]) -> bool:
        """Whether another step, of the same state, has gradients of the same parameters, in the same groups."""
        return (
            len(grads) == len(self._params)
            and self._arenas == arenas
            and all(map(operator.is_, grads.params, self._params))
            and grads.groups == self._groups
        )

    def _seats(self, at: list[int], count: int, places: Sequence[tuple[int, int]]) -> Seats:
        indices = [places[n][1] for n in at]
        groups = np.zeros(count, np.int64)
        groups[indices] = [self._groups[n] for n in at]
        return Seats(indices, np.array(indices, np.int64), groups, None if len(at) == len(places) else at)


def take(
    arenas: Sequence[Arena],
    seating: Sequence[Seats],
    grads: Found,
    addresses: Sequence[Sequence[int]],
    rows: Coefficients,
    stores: Sequence[GradientStore] | None,
) -> list[ArenaWork]:
    """One work for each arena that has something to step.

    Args:
        seating: what of each arena is stepped.
        addresses: for each arena, those of its weights, just read.
        stores: where gradients that left during backward are, one for each arena; None where none does. What stays on
            the device has its gradients there.

    Raises:
        StateError: a parameter was converted or resized after its state was made; nothing was taken.
    """
    for arena, seats in zip(arenas, seating):
        arena.glance(seats.indices)
    works = []
    for arena, seats, weights_at in zip(arenas, seating, addresses):
        if seats.indices:
            theirs = grads.values if seats.at is None else [grads.values[n] for n in seats.at]
            gradients = _gradients(arena, seats.indices, theirs, stores)
            works.append(_work(arena, seats, weights_at, rows, gradients))
    return works


def _work(
    arena: Arena, seats: Seats, addresses: Sequence[int], rows: Coefficients,
    gradients: DeviceGradients | StoredGradients,
) -> ArenaWork:  # fmt: skip
    indices, stepped, groups, _ = seats
    count, turns = len(arena.params), arena.turns
    table = rows.table(groups, turns, stepped)
    if indices != arena.indices:
        active, table = table, np.tile(cpu.INACTIVE, (count, 1))
        table[stepped] = active
    weights, pointers = arena.weights_of(indices, addresses)
    return ArenaWork(arena, gradients, weights, [], pointers, table, stepped, turns)


def _gradients(
    arena: Arena, indices: list[int], values: list[Tensor | None], stores: Sequence[GradientStore] | None
) -> DeviceGradients | StoredGradients:
    if stores is None or arena.resident:
        return _on_device(arena, indices, values)
    return StoredGradients(stores[arena.number])


def _on_device(arena: Arena, indices: list[int], values: list[Tensor | None]) -> DeviceGradients:
    if indices != arena.indices:
        given = dict(zip(indices, values))
        values = [given.get(i) for i in arena.indices]
    storages: list[object] = [None if v is None else v.untyped_storage() for v in values]
    pointers = [0 if v is None else v.data_ptr() for v in values]
    return DeviceGradients(list(values), storages, versions_of(values), pointers, list(arena.piece_counts))
