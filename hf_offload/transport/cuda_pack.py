"""Many small segments in one launch: a kernel that reads or writes the pinned slot over the link by itself.

A copy by the copy engine costs some microseconds however small it is, in which the link moves 64 KiB and more. So
small segments are moved by the multiprocessors: pinned memory can be addressed by the device, and no staging buffer, no
second copy and no table in memory is needed. The table travels as the kernel's argument, by value: 240 rows a launch.

`cudaMemcpyBatchAsync` (CUDA 12.8) would do it on the copy engines; CuPy does not have it yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_offload.transport.base import Segment
from hf_offload.transport.cuda_device import CudaDevice

logger = logging.getLogger(__name__)

SMALL = 64 << 10
"""Bytes of the largest segment that is packed."""
FEWEST = 4
"""Small segments of one copy from which on a launch is cheaper than single copies."""
ROWS = 240  # of 16 bytes: a kernel's arguments are 4096 bytes at most
NAME = "hf_offload_pack"
_THREADS = 256
_ROW = np.dtype([("pointer", np.uint64), ("offset", np.uint32), ("nbytes", np.uint32)])
_TABLE = np.dtype([("row", _ROW, (ROWS,))])

_BODY = """
struct Row { unsigned long long pointer; unsigned int offset; unsigned int nbytes; };
struct Table { Row row[ROWS]; };

template <typename T>
__device__ void move_as(unsigned char* to, const unsigned char* from, unsigned int nbytes)
{
    const unsigned int whole = nbytes / sizeof(T);
    for (unsigned int i = threadIdx.x; i < whole; i += blockDim.x)
        reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
    for (unsigned int i = whole * sizeof(T) + threadIdx.x; i < nbytes; i += blockDim.x)
        to[i] = from[i];
}

// Block b moves row b between device memory and the slot: down (up == 0) or up, in the widest words both ends allow.
extern "C" __global__ void hf_offload_pack(const Table table, unsigned char* slot, int up)
{
    const Row row = table.row[blockIdx.x];
    unsigned char* device = reinterpret_cast<unsigned char*>(row.pointer);
    unsigned char* host = slot + row.offset;
    unsigned char* to = up ? device : host;
    const unsigned char* from = up ? host : device;
    const unsigned long long both = (unsigned long long)to | (unsigned long long)from;
    if (both % 16 == 0) move_as<uint4>(to, from, row.nbytes);
    else if (both % 4 == 0) move_as<unsigned int>(to, from, row.nbytes);
    else if (both % 2 == 0) move_as<unsigned short>(to, from, row.nbytes);
    else move_as<unsigned char>(to, from, row.nbytes);
}
"""
SOURCE = f"#define ROWS {ROWS}{_BODY}"


class Packer:
    """Moves small segments between device memory and a pinned slot.

    Compiled at construction; where that fails (no NVRTC, say) a warning is given and nothing is ever packed. The
    device must be current at construction and in `move`.
    """

    def __init__(self, device: CudaDevice, slot_bytes: int) -> None:
        self._kernel: Any = None
        if slot_bytes >= 1 << 32:  # offsets are 32 bits; beyond, small segments are not what counts
            return
        kernel = device.cupy.RawKernel(SOURCE, NAME)
        try:
            kernel.compile()
        except Exception as error:
            logger.warning(
                "hf_offload: the kernel that packs small parameters could not be compiled (%s); they are copied one by "
                "one, which is slower.", error,
            )  # fmt: skip
            return
        self._kernel = kernel

    def split(self, segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
        """Those to copy one by one, and those to pack; empty ones are left out."""
        found = [s for s in segments if s.nbytes]
        small = [s for s in found if s.nbytes <= SMALL]
        if self._kernel is None or len(small) < FEWEST:
            return found, []
        return [s for s in found if s.nbytes > SMALL], small

    def move(self, stream: Any, segments: Sequence[Segment], slot: int, up: bool) -> None:
        """Enqueue the move of `segments` between the device and the slot at host address `slot`."""
        for first in range(0, len(segments), ROWS):
            part = segments[first : first + ROWS]
            table = np.zeros(1, _TABLE)
            rows = table["row"][0]
            rows["pointer"][: len(part)] = [s.pointer for s in part]
            rows["offset"][: len(part)] = [s.offset for s in part]
            rows["nbytes"][: len(part)] = [s.nbytes for s in part]
            with stream:
                self._kernel((len(part),), (_THREADS,), (table, np.uint64(slot), np.int32(up)))
