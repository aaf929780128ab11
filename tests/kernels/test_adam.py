"""The fused step against its NumPy twin, bit for bit: wires, settings, pieces, splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload.errors import ConfigError
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import adam, reference

WIRES = ["bfloat16", "float16", "float32"]
DEFAULTS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
    "step": 3, "grad_scale": 0.25, "decoupled": True, "maximize": False,
}  # fmt: skip


def row(**changed):
    return cpu.coefficients(**{**DEFAULTS, **changed})


def held(wire):
    return np.float32 if wire == "float32" else np.uint16


def ordinary(n, wire, seed=0):
    """master, exp_avg, exp_avg_sq, grad, weight as training has them; the weight is not yet the rounded master."""
    rng = np.random.default_rng(seed)
    normal = [rng.standard_normal(n).astype(np.float32) for _ in range(4)]
    grad = reference.narrowed(normal[3], wire)
    return [normal[0], 0.1 * normal[1], normal[2] ** 2, grad, np.zeros(n, dtype=held(wire))]


def any_bits(n, wire, seed=0):
    """The same five arrays from random bits: every exponent, denormals, infinities, NaNs of any payload."""
    rng = np.random.default_rng(seed)
    floats = [rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32) for _ in range(4)]
    grad = floats[3] if wire == "float32" else rng.integers(0, 1 << 16, n, dtype=np.uint16)
    return [floats[0], floats[1], np.abs(floats[2]), grad, np.zeros(n, dtype=held(wire))]


def bits(arrays):
    return [a.view(np.uint8) for a in arrays]


def assert_same_bits(got, wanted):
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq", "grad", "weight"), bits(got), bits(wanted)):
        np.testing.assert_array_equal(a, b, err_msg=name)


def both(arrays, bounds, coef, wire, threads=2):
    ours, twins = [a.copy() for a in arrays], [a.copy() for a in arrays]
    bounds, coef = (
        np.asarray(bounds, dtype=np.int64),
        np.stack(coef) if len(coef) else np.zeros((0, cpu.NUM_COEF), "f4"),
    )
    cpu.adam_step(*ours, bounds, coef, wire=wire, threads=threads)
    reference.adam_step(*twins, bounds, coef, wire=wire)
    return ours, twins


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["decoupled", "l2"])
@pytest.mark.parametrize("data", [ordinary, any_bits], ids=["ordinary", "any bits"])
@pytest.mark.parametrize("wire", WIRES)
def test_bits_equal_the_twins(wire, data, decoupled, maximize):
    arrays = data(100_003, wire)
    coef = row(decoupled=decoupled, maximize=maximize, weight_decay=0.1)
    ours, twins = both(arrays, [0, 100_003], [coef], wire)
    assert_same_bits(ours, twins)
    assert not np.array_equal(ours[0], arrays[0])
    np.testing.assert_array_equal(ours[3], arrays[3])  # the gradient is only read


@pytest.mark.parametrize("wire", WIRES)
def test_several_steps_bits_equal_the_twins(wire):
    n = 4_001
    ours = ordinary(n, wire)
    twins = [a.copy() for a in ours]
    bounds = np.array([0, n])
    for step in range(1, 30):
        grad = reference.narrowed(np.random.default_rng(step).standard_normal(n).astype(np.float32), wire)
        ours[3][:] = twins[3][:] = grad
        coef = row(step=step, lr=1e-2 / step)[None]
        cpu.adam_step(*ours, bounds, coef, wire=wire, threads=1)
        reference.adam_step(*twins, bounds, coef, wire=wire)
    assert_same_bits(ours, twins)


def test_one_step_by_hand():
    """The paper's formula in Python floats, from zero state: the first step is about lr in the gradient's sign."""
    master, m, v = np.array([1.0], "f4"), np.zeros(1, "f4"), np.zeros(1, "f4")
    weight = np.zeros(1, np.uint16)
    grad = np.array([0x4000], np.uint16)  # 2.0
    coef = row(step=1, grad_scale=0.5, lr=0.01, weight_decay=0.1)[None]
    cpu.adam_step(master, m, v, grad, weight, np.array([0, 1]), coef, wire="bfloat16", threads=1)
    assert m[0] == pytest.approx(0.1, rel=1e-6)
    assert v[0] == pytest.approx(0.001, rel=1e-6)
    assert master[0] == pytest.approx(1.0 * (1 - 0.01 * 0.1) - 0.01, rel=1e-6)
    assert weight[0] == 0x3F7D  # 0.98828125, the bfloat16 nearest to 0.989


def test_coefficients_are_float64_rounded_once():
    c = row(beta2=0.999, step=1000, lr=3e-4, grad_scale=1.0)
    assert c.dtype == np.float32 and c.shape == (cpu.NUM_COEF,)
    assert c[adam.REST2] == np.float32(1 - 0.999) != np.float32(1) - np.float32(0.999)
    assert c[adam.STEP_SIZE] == np.float32(3e-4 / (1 - 0.9**1000))
    assert c[adam.ROOT_SCALE] == np.float32(1 / math.sqrt(1 - 0.999**1000))
    assert c[adam.DECAY] == np.float32(1 - 3e-4 * 0.01)
    assert c[adam.KEEP1] - c[adam.FADE1] == np.float32(0.9)
    assert row(maximize=True)[adam.SCALE] == -row()[adam.SCALE]
    assert row(decoupled=False)[adam.DECAY] == 1 and row(decoupled=True)[adam.L2] == 0
    assert not cpu.INACTIVE.any()


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3, 0.7 / 65536, 3e-20, 7e19, 0.0])
def test_the_gradient_scale_is_a_power_of_two_and_a_part_folded_into_the_rest(scale):
    c = row(grad_scale=scale).astype(np.float64)
    power = c[adam.SCALE]
    assert math.frexp(power)[0] in (0.0, 0.5)
    assert power * c[adam.REST1] == pytest.approx(0.1 * scale, rel=1e-7)
    assert power**2 * c[adam.REST2] == pytest.approx((1 - 0.999) * scale**2, rel=1e-7)
    l2 = row(grad_scale=scale, decoupled=False, weight_decay=0.3).astype(np.float64)
    assert l2[adam.L2] * l2[adam.REST1] == pytest.approx(0.1 * 0.3, rel=1e-6)


sizes = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 300]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, wire=st.sampled_from(WIRES), tasks=st.integers(1, 9), seed=st.integers(0, 99), data=st.data())
def test_any_pieces_any_split(sizes, wire, tasks, seed, data):
    """Empty pieces, one-element pieces, inactive ones, more tasks than elements: the twin's bits, others untouched."""
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    kinds = data.draw(st.lists(st.sampled_from(["adamw", "l2", "inactive"]), min_size=len(sizes), max_size=len(sizes)))
    coef = [
        cpu.INACTIVE if kind == "inactive" else row(decoupled=kind == "adamw", step=k + 1, lr=0.01 * (k + 1))
        for k, kind in enumerate(kinds)
    ]
    arrays = any_bits(int(bounds[-1]), wire, seed)
    ours, twins = both(arrays, bounds, coef, wire, threads=1)
    assert_same_bits(ours, twins)
    for k, kind in enumerate(kinds):
        if kind == "inactive":
            piece = slice(bounds[k], bounds[k + 1])
            assert_same_bits([a[piece] for a in ours], [a[piece] for a in arrays])
    if sizes:
        split = [a.copy() for a in arrays]
        view = [a.view(np.int16) if wire == "float16" and a.dtype == np.uint16 else a for a in split]
        adam._step_parallel(*view, bounds, np.stack(coef), tasks)
        assert_same_bits(split, twins)


@pytest.mark.parametrize("wire", WIRES)
def test_large_bucket_of_many_pieces_in_threads(wire):
    """Above the size from which the pool is used; some pieces span the border between two tasks."""
    rng = np.random.default_rng(5)
    bounds = np.unique(np.concatenate([[0, 200_000], rng.integers(0, 200_000, 400)]))
    coef = [cpu.INACTIVE if k % 7 == 3 else row(step=k + 1, decoupled=k % 2 == 0) for k in range(len(bounds) - 1)]
    arrays = any_bits(200_000, wire)
    ours, twins = both(arrays, bounds, coef, wire, threads=cpu.max_threads())
    assert_same_bits(ours, twins)
    alone, _ = both(arrays, bounds, coef, wire, threads=1)
    assert_same_bits(alone, twins)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("offset", [1, 3, 16])
def test_slices_that_start_anywhere(wire, offset):
    """Arena views begin at any element, so at any multiple of 2 or 4 bytes."""
    n = 40_000
    arrays = ordinary(n + 2 * offset, wire)
    inside, twins = [a.copy() for a in arrays], [a[offset : offset + n].copy() for a in arrays]
    coef = row()[None]
    cpu.adam_step(*(a[offset : offset + n] for a in inside), np.array([0, n]), coef, wire=wire, threads=2)
    reference.adam_step(*twins, np.array([0, n]), coef, wire=wire)
    assert_same_bits([a[offset : offset + n] for a in inside], twins)
    for edge in (slice(0, offset), slice(offset + n, None)):
        assert_same_bits([a[edge] for a in inside], [a[edge] for a in arrays])


def test_bucket_without_elements_or_pieces():
    empty = [np.zeros(0, "f4")] * 3 + [np.zeros(0, np.uint16)] * 2
    cpu.adam_step(*empty, np.array([0]), np.zeros((0, cpu.NUM_COEF), "f4"), wire="bfloat16", threads=2)
    cpu.adam_step(*empty, np.array([0, 0, 0]), np.stack([row(), row()]), wire="bfloat16", threads=2)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"wire": "bf16"}, ConfigError, "Did you mean 'bfloat16'"),
        ({"wire": "float32"}, TypeError, "grad: kernels take contiguous 1-dimensional float32 arrays, got"),
        ({"exp_avg": np.zeros(9, "f4")}, ValueError, "exp_avg: 9 elements where the other arrays have 10"),
        ({"master": np.zeros(10, "f8")}, TypeError, "master"),
        ({"weight": np.zeros(20, np.uint16)[::2]}, TypeError, "weight"),
        ({"exp_avg_sq": np.zeros((2, 5), "f4")}, TypeError, "exp_avg_sq"),
        ({"bounds": np.array([0, 11])}, ValueError, "bounds"),
        ({"bounds": np.array([-1, 10])}, ValueError, "bounds"),
        ({"bounds": np.array([0, 12, 10])}, ValueError, "bounds"),
        ({"bounds": np.array([0, 10], dtype=np.int32)}, TypeError, "bounds"),
        ({"coef": np.zeros((2, cpu.NUM_COEF), "f4")}, ValueError, "coef"),
        ({"coef": np.zeros((1, cpu.NUM_COEF), "f8")}, ValueError, "coef"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(changed, error, text):
    names = ("master", "exp_avg", "exp_avg_sq", "grad", "weight")
    given = dict(zip(names, ordinary(10, "bfloat16")), bounds=np.array([0, 10]), coef=row()[None], wire="bfloat16")
    before = {name: given[name].copy() for name in names}
    given.update(changed)
    with pytest.raises(error, match=text):
        cpu.adam_step(*(given[name] for name in (*names, "bounds", "coef")), wire=given["wire"], threads=1)
    for name in set(names) - set(changed):
        np.testing.assert_array_equal(given[name], before[name])
