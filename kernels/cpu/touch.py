"""First touch: pages that the system has promised come into being, on the node of the thread that writes them."""

from __future__ import annotations

import numba
import numpy as np

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.wire import Array, as_flat

PAGE = 4096
"""Bytes; the smallest there is. A larger page is touched more often than needed."""


def touch(memory: Array, threads: int) -> None:
    """Write a zero into every page of `memory`; each thread into the part that it will step.

    Args:
        memory: uint8[n] of zeros.

    Raises as `adam_step`.
    """
    memory = as_flat("memory", memory, np.dtype(np.uint8))
    jit.run(_touch_range, _touch_parallel, (memory,), memory.size, threads)


@jit.kernel
def _touch_range(memory, lo, hi):  # type: ignore[no-untyped-def]
    part = memory[lo:hi]
    for i in range(0, part.size, PAGE):
        part[i] = 0
    if part.size:
        part[part.size - 1] = 0


@jit.parallel_kernel
def _touch_parallel(memory, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _touch_range(memory, jit.share(memory.size, t, tasks), jit.share(memory.size, t + 1, tasks))
