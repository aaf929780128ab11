"""Micro-batches added up on the host: what autograd does to `.grad`, done to the gradient store."""

from __future__ import annotations

import numba

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.bits import enter_ieee, leave_ieee, narrow_as, one_nan, widen_one
from hf_offload.kernels.cpu.wire import Array, as_wire


def put(src: Array, dst: Array, wire: str, held: str, threads: int) -> None:
    """dst (held[n]) = src (wire[n]): the same bits where both are one format, widened where `held` is float32.

    Raises as `adam_step`.
    """
    _run(_put_range, _put_parallel, src, dst, wire, held, threads)


def add(src: Array, dst: Array, wire: str, held: str, threads: int) -> None:
    """dst (held[n]) += src (wire[n]): added in float32, then rounded to `held`, ties to even, as torch adds gradients.

    A NaN becomes the one quiet NaN of `narrow`. Raises as `adam_step`.
    """
    _run(_add_range, _add_parallel, src, dst, wire, held, threads)


def _run(body, driver, src: Array, dst: Array, wire: str, held: str, threads: int) -> None:  # type: ignore[no-untyped-def]
    dst = as_wire("dst", dst, held)
    jit.run(body, driver, (as_wire("src", src, wire, dst.size), dst), dst.size, threads)


@jit.kernel
def _put_range(src, dst, lo, hi):  # type: ignore[no-untyped-def]
    mode = enter_ieee()
    src, dst = src[lo:hi], dst[lo:hi]
    if src.dtype == dst.dtype:  # decided when compiled: bits are moved as they are, a NaN's too
        for i in range(src.size):
            dst[i] = src[i]
    else:
        for i in range(src.size):
            dst[i] = narrow_as(dst[i], widen_one(src[i]))
    leave_ieee(mode)


@jit.parallel_kernel
def _put_parallel(src, dst, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _put_range(src, dst, jit.share(src.size, t, tasks), jit.share(src.size, t + 1, tasks))


@jit.kernel
def _add_range(src, dst, lo, hi):  # type: ignore[no-untyped-def]
    mode = enter_ieee()
    src, dst = src[lo:hi], dst[lo:hi]
    for i in range(src.size):
        dst[i] = narrow_as(dst[i], one_nan(widen_one(dst[i]) + widen_one(src[i])))
    leave_ieee(mode)


@jit.parallel_kernel
def _add_parallel(src, dst, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _add_range(src, dst, jit.share(src.size, t, tasks), jit.share(src.size, t + 1, tasks))
