"""The step against a float64 oracle and against torch's fp32 AdamW, in units in the last place (ulp).

An error is measured against the magnitude of the terms that were added, so that cancellation does not count: for m
|beta1 m| + |(1 - beta1) g|, for theta |decay theta| + lr / (1 - beta1^t) (|beta1 m| + |(1 - beta1) g|) / denominator.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import CODECS, CompactState, codecs, dither, reference

WIRES = ["bfloat16", "float16", "float32"]
BASE = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
    "step": 1, "grad_scale": 1.0, "decoupled": True, "maximize": False,
}  # fmt: skip
SETS = {
    "defaults": {},
    "step 1000": {"step": 1000},
    "fine-tuning": {"lr": 2e-5, "beta2": 0.95, "weight_decay": 0.1, "step": 37, "grad_scale": 0.3183098861837907},
    "loss scale and clip": {"lr": 3e-4, "beta2": 0.98, "step": 12, "grad_scale": 0.7071067811865475 / 65536},
    "long memory": {"lr": 1e-2, "beta1": 0.95, "beta2": 0.9999, "eps": 1e-6, "weight_decay": 0.0, "step": 250},
    "L2, small eps": {"decoupled": False, "weight_decay": 0.1, "eps": 1e-12, "step": 5},
    "maximize": {"maximize": True, "step": 3},
    "L2, scaled": {"decoupled": False, "weight_decay": 0.03, "grad_scale": 0.0123, "maximize": True, "step": 40},
    "no first moment": {"beta1": 0.0, "step": 7},
    "short memory": {"beta1": 0.3, "beta2": 0.4, "weight_decay": 0.5, "lr": 0.3},
    "step 1e6": {"step": 1_000_000, "lr": 1e-5},
}
ULP = {"exp_avg": 2.0, "exp_avg_sq": 4.0, "master": 6.0}
N = 1_000_000
SMALLEST = 2.0**-126  # normal fp32; below it the spacing, and so the error of a stored m, is no longer relative


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.lru_cache(maxsize=1)
def wide_range(n, seed):
    """theta, m, v and gradient of every magnitude that fp32 state meets: |g| <= 1e18, denormals, zeros; half of the
    elements as in training, where the four belong together."""
    rng = np.random.default_rng(seed)

    def spread(low, high):
        return rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(low, high, n)

    theta, m, g, v = spread(-45, 4), spread(-45, 18), spread(-45, 18), np.abs(spread(-45, 36))
    usual = slice(0, n // 2)
    g[usual] = rng.standard_normal(n // 2) * 10.0 ** rng.uniform(-12, 0, n // 2)
    m[usual] = g[usual] * rng.uniform(-1, 1, n // 2)
    v[usual] = g[usual] ** 2 * rng.uniform(0.01, 2, n // 2)
    theta[usual] = rng.standard_normal(n // 2) * 0.02
    for x in (theta, m, g, v):
        x[rng.random(n) < 0.05] = 0.0
    v = np.maximum(v, m**2 / 50)  # as any history of gradients leaves it (v = 0 with m > 0 is none)
    return [x.astype(np.float32) for x in (theta, m, v, g)]


def oracle(theta, m, v, grad, p):
    """One step in float64; returns m, v, theta and the magnitudes of the terms of each."""
    theta, m, v, g = (x.astype(np.float64) for x in (theta, m, v, grad))
    g = g * (-p["grad_scale"] if p["maximize"] else p["grad_scale"])
    size = np.abs(g)
    if not p["decoupled"]:
        size = size + np.abs(p["weight_decay"] * theta)
        g = g + p["weight_decay"] * theta
    decay = 1 - p["lr"] * p["weight_decay"] if p["decoupled"] else 1.0
    of_m = np.abs(p["beta1"] * m) + (1 - p["beta1"]) * size
    of_v = p["beta2"] * v + (1 - p["beta2"]) * size**2
    m = p["beta1"] * m + (1 - p["beta1"]) * g
    v = p["beta2"] * v + (1 - p["beta2"]) * g**2
    rate = p["lr"] / (1 - p["beta1"] ** p["step"])
    denominator = np.sqrt(v) / math.sqrt(1 - p["beta2"] ** p["step"]) + p["eps"]
    of_theta = np.abs(decay * theta) + rate * np.maximum(of_m, SMALLEST) / denominator
    return {
        "exp_avg": (m, of_m),
        "exp_avg_sq": (v, of_v),
        "master": (decay * theta - rate * m / denominator, of_theta),
    }


def ulps(got, exact, magnitude):
    """The largest error in fp32 ulp of the magnitude (at least the spacing of denormals, 2**-149)."""
    spacing = np.spacing(np.minimum(magnitude, 3e38).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(got.astype(np.float64) - exact) / spacing))


def ours(theta, m, v, grad, p, wire):
    state = {"master": theta.copy(), "exp_avg": m.copy(), "exp_avg_sq": v.copy()}
    weight = np.empty(theta.size, dtype=grad.dtype)
    bounds = np.array([0, theta.size])
    coef = cpu.coefficients(**p)[None]
    cpu.adam_step(*state.values(), grad, weight, bounds, coef, wire=wire, threads=2)
    return state, weight


def torchs(theta, m, v, g, p, foreach):
    param = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    kind = torch.optim.AdamW if p["decoupled"] else torch.optim.Adam
    names = ("lr", "eps", "weight_decay", "maximize")
    optimizer = kind([param], betas=(p["beta1"], p["beta2"]), foreach=foreach, **{name: p[name] for name in names})
    optimizer.state[param] = {
        "step": torch.tensor(float(p["step"] - 1)),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    param.grad = torch.from_numpy(g.copy()) * p["grad_scale"]
    optimizer.step()
    state = optimizer.state[param]
    found = {"master": param.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize("wire", WIRES)  # on top: varies fastest, so that `wide_range` is drawn once a set
@pytest.mark.parametrize("settings", SETS.values(), ids=SETS)
def test_one_step_is_within_a_few_ulp_and_no_worse_than_torch(wire, settings, record_property):
    p = {**BASE, **settings}
    theta, m, v, g = wide_range(N, seed=p["step"])
    g = np.clip(g, -6e4, 6e4) if wire == "float16" else g
    grad = reference.narrowed(g, wire)
    g = reference.widened(grad, wire)
    exact = oracle(theta, m, v, g, p)
    state, weight = ours(theta, m, v, grad, p, wire)
    rivals = [torchs(theta, m, v, g, p, foreach) for foreach in (False, True)]
    for name, (value, magnitude) in exact.items():
        assert np.isfinite(value).all() and np.abs(value).max() < 3e38
        error = ulps(state[name], value, magnitude)
        torch_error = min(ulps(rival[name], value, magnitude) for rival in rivals)
        record_property(name, f"{error:.2f} ulp, torch {torch_error:.2f}")
        print(f"{wire} {name}: {error:.2f} ulp, torch {torch_error:.2f}")
        assert error <= ULP[name]
        assert error <= torch_error + 1
    np.testing.assert_array_equal(weight, reference.narrowed(state["master"], wire))


@pytest.mark.parametrize("settings", ["defaults", "fine-tuning", "L2, small eps"])
def test_a_thousand_steps_drift_no_further_than_torch(settings):
    """Distance from a float64 run on the same gradients: root mean square, and mean (a bias would add up).

    A rounding of its own in every step leaves 0.1 ulp more of stationary noise in m, and is allowed; multiplying m by
    beta1 rounded to fp32 leaves 0.5.
    """
    p = {**BASE, **SETS[settings], "grad_scale": 1.0}
    rng = np.random.default_rng(0)
    n = 4096
    theta = (rng.standard_normal(n) * 0.02).astype(np.float32)
    exact = [theta.astype(np.float64), np.zeros(n), np.zeros(n)]
    state = {"master": theta.copy(), "exp_avg": np.zeros(n, "f4"), "exp_avg_sq": np.zeros(n, "f4")}
    param = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    kind = torch.optim.AdamW if p["decoupled"] else torch.optim.Adam
    names = ("lr", "eps", "weight_decay")
    optimizer = kind([param], betas=(p["beta1"], p["beta2"]), foreach=False, **{name: p[name] for name in names})
    slope, bounds, weight = rng.standard_normal(n) * 0.1, np.array([0, n]), np.empty(n, "f4")
    for step in range(1, 1001):
        p["step"] = step
        g = (slope + rng.standard_normal(n)).astype(np.float32)
        found = oracle(exact[0], exact[1], exact[2], g, p)
        exact = [found[name][0] for name in ("master", "exp_avg", "exp_avg_sq")]
        coef = cpu.coefficients(**p)[None]
        cpu.adam_step(*state.values(), g, weight, bounds, coef, wire="float32", threads=1)
        param.grad = torch.from_numpy(g)
        optimizer.step()
    rival = optimizer.state[param]
    pairs = {
        "master": (state["master"], param.detach().numpy(), exact[0]),
        "exp_avg": (state["exp_avg"], rival["exp_avg"].numpy(), exact[1]),
        "exp_avg_sq": (state["exp_avg_sq"], rival["exp_avg_sq"].numpy(), exact[2]),
    }
    for name, (mine, torchs_own, truth) in pairs.items():
        spacing = np.spacing(np.abs(truth).max().astype(np.float32))
        errors = [(x.astype(np.float64) - truth) / spacing for x in (mine, torchs_own)]
        rms, bias = ([float(f(e)) for e in errors] for f in (lambda e: np.sqrt(np.mean(e**2)), lambda e: abs(e.mean())))
        print(f"{settings} {name}: rms {rms[0]:.3f} torch {rms[1]:.3f}, bias {bias[0]:.3f} torch {bias[1]:.3f} ulp")
        assert rms[0] <= 1.05 * rms[1] + 0.15
        assert bias[0] <= 1.05 * bias[1] + 0.05


# ---- moments held as bfloat16 and int8

# What rounding to the held format may be off by, of the value; and, as int8, of the block's largest: m below 2^-14 of
# it is held in steps of 2^-17, and v below 2^-31 of it as that (once more where the largest is rounded up to a power).
HELD = {"bfloat16": (2**-7, 0.0, 0.0), "int8": (2**-3, 2.0**-16, 2.0**-30)}
LEAST = 2.0 ** (codecs.LEAST_SCALE - 127 - 31)
COMPACT_SETS = ("defaults", "fine-tuning", "loss scale and clip", "L2, scaled", "short memory")


@pytest.mark.parametrize("settings", COMPACT_SETS)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_compact_step_is_as_exact_as_the_one_in_fp32_and_rounds_once(codec, settings):
    """theta takes its step with moments that are not yet rounded, so it is held to the bounds of fp32 state."""
    p = {**BASE, **SETS[settings]}
    n = 100_000
    theta, m, v, g = (x[:n] for x in wide_range(N, seed=1))  # as in training; the other half is wider than one block
    grad = reference.narrowed(g, "bfloat16")
    held = codecs.encode(m, v, codecs.half(n, codec), codec)
    m, v = codecs.decode(held, codec)
    exact = oracle(theta, m, v, reference.widened(grad, "bfloat16"), p)
    state, weight = CompactState(theta.copy(), held), np.empty_like(grad)
    noise = dither.rows(0, *np.array([[0], [0], [p["step"]]]))
    rest = np.array([0, n]), cpu.coefficients(**p)[None], noise
    cpu.compact_step(state, state, grad, weight, *rest, codec=codec, wire="bfloat16", threads=1)
    # With L2 the sum g is rounded to fp32, once in m and twice in v and so in theta; fp32 state sums in float64.
    allowed = ULP["master"] + (0 if p["decoupled"] else 2)
    assert ulps(state.master, *exact["master"]) <= allowed
    np.testing.assert_array_equal(weight, reference.narrowed(state.master, "bfloat16"))
    relative, *of_largest = HELD[codec.name]
    for name, made, share in zip(("exp_avg", "exp_avg_sq"), codecs.decode(state.held, codec), of_largest):
        value, magnitude = exact[name]
        top = np.abs(codecs.in_blocks(value)).max(axis=1).repeat(codecs.BLOCK)[:n]
        bound = relative * np.abs(value) + share * top + (LEAST if codec.scaled else 2.0**-133)
        bound = (1 + relative) * (bound + ULP[name] * 2.0**-23 * magnitude)  # what rounds was stepped in fp32
        assert (np.abs(made - value) <= bound).all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_v_settles_at_the_square_of_a_constant_gradient(codec):
    """(1 - beta2) g^2 is far below what neighbouring values of v are apart: rounded to nearest, v stays too low."""
    n, steps = 512, 4000
    rng = np.random.default_rng(0)
    grad = reference.narrowed(rng.uniform(0.5, 1.0, n).astype(np.float32), "bfloat16")
    square = reference.widened(grad, "bfloat16").astype(np.float64) ** 2
    state = CompactState(np.zeros(n, np.float32), codec.empty(n, codecs.blocks(n)))
    weight, bounds, ratios = np.zeros_like(grad), np.array([0, n]), []
    for step in range(1, steps + 1):
        noise = dither.rows(0, *np.array([[0], [0], [step]]))
        coef = cpu.coefficients(**{**BASE, "step": step})[None]
        cpu.compact_step(state, state, grad, weight, bounds, coef, noise, codec=codec, wire="bfloat16", threads=1)
        if step > steps // 2 and step % 50 == 0:
            ratios.append(codecs.decode(state.held, codec)[1] / ((1 - 0.999**step) * square))
    ratio = np.mean(ratios, axis=0)
    print(f"{codec.name}: mean {ratio.mean():.4f}, from {ratio.min():.3f} to {ratio.max():.3f}")
    assert abs(ratio.mean() - 1) <= 0.03 and np.abs(ratio - 1).max() <= 0.15
    nearest = codec.empty(n, codecs.blocks(n))
    for _ in range(1000):
        v = np.float32(0.999) * codecs.decode(nearest, codec)[1] + np.float32(0.001) * square.astype(np.float32)
        nearest = codecs.encode(v, v, codecs.half(n, codec), codec)
    stuck = codecs.decode(nearest, codec)[1] / ((1 - 0.999**1000) * square)
    print(f"{codec.name}, to nearest: mean {stuck.mean():.4f}")
    assert stuck.mean() < 0.7
