"""Taking a step: what the training thread freezes of gradients, weights and settings before it hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.gradients import Gradient
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.store import GradientStore
from hf_offload.engine.work import ArenaWork, DeviceGradients, StoredGradients
from hf_offload.kernels import cpu


def take(
    arenas: Sequence[Arena],
    place_of: Mapping[int, tuple[int, int]],
    grads: Sequence[Gradient],
    rows: Coefficients,
    stores: Sequence[GradientStore] | None,
) -> list[ArenaWork]:
    """One work for each arena that has something to step.

    Args:
        place_of: the (arena, index) of each parameter, by its id.
        stores: where gradients that left during backward are, one for each arena; None where none does.

    Raises:
        StateError: a parameter was converted or resized after its state was made; nothing was taken.
    """
    places = [place_of[id(p)] for p, _, _ in grads]
    found = [_of_arena(number, places, grads) for number in range(len(arenas))]
    for arena, (indices, _) in zip(arenas, found):
        arena.glance(indices)
    return [
        _work(a, indices, theirs, rows, _on_device(a, indices, theirs) if stores is None else _stored(stores, a))
        for a, (indices, theirs) in zip(arenas, found)
        if indices
    ]


def _of_arena(
    number: int, places: Sequence[tuple[int, int]], grads: Sequence[Gradient]
) -> tuple[list[int], Sequence[Gradient]]:
    """The indices and gradients of those parameters that are in arena `number`."""
    indices = [index for arena, index in places if arena == number]
    if len(indices) == len(places):
        return indices, grads
    return indices, [g for g, (arena, _) in zip(grads, places) if arena == number]


def _work(
    arena: Arena, indices: list[int], grads: Sequence[Gradient], rows: Coefficients,
    gradients: DeviceGradients | StoredGradients,
) -> ArenaWork:  # fmt: skip
    count = len(arena.params)
    stepped = np.array(indices)
    groups = np.zeros(count, np.int64)
    groups[stepped] = [number for _, _, number in grads]
    table = rows.table(groups, arena.steps + 1, stepped)
    if indices != arena.indices:
        active, table = table, np.tile(cpu.INACTIVE, (count, 1))
        table[stepped] = active
    weights, pointers = arena.weights_of(indices)
    return ArenaWork(arena, gradients, weights, [], pointers, table, stepped)


def _stored(stores: Sequence[GradientStore], arena: Arena) -> StoredGradients:
    return StoredGradients(stores[arena.number])


def _on_device(arena: Arena, indices: list[int], found: Sequence[Gradient]) -> DeviceGradients:
    values: list[Tensor | None] = [None] * len(arena.params)
    for i, (_, value, _) in zip(indices, found):
        values[i] = value
    storages: list[object] = [None if v is None else v.untyped_storage() for v in values]
    versions = [0 if v is None else v._version for v in values]
    pointers = [0 if v is None else v.data_ptr() for v in values]
    return DeviceGradients(values, storages, versions, pointers, arena.piece_counts.tolist())
