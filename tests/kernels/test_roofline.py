"""The rooflines really load and store every element: seen in the data and in the assembly."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from numba import types

from hf_offload.kernels.cpu import jit, roofline

MASK = 0x1234_5678
SIZES = [1, 31, 64, 4097, 70_003]
PATTERNS = [roofline.step_pattern, roofline.step_pattern_streamed]
U32, U16, INT = types.uint32[::1], types.uint16[::1], types.int64


def arrays(n, skew=0):
    """Three float32[n] with random bits, gradient and weight; the weight begins `skew` elements after a cache line."""
    rng = np.random.default_rng(n)
    state = tuple(rng.integers(0, 1 << 32, n, np.uint32).view(np.float32) for _ in range(3))
    raw = np.zeros(n + 64, np.uint16)
    begin = (-raw.ctypes.data % 64) // 2 + skew
    return state, rng.integers(0, 1 << 16, n, np.uint16), raw[begin : begin + n]


def bits(state):
    return [a.view(np.uint32).copy() for a in state]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_element_is_loaded_and_stored(pattern, n, threads):
    state, grad, weight = arrays(n, skew=n % 32)
    before = bits(state)
    pattern(state, grad, weight, threads=threads, mask=MASK)
    for was, now in zip(before, bits(state)):
        np.testing.assert_array_equal(now, was ^ np.uint32(MASK))
    np.testing.assert_array_equal(weight, grad ^ np.uint16(MASK & 0xFFFF))


@pytest.mark.parametrize("skew", [0, 1, 31])
def test_the_streamed_pattern_writes_no_neighbour(skew):
    state, grad, weight = arrays(5000, skew)
    weight.base[:] = 7
    weight[:] = 0
    outside = weight.base.sum(dtype=np.int64)
    roofline.step_pattern_streamed(state, grad, weight, threads=1)
    assert weight.base.sum(dtype=np.int64) - weight.sum(dtype=np.int64) == outside
    np.testing.assert_array_equal(weight, grad)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", SIZES)
def test_read_modify_write(n, threads):
    state, _, _ = arrays(n)
    before = bits(state)
    roofline.read_modify_write(state, threads=threads, mask=MASK)
    for was, now in zip(before, bits(state)):
        np.testing.assert_array_equal(now, was ^ np.uint32(MASK))
    roofline.read_modify_write(state, threads=threads, mask=MASK)
    for was, now in zip(before, bits(state)):
        np.testing.assert_array_equal(now, was)


@pytest.mark.parametrize("threads", [1, 2])
def test_fill_repeats_the_tile(threads):
    tile = np.arange(64, dtype=np.float32)
    array = np.full(70_003, -1, np.float32)
    roofline.fill(array, tile, threads=threads)
    np.testing.assert_array_equal(array, np.resize(tile, array.size))


def test_bad_arrays_are_refused():
    state, grad, weight = arrays(100)
    with pytest.raises(ValueError, match="weight: 99 elements"):
        roofline.step_pattern(state, grad, weight[:99], threads=1)
    with pytest.raises(TypeError, match="third array"):
        roofline.read_modify_write((*state[:2], state[2].astype(np.float64)), threads=1)
    with pytest.raises(ValueError, match="tile: 3 elements"):
        roofline.fill(state[0], np.zeros(3, np.float32), threads=1)


def assembly(body, *signature):
    fresh = numba.njit(**jit.OPTIONS)(body.py_func)
    fresh.compile(signature)
    (text,) = fresh.inspect_asm().values()
    return text


def stores(text, operation):
    """Stores of whole 256- or 512-bit registers."""
    return re.findall(rf"^\s*v{operation}\s+%[yz]mm\d+, .*\(", text, flags=re.M)


def test_loads_and_stores_are_packed():
    if not llvm.get_process_triple().startswith("x86_64") or not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("the instructions looked for are those of x86-64 with AVX2")
    rmw = assembly(roofline._rmw_range, U32, U32, U32, types.uint32, INT, INT)
    plain = assembly(roofline._pattern_range, U32, U32, U32, U16, U16, types.uint32, INT, INT)
    streamed = assembly(roofline._streamed_range, U32, U32, U32, U16, U16, types.uint32, INT, INT, INT)
    move = r"movdq[au]\w*|movup[sd]|movap[sd]"
    assert len(stores(rmw, f"(?:{move})")) >= 3
    assert len(stores(plain, f"(?:{move})")) >= 4
    assert stores(streamed, "movnt(?:dq|p[sd])") and len(stores(streamed, f"(?:{move})")) >= 3
    for text in (rmw, plain, streamed):
        assert re.search(r"^\s*vp?xor\w*\s.*%[yz]mm", text, flags=re.M), "the mask is still there: nothing was dropped"
