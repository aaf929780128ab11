"""Casts between the wire dtypes and float32, and masters taken anew from weights that were changed from outside."""

from __future__ import annotations

import numba
import numpy as np

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.bits import bits_of, enter_ieee, leave_ieee, narrow_as, widen_one
from hf_offload.kernels.cpu.wire import Array, as_float32, as_wire


def widen(src: Array, dst: Array, wire: str, threads: int) -> None:
    """dst (float32[n]) = src (wire[n]), exactly. Raises as `adam_step`."""
    dst = as_float32("dst", dst)
    jit.run(_widen_range, _widen_parallel, (as_wire("src", src, wire, dst.size), dst), dst.size, threads)


def narrow(src: Array, dst: Array, wire: str, threads: int) -> None:
    """dst (wire[n]) = src (float32[n]) rounded to nearest even. A NaN becomes the quiet 0x7FC0 (bfloat16), 0x7E00
    (float16), or stays as it is (float32). Raises as `adam_step`."""
    src = as_float32("src", src)
    jit.run(_narrow_range, _narrow_parallel, (src, as_wire("dst", dst, wire, src.size)), src.size, threads)


def reseed(weight: Array, master: Array, wire: str, threads: int) -> int:
    """Where a weight is not its rounded master, bit for bit, the weight becomes the master.

    So an element nobody touched keeps the digits that only its master has.

    Args:
        weight: wire[n], read.
        master: float32[n], updated in place.

    Returns:
        The number of masters replaced. Raises as `adam_step`.
    """
    master = as_float32("master", master)
    bits = as_wire("weight", weight, wire, master.size)
    counts = np.zeros(max(1, min(threads, jit.max_threads())), dtype=np.int64)
    jit.run(_reseed_range, _reseed_parallel, (bits, master, counts), master.size, threads)
    return int(counts.sum())


@jit.kernel
def _widen_range(src, dst, lo, hi):  # type: ignore[no-untyped-def]
    mode = enter_ieee()
    src, dst = src[lo:hi], dst[lo:hi]
    for i in range(src.size):
        dst[i] = widen_one(src[i])
    leave_ieee(mode)


@jit.parallel_kernel
def _widen_parallel(src, dst, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _widen_range(src, dst, jit.share(src.size, t, tasks), jit.share(src.size, t + 1, tasks))


@jit.kernel
def _narrow_range(src, dst, lo, hi):  # type: ignore[no-untyped-def]
    mode = enter_ieee()
    src, dst = src[lo:hi], dst[lo:hi]
    for i in range(src.size):
        dst[i] = narrow_as(dst[i], src[i])
    leave_ieee(mode)


@jit.parallel_kernel
def _narrow_parallel(src, dst, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _narrow_range(src, dst, jit.share(src.size, t, tasks), jit.share(src.size, t + 1, tasks))


@jit.helper
def _reseed_part(weight, master):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(weight.size):
        changed = bits_of(narrow_as(weight[i], master[i])) != bits_of(weight[i])
        # Written either way: a select vectorises, a branch around the store does not everywhere.
        master[i] = widen_one(weight[i]) if changed else master[i]
        count += changed
    return count


@jit.kernel
def _reseed_range(weight, master, counts, lo, hi):  # type: ignore[no-untyped-def]
    mode = enter_ieee()
    counts[0] = _reseed_part(weight[lo:hi], master[lo:hi])
    leave_ieee(mode)


@jit.parallel_kernel
def _reseed_parallel(weight, master, counts, tasks):  # type: ignore[no-untyped-def]
    n = master.size
    for t in numba.prange(tasks):
        _reseed_range(weight, master, counts[t:], jit.share(n, t, tasks), jit.share(n, t + 1, tasks))
