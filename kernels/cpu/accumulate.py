"""Micro-batches added up on the host: what autograd does to `.grad`, done to the gradient store."""

from __future__ import annotations

import numba

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.bits import enter_ieee, leave_ieee, narrow_as, one_nan, widen_one
from hf_offload.kernels.cpu.cast import widen
from hf_offload.kernels.cpu.wire import Array, as_wire


def put(src: Array, dst: Array, wire: str, held: str, threads: int) -> None:
    """dst (held[n]) = src (wire[n]): the same bits where both are one format, else widened, `held` being float32.

    Raises as `adam_step`.
    """
    if wire == held:
        _run(_copy_range, _copy_parallel, src, dst, wire, held, threads)
    else:
        widen(src, dst, wire, threads)


def add(src: Array, dst: Array, wire: str, held: str, threads: int) -> None:
    """dst (held[n]) += src (wire[n]): added in float32, then rounded to `held`, ties to even, as torch adds gradients.

    A NaN becomes the one quiet NaN of `narrow`. Raises as `adam_step`.
    """
    _run(_add_range, _add_parallel, src, dst, wire, held, threads)


def _run(body, driver, src: Array, dst: Array, wire: str, held: str, threads: int) -> None:  # type: ignore[no-untyped-def]
    dst = as_wire("dst", dst, held)
    jit.run(body, driver, (as_wire("src", src, wire, dst.size), dst), dst.size, threads)


@jit.kernel
def _copy_range(src, dst, lo, hi):  # type: ignore[no-untyped-def]
    src, dst = src[lo:hi], dst[lo:hi]
    for i in range(src.size):
        dst[i] = src[i]


@jit.parallel_kernel
def _copy_parallel(src, dst, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _copy_range(src, dst, jit.share(src.size, t, tasks), jit.share(src.size, t + 1, tasks))


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
