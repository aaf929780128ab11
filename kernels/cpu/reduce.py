"""Sums over an array whose bits do not depend on the thread count: the square of a gradient's norm, a checksum."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.bits import bits_of, enter_ieee, leave_ieee, widen_one
from hf_offload.kernels.cpu.wire import Array, as_flat, as_wire

CHUNK = 1 << 20  # elements whose sum is formed by a fixed tree; chunks are added in order
BLOCK = 1 << 16  # a task's smallest piece of work: 16 subtrees of a chunk
LEAVES = CHUNK // BLOCK
LANES = 256  # running sums of a block, element i goes to lane i % 256; with 64, loop overhead costs a fifth

ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, rounded to odd
_MASK = (1 << 64) - 1


def sum_of_squares(x: Array, wire: str, threads: int) -> float:
    """The sum of x[i] ** 2 in float64; the same bits for any thread count. Inf and NaN come through.

    Args:
        x: wire[n].

    Raises as `adam_step`.
    """
    bits = as_wire("x", x, wire)
    tree = np.zeros((-(-x.size // CHUNK), LEAVES), dtype=np.float64)
    blocks = -(-x.size // BLOCK)
    jit.run(_squares_range, _squares_parallel, (bits, tree.reshape(-1)), blocks, threads, parallel_from=4)
    return sum_of_blocks(tree)


@dataclass(frozen=True)
class Blocks:
    """Blocks that lie in one array, and where their sums belong in a tree of several arrays, float64[chunks, LEAVES].

    Attributes:
        starts, ends: int64[n], elements.
        leaves: int64[n], indices into the flat tree.
    """

    starts: Array
    ends: Array
    leaves: Array


def sum_blocks(x: Array, blocks: Blocks, tree: Array, wire: str, threads: int) -> None:
    """Write the sum of squares of each of `blocks` of x to its leaf of `tree`; the other leaves stay. Raises as
    `adam_step`."""
    bits = as_wire("x", x, wire)
    arrays = (bits, blocks.starts, blocks.ends, blocks.leaves, tree.reshape(-1))
    jit.run(_blocks_range, _blocks_parallel, arrays, len(blocks.starts), threads, parallel_from=4)


def sums_of_trees(tree: Array, firsts: Array) -> Array:
    """float64[k]: sum k is that of the chunks firsts[k] to firsts[k + 1] of `tree`, as `sum_of_squares` adds them."""
    chunks = _chunk_sums(tree)
    counts = np.diff(firsts)
    sums = np.zeros(len(counts))
    for n in range(int(counts.max(initial=0))):  # chunk after chunk, all sums at once
        has = counts > n
        sums[has] += chunks[firsts[:-1][has] + n]
    return sums


def _chunk_sums(tree: Array) -> Array:
    """float64[chunks, blocks of a chunk] to float64[chunks], pairwise."""
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    return tree[:, 0]


def sum_of_blocks(tree: Array) -> float:
    """float64[chunks, blocks of a chunk] to one sum: pairwise inside a chunk, then chunk after chunk."""
    total = 0.0
    for chunk in _chunk_sums(tree).tolist():
        total += chunk
    return total


def checksum(x: Array, threads: int) -> int:
    """A 64-bit hash of the bits of x and of where they stand; the same for any thread count.

    sum of (bits[i] + 1) * odd(i) mod 2**64, with an odd multiplier mixed from i: any one changed element changes it for
    certain, anything else (swaps, zeroing, a changed length) but for one chance in about 2**60.

    Args:
        x: uint16[n] or float32[n].

    Raises as `adam_step`.
    """
    x = as_flat("x", x, np.dtype(np.uint16 if x.dtype == np.uint16 else np.float32))
    sums = np.zeros(max(1, min(threads, jit.max_threads())), dtype=np.uint64)
    jit.run(_checksum_range, _checksum_parallel, (x, sums), x.size, threads)
    return finish_checksum(int(sums.sum(dtype=np.uint64)), x.size)


def finish_checksum(total: int, size: int) -> int:
    """Spreads the sum over all 64 bits (the finalizer of splitmix64), the length mixed in."""
    z = (total + size * ODD) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@jit.helper
def _add_squares(lanes, x):  # type: ignore[no-untyped-def]
    for j in range(x.size):
        value = np.float64(widen_one(x[j]))
        lanes[j] += value * value


@jit.helper
def _block_sum(lanes, x):  # type: ignore[no-untyped-def]
    lanes[:] = 0.0
    rows = x.size // LANES
    for r in range(rows):
        _add_squares(lanes, x[r * LANES : (r + 1) * LANES])
    _add_squares(lanes, x[rows * LANES :])
    half = LANES // 2
    while half > 0:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]


@jit.kernel
def _squares_range(x, sums, lo, hi):  # type: ignore[no-untyped-def]
    """sums[k] = the sum of squares of block k, for lo <= k < hi."""
    mode = enter_ieee()
    lanes = np.empty(LANES, dtype=np.float64)
    for k in range(lo, hi):
        sums[k] = _block_sum(lanes, x[k * BLOCK : min((k + 1) * BLOCK, x.size)])
    leave_ieee(mode)


@jit.parallel_kernel
def _squares_parallel(x, sums, tasks):  # type: ignore[no-untyped-def]
    blocks = (x.size + BLOCK - 1) // BLOCK
    for t in numba.prange(tasks):
        _squares_range(x, sums, blocks * t // tasks, blocks * (t + 1) // tasks)


@jit.kernel
def _blocks_range(x, starts, ends, leaves, sums, lo, hi):  # type: ignore[no-untyped-def]
    """sums[leaves[k]] = the sum of squares of x[starts[k]:ends[k]], for lo <= k < hi."""
    mode = enter_ieee()
    lanes = np.empty(LANES, dtype=np.float64)
    for k in range(lo, hi):
        sums[leaves[k]] = _block_sum(lanes, x[starts[k] : ends[k]])
    leave_ieee(mode)


@jit.parallel_kernel
def _blocks_parallel(x, starts, ends, leaves, sums, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _blocks_range(x, starts, ends, leaves, sums, starts.size * t // tasks, starts.size * (t + 1) // tasks)


@jit.kernel
def _checksum_range(x, sums, lo, hi):  # type: ignore[no-untyped-def]
    part, start = x[lo:hi], np.uint64(lo)
    total = np.uint64(0)
    for i in range(part.size):
        odd = (start + np.uint64(i)) * np.uint64(ODD)
        odd = (odd ^ (odd >> np.uint64(32))) | np.uint64(1)
        total += (np.uint64(bits_of(part[i])) + np.uint64(1)) * odd
    sums[0] = total


@jit.parallel_kernel
def _checksum_parallel(x, sums, tasks):  # type: ignore[no-untyped-def]
    for t in numba.prange(tasks):
        _checksum_range(x, sums[t:], jit.share(x.size, t, tasks), jit.share(x.size, t + 1, tasks))
