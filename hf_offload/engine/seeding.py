"""Masters from weights: at first, and again wherever a weight was changed from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from hf_offload.engine.arena import Arena
from hf_offload.engine.masters import drop_master, give_back_master, waiting_master
from hf_offload.engine.resident import ResidentArena
from hf_offload.engine.tensors import NUMPY_WIRE, flat, like_layout, shaped_view
from hf_offload.kernels import cpu
from hf_offload.transport import Segment, Transport

Take = Callable[[int, np.ndarray, np.ndarray, str], None]
"""`take(param, weight_bits, master, wire)`: what to do with a run of a weight and the same run of its master."""


@contextmanager
def seeded_masters(arena: Arena, transport: Transport, threads: int, timeout_s: float) -> Iterator[None]:
    """Fill `arena.master`: from fp32 values that waited for a parameter (where they still round to its weight), else
    from the weight itself, as where the parameter was resized meanwhile.

    The values are handed over when the context ends. After an exception, Ctrl-C too, they wait again: whoever binds
    the parameters next needs them.
    """
    if isinstance(arena, ResidentArena):
        with arena.seeded(threads):
            yield
        return
    waited: set[int] = set()
    try:
        _seed(arena, waited, transport, threads, timeout_s)
        yield
    except BaseException:
        for i in waited:
            give_back_master(arena.params[i], shaped_view(arena.master[arena.slice_of(i)], arena.params[i]))
        raise


def _seed(arena: Arena, waited: set[int], transport: Transport, threads: int, timeout_s: float) -> None:
    for i, p in enumerate(arena.params):
        values = waiting_master(p)
        if values is not None and values.shape == p.shape:
            source, master = flat(like_layout(values, p)).numpy(), arena.master[arena.slice_of(i)]
            cpu.widen(source, master, "float32", threads)  # a copy, by the threads that step
            waited.add(i)
        drop_master(p)

    def take(param: int, weight: np.ndarray, master: np.ndarray, wire: str) -> None:
        if param in waited:
            cpu.reseed(weight, master, wire, threads)
        else:
            cpu.widen(weight, master, wire, threads)

    _visit(arena, set(range(len(arena.params))), transport, timeout_s, take)


def reseed_masters(arena: Arena, params: set[int], transport: Transport, threads: int, timeout_s: float) -> int:
    """Where a weight differs from its rounded master, the master becomes the weight. Returns how many elements did."""
    if isinstance(arena, ResidentArena):
        return arena.reseed(params, threads)
    changed = 0

    def take(param: int, weight: np.ndarray, master: np.ndarray, wire: str) -> None:
        nonlocal changed
        changed += cpu.reseed(weight, master, wire, threads)

    _visit(arena, params, transport, timeout_s, take)
    return changed


def _visit(arena: Arena, params: set[int], transport: Transport, timeout_s: float, take: Take) -> None:
    """Bring the weights of `params` to the host, bucket by bucket through the ring, and `take` each piece."""
    for bucket in arena.plan.buckets:
        pieces = [p for p in bucket.pieces if p.param in params]
        if not pieces:
            continue
        size = bucket.itemsize
        segments = [
            Segment(arena.params[p.param].data_ptr() + p.start * size, p.length * size, p.offset * size,
                    arena.params[p.param])
            for p in pieces
        ]  # fmt: skip
        transport.to_host(segments, 0, transport.mark()).wait(timeout_s)
        slot = transport.down[0].view(NUMPY_WIRE[bucket.wire])
        for p in pieces:
            run = slice(p.offset, p.offset + p.length)
            master = arena.master[bucket.start : bucket.start + bucket.numel][run]
            take(p.param, slot[run], master, bucket.wire)
