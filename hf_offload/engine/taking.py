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

Entries = list[tuple[int, Gradient]]
"""The gradients of one arena, each with its parameter's index."""


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
        StateError: a parameter was converted, moved or resized after its state was made; nothing was taken.
    """
    found: list[Entries] = [[] for _ in arenas]
    for g in grads:
        arena, index = place_of[id(g.param)]
        found[arena].append((index, g))
    for number, entries in enumerate(found):
        arenas[number].check_unchanged(i for i, _ in entries)
    return [
        _work(arena, entries, rows, _on_device(arena, entries) if stores is None else StoredGradients(stores[number]))
        for number, (arena, entries) in enumerate(zip(arenas, found))
        if entries
    ]


def _work(
    arena: Arena, entries: Entries, rows: Coefficients, gradients: DeviceGradients | StoredGradients
) -> ArenaWork:
    count = len(arena.params)
    stepped = np.array([i for i, _ in entries])
    groups = np.zeros(count, np.int64)
    groups[stepped] = [g.group for _, g in entries]
    table = np.tile(cpu.INACTIVE, (count, 1))
    table[stepped] = rows.table(groups, arena.steps + 1, stepped)
    weights, pointers = arena.weights_of(stepped.tolist())
    return ArenaWork(arena, gradients, weights, [], pointers, table, stepped)


def _on_device(arena: Arena, entries: Entries) -> DeviceGradients:
    count = len(arena.params)
    grads: list[Tensor | None] = [None] * count
    versions, pointers = [0] * count, [0] * count
    for i, g in entries:
        assert g.value is not None
        grads[i] = g.value.detach()  # the memory, whatever `.data = ...` puts there since
        versions[i], pointers[i] = g.value._version, g.value.data_ptr()
    return DeviceGradients(grads, versions, pointers, arena.piece_counts.copy())
