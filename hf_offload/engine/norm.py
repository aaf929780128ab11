"""The global L2 norm of the gradients, computed where they lie, the same in every schedule.

Chunks of 2^20 elements from each parameter's start are each summed in fp64 and combined in `param_groups` order, so
the norm is right where squares overflow fp32, and its bits do not depend on buckets or threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hf_offload.engine.tensors import WIRE, flat, host_array
from hf_offload.kernels import cpu

_CHUNK = 1 << 20


def gradient_norm(grads: Sequence[Tensor], threads: int) -> float:
    """sqrt(Σ g²) over dense gradients, a Python float; inf or NaN where a gradient has one."""
    if grads and grads[0].device.type != "cpu":
        return norm_of_sums(_device_sums(grads))
    return norm_of_sums(cpu.sum_of_squares(host_array(g), WIRE[g.dtype], threads) for g in grads)


def norm_of_sums(sums: Iterable[float]) -> float:
    """The root of all sums of squares, added one after the other."""
    total = 0.0
    for each in sums:
        total += each
    return math.sqrt(total) if total == total else total


def _device_sums(grads: Sequence[Tensor]) -> list[float]:
    """Each gradient's sum of squares, with one transfer for all; chunks are added here, in order."""
    chunks = [list(flat(g).split(_CHUNK)) if g.numel() else [] for g in grads]
    norms = [torch.linalg.vector_norm(c, dtype=torch.float64) for each in chunks for c in each]
    squares = iter(torch.stack(norms).square().tolist() if norms else [])
    return [sum(next(squares) for _ in each) for each in chunks]


def clip_factor(max_norm: float, norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ defines it; NaN where the norm is NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor
