"""A checksum of a weight's bits, computed where the weight lies, to see whether somebody else wrote to it."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_offload.engine.tensors import flat, host_array
from hf_offload.kernels import cpu

_CHUNK = 1 << 20  # elements: bounds the int64 temporaries to 8 MiB each
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # Knuth's multiplicative constant, as a signed 64-bit number


def checksum(p: Tensor, threads: int) -> int:
    """A position-dependent 64-bit hash of the bits of dense `p`. Comparable only on one kind of device."""
    if p.device.type == "cpu":
        return int(cpu.checksum(host_array(p), threads))
    return device_checksum(p)


def device_checksum(p: Tensor) -> int:
    """The same idea in torch operations: sum of (bits + 1) · odd multiple of the position, modulo 2^64."""
    bits = flat(p).view(torch.int32 if p.dtype == torch.float32 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=p.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), dtype=torch.int64, device=p.device)
        total += ((chunk + 1) * (place * _ODD | 1)).sum()
    return int(total.item())
