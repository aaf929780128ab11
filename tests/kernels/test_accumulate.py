"""Adding micro-batches up on the host, stepping into a shadow, and the norms of many pieces at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import reduce, reference

WIRES = ["bfloat16", "float16", "float32"]
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
N = 70_001  # above the size from which kernels run in parallel, and odd


def bits(n, wire, seed):
    """Any bit pattern: NaN, Inf and denormals among them."""
    raw = np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32)
    return raw.view(np.float32) if wire == "float32" else (raw >> 16).astype(np.uint16)


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def as_torch(array, wire):
    t = torch.from_numpy(array.copy())
    return t if wire == "float32" else t.view(torch.int16).view(TORCH[wire])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire", WIRES)
def test_adding_rounds_as_autograd_does(wire, threads):
    src, dst = bits(N, wire, 1), bits(N, wire, 2)
    dst[:5000] = src[:5000]  # sums that double
    src[5000:9000] = dst[5000:9000] ^ 0x8000 if wire != "float32" else -dst[5000:9000]  # sums that vanish
    expected, sums = dst.copy(), as_torch(dst, wire)
    reference.add(src, expected, wire, wire)
    cpu.add(src, dst, wire, wire, threads)
    same_bits(dst, expected)
    sums += as_torch(src, wire)
    number = ~torch.isnan(sums)
    assert torch.equal(as_torch(dst, wire)[number], sums[number])
    assert torch.equal(torch.isnan(as_torch(dst, wire)), ~number)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wire", WIRES)
def test_adding_up_in_float32_rounds_once(wire, threads):
    src, dst = bits(N, wire, 3), bits(N, "float32", 4)
    expected = dst.copy()
    reference.add(src, expected, wire, "float32")
    cpu.add(src, dst, wire, "float32", threads)
    same_bits(dst, expected)


@pytest.mark.parametrize("held", ["wire", "float32"])
@pytest.mark.parametrize("wire", WIRES)
def test_the_first_micro_batch_is_put_as_it_is(wire, held):
    kept = wire if held == "wire" else held
    src = bits(N, wire, 5)
    dst = bits(N, kept, 6)
    expected = dst.copy()
    reference.put(src, expected, wire, kept)
    cpu.put(src, dst, wire, kept, 2)
    same_bits(dst, expected)
    if kept == wire:
        same_bits(dst, src)


def bucket(wire, seed, n=N):
    rng = np.random.default_rng(seed)
    bounds = np.array([0, 5, 5, 4097, 40_000, n], np.int64)
    arguments = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True, "maximize": False}
    rows = [cpu.coefficients(lr=1e-3 * k, weight_decay=0.1, step=k, grad_scale=0.3, **arguments) for k in range(1, 6)]
    rows[3] = cpu.INACTIVE
    state = (*tuple(rng.normal(size=n).astype(np.float32) for _ in range(2)), rng.random(n).astype(np.float32))
    return state, bits(n, wire, seed + 1), bounds, np.stack(rows)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("grad_wire", ["same", "float32"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_step_into_a_shadow_makes_the_same_bits_and_touches_nothing_else(wire, grad_wire, threads):
    kind = wire if grad_wire == "same" else grad_wire
    state, grad, bounds, coef = bucket(kind, 7)
    before = tuple(a.copy() for a in state)
    weight = bits(N, wire, 9)
    shadow, made = tuple(bits(N, "float32", k) for k in (10, 11, 12)), weight.copy()
    cpu.adam_step_into(state, shadow, grad, made, bounds, coef, wire=wire, grad_wire=kind, threads=threads)
    for a, b in zip(state, before):
        same_bits(a, b)
    cpu.adam_step(*state, grad, weight, bounds, coef, wire=wire, grad_wire=kind, threads=threads)
    for a, b in zip((*shadow, made), (*state, weight)):
        same_bits(a, b)
    reference.adam_step(*before, grad, made, bounds, coef, wire=wire, grad_wire=kind)
    for a, b in zip(shadow, before):
        same_bits(a, b)


def test_a_shadow_of_another_size_is_refused():
    state, grad, bounds, coef = bucket("bfloat16", 1)
    shadow = tuple(np.zeros(N + 1, np.float32) for _ in range(3))
    with pytest.raises(ValueError, match=r"shadow's master: 70002 elements where the other arrays have 70001"):
        cpu.adam_step_into(state, shadow, grad, grad.copy(), bounds, coef, wire="bfloat16", threads=1)


def trees(x, sizes, wire, threads):
    """What `sum_blocks` makes of pieces of `sizes` elements that follow each other in x."""
    starts, ends, leaves, firsts, at = [], [], [], [0], 0
    for size in sizes:
        for begin in range(0, size, reduce.BLOCK):
            starts.append(at + begin)
            ends.append(at + min(begin + reduce.BLOCK, size))
            leaves.append(firsts[-1] * reduce.LEAVES + begin // reduce.BLOCK)
        firsts.append(firsts[-1] + -(-size // reduce.CHUNK))
        at += size
    tree = np.zeros((firsts[-1], reduce.LEAVES))
    cpu.sum_blocks(x, cpu.Blocks(*(np.array(a, np.int64) for a in (starts, ends, leaves))), tree, wire, threads)
    return cpu.sums_of_trees(tree, np.array(firsts))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 255, 256, 65_535, 65_536, 65_537, 200_001, reduce.CHUNK + 3]), max_size=6),
    wire=st.sampled_from(WIRES),
    threads=st.integers(1, 2),
)
def test_the_sums_of_many_pieces_are_those_of_each(sizes, wire, threads):
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    x = bits(int(bounds[-1]), wire, len(sizes))
    with np.errstate(all="ignore"):
        finite = np.isfinite(reference.widened(x, wire))
    x[~finite] = 0
    found = trees(x, sizes, wire, threads)
    each = [cpu.sum_of_squares(x[a:b], wire, threads) for a, b in itertools.pairwise(bounds)]
    same_bits(found, np.array(each, np.float64))


def test_a_piece_that_is_not_finite_says_so_and_spoils_no_other():
    x = np.ones(200, np.float32)
    x[150] = np.inf
    sums = trees(x, [100, 100], "float32", 1)
    assert sums[0] == 100.0 and sums[1] == np.inf
