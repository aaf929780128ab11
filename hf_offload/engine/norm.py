"""The global L2 norm of the gradients, computed where they lie, the same in every schedule.

Chunks of 2^20 elements from each parameter's start are each summed in fp64 and combined in `param_groups` order, so
the norm is right where squares overflow fp32, and its bits do not depend on buckets, on threads, or on whether the
gradients lie on a GPU or in the host's store.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.tensors import WIRE, flat, host_array, is_dense
from hf_offload.kernels import cpu
from hf_offload.kernels.cuda import CompileError, SquareSums

logger = logging.getLogger(__name__)
_CHUNK = 1 << 20
SMALL = 1 << 12
"""Elements up to which gradients are summed together, in a copy of them all."""
_KERNELS: dict[int, SquareSums | None] = {}
"""By torch's index of the device; None where there is none. A stream and a little memory each, kept for good."""
_MAKING = threading.Lock()


def gradient_norm(grads: Sequence[Tensor], threads: int) -> float:
    """sqrt(Σ g²) over gradients of one device, a Python float; inf or NaN where a gradient has one."""
    return norm_of_sums(gradient_sums(grads, threads))


def gradient_sums(grads: Sequence[Tensor], threads: int) -> list[float]:
    """Σ g² of each of the gradients, all on one device."""
    if grads and grads[0].device.type != "cpu":
        return device_sums(grads, kernel_of(grads[0].device))
    sums = [0.0] * len(grads)
    small: dict[torch.dtype, list[int]] = {}
    for k, g in enumerate(grads):
        if g.numel() <= SMALL:
            small.setdefault(g.dtype, []).append(k)
        else:
            sums[k] = float(cpu.sum_of_squares(host_array(g), WIRE[g.dtype], threads))
    for members in small.values():
        for k, total in zip(members, _sums_together([grads[k] for k in members], threads)):
            sums[k] = total
    return sums


def _sums_together(grads: Sequence[Tensor], threads: int) -> list[float]:
    """The sums of gradients of one dtype that are a block or less each: a call of the kernel costs more than its work.

    A gradient's only block is a tree of its own, so the bits are those of `cpu.sum_of_squares`.
    """
    together = torch.cat([flat(g) if g.ndim != 1 else g for g in grads])
    ends = np.cumsum([g.numel() for g in grads])
    blocks = cpu.Blocks(np.concatenate(([0], ends[:-1])), ends, np.arange(len(grads)))
    sums = np.zeros(len(grads))
    wanted = threads if together.numel() >= _CHUNK else 1
    cpu.sum_blocks(host_array(together), blocks, sums, WIRE[together.dtype], wanted)
    found: list[float] = sums.tolist()
    return found


def norm_of_sums(sums: Iterable[float]) -> float:
    """The root of all sums of squares, added one after the other."""
    total = 0.0
    for each in sums:
        total += each
    return math.sqrt(total) if total == total else total


def device_sums(grads: Sequence[Tensor], kernel: SquareSums | None) -> list[float]:
    """Each gradient's sum of squares, with one transfer for all, once the current stream's work is done.

    Args:
        kernel: gives the bits of the host. None: torch's reduction, whose order of additions is another.
    """
    if kernel is None:
        return _sums_by_torch(grads)
    # what is no block of memory is refused by the step, for what became of its parameter; until then it is read right
    held = [g if is_dense(g) else g.contiguous() for g in grads]  # alive until the kernel has read them
    return kernel.sums_of_squares([(g.data_ptr(), g.numel(), WIRE[g.dtype]) for g in held])


def kernel_of(device: torch.device) -> SquareSums | None:
    """The device's kernel, made at first use; None, with one warning, where CuPy cannot compile it."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    with _MAKING:
        if index not in _KERNELS:
            try:
                _KERNELS[index] = SquareSums(index, lambda: torch.cuda.current_stream(index).cuda_stream)
            except CompileError as error:
                logger.warning(
                    "hf_offload: the kernel of the gradient norm could not be compiled (%s). torch computes the norm, "
                    "whose last bits, and those of clipped steps, may differ between streamed and other schedules.",
                    error,
                )
                _KERNELS[index] = None
        return _KERNELS[index]


def _sums_by_torch(grads: Sequence[Tensor]) -> list[float]:
    """Chunks are added here, in order."""
    chunks = [list(flat(g).split(_CHUNK)) if g.numel() else [] for g in grads]
    norms = [torch.linalg.vector_norm(c, dtype=torch.float64) for each in chunks for c in each]
    squares = iter(torch.stack(norms).square().tolist() if norms else [])
    return [sum(next(squares) for _ in each) for each in chunks]


def clip_factor(max_norm: float, norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ defines it; NaN where the norm is NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor
