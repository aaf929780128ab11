"""16-bit and fp32 weights with fp32 masters: against the kernels' NumPy twin bit for bit, against torch to ulps, and
single steps against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload import OffloadAdam
from support.optimizer import (
    DTYPES,
    EXACT,
    Twin,
    assert_twin,
    config,
    give,
    gradients,
    make_params,
    offload,
    same_bits,
    state,
    train,
    twins,
)

STEPS = 8
MODES = {
    "adamw": {},
    "l2": {"decoupled_weight_decay": False, "weight_decay": 0.1},
    "maximize": {"maximize": True},
}


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[::2], "lr": 3e-2, "weight_decay": 0.2},
        {"params": params[1::2], "lr": 1e-3, "betas": (0.8, 0.98), "eps": 1e-6},
    ]


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", DTYPES)
def test_bits_are_the_twins(wire: str, mode: str, schedule: str) -> None:
    """Weights, masters and moments after several steps of two groups that share buckets: no bit differs."""
    params = make_params(DTYPES[wire])
    others = twins(params)
    optimizer = offload(groups_of(params), schedule, **MODES[mode])
    twin = Twin(groups_of(others), weight_decay=MODES[mode].get("weight_decay", 0.01))
    for step in range(STEPS):
        train(optimizer, params, [step])
        give(others, gradients(step, others))
        twin.step(decoupled=mode != "l2", maximize=mode == "maximize")
    for p, q in zip(params, others):
        assert same_bits(p, q)
        for name, array in (("master", twin.master[q]), ("exp_avg", twin.m[q]), ("exp_avg_sq", twin.v[q])):
            assert same_bits(state(optimizer, p, name).reshape(-1), torch.from_numpy(array)), name


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_torch_with_fp32_masters_by_hand(wire: str, schedule: str) -> None:
    """The reference a user would write: fp32 copies stepped by torch.optim.AdamW, weights rounded from them.

    Masters agree to a few fp32 ulps (torch's code fuses multiply and add, ours does not), so weights may differ where a
    master lies that close to the middle between two 16-bit values: in at most one of a thousand, by one 16-bit ulp.
    """
    params = make_params(DTYPES[wire], shapes=[(5000,), (30, 40), ()])
    masters = twins(params, torch.float32)
    ours = offload(params, schedule, lr=1e-2)
    theirs = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.01)
    for step in range(STEPS):
        train(ours, params, [step])
        give(masters, [g.float() for g in gradients(step, params)])
        theirs.step()
    for p, master in zip(params, masters):
        torch.testing.assert_close(state(ours, p, "master"), master.detach(), rtol=2e-6, atol=1e-6)
        expected = master.detach().to(p.dtype)
        apart = (p.detach() != expected).float().mean().item()
        assert apart <= 1e-3, f"{apart:.2%} of the weights differ"
        torch.testing.assert_close(p.detach(), expected, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("wire", DTYPES)
def test_small_steps_are_not_lost_in_16_bit_weights(wire: str, schedule: str) -> None:
    """What masters are for: 400 steps of 1e-4 move a weight of 1.0 by 0.04, though each is below half a bf16 ulp."""
    p = torch.nn.Parameter(torch.ones(3, dtype=DTYPES[wire]))
    optimizer = offload([p], schedule, lr=1e-4, weight_decay=0.0)
    for _ in range(400):
        p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.synchronize()
    assert p.float().tolist() == pytest.approx([0.96] * 3, abs=4e-3)


@pytest.mark.parametrize("wire", DTYPES)
def test_one_step_against_float64(wire: str) -> None:
    """In fp32 ulps of the terms that are added, as in the kernels' own test: at most 2 for m, 4 for v, 6 for θ."""
    lr, (b1, b2), eps, decay = 1e-3, (0.9, 0.999), 1e-8, 0.01
    n = 20_000
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-7, 4, (n,), generator=generator)
    p = torch.nn.Parameter(torch.randn(n, generator=generator).to(DTYPES[wire]))
    optimizer = OffloadAdam([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, config=config(bucket_bytes=4096))
    theta, m, v = p.detach().double().numpy().copy(), np.zeros(n), np.zeros(n)
    for t in (1, 2, 3):
        p.grad = (wide * t).to(DTYPES[wire])
        g = p.grad.double().numpy()
        optimizer.step()
        new_m, new_v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        move = lr * (new_m / (1 - b1**t)) / (np.sqrt(new_v / (1 - b2**t)) + eps)
        new_theta = (1 - lr * decay) * theta - move
        sizes = np.abs(b1 * m) + np.abs((1 - b1) * g), new_v, np.abs(theta) + np.abs(move)
        m, v, theta = (state(optimizer, p, k).double().numpy() for k in ("exp_avg", "exp_avg_sq", "master"))
        for name, got, exact, size, most in zip("mvθ", (m, v, theta), (new_m, new_v, new_theta), sizes, (2, 4, 6)):
            error = np.abs(got - exact) / np.spacing(size.astype(np.float32))
            assert error.max() <= most, f"{name}, step {t}: {error.max():.2f} ulp"
        assert same_bits(p, state(optimizer, p, "master").to(p.dtype))


@pytest.mark.parametrize("schedule", EXACT)
def test_dtypes_mixed_within_one_optimizer(schedule: str) -> None:
    """LoRA: fp32 adapters on a 16-bit base, in one group."""
    params = [p for k, d in enumerate(DTYPES.values()) for p in make_params(d, shapes=[(7,), (300,)], seed=k)]
    others = twins(params)
    optimizer, twin = offload(params, schedule, lr=1e-2), Twin([{"params": others, "lr": 1e-2}])
    for step in range(STEPS):
        train(optimizer, params, [step])
        give(others, gradients(step, others))
        twin.step()
    assert_twin(optimizer, params, twin, others)
    assert optimizer.stats().wire_dtype == "mixed"


CUTS = {
    "small": ([(5,), (), (3, 33)], [(1, 1), (4, 1), (10, 2), (998, 1), (1 << 20, 1), (1 << 20, 2)]),
    # above the size from which kernels use their thread pool
    "large": ([(5,), (50_000,), (7, 7)], [(1 << 22, 1), (1 << 22, 2), (69_998, 2)]),
}


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("size", CUTS)
def test_bits_do_not_depend_on_buckets_or_threads(size: str, wire: str, schedule: str) -> None:
    """Nor does the norm, and so the clip factor."""
    shapes, cuts = CUTS[size]
    results = []
    for bucket_bytes, threads in cuts:
        params = make_params(DTYPES[wire], shapes)
        optimizer = offload(params, schedule, {"bucket_bytes": bucket_bytes, "threads": threads}, lr=1e-2)
        norms = []
        for step in range(3):
            give(params, gradients(step, params))
            optimizer.clip_grad_norm_(0.5)
            norms.append(optimizer.last_grad_norm)
            optimizer.step()
        optimizer.synchronize()
        results.append((norms, params))
    for norms, params in results[1:]:
        assert norms == results[0][0]
        assert all(same_bits(p, q) for p, q in zip(params, results[0][1]))


@pytest.mark.parametrize("schedule", EXACT)
def test_the_callers_flush_to_zero_flag_changes_nothing(schedule: str) -> None:
    """Denormal moments, gradients and weights, with the flag off and on in the thread that trains."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals to zero")
    results = []
    try:
        for flush in (False, True):
            torch.set_flush_denormal(False)
            generator = torch.Generator().manual_seed(0)
            tiny = torch.randn(1000, generator=generator) * 1e-39
            p = torch.nn.Parameter((torch.randn(1000, generator=generator) * 1e-38).clone())
            torch.set_flush_denormal(flush)
            optimizer = offload([p], schedule, lr=1e-39)
            for _ in range(3):
                p.grad = tiny.clone()
                norm = optimizer.clip_grad_norm_(1e-38).item()
                optimizer.step()
            optimizer.synchronize()
            torch.set_flush_denormal(False)
            results.append([norm, p, *(state(optimizer, p, k) for k in ("master", "exp_avg", "exp_avg_sq"))])
    finally:
        torch.set_flush_denormal(False)
    assert (results[0][3].abs() < 1.1754944e-38).any(), "nothing here is denormal"
    assert results[0][0] == results[1][0]
    assert all(same_bits(a, b) for a, b in zip(results[0][1:], results[1][1:]))
