"""Clipping: the norm, the folded factor, what drops it, and steps whose gradients are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_offload.engine import gradients as found_gradients
from hf_offload.errors import ConfigError, StateError
from support.optimizer import (
    DTYPES,
    EXACT,
    SCHEDULES,
    Bag,
    Twin,
    assert_same_run,
    assert_twin,
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


def norm64(params: list[Any]) -> float:
    """The L2 norm of the gradients in float64, by NumPy."""
    flat = [p.grad.double().reshape(-1).numpy() for p in params if p.grad is not None]
    return float(np.linalg.norm(np.concatenate(flat))) if flat else 0.0


def fp32(x: float) -> float:
    return float(np.float32(x))


# ---- the norm

SIZES = {"ordinary": 1.0, "large": 1e4, "small": 1e-6}


@every_mode
@every_wire
@pytest.mark.parametrize("size", SIZES)
def test_the_norm_is_that_of_float64(size: str, wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire])
    optimizer = offload(params, schedule)
    for step in range(3):
        give(params, gradients(step, params))
        for p in params:
            p.grad = (torch.sign(p.grad) * p.grad.float().abs().clamp(0.01, 5) * SIZES[size]).to(p.dtype)
        exact = norm64(params)
        norm = optimizer.clip_grad_norm_(1.0)
        assert norm.dtype == torch.float32 and norm.ndim == 0 and norm.device == params[0].device
        assert norm.item() == pytest.approx(exact, rel=3e-7)
        assert optimizer.last_grad_norm == pytest.approx(exact, rel=1e-14)
        optimizer.step()


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
def test_squares_beyond_fp32(wire: str) -> None:
    """Gradients of 1e30 and of 1e-30: their squares are inf and 0 in fp32."""
    for size in (1e30, 1e-30):
        (p,) = make_params(DTYPES[wire], shapes=[(1000,)])
        optimizer = offload([p], lr=0.1, weight_decay=0.0)
        p.grad = torch.full_like(p, size)
        norm = optimizer.clip_grad_norm_(1.0).item()
        assert norm == pytest.approx(norm64([p]), rel=1e-6) and 0 < norm < math.inf
        optimizer.step()
        if size == 1e30:  # clipped to norm 1: every gradient is 1/sqrt(1000)
            expected = torch.full((1000,), 0.1 / math.sqrt(1000))
            torch.testing.assert_close(state(optimizer, p, "exp_avg"), expected, rtol=1e-5, atol=0.0)


def test_a_norm_beyond_fp32_is_inf_to_the_caller_and_right_inside() -> None:
    (p,) = make_params(shapes=[(100,)])
    optimizer = offload([p], weight_decay=0.0)
    p.grad = torch.full((100,), 2e38)
    assert optimizer.clip_grad_norm_(1e38).item() == math.inf
    assert optimizer.last_grad_norm == pytest.approx(2e39)
    optimizer.step()
    assert optimizer.stats().skipped_steps == 0
    torch.testing.assert_close(state(optimizer, p, "exp_avg"), torch.full((100,), 1e36), rtol=1e-5, atol=0.0)


@every_mode
def test_the_norm_of_nothing_is_zero(schedule: str) -> None:
    params = make_params(shapes=[(3,), (0,)])
    optimizer = offload(params, schedule)
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0
    optimizer.step()
    params[1].grad = torch.zeros(0)
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0
    optimizer.step()


# ---- the factor


@both_schedules
@every_wire
@pytest.mark.parametrize("bound", ["a tenth", "the norm", "ten times", "zero"])
def test_the_factor_is_folded_in_and_grad_stays(bound: str, wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire], shapes=[(5,), (3, 40), ()])
    others = twins(params)
    optimizer, twin = offload(params, schedule, lr=1e-2), Twin([{"params": others, "lr": 1e-2}])
    for step in range(4):
        for own in (params, others):
            give(own, gradients(step, own))
        norm = norm64(params)
        most = {"a tenth": norm / 10, "the norm": norm, "ten times": norm * 10, "zero": 0.0}[bound]
        before = [p.grad.clone() for p in params]
        optimizer.clip_grad_norm_(most)
        assert optimizer.last_grad_norm is not None
        optimizer.step()
        optimizer.synchronize()
        assert all(same_bits(p.grad, b) for p, b in zip(params, before))
        twin.step(min(1.0, most / (optimizer.last_grad_norm + 1e-6)))
    assert_twin(optimizer, params, twin, others)


@every_mode
def test_like_torchs_clip_and_step(schedule: str) -> None:
    params = make_params()
    others = twins(params)
    optimizer, theirs = offload(params, schedule, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    for step, bound in enumerate([0.5, 1e9, 2.0, torch.tensor(0.1), 7]):
        for own in (params, others):
            give(own, gradients(step, own))
        yours = torch.nn.utils.clip_grad_norm_(others, float(bound))
        assert optimizer.clip_grad_norm_(bound).item() == pytest.approx(yours.item(), rel=1e-5)
        optimizer.step()
        theirs.step()
    optimizer.synchronize()
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=5e-6, atol=2e-6)
        torch.testing.assert_close(state(optimizer, p, "exp_avg_sq"), theirs.state[q]["exp_avg_sq"], rtol=1e-5, atol=0)


@every_mode
@pytest.mark.parametrize("bounds", [(2.0, 0.5), (0.5, 2.0), (math.inf, 0.5), (0.5, math.inf), (0.5,)])
def test_of_several_calls_the_tightest_bound_holds(bounds: tuple[float, ...], schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, twin = offload(params, schedule), Twin([{"params": others}])
    for own in (params, others):
        give(own, gradients(0, own, 100.0))
    norms = {optimizer.clip_grad_norm_(b).item() for b in bounds}
    assert len(norms) == 1 and norms.pop() > 2.0
    optimizer.step()
    optimizer.synchronize()
    twin.step(0.5 / (norm64(others) + 1e-6))
    assert_twin(optimizer, params, twin, others)


@every_mode
def test_a_factor_is_for_one_step_only(schedule: str) -> None:
    params = make_params(shapes=[(5,)])
    others = twins(params)
    optimizer, twin = offload(params, schedule), Twin([{"params": others}])
    for step, clip in enumerate([True, False, False]):
        for own in (params, others):
            give(own, gradients(step, own))
        if clip:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        twin.step(0.1 / (norm64(others) + 1e-6) if clip else 1.0)
    optimizer.synchronize()
    assert_twin(optimizer, params, twin, others)


@pytest.mark.parametrize("bound", [-1.0, -0.001, float("nan"), -math.inf, torch.tensor(-1.0)])
def test_bounds_that_are_none(bound: Any) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    give(params, gradients(0, params))
    with pytest.raises(ConfigError, match=r"max_norm=(-|nan).*not a bound.*inf only reads"):
        optimizer.clip_grad_norm_(bound)
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(before, params[0])


def test_no_norm_is_computed_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(found_gradients, "gradient_norm", lambda grads, threads: calls.append(1) or 1.0)
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    train(optimizer, params, range(3))
    assert not calls and optimizer.last_grad_norm is None
    optimizer.clip_grad_norm_(1.0)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    assert len(calls) == 1, "the norm is computed once for all calls before a step"


# ---- what drops it, and what must not be lost


def backward(params: list[Any]) -> None:
    Bag(params)().backward()


EDITS: dict[str, Callable[[list[Any]], None]] = {
    "backward": backward,
    "in place": lambda params: params[1].grad.mul_(2.0),
    "replaced": lambda params: setattr(params[1], "grad", params[1].grad * 2),
    "one dropped": lambda params: setattr(params[0], "grad", None),
    "all zeroed by the model": lambda params: Bag(params).zero_grad(set_to_none=False),
}


@both_schedules
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("pending", ["clip", "unscale"])
def test_gradients_that_change_after_clipping_raise_at_step(pending: str, edit: str, schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    backward(params)
    optimizer.clip_grad_norm_(1.0) if pending == "clip" else optimizer.unscale_(0.5)
    EDITS[edit](params)
    with pytest.raises(StateError, match=r"step\(\): the gradients changed after.*right before step\(\)"):
        optimizer.step()
    assert snapshot(optimizer, params) == before


@every_mode
def test_a_backward_between_two_clips_raises_since_the_first_would_be_lost(schedule: str) -> None:
    """torch would have scaled the first gradients in place; dropping that silently gives another result."""
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params, schedule)
    backward(params)
    optimizer.clip_grad_norm_(1.0)
    backward(params)
    with pytest.raises(StateError, match=r"clip_grad_norm_\(\): the gradients changed"):
        optimizer.clip_grad_norm_(1.0)


@both_schedules
@pytest.mark.parametrize("edit", EDITS)
def test_a_norm_that_was_only_read_binds_nobody(edit: str, schedule: str) -> None:
    """A loop that logs the norm of every micro-batch may go on accumulating."""
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, plain = offload(params, schedule), offload(others, schedule)
    for o, own in ((optimizer, params), (plain, others)):
        backward(own)
        if o is optimizer:
            o.clip_grad_norm_(math.inf)
        EDITS[edit](own)
        if o is optimizer:
            o.clip_grad_norm_(math.inf)
        backward(own)
        o.step()
        o.synchronize()
    assert_same_run(optimizer, params, plain, others)


@every_mode
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_is_pending(set_to_none: bool, schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, plain = offload(params, schedule), offload(others, schedule)
    backward(params)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.unscale_(1e-3)
    optimizer.zero_grad(set_to_none=set_to_none)
    for o, own in ((optimizer, params), (plain, others)):
        backward(own)
        o.step()
        o.synchronize()
    assert_same_run(optimizer, params, plain, others)


@every_mode
def test_after_a_step_that_was_not_taken_new_gradients_can_be_clipped(schedule: str) -> None:
    """A GradScaler skips optimizer.step(); the loop then calls model.zero_grad(), which we do not see."""
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, twin = offload(params, schedule), Twin([{"params": others}])
    backward(params)
    optimizer.unscale_(0.25)
    optimizer.clip_grad_norm_(1e-3)
    Bag(params).zero_grad()
    for own in (params, others):
        backward(own)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.synchronize()
    twin.step(0.5 / (norm64(others) + 1e-6))
    assert_twin(optimizer, params, twin, others)


@every_mode
def test_load_state_dict_drops_what_is_pending(schedule: str) -> None:
    params = make_params(shapes=[(5,)])
    others = twins(params)
    optimizer, plain = offload(params, schedule), offload(others, schedule)
    for o, own in ((optimizer, params), (plain, others)):
        train(o, own, [0])
        give(own, gradients(1, own))
        if o is optimizer:
            o.clip_grad_norm_(1e-3)
            o.load_state_dict(o.state_dict())
        o.step()
        o.synchronize()
    assert_same_run(optimizer, params, plain, others)


# ---- gradients that are not finite

BAD = {"nan": float("nan"), "inf": math.inf, "-inf": -math.inf}
CALLS: dict[str, Callable[[Any], Any]] = {
    "no call": lambda o: None,
    "clip": lambda o: o.clip_grad_norm_(1.0),
    "read": lambda o: o.clip_grad_norm_(math.inf),
    "unscale": lambda o: o.unscale_(0.5),
}


@every_mode
@every_wire
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("skip", ["when_clipping", "always", "never"])
def test_skipping(skip: str, call: str, bad: str, wire: str, schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    """A skipped step changes no byte of anything, is warned of and counted, and the next one goes on as if never."""
    params = make_params(DTYPES[wire], shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, plain = offload(params, schedule, {"skip_nonfinite": skip}), offload(others, schedule)
    for o, own in ((optimizer, params), (plain, others)):
        train(o, own, range(2))
    give(params, gradients(2, params))
    params[1].grad[3] = BAD[bad]
    before = snapshot(optimizer, params)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        CALLS[call](optimizer)
        optimizer.step()
    should_skip = skip == "always" or (skip == "when_clipping" and call != "no call")
    assert (snapshot(optimizer, params) == before) == should_skip
    assert optimizer.stats().skipped_steps == int(should_skip)
    warned = [r for r in caplog.records if "not finite" in r.message and f"skip_nonfinite={skip!r}" in r.message]
    assert len(warned) == int(should_skip)
    if should_skip:
        for o, own in ((optimizer, params), (plain, others)):
            o.zero_grad()
            train(o, own, [3])
        assert_same_run(optimizer, params, plain, others)
        assert optimizer.stats().steps == plain.stats().steps == 3


@every_mode
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_never_skipping_gives_what_torch_gives(bound: float, bad: str, schedule: str) -> None:
    """NaN goes through as in AdamW. An inf norm makes the factor 0: 0 * inf is NaN where the inf was, 0 elsewhere."""
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer = offload(params, schedule, {"skip_nonfinite": "never"}, lr=1e-2)
    theirs = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    for o, own in ((optimizer, params), (theirs, others)):
        train(o, own, [0])
        give(own, gradients(1, own))
        own[0].grad[2] = BAD[bad]
    optimizer.clip_grad_norm_(bound)
    if bound != math.inf:
        torch.nn.utils.clip_grad_norm_(others, bound)
    optimizer.step()
    theirs.step()
    optimizer.synchronize()
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=5e-6, atol=2e-6, equal_nan=True)
        torch.testing.assert_close(
            state(optimizer, p, "exp_avg"), theirs.state[q]["exp_avg"], rtol=5e-6, atol=1e-6, equal_nan=True
        )
    assert any(torch.isnan(p).any() for p in params)


def test_skipping_is_decided_by_the_norm_of_all_parameters() -> None:
    """One bad element in the last group keeps every parameter as it was."""
    params = make_params(shapes=[(5,), (1,)])
    optimizer = offload([{"params": params[:1]}, {"params": params[1:]}])
    train(optimizer, params, [0])
    before = snapshot(optimizer, params)
    give(params, gradients(1, params))
    params[1].grad.fill_(math.nan)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert snapshot(optimizer, params) == before


def test_always_skips_even_where_a_norm_read_earlier_was_finite() -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params, settings={"skip_nonfinite": "always"})
    train(optimizer, params, [0])
    before = snapshot(optimizer, params)
    give(params, gradients(1, params))
    optimizer.clip_grad_norm_(math.inf)
    params[0].grad[0] = math.inf
    optimizer.step()
    assert snapshot(optimizer, params) == before


def test_steps_skipped_in_a_row_are_counted_and_warned_of_with_rising_counts(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        for _ in range(3):
            params[0].grad = torch.full((5,), math.nan)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    assert optimizer.stats().skipped_steps == 3 and len(caplog.records) == 2
    assert optimizer.stats().steps == 0


def test_clipping_under_autograds_own_graph() -> None:
    """Gradients made with create_graph=True are tensors of a graph; only their values count."""
    params = make_params(shapes=[(5,)])
    others = twins(params)
    optimizer, plain = offload(params), offload(others)
    for o, own in ((optimizer, params), (plain, others)):
        loss: Tensor = Bag(own)()
        (grad,) = torch.autograd.grad(loss, own, create_graph=o is optimizer)
        own[0].grad = grad
        o.clip_grad_norm_(0.5)
        o.step()
    assert_same_run(optimizer, params, plain, others)
