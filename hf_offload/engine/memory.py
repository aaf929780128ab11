"""Memory of the state: where each array begins, and who touches its pages first.

All arrays of one owner lie in one block of zero pages that the system gives as they are touched: reserving costs
neither time nor memory, and each page comes to the NUMA node of the thread that first writes it, which is one of the
step's own. NumPy asks for huge pages for blocks of 4 MiB and more (madvise, where the system's THP setting is
`madvise` or `always`; NUMPY_MADVISE_HUGEPAGE=0 turns that off).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_offload.kernels import cpu

CACHE_LINE = 64
SPAN = 1 << 16
"""Bytes within which the beginnings of arrays differ that are no smaller; smaller ones follow each other."""
SKEW = 85 * CACHE_LINE
"""Bytes from one array's beginning to the next one's, modulo SPAN.

A step reads and writes all arrays at the same index. Where two are a multiple of 4096 bytes apart, a load looks to the
core as if it depended on the other's store, whose address ends in the same 12 bits; at a power of two they also
compete for the same sets of the caches and banks of memory. An odd number of cache lines, a page and a third, keeps any
eight arrays apart in both.
"""


def allocate(*parts: tuple[int, np.dtype]) -> list[np.ndarray]:
    """Zeros that nobody has touched: one flat array for each (elements, dtype) of `parts`.

    Returns:
        Views of one block. Each begins at a cache line; of SPAN bytes or more, the k-th k * SKEW bytes after a multiple
        of SPAN from the block's first.

    Raises:
        MemoryError: the system refuses.
    """
    starts, end = [], 0
    for k, (count, dtype) in enumerate(parts):
        nbytes = count * dtype.itemsize
        start = end + ((k * SKEW - end) % SPAN if nbytes >= SPAN else -end % CACHE_LINE)
        starts.append(start)
        end = start + nbytes
    block = np.zeros(end + CACHE_LINE, np.uint8)  # calloc
    first = -block.ctypes.data % CACHE_LINE
    return [
        block[first + start :][: count * dtype.itemsize].view(dtype) for start, (count, dtype) in zip(starts, parts)
    ]


def touch(arrays: Sequence[np.ndarray], threads: int) -> None:
    """Have every page of fresh `arrays` now, from the nodes of the threads that step them. They must hold zeros."""
    for array in arrays:
        cpu.touch(array.view(np.uint8), threads)
