"""Ours with m and v in fewer bytes, for `hf-offload bench step`, and the twin that it is compared with."""

from __future__ import annotations

import numpy as np

from hf_offload.bench.step_adam import BUCKET_BYTES, HYPER, TAKEN, Outcome
from hf_offload.bench.step_memory import TILE, Memory
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import codecs, reference

_BLOCK = cpu.BLOCK_OF_STATE


def scratch_bytes(state_dtype: str) -> int:
    """Bytes a parameter, rounded up, that m, v and their scales take."""
    codec = cpu.CODECS[state_dtype]
    return 2 * codec.dtype.itemsize + int(codec.scaled)


class OurCompact:
    """`kernels.cpu.compact_step`, the engine's kernel for such state, bucket by bucket. m and v lie in the scratch."""

    def __init__(self, memory: Memory, threads: int, wire: str, state_dtype: str) -> None:
        self._memory, self._threads, self._wire = memory, threads, wire
        self._codec, self._taken = cpu.CODECS[state_dtype], TAKEN
        self._held = _in_scratch(memory, self._codec)
        size = BUCKET_BYTES // 2
        self._buckets = [slice(at, min(at + size, memory.params)) for at in range(0, memory.params, size)]

    def begin(self) -> None:
        """m and v of the values that the float32 state began with, rounded to nearest."""
        _fill(self._held, _encoded(self._memory, self._codec))

    def step(self) -> None:
        self._taken += 1
        row, memory = _row(self._taken), self._memory
        for at in self._buckets:
            bounds, noise = np.array([0, at.stop - at.start], np.int64), _noise(at.start, self._taken)
            state = cpu.CompactState(memory.master[at], _part(self._held, at))
            cpu.compact_step(
                state, state, memory.grad[at], memory.weight[at], bounds, row, noise,
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


def _row(taken: int) -> np.ndarray:
    return cpu.coefficients(**HYPER, step=taken, grad_scale=1.0, decoupled=True, maximize=False)[None]


def _noise(start: int, taken: int) -> np.ndarray:
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
