"""fp16 loss scaling: `unscale_`, and the GradScaler of torch on top of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.errors import ConfigError
from support.optimizer import (
    DTYPES,
    EXACT,
    SCHEDULES,
    Bag,
    Twin,
    assert_same_run,
    give,
    gradients,
    make_params,
    offload,
    same_bits,
    snapshot,
    state,
    train,
    twins,
)

both_schedules = pytest.mark.parametrize("schedule", SCHEDULES)
every_mode = pytest.mark.parametrize("schedule", EXACT)
every_wire = pytest.mark.parametrize("wire", DTYPES)


class Scaler(torch.amp.GradScaler):
    """torch's, with nothing but its unscaling left to the optimizer, as `hf_offload.compat` does it."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, *args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        found = optimizer.unscale_(inv_scale)
        return {found.device: found}


def scaled(params: list[Any], step: int, scale: float) -> None:
    """Gradients of a step, times the scale, as backward of a scaled loss leaves them; of few digits, so exact."""
    for p, g in zip(params, gradients(step, params)):
        p.grad = (torch.sign(g) * (g.float().abs() * 64).round().clamp(1, 255) / 64 * scale).to(p.dtype)


@both_schedules
@every_wire
def test_the_inverse_is_folded_in_and_grad_stays_scaled(wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire], shapes=[(5,), (30,)])
    others = twins(params)
    optimizer, plain = offload(params, schedule, lr=1e-2), offload(others, schedule, lr=1e-2)
    for step, scale in enumerate([1024.0, 1024.0, 2.0]):
        scaled(params, step, scale)
        scaled(others, step, 1.0)
        kept = [p.grad.clone() for p in params]
        found = optimizer.unscale_(torch.tensor(1 / scale))
        assert found.dtype == torch.float32 and found.ndim == 0 and found.item() == 0.0
        optimizer.step()
        plain.step()
        optimizer.synchronize()
        plain.synchronize()
        assert all(same_bits(p.grad, k) for p, k in zip(params, kept))
    assert_same_run(optimizer, params, plain, others)
    assert all(same_bits(state(optimizer, p, "master"), state(plain, q, "master")) for p, q in zip(params, others))


@every_mode
def test_gradients_that_fp16_could_not_hold_unscaled(schedule: str) -> None:
    """1e-9 times 65536 fits into fp16, 1e-9 does not: unscaling in fp16 would train nothing."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = offload([p], schedule, lr=1e-2, weight_decay=0.0, eps=1e-12)
    p.grad = torch.full((4,), 1e-9 * 65536, dtype=torch.float16)
    optimizer.unscale_(1 / 65536)
    optimizer.step()
    optimizer.synchronize()
    torch.testing.assert_close(state(optimizer, p, "master"), torch.full((4,), 0.99), rtol=1e-4, atol=0.0)


@every_mode
@every_wire
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_found_inf(bad: float, wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire], shapes=[(5,), (1,)])
    optimizer = offload(params, schedule)
    give(params, gradients(0, params))
    assert optimizer.unscale_(0.5).item() == 0.0
    optimizer.zero_grad()
    give(params, gradients(0, params))
    params[1].grad.fill_(bad)
    assert optimizer.unscale_(0.5).item() == 1.0
    optimizer.zero_grad()
    assert optimizer.unscale_(0.5).item() == 0.0, "no gradients"


def test_finite_gradients_whose_squares_are_not_are_no_overflow() -> None:
    """fp32 squares of 1e30 are inf; a scaler that took that for an overflow would halve its scale for ever."""
    p = nn.Parameter(torch.ones(3))
    optimizer = offload([p])
    p.grad = torch.full((3,), 1e30)
    assert optimizer.unscale_(1e-30).item() == 0.0
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(math.sqrt(3), rel=1e-6)


@every_mode
@every_wire
def test_clipping_after_unscaling_sees_the_unscaled_norm(wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire], shapes=[(5,), (30,)])
    others = twins(params)
    optimizer, twin = offload(params, schedule), Twin([{"params": others}])
    scaled(params, 0, 128.0)
    scaled(others, 0, 1.0)
    norm = math.sqrt(sum(q.grad.double().square().sum().item() for q in others))
    optimizer.unscale_(1 / 128)
    assert optimizer.clip_grad_norm_(norm / 4).item() == pytest.approx(norm, rel=1e-6)
    assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-12)
    optimizer.step()
    optimizer.synchronize()
    twin.step(norm / 4 / (norm + 1e-6))
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=0.0)
        torch.testing.assert_close(state(optimizer, p, "exp_avg").reshape(-1), torch.from_numpy(twin.m[q]))


def test_a_bound_given_before_unscaling_is_one_for_the_scaled_gradients_as_in_torch() -> None:
    params = make_params(shapes=[(5,), (30,)])
    others = twins(params)
    optimizer, theirs = offload(params, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for own in (params, others):
        scaled(own, 0, 1024.0)
    optimizer.clip_grad_norm_(3.0)
    optimizer.unscale_(1 / 1024)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(others, 3.0)
    scaler.scale(torch.ones(()))
    scaler.step(theirs)
    for p, q in zip(params, others):
        torch.testing.assert_close(state(optimizer, p, "exp_avg"), theirs.state[q]["exp_avg"], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("inverse", [0.0, -1.0, math.inf, math.nan])
def test_inverses_that_are_none(inverse: float) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    give(params, gradients(0, params))
    with pytest.raises(ConfigError, match=r"inv_scale=.*not the inverse of a loss scale"):
        optimizer.unscale_(inverse)


@both_schedules
@every_wire
def test_a_scaler_skips_backs_off_and_grows(wire: str, schedule: str) -> None:
    """The course of a run: overflow in steps 0 and 1, growth after two good steps. A skipped step changes no byte."""
    p = nn.Parameter(torch.ones(8, dtype=DTYPES[wire]))
    optimizer = offload([p], schedule, lr=1e-2)
    scaler = Scaler("cpu", init_scale=2.0**14, growth_interval=2)
    data = torch.linspace(0.1, 1.0, 8).to(p.dtype)
    scales, counts = [], []
    train(optimizer, [p], [0])
    for step in range(7):
        optimizer.zero_grad()
        scaler.scale((p * data).float().sum()).backward()
        if step < 2:
            p.grad[3] = math.inf
        before = snapshot(optimizer, [p])
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (snapshot(optimizer, [p]) == before) == (step < 2)
        scales.append(math.log2(scaler.get_scale()))
        counts.append(optimizer.stats().steps)
    assert scales == [13.0, 12.0, 12.0, 13.0, 13.0, 14.0, 14.0]
    assert counts == [1, 1, 2, 3, 4, 5, 6]
    assert state(optimizer, p, "step").item() == 6
    assert optimizer.stats().skipped_steps == 0, "torch's scaler tells nobody; OffloadGradScaler does"


@every_mode
def test_a_scaled_run_is_the_unscaled_run(schedule: str) -> None:
    """Powers of two change no digit: the run under a scaler ends with the bits of the run without one."""
    params, others = make_params(shapes=[(5,), (30,)]), make_params(shapes=[(5,), (30,)])
    optimizer, plain = offload(params, schedule), offload(others, schedule)
    scaler = Scaler("cpu", init_scale=2.0**10)
    for _ in range(4):
        for o, own in ((optimizer, params), (plain, others)):
            o.zero_grad()
            loss = Bag(own)()
            (scaler.scale(loss) if o is optimizer else loss).backward()
        scaler.unscale_(optimizer)
        assert optimizer.clip_grad_norm_(0.1).item() == plain.clip_grad_norm_(0.1).item()
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        optimizer.synchronize()
        plain.synchronize()
    assert_same_run(optimizer, params, plain, others)


@both_schedules
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_torchs_own_scaler_works_too(wire: str, schedule: str) -> None:
    """It unscales `.grad` in place: before our clip, or after it, where the bound is then one for scaled gradients."""
    p = nn.Parameter(torch.ones(8, dtype=DTYPES[wire]))
    q = nn.Parameter(torch.ones(8, dtype=DTYPES[wire]))
    optimizer, plain = offload([p], schedule, lr=1e-2), offload([q], schedule, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for overflow in (False, True, False):
        optimizer.zero_grad()
        plain.zero_grad()
        scaler.scale(p.float().square().sum()).backward()
        q.float().square().sum().backward()
        if overflow:
            p.grad[0] = math.inf
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        if not overflow:
            plain.clip_grad_norm_(0.5)
            plain.step()
        optimizer.synchronize()
        plain.synchronize()
        assert same_bits(p, q)
    optimizer.zero_grad()
    plain.zero_grad()
    scaler.scale(p.float().square().sum()).backward()
    q.float().square().sum().backward()
    optimizer.clip_grad_norm_(0.5 * scaler.get_scale())
    scaler.step(optimizer)
    plain.clip_grad_norm_(0.5)
    plain.step()
    optimizer.synchronize()
    plain.synchronize()
    torch.testing.assert_close(state(optimizer, p, "exp_avg"), state(plain, q, "exp_avg"), rtol=1e-5, atol=0.0)


def test_compats_scaler_drives_it_alike() -> None:
    from hf_offload.compat import OffloadGradScaler

    results = []
    for kind in (Scaler, OffloadGradScaler):
        p = nn.Parameter(torch.ones(8, dtype=torch.float16))
        optimizer: OffloadAdam = offload([p], lr=1e-2)
        scaler = kind("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(p.float().square().sum()).backward()
            if step == 1:
                p.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        results.append((p, scaler.get_scale(), optimizer.stats().steps))
    assert same_bits(results[0][0], results[1][0]) and optimizer.stats().skipped_steps == 1
    assert results[0][1:] == results[1][1:] == (2.0**12, 3)
