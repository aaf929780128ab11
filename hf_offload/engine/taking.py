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
    found: list[tuple[list[int], list[Gradient]]] = [([], []) for _ in arenas]
    for g in grads:
        arena, index = place_of[id(g.param)]
        indices, theirs = found[arena]
        indices.append(index)
        theirs.append(g)
    for arena_, (indices, _) in zip(arenas, found):
        arena_.glance(indices)
    return [
        _work(a, indices, theirs, rows, _gradients(a, indices, theirs, stores))
        for a, (indices, theirs) in zip(arenas, found)
        if indices
    ]


def _work(
    arena: Arena, indices: list[int], grads: list[Gradient], rows: Coefficients,
    gradients: DeviceGradients | StoredGradients,
) -> ArenaWork:  # fmt: skip
    count = len(arena.params)
    stepped = np.array(indices)
    groups = np.zeros(count, np.int64)
    groups[stepped] = [number for _, _, number in grads]
    table = np.tile(cpu.INACTIVE, (count, 1))
    table[stepped] = rows.table(groups, arena.steps + 1, stepped)
    weights, pointers = arena.weights_of(indices)
    return ArenaWork(arena, gradients, weights, [], pointers, table, stepped)


def _gradients(
    arena: Arena, indices: list[int], found: list[Gradient], stores: Sequence[GradientStore] | None
) -> DeviceGradients | StoredGradients:
    if stores is None or arena.resident:
        return _on_device(arena, indices, found)
    return StoredGradients(stores[arena.number])


def _on_device(arena: Arena, indices: list[int], found: list[Gradient]) -> DeviceGradients:
    count = len(arena.params)
    grads: list[Tensor | None] = [None] * count
    storages: list[object] = [None] * count
    versions, pointers = [0] * count, [0] * count
    for i, (_, value, _) in zip(indices, found):
        assert value is not None
        grads[i], storages[i] = value, value.untyped_storage()
        versions[i], pointers[i] = value._version, value.data_ptr()
    return DeviceGradients(grads, storages, versions, pointers, arena.piece_counts.copy())
