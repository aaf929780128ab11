"""The global L2 norm of the gradients, computed where they lie, the same in every schedule.

Chunks of 2^20 elements from each parameter's start are each summed in fp64 and combined in `param_groups` order, so
the norm is right where squares overflow fp32, and its bits do not depend on buckets or threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_offload.engine.tensors import WIRE, flat, host_array
from hf_offload.kernels import cpu

_CHUNK = 1 << 20


def gradient_norm(grads: Iterable[Tensor], threads: int) -> float:
    """sqrt(Σ g²) over dense gradients, a Python float; inf or NaN where a gradient has one."""
    on_device: list[Tensor] = []
    total = 0.0
    for g in grads:
        if g.device.type == "cpu":
            total += cpu.sum_of_squares(host_array(g), WIRE[g.dtype], threads)
        else:
            on_device.extend(_device_chunks(g))
    if on_device:
        total += sum(torch.stack(on_device).tolist())  # one transfer for all chunks; summed here, in order
    return math.sqrt(total) if total == total else total


def _device_chunks(g: Tensor) -> list[Tensor]:
    return [chunk.double().square().sum() for chunk in flat(g).split(_CHUNK)] if g.numel() else []


def clip_factor(max_norm: float, norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ defines it; NaN where the norm is NaN."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor
