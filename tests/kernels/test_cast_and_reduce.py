"""Casts, re-seeding, sum of squares and checksum: against the twins, against torch or exact sums, in any split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import reduce, reference

WIRES = ["bfloat16", "float16", "float32"]
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def held(wire):
    return np.float32 if wire == "float32" else np.uint16


def any_floats(n, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_widen_all_65536_values(wire, threads):
    src = np.arange(1 << 16, dtype=np.uint16)
    dst = np.zeros(1 << 16, dtype=np.float32)
    cpu.widen(src, dst, wire, threads)
    same_bits(dst, reference.widened(src, wire))
    exact = torch.from_numpy(src.view(np.int16)).view(TORCH[wire]).float().numpy()
    np.testing.assert_array_equal(dst, exact)  # NaN equals NaN here, of whatever payload


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_narrow_rounds_to_nearest_even(wire, threads):
    wide = np.zeros(1 << 16, dtype=np.float32)
    cpu.widen(np.arange(1 << 16, dtype=np.uint16), wide, wire, 1)
    ordered = np.sort(wide[np.isfinite(wide)].astype(np.float64))
    middles = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)  # ties, exact in float32 but for the smallest
    beside = [np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf)]
    src = np.concatenate([wide, middles, *beside, any_floats(100_000)])
    dst = np.zeros(src.size, dtype=np.uint16)
    cpu.narrow(src, dst, wire, threads)
    same_bits(dst, reference.narrowed(src, wire))
    number = ~np.isnan(src)
    wanted = torch.from_numpy(src).to(TORCH[wire]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(dst[number], wanted[number])
    assert set(dst[~number]) == {0x7FC0 if wire == "bfloat16" else 0x7E00}


def test_float32_wire_is_copied_bit_for_bit():
    src = any_floats(50_000)
    for cast in (cpu.widen, cpu.narrow):
        dst = np.zeros_like(src)
        cast(src, dst, "float32", 2)
        same_bits(dst, src)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire", WIRES)
def test_reseed_replaces_exactly_what_was_changed(wire, threads):
    rng = np.random.default_rng(3)
    master = rng.standard_normal(80_000).astype(np.float32)
    weight = np.zeros(master.size, dtype=held(wire))
    cpu.narrow(master, weight, wire, 1)
    kept = master.copy()
    assert cpu.reseed(weight, master, wire, threads) == 0
    same_bits(master, kept)
    changed = rng.choice(master.size, 1234, replace=False)
    weight.view(np.uint32 if wire == "float32" else np.uint16)[changed] ^= 1
    assert cpu.reseed(weight, master, wire, threads) == 1234
    expected = kept.copy()
    expected[changed] = reference.widened(weight, wire)[changed]
    same_bits(master, expected)


@pytest.mark.parametrize("wire", WIRES)
def test_reseed_any_bits_equals_the_twin(wire):
    weight = any_floats(70_000, 8)
    weight = weight if wire == "float32" else (weight.view(np.uint32) >> 16).astype(np.uint16)
    ours, twin = any_floats(70_000, 9), any_floats(70_000, 9)
    assert cpu.reseed(weight, ours, wire, 2) == reference.reseed(weight, twin, wire)
    same_bits(ours, twin)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 65_536, 65_537, 300_000, (1 << 20) + 5, (2 << 20) + 70_000])
@pytest.mark.parametrize("wire", WIRES)
def test_sum_of_squares_bits_equal_the_twin_and_the_exact_sum(wire, n):
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    x = reference.narrowed(values, wire)
    got = cpu.sum_of_squares(x, wire, 2)
    assert got == reference.sum_of_squares(x, wire) == cpu.sum_of_squares(x, wire, 1)
    exact = math.fsum((reference.widened(x, wire).astype(np.float64) ** 2).tolist())
    assert got == pytest.approx(exact, rel=1e-14)


def test_sum_of_squares_adds_chunk_after_chunk():
    """The rule that every schedule shares: chunks of 2**20 from the start, each on its own, added in order."""
    x = np.random.default_rng(0).standard_normal((3 << 20) + 12_345).astype(np.float32)
    total = 0.0
    for start in range(0, x.size, 1 << 20):
        total += cpu.sum_of_squares(x[start : start + (1 << 20)], "float32", 2)
    assert cpu.sum_of_squares(x, "float32", 2) == total


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 16, 40])
def test_sum_of_squares_in_any_split(tasks):
    x = np.random.default_rng(1).standard_normal((1 << 20) + 99_999).astype(np.float32)
    tree = np.zeros((2, reduce.CHUNK // reduce.BLOCK))
    reduce._squares_parallel(x, tree.reshape(-1), tasks)
    assert reduce.sum_of_blocks(tree) == cpu.sum_of_squares(x, "float32", 1)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("place", [0, 77, 70_000, 99_999])
def test_sum_of_squares_shows_inf_and_nan_wherever_they_are(wire, place):
    values = np.ones(100_000, dtype=np.float32)
    for special, seen in ((np.inf, math.isinf), (-np.inf, math.isinf), (np.nan, math.isnan)):
        values[place] = special
        assert seen(cpu.sum_of_squares(reference.narrowed(values, wire), wire, 2))


def test_sum_of_squares_where_float32_squares_overflow_or_vanish():
    assert cpu.sum_of_squares(np.full(1000, 1e30, "f4"), "float32", 1) == pytest.approx(1e63, rel=1e-6)
    assert cpu.sum_of_squares(np.full(1000, 1e-40, "f4"), "float32", 1) == pytest.approx(1e-77, rel=1e-4)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("n", [0, 1, 64, 65, 40_001, 100_000])
def test_checksum_equals_the_twin_for_any_threads(dtype, n):
    x = any_floats(n) if dtype is np.float32 else (any_floats(n).view(np.uint32) >> 16).astype(np.uint16)
    value = reference.checksum(x)
    assert 0 <= value < 1 << 64
    assert cpu.checksum(x, 1) == cpu.checksum(x, 2) == value
    for tasks in (3, 7):
        parts = np.zeros(tasks, dtype=np.uint64)
        reduce._checksum_parallel(x, parts, tasks)
        assert reduce.finish_checksum(int(parts.sum(dtype=np.uint64)), n) == value


@settings(max_examples=40, deadline=None)
@given(dtype=st.sampled_from([np.uint16, np.float32]), n=st.integers(2, 400), seed=st.integers(0, 1000), data=st.data())
def test_checksum_sees_every_kind_of_change(dtype, n, seed, data):
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    x = values if dtype is np.float32 else reference.narrowed(values, "bfloat16")
    word = x.view(np.uint32) if dtype is np.float32 else x
    before = cpu.checksum(x, 1)
    i, j = data.draw(st.permutations(range(n)))[:2]

    def changed(edit):
        copy = word.copy()
        edit(copy)
        return np.array_equal(copy, word) or cpu.checksum(copy.view(dtype), 1) != before

    top = word.dtype.type(1 << (8 * word.itemsize - 1))
    assert changed(lambda w: w.__setitem__(slice(None), w ^ top)), "all negated"
    assert changed(lambda w: w.__setitem__(i, w[i] ^ top)), "one negated"
    assert changed(lambda w: w.__setitem__([i, j], w[[j, i]])), "two swapped"
    assert changed(lambda w: w.__setitem__(i, 0)), "one zeroed"
    assert changed(lambda w: w.fill(0)), "all zeroed"
    assert changed(lambda w: w.__setitem__(slice(None), np.roll(w, 1))), "rolled"
    assert changed(lambda w: w.__setitem__(slice(None), w[::-1].copy())), "reversed"
    assert cpu.checksum(x[:-1], 1) != before, "shorter"


def test_checksum_of_zeros_depends_on_their_number():
    assert len({cpu.checksum(np.zeros(n, np.uint16), 1) for n in range(50)}) == 50


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="dst: kernels take contiguous 1-dimensional float32"):
        cpu.widen(np.zeros(3, np.uint16), np.zeros(3, np.uint16), "bfloat16", 1)
    with pytest.raises(ValueError, match="dst: 4 elements where the other arrays have 3"):
        cpu.narrow(np.zeros(3, "f4"), np.zeros(4, np.uint16), "bfloat16", 1)
    with pytest.raises(TypeError, match="x: kernels take contiguous 1-dimensional float32"):
        cpu.checksum(np.zeros(3, np.int16), 1)
    with pytest.raises(TypeError, match="x: kernels take contiguous"):
        cpu.sum_of_squares(np.zeros((3, 3), "f4"), "float32", 1)
