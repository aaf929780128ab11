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
        stores: where gradients that left during backward are, one for each arena; None where none does. What stays on
            the device has its gradients there.

    Raises:
        StateError: a parameter was converted or resized after its state was made; nothing was taken.
    """
    found = _by_arena(len(arenas), [place_of[id(p)] for p, _, _ in grads], grads)
    for arena, (indices, _) in zip(arenas, found):
        arena.glance(indices)
    return [
        _work(a, indices, theirs, rows, _gradients(a, indices, theirs, stores))
        for a, (indices, theirs) in zip(arenas, found)
        if indices
    ]


def _by_arena(
    count: int, places: Sequence[tuple[int, int]], grads: Sequence[Gradient]
) -> list[tuple[list[int], Sequence[Gradient]]]:
    """For each arena the indices of its parameters, and their gradients."""
    if count == 1:  # mostly
        return [([index for _, index in places], grads)]
    found: list[tuple[list[int], list[Gradient]]] = [([], []) for _ in range(count)]
    for (arena, index), g in zip(places, grads):
        indices, theirs = found[arena]
        indices.append(index)
        theirs.append(g)
    return list[tuple[list[int], Sequence[Gradient]]](found)


def _work(
    arena: Arena, indices: list[int], grads: Sequence[Gradient], rows: Coefficients,
    gradients: DeviceGradients | StoredGradients,
) -> ArenaWork:  # fmt: skip
    count = len(arena.params)
    stepped = np.array(indices)
    groups = np.zeros(count, np.int64)
    groups[stepped] = [number for _, _, number in grads]
    turns = arena.turns
    table = rows.table(groups, turns, stepped)
    if indices != arena.indices:
        active, table = table, np.tile(cpu.INACTIVE, (count, 1))
        table[stepped] = active
    weights, pointers = arena.weights_of(indices)
    return ArenaWork(arena, gradients, weights, [], pointers, table, stepped, turns)


def _gradients(
    arena: Arena, indices: list[int], found: Sequence[Gradient], stores: Sequence[GradientStore] | None
) -> DeviceGradients | StoredGradients:
    if stores is None or arena.resident:
        return _on_device(arena, indices, found)
    return StoredGradients(stores[arena.number])


def _on_device(arena: Arena, indices: list[int], found: Sequence[Gradient]) -> DeviceGradients:
    values: list[Tensor | None] = [None] * len(arena.params)
    for i, (_, value, _) in zip(indices, found):
        values[i] = value
    storages: list[object] = [None if v is None else v.untyped_storage() for v in values]
    versions = [0 if v is None else v._version for v in values]
    pointers = [0 if v is None else v.data_ptr() for v in values]
    return DeviceGradients(values, storages, versions, pointers, arena.piece_counts.tolist())
