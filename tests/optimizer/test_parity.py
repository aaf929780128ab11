"""fp32 weights: OffloadAdam next to torch.optim.AdamW and Adam, over every way of driving them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_offload import OffloadAdam
from support.optimizer import EXACT, Bag, give, gradients, make_params, offload, train, twins

STEPS = 10
# Both compute in fp32, each rounding where it likes (torch's vector code uses fused multiply-add, ours does not). The
# values are of order 1 and each step rounds them once: ten half ulps of 1.2e-7.
CLOSE = {"rtol": 2e-6, "atol": 1e-6}

KINDS: dict[str, tuple[dict[str, Any], type[Optimizer], dict[str, Any]]] = {
    "adamw": ({"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw no decay": ({"weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
    "adam l2": ({"weight_decay": 0.1, "decoupled_weight_decay": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    "maximize": ({"maximize": True, "weight_decay": 0.1}, torch.optim.AdamW, {"maximize": True, "weight_decay": 0.1}),
    "l2 maximize": (
        {"maximize": True, "weight_decay": 0.1, "decoupled_weight_decay": False},
        torch.optim.Adam,
        {"maximize": True, "weight_decay": 0.1},
    ),
    "other numbers": (
        {"betas": (0.5, 0.95), "eps": 1e-3, "lr": 0.05},
        torch.optim.AdamW,
        {"betas": (0.5, 0.95), "eps": 1e-3, "lr": 0.05, "weight_decay": 0.01},
    ),
    "no momentum": ({"betas": (0.0, 0.0)}, torch.optim.AdamW, {"betas": (0.0, 0.0), "weight_decay": 0.01}),
    "eps 0": ({"eps": 0.0}, torch.optim.AdamW, {"eps": 0.0, "weight_decay": 0.01}),
    "defaults": ({}, torch.optim.AdamW, {}),
}


def assert_same(ours: OffloadAdam, theirs: Optimizer, params: list[Any], others: list[Any]) -> None:
    for i, (p, q) in enumerate(zip(params, others)):
        where = f"parameter {i} of shape {tuple(p.shape)}"
        torch.testing.assert_close(p, q, **CLOSE, msg=lambda m, w=where: f"{w}: {m}")
        mine, yours = ours.state.get(p, {}), theirs.state.get(q, {})
        assert float(mine.get("step", 0)) == float(yours.get("step", 0)), where
        for name in ("exp_avg", "exp_avg_sq"):
            if name in yours:
                # one ulp of the terms added: cancellation in exp_avg is not counted
                scale = yours[name].abs().max().item() if yours[name].numel() else 0.0
                torch.testing.assert_close(mine[name], yours[name], rtol=2e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("kind", KINDS)
def test_one_group(kind: str, schedule: str) -> None:
    mine, other, theirs = KINDS[kind]
    params = make_params()
    others = twins(params)
    ours, torchs = offload(params, schedule, **{"lr": 1e-2, **mine}), other(others, **{"lr": 1e-2, **theirs})
    train(ours, params, range(STEPS))
    train(torchs, others, range(STEPS))
    assert_same(ours, torchs, params, others)


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    """Groups of their own lr, betas, eps and decay, a tensor as lr, an empty group, one on the defaults."""
    return [
        {"params": params[:2], "lr": 1e-1, "weight_decay": 0.3},
        {"params": params[2:4], "lr": torch.tensor(3e-3), "betas": (0.8, 0.99)},
        {"params": []},
        {"params": params[4:6], "eps": 1e-2, "weight_decay": 0.0},
        {"params": params[6:]},
    ]


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("decoupled", [True, False])
def test_several_groups_in_shared_buckets(decoupled: bool, schedule: str) -> None:
    params = make_params()
    others = twins(params)
    other = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours = offload(groups_of(params), schedule, lr=2e-2, weight_decay=0.05, decoupled_weight_decay=decoupled)
    torchs = other(groups_of(others), lr=2e-2, weight_decay=0.05)
    train(ours, params, range(STEPS))
    train(torchs, others, range(STEPS))
    assert_same(ours, torchs, params, others)
    assert [len(g["params"]) for g in ours.param_groups] == [2, 2, 0, 2, 2]


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, [lambda s, k=k: 1.0 / (1 + s * (k + 1)) for k in range(len(o.param_groups))]),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=[0.05] * len(o.param_groups), total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0),
    "warm-up": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 4), LambdaLR(o, lambda s: 0.9**s)], milestones=[4]),
}


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_stock_schedulers(kind: str, schedule: str) -> None:
    params = make_params()
    others = twins(params)
    ours, torchs = offload(groups_of(params), schedule, lr=1e-2), torch.optim.AdamW(groups_of(others), lr=1e-2)
    drivers = [(ours, params, SCHEDULERS[kind](ours)), (torchs, others, SCHEDULERS[kind](torchs))]
    seen: list[list[Any]] = [[], []]
    for step in range(STEPS):
        for k, (optimizer, own, scheduler) in enumerate(drivers):
            train(optimizer, own, [step])
            scheduler.step(1.0) if kind == "ReduceLROnPlateau" else scheduler.step()
            seen[k].append([(float(g["lr"]), tuple(map(float, g["betas"]))) for g in optimizer.param_groups])
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][-1], "the scheduler did nothing"
    assert_same(ours, torchs, params, others)


def test_the_learning_rate_is_read_at_step_and_not_later() -> None:
    """The scheduler rewrites lr while the step is still under way."""
    params = make_params(shapes=[(513,), (100,)])
    others = twins(params)
    slow = {"link_latency_us": 3000.0}
    ours, torchs = offload(params, "overlapped", slow, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    for optimizer, own in ((ours, params), (torchs, others)):
        for step in range(4):
            give(own, gradients(step, own))
            optimizer.step()
            for g in optimizer.param_groups:
                g["lr"], g["weight_decay"], g["betas"] = g["lr"] * 7, 0.5, (0.1, 0.2)
            for g in optimizer.param_groups[:1]:
                g.update(lr=1e-2 * (step + 1), weight_decay=0.01, betas=(0.9, 0.999)) if step % 2 else None
    ours.synchronize()
    assert_same(ours, torchs, params, others)


@pytest.mark.parametrize("schedule", EXACT)
def test_closures_return_their_loss_and_are_called_once_with_gradients_on(schedule: str) -> None:
    params = make_params()
    others = twins(params)
    ours, torchs = offload(params, schedule, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    calls = []

    def closure(optimizer: Optimizer, bag: Bag) -> Callable[[], Tensor]:
        def run() -> Tensor:
            assert torch.is_grad_enabled()
            calls.append(1)
            optimizer.zero_grad()
            loss = bag()
            loss.backward()
            return loss

        return run

    bag = getattr(ours, "_bag", None) or Bag(params)
    with torch.no_grad():
        losses = [
            [ours.step(closure(ours, bag)).item(), torchs.step(closure(torchs, Bag(others))).item()] for _ in range(5)
        ]
    assert len(calls) == 10
    for mine, yours in losses:
        assert mine == pytest.approx(yours, rel=1e-5)
    ours.synchronize()
    assert_same(ours, torchs, params, others)


def test_step_hooks_get_what_they_get_with_torch() -> None:
    """Pre- and post-hooks are called in order, with the optimizer and the arguments; the global ones too."""
    log: list[Any] = []
    note = log.append
    first = register_optimizer_step_pre_hook(lambda o, a, k: note(("global", type(o).__name__)))
    try:
        logs = []
        for kind in (offload, torch.optim.AdamW):
            (p,) = make_params(shapes=[(5,)])
            optimizer = kind([p], lr=0.1, weight_decay=0.01)
            before = p.detach().clone()
            optimizer.register_step_pre_hook(
                lambda o, a, k, p=p, b=before: log.append(("pre", a[1:], k, torch.equal(p, b)))
            )
            optimizer.register_step_post_hook(lambda o, a, k, p=p, b=before: log.append(("post", torch.equal(p, b))))
            log.clear()
            p.grad = torch.ones(5)
            optimizer.step(None)
            logs.append([entry for entry in log if entry[0] != "global"])
            assert ("global", type(optimizer).__name__) in log
        assert logs[0] == logs[1] == [("pre", (None,), {}, True), ("post", False)]
    finally:
        first.remove()


def test_a_step_hook_may_change_the_gradient() -> None:
    params = make_params(shapes=[(9,)])
    others = twins(params)
    ours, torchs = offload(params, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)

    def turn(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(-3)

    for optimizer, own in ((ours, params), (torchs, others)):
        optimizer.register_step_pre_hook(turn)
        train(optimizer, own, range(3))
    assert_same(ours, torchs, params, others)


def test_named_parameters() -> None:
    params = make_params(shapes=[(3,), (4,)])
    optimizer = offload([("a", params[0]), ("b", params[1])])
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["a", "b"]
    assert sorted(saved["state"]) == [0, 1]
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": make_params(shapes=[(2,)])})
    # torch keeps its own names where the file has none, and takes the file's where it has some
    without = copy.deepcopy(saved)
    del without["param_groups"][0]["param_names"]
    optimizer.load_state_dict(without)
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]
    without["param_groups"][0]["param_names"] = ["x", "y"]
    optimizer.load_state_dict(without)
    assert optimizer.param_groups[0]["param_names"] == ["x", "y"]


def test_the_profiler_sees_the_step_under_its_name() -> None:
    params = make_params(shapes=[(3,)])
    optimizer = offload(params)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(optimizer, params, [0])
        optimizer.zero_grad()
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#OffloadAdam.step" in names
    assert "Optimizer.zero_grad#OffloadAdam.zero_grad" in names


@pytest.mark.parametrize("method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_signatures_match_the_base_class(method: str) -> None:
    def shape(kind: type) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(getattr(kind, method)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(OffloadAdam) == shape(Optimizer)


def test_the_public_signature() -> None:
    parameters = inspect.signature(OffloadAdam).parameters
    positional = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keyword = {n: p.default for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert positional == ["params", "lr", "betas", "eps", "weight_decay"]
    assert [parameters[n].default for n in positional[1:]] == [1e-3, (0.9, 0.999), 1e-8, 0.01]
    assert keyword == {
        "decoupled_weight_decay": True, "maximize": False, "amsgrad": False, "config": None, "model": None,
    }  # fmt: skip
    assert issubclass(OffloadAdam, Optimizer)
