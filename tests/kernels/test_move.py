"""Many small moves in one call."""

from __future__ import annotations

import numpy as np
import pytest

from hf_offload.kernels import cpu


def test_each_run_is_copied_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    sizes = np.concatenate(([0, 1, 3, 64, 100_000], rng.integers(0, 3000, 200)))
    starts = np.cumsum(sizes) - sizes
    source = rng.integers(0, 256, int(sizes.sum()), dtype=np.uint8)
    place = np.full(source.size + 2 * len(sizes), 7, np.uint8)
    there = starts + 2 * np.arange(len(sizes)) + 1  # a byte before and after each
    expected = place.copy()
    for at, start, size in zip(there, starts, sizes):
        expected[at : at + size] = source[start : start + size]
    cpu.move(there + place.ctypes.data, starts + source.ctypes.data, sizes)
    assert np.array_equal(place, expected)


def test_nothing_to_move() -> None:
    nothing = np.zeros(0, np.int64)
    cpu.move(nothing, nothing, nothing)


def test_lists_that_do_not_match_are_refused() -> None:
    two, three = np.zeros(2, np.int64), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="nbytes: 3 elements"):
        cpu.move(two, two, three)
    with pytest.raises(TypeError, match="source: kernels take"):
        cpu.move(two, two.astype(np.int32), two)
