"""The noise of stochastic rounding: a pure function of (seed, parameter, element, step), so that bits depend neither
on threads nor on buckets, and a resumed run rounds as the one that never stopped.

Element i of a parameter, in block b = i // BLOCK, at the parameter's step t draws the 32 bits

    u = TABLE[i % BLOCK] + mix(key + b * ODD) + t * GOLDEN    mod 2^32

exp_avg is rounded with its upper bits, exp_avg_sq with its lower ones. In time each element walks a Weyl sequence
(equidistributed, and closer to its mean than independent draws: Kuipers and Niederreiter, Uniform Distribution of
Sequences, 1974, chapter 2.3); from element to element it is shifted at random (Cranley and Patterson, 1976).
"""

from __future__ import annotations

import numpy as np

from hf_offload.kernels.cpu.wire import Array

BLOCK = 128
"""Elements that share one draw of `mix`, and, as int8, one scale."""

GOLDEN = 0x9E376A09
"""Upper half: the golden ratio's fractional part times 2^16; lower half: that of sqrt(2), made odd."""

ODD = 0x9E3779B1
MASK = 0xFFFFFFFF
NUM_NOISE = 2


def mix(x: Array) -> Array:
    """uint32 -> uint32, a bijection in which each input bit moves about half of the output's (Wellons' lowbias32)."""
    x = x.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


TABLE: Array = mix(np.arange(1, BLOCK + 1, dtype=np.uint32))
TABLE.setflags(write=False)


def rows(seed: int, numbers: Array, firsts: Array, steps: Array) -> Array:
    """The rows of noise of p pieces.

    Args:
        seed: any whole number; its lower 64 bits count.
        numbers: int64[p], the number of each piece's parameter.
        firsts: int64[p], the block of that parameter with which the piece begins.
        steps: int64[p], the parameter's step, 1 at first.

    Returns:
        uint32[p, NUM_NOISE]: what `mix` is given for the piece's first block, and t * GOLDEN.
    """
    low, high = seed & MASK, (seed >> 32) & MASK
    keys = mix(mix(mix(np.uint32(low) + np.zeros(1, np.uint32)) ^ np.uint32(high)) ^ _low(numbers))
    found = np.empty((len(numbers), NUM_NOISE), np.uint32)
    found[:, 0] = _low(keys.astype(np.int64) + np.asarray(firsts, np.int64) * ODD)
    found[:, 1] = _low(np.asarray(steps, np.int64) * GOLDEN)
    return found


def noise(row: Array, blocks: int) -> Array:
    """uint32[blocks, BLOCK]: the bits that a piece's elements draw."""
    starts = _low(np.arange(blocks, dtype=np.int64) * ODD + int(row[0]))
    return TABLE + (mix(starts) + row[1])[:, None]


def _low(x: Array) -> Array:
    """x mod 2^32, as uint32. int64 arithmetic wraps, which keeps the lower bits right."""
    return (np.asarray(x, np.int64) & MASK).astype(np.uint32)
