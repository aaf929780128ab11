"""How fast memory is: the step's access patterns without arithmetic, compiled, chunked and threaded as `adam_step` is.

Each loads every element and stores it again, xor-ed with a mask that LLVM cannot know: with mask 0 the data stay as
they are, and no load or store can be dropped (a test looks at the assembly, and at the data under other masks).
"""

# `intrinsic` passes Numba and LLVM objects that carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import chunks, jit
from hf_offload.kernels.cpu.wire import HELD, Array, as_flat, as_float32

_LINE = 32  # 16-bit elements of a cache line of 64 bytes
_TILE = 16 * _LINE
"""Elements after which the streamed pattern turns from the state to the weights. Of 1 to 1024 lines the fastest where
this was tried (one core with AVX-512): a tenth above the plain pattern."""


def read_modify_write(arrays: tuple[Array, Array, Array], *, threads: int, mask: int = 0) -> None:
    """Reads and writes three arrays: 24 bytes of traffic an element.

    Args:
        arrays: float32[n] each, unchanged with mask 0.
        mask: uint32, xor-ed into every element's bits.

    Raises:
        TypeError, ValueError: as `adam_step`.
    """
    views = _as_bits(arrays, None)
    jit.run(_rmw_range, _rmw_parallel, (*views, np.uint32(mask)), views[0].size, threads)


def step_pattern(state: tuple[Array, Array, Array], grad: Array, weight: Array, *, threads: int, mask: int = 0) -> None:
    """What `adam_step` reads and writes on a 16-bit wire, 28 bytes an element, without its arithmetic.

    The weight is stored as any array is, so that the processor may read its line before it writes it: 30 bytes.

    Args:
        state: master, exp_avg, exp_avg_sq, float32[n] each, unchanged with mask 0.
        grad: uint16[n], read.
        weight: uint16[n], written: the gradient, xor-ed with the mask's low half.
        mask: uint32.

    Raises:
        TypeError, ValueError: as `adam_step`.
    """
    args = _pattern_args(state, grad, weight, mask)
    jit.run(_pattern_range, _pattern_parallel, args, grad.size, threads)


def step_pattern_streamed(
    state: tuple[Array, Array, Array], grad: Array, weight: Array, *, threads: int, mask: int = 0
) -> None:
    """`step_pattern` whose weights are written past the cache, whole lines at a time: 28 bytes and no more."""
    skew = (-weight.ctypes.data % 64) // 2  # elements before the first whole line
    args = (*_pattern_args(state, grad, weight, mask), skew)
    jit.run(_streamed_range, _streamed_parallel, args, grad.size, threads)


def fill(array: Array, tile: Array, *, threads: int) -> None:
    """array[i] = tile[i mod the tile's size], each page first touched by a thread that shares the step's work.

    Args:
        array: [n], elements of an even number of bytes.
        tile: of the same dtype; a power of two of elements.

    Raises:
        TypeError, ValueError: another dtype or layout; a tile of another size.
    """
    args = (as_flat("array", array, array.dtype), as_flat("tile", tile, array.dtype))
    if tile.size & (tile.size - 1) or not tile.size:
        raise ValueError(f"tile: {tile.size} elements, which is not a power of two")
    halves = tuple(a.view(np.uint16) for a in args)  # one kernel for all dtypes
    jit.run(_fill_range, _fill_parallel, halves, halves[0].size, threads)


def _as_bits(arrays: tuple[Array, Array, Array], n: int | None) -> tuple[Array, ...]:
    first = as_float32("first array", arrays[0], n)
    rest = (as_float32(name, a, first.size) for name, a in zip(("second array", "third array"), arrays[1:]))
    return tuple(a.view(np.uint32) for a in (first, *rest))


def _pattern_args(state: tuple[Array, Array, Array], grad: Array, weight: Array, mask: int) -> tuple[object, ...]:
    views = _as_bits(state, None)
    n = views[0].size
    ends = (as_flat(name, a, HELD["bfloat16"], n) for name, a in (("grad", grad), ("weight", weight)))
    return (*views, *ends, np.uint32(mask))


@jit.helper
def _rmw(a, b, c, mask):
    for i in range(a.size):
        a[i] ^= mask
        b[i] ^= mask
        c[i] ^= mask


@jit.helper
def _pattern(a, b, c, grad, weight, mask):
    low = np.uint16(mask)
    for i in range(a.size):
        a[i] ^= mask
        b[i] ^= mask
        c[i] ^= mask
        weight[i] = grad[i] ^ low


@jit.kernel
def _rmw_range(a, b, c, mask, lo, hi):
    _rmw(a[lo:hi], b[lo:hi], c[lo:hi], mask)


@jit.kernel
def _pattern_range(a, b, c, grad, weight, mask, lo, hi):
    _pattern(a[lo:hi], b[lo:hi], c[lo:hi], grad[lo:hi], weight[lo:hi], mask)


@intrinsic
def _line_past_cache(typingctx, source, target, at, mask):
    """target[at : at + 32] = source[at : at + 32] ^ mask, uint16, written past the cache. target's line is aligned."""

    def codegen(context, builder, sig, args):
        vector = ir.VectorType(ir.IntType(16), _LINE)
        places = []
        for kind, value in zip(sig.args[:2], args[:2]):
            array = context.make_array(kind)(context, builder, value)
            place = cgutils.get_item_pointer(context, builder, kind, array, [args[2]], wraparound=False)
            places.append(builder.bitcast(place, vector.as_pointer()))
        loaded = builder.load(places[0])
        loaded.align = 2
        lanes = ir.Constant(vector, ir.Undefined)
        for lane in range(_LINE):
            lanes = builder.insert_element(lanes, args[3], ir.Constant(ir.IntType(32), lane))
        stored = builder.store(builder.xor(loaded, lanes), places[1])
        stored.align = 64
        # LLVM language reference, "store": `!nontemporal !{i32 1}`
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(source, target, types.intp, types.uint16), codegen


@intrinsic
def _drained(typingctx):
    """What was written past the cache is seen by every thread from here on (x86-64 orders it by a fence alone)."""

    def codegen(context, builder, sig, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@jit.kernel
def _streamed_range(a, b, c, grad, weight, mask, skew, lo, hi):
    low = np.uint16(mask)
    at = min(hi, lo + (skew - lo) % _LINE)
    _pattern(a[lo:at], b[lo:at], c[lo:at], grad[lo:at], weight[lo:at], mask)
    while at + _LINE <= hi:
        end = at + min(_TILE, (hi - at) // _LINE * _LINE)
        _rmw(a[at:end], b[at:end], c[at:end], mask)
        for line in range(at, end, _LINE):
            _line_past_cache(grad, weight, line, low)  # type: ignore[call-arg]
        at = end
    _pattern(a[at:hi], b[at:hi], c[at:hi], grad[at:hi], weight[at:hi], mask)
    _drained()  # type: ignore[call-arg]


@jit.kernel
def _fill_range(array, tile, lo, hi):
    mask = tile.size - 1
    for i in range(lo, hi):
        array[i] = tile[i & mask]


@jit.parallel_kernel
def _rmw_parallel(a, b, c, mask, tasks):
    n = a.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            _rmw_range(a, b, c, mask, jit.share(n, k, total), jit.share(n, k + 1, total))
            k = chunks.take(taken, t, tasks, total)


@jit.parallel_kernel
def _pattern_parallel(a, b, c, grad, weight, mask, tasks):
    n = a.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            _pattern_range(a, b, c, grad, weight, mask, jit.share(n, k, total), jit.share(n, k + 1, total))
            k = chunks.take(taken, t, tasks, total)


@jit.parallel_kernel
def _streamed_parallel(a, b, c, grad, weight, mask, skew, tasks):
    n = a.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            _streamed_range(a, b, c, grad, weight, mask, skew, jit.share(n, k, total), jit.share(n, k + 1, total))
            k = chunks.take(taken, t, tasks, total)


@jit.parallel_kernel
def _fill_parallel(array, tile, tasks):
    n = array.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            _fill_range(array, tile, jit.share(n, k, total), jit.share(n, k + 1, total))
            k = chunks.take(taken, t, tasks, total)
