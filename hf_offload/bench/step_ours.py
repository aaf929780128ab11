"""Ours, in `hf-offload bench step`, for each way to hold m and v; and what compact state is compared with."""

from __future__ import annotations

import numpy as np

from hf_offload.bench.step_adam import BUCKET_BYTES, HYPER, TAKEN, Outcome
from hf_offload.bench.step_memory import TILE, Memory
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import codecs, reference
from hf_offload.kernels.cpu.wire import Array

_BLOCK = cpu.BLOCK_OF_STATE


def scratch_bytes(state_dtype: str) -> int:
    """Bytes a parameter, rounded up, that m, v and their scales take."""
    codec = cpu.CODECS[state_dtype]
    return 2 * codec.dtype.itemsize + int(codec.scaled)


class Ours:
    """A kernel of ours, bucket by bucket. Each state dtype has its `_step`."""

    def __init__(self, memory: Memory, threads: int, wire: str) -> None:
        self._memory, self._threads, self._wire = memory, threads, wire
        self._taken = TAKEN
        size = BUCKET_BYTES // 2
        self._buckets = [slice(at, min(at + size, memory.params)) for at in range(0, memory.params, size)]

    def begin(self) -> None:
        """Nothing of it is in the scratch."""

    def step(self) -> None:
        self._taken += 1
        row = _row(self._taken)
        for at in self._buckets:
            self._step(at, np.array([0, at.stop - at.start], np.int64), row)

    def _step(self, at: slice, bounds: Array, row: Array) -> None:
        """One bucket, the elements `at`; bounds and row as `kernels.cpu.adam_step` has them."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        return Outcome(*self._memory.state, self._memory.weight)


class OurFloat32(Ours):
    """`kernels.cpu.adam_step`, the engine's kernel for float32 state."""

    def _step(self, at: slice, bounds: Array, row: Array) -> None:
        memory = self._memory
        state = (a[at] for a in memory.state)
        cpu.adam_step(*state, memory.grad[at], memory.weight[at], bounds, row, wire=self._wire, threads=self._threads)


class OurCompact(Ours):
    """`kernels.cpu.compact_step`, the engine's kernel for m and v in fewer bytes. They lie in the scratch."""

    def __init__(self, memory: Memory, threads: int, wire: str, state_dtype: str) -> None:
        super().__init__(memory, threads, wire)
        self._codec = cpu.CODECS[state_dtype]
        self._held = _in_scratch(memory, self._codec)

    def begin(self) -> None:
        """m and v of the values that the float32 state has now (its first tile, repeated), rounded to nearest."""
        _fill(self._held, _encoded(self._memory, self._codec))

    def _step(self, at: slice, bounds: Array, row: Array) -> None:
        memory = self._memory
        state = cpu.CompactState(memory.master[at], _part(self._held, at))
        cpu.compact_step(
            state, state, memory.grad[at], memory.weight[at], bounds, row, _noise(at.start, self._taken),
            codec=self._codec, wire=self._wire, threads=self._threads,
        )  # fmt: skip

    def outcome(self) -> Outcome:
        m, v = codecs.decode(self._held, self._codec)
        return Outcome(self._memory.master, m, v, self._memory.weight)


def twin(memory: Memory, wire: str, state_dtype: str, steps: int) -> Outcome:
    """What so many steps from `memory` make by `kernels.cpu.reference`."""
    codec, n = cpu.CODECS[state_dtype], memory.params
    held = codec.empty(n, codecs.blocks(n))
    _fill(held, _encoded(memory, codec))
    state, weight = cpu.CompactState(memory.master.copy(), held), np.zeros(n, np.uint16)
    for taken in range(TAKEN + 1, TAKEN + steps + 1):
        reference.compact_step(
            state, state, memory.grad, weight, np.array([0, n]), _row(taken), _noise(0, taken), codec=codec, wire=wire
        )
    m, v = codecs.decode(held, codec)
    return Outcome(state.master, m, v, weight)


def _row(taken: int) -> Array:
    return cpu.coefficients(**HYPER, step=taken, grad_scale=1.0, decoupled=True, maximize=False)[None]


def _noise(start: int, taken: int) -> Array:
    return cpu.noise_rows(0, np.array([0]), np.array([start // _BLOCK]), np.array([taken]))


def _part(held: cpu.Held, at: slice) -> cpu.Held:
    blocks = slice(at.start // _BLOCK, codecs.blocks(at.stop))
    return cpu.Held(held.m[at], held.v[at], held.m_scale[blocks], held.v_scale[blocks])


def _in_scratch(memory: Memory, codec: cpu.Codec) -> cpu.Held:
    n, size = memory.params, codec.dtype.itemsize
    codes = memory.scratch[: 2 * n * size].view(codec.dtype)
    blocks = codecs.blocks(n) if codec.scaled else 0
    scales = memory.scratch[2 * n * size :]
    return cpu.Held(codes[:n], codes[n:], scales[:blocks], scales[blocks : 2 * blocks])


def _encoded(memory: Memory, codec: cpu.Codec) -> cpu.Held:
    """The first tile of m and v; the arrays begin as repetitions of it."""
    m, v = memory.exp_avg[:TILE], memory.exp_avg_sq[:TILE]
    return codecs.encode(m, v, codecs.half(m.size, codec), codec)


def _fill(held: cpu.Held, tile: cpu.Held) -> None:
    for array, values in zip(held, tile):
        for at in range(0, array.size, max(values.size, 1)):
            run = array[at : at + values.size]
            run[:] = values[: run.size]
