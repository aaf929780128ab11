"""The arrays that every contender of `hf-offload bench step` steps in turn: one state, one gradient, one weight.

Contenders share them so that a billion parameters fit a small machine, and so that no one has better placed memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import roofline
from hf_offload.kernels.cpu.wire import Array

TILE = 1 << 16
"""Elements that differ; the arrays repeat them. What is timed does not depend on values that are neither 0, denormal,
infinite nor NaN."""

TORCH_WIRE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Memory:
    """n parameters of the host step.

    The gradient's bits are ordinary numbers to both 16-bit formats: of magnitude 2^-20 to 1 read as bfloat16, and 1/4
    to 2 read as float16. So both wires share one array.

    Attributes:
        master, exp_avg, exp_avg_sq: float32[n].
        grad, weight: uint16[n].
        scratch_bytes: bytes a parameter of `scratch`.
    """

    master: Array
    exp_avg: Array
    exp_avg_sq: Array
    grad: Array
    weight: Array
    scratch_bytes: int

    @property
    def params(self) -> int:
        return int(self.master.size)

    @property
    def state(self) -> tuple[Array, Array, Array]:
        return self.master, self.exp_avg, self.exp_avg_sq

    @cached_property
    def scratch(self) -> Array:
        """uint8[n * scratch_bytes], aligned to 64: whose turn it is may use it, and finds others' bytes in it.

        Touched in parallel, as the arrays are: its first user may write it in one thread, and then all of it would lie
        on one NUMA node for those that follow.
        """
        found = _aligned(self.params * self.scratch_bytes, np.dtype(np.uint8))
        cpu.touch(found, cpu.max_threads())
        return found

    def fp32_scratch(self) -> Tensor:
        """float32[n] in the scratch."""
        return torch.from_numpy(self.scratch[: 4 * self.params].view(np.float32))

    def grad_as(self, wire: str) -> Tensor:
        """The gradient as torch sees it: bfloat16[n] or float16[n]."""
        return torch.from_numpy(self.grad.view(np.int16)).view(TORCH_WIRE[wire])

    def weight_as(self, wire: str) -> Tensor:
        """The weight, likewise."""
        return torch.from_numpy(self.weight.view(np.int16)).view(TORCH_WIRE[wire])

    def finite(self) -> bool:
        """Whether the state has neither infinity nor NaN in it."""
        return all(bool(torch.from_numpy(a[at : at + _SCAN]).isfinite().all())
                   for a in self.state for at in range(0, a.size, _SCAN))  # fmt: skip


_SCAN = 1 << 22


def need(params: int, scratch_bytes: int) -> dict[str, int]:
    """Bytes of `make(params, scratch_bytes)`, by what they are for."""
    found = {"master, m, v": 12 * params, "gradient": 2 * params, "weight": 2 * params}
    return {**found, "scratch": scratch_bytes * params} if scratch_bytes else found


def make(params: int, scratch_bytes: int, threads: int, seed: int = 0) -> Memory:
    """Arrays with values as in training, each page first touched by a thread that steps it."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((2, TILE), np.float32)
    master, exp_avg = normal[0] * np.float32(0.02), normal[1] * np.float32(1e-3)
    exp_avg_sq = (rng.random(TILE) * 1e-6 + 1e-7).astype(np.float32)
    sign, exponent, fraction = (rng.integers(low, high, TILE) for low, high in ((0, 2), (107, 127), (0, 128)))
    grad = (sign << 15 | exponent << 7 | fraction).astype(np.uint16)
    tiles = master, exp_avg, exp_avg_sq, grad, np.zeros(1, np.uint16)
    master, exp_avg, exp_avg_sq, grad, weight = (_filled(params, tile, threads) for tile in tiles)
    return Memory(master, exp_avg, exp_avg_sq, grad, weight, scratch_bytes)


def _filled(params: int, tile: Array, threads: int) -> Array:
    array = _aligned(params, tile.dtype)
    roofline.fill(array, tile, threads=threads)
    return array


def _aligned(size: int, dtype: np.dtype) -> Array:  # type: ignore[type-arg]
    """Uninitialised [size], which begins at a cache line: NumPy's own begins 16 bytes into a page."""
    raw = np.empty(size * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size * dtype.itemsize].view(dtype)
