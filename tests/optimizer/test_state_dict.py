"""Saving and loading: what is in the file, both ways between torch.optim.AdamW and us, and resuming to the bit."""

from __future__ import annotations

import copy
import io
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hf_offload import OffloadAdam
from hf_offload.engine.masters import cast_trainable
from support.optimizer import (
    DTYPES,
    EXACT,
    SCHEDULES,
    Bag,
    assert_same_run,
    config,
    frozen_state_dict,
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
SHAPES = [(), (0, 3), (7,), (3, 40)]


def groups_of(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 3e-2, "betas": (0.8, 0.99)}]


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---- what is in it


@every_mode
@every_wire
def test_contents(wire: str, schedule: str) -> None:
    """fp32 host tensors in the parameter's shape, `step` as torch's AdamW has it, the groups' settings."""
    params = make_params(DTYPES[wire], SHAPES)
    others = twins(params, torch.float32)
    optimizer, theirs = offload(groups_of(params), schedule), torch.optim.AdamW(groups_of(others), weight_decay=0.01)
    train(optimizer, params, range(3))
    train(theirs, others, range(3))
    saved, yours = optimizer.state_dict(), theirs.state_dict()
    assert list(saved) == list(yours) and list(saved["state"]) == list(yours["state"])
    for i, p in enumerate(params):
        entry = saved["state"][i]
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "master"]
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert entry[name].dtype == torch.float32 and entry[name].device.type == "cpu"
            assert entry[name].shape == p.shape and not entry[name].requires_grad
        mine, step = entry["step"], yours["state"][i]["step"]
        assert (mine.dtype, mine.shape, mine.device, mine.item()) == (step.dtype, step.shape, step.device, step.item())
        assert same_bits(entry["master"].to(p.dtype), p.detach())
    for mine, group in zip(saved["param_groups"], yours["param_groups"]):
        for name in ("params", "lr", "betas", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay"):
            assert mine[name] == group[name], name


@every_mode
def test_before_any_step_there_is_no_state_and_no_step_is_taken(schedule: str) -> None:
    params = make_params(shapes=[(5,)])
    before = params[0].detach().clone()
    optimizer = offload(params, schedule)
    assert optimizer.state_dict()["state"] == {}
    assert same_bits(params[0], before) and optimizer.stats().steps == 0 and not optimizer.engine.arenas
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"] == {} and not optimizer.engine.arenas


@both_schedules
def test_the_tensors_are_live_views_and_so_is_optimizer_state(schedule: str) -> None:
    params = make_params(shapes=[(5,), (3, 4)])
    optimizer = offload(params, schedule)
    train(optimizer, params, [0])
    saved = optimizer.state_dict()["state"]
    old = {n: t.clone() for n, t in saved[1].items()}
    train(optimizer, params, [1])
    assert all(not torch.equal(saved[1][n], old[n]) for n in old)
    assert all(optimizer.state[params[1]][n] is saved[1][n] for n in old)
    # and a write into them is a write into the state, as with torch
    optimizer.state[params[1]]["exp_avg"].zero_()
    assert not optimizer.state_dict()["state"][1]["exp_avg"].any()


@every_mode
def test_the_state_lies_in_the_parameters_own_order(schedule: str) -> None:
    """Several parameters share a bucket and units reorder the arena: each entry is its parameter's all the same."""
    params = make_params(shapes=[(300,), (2,), (3, 4), (500,)])
    others = twins(params)
    optimizer, theirs = offload(params, schedule), torch.optim.AdamW(others, weight_decay=0.01)
    train(optimizer, params, range(2))
    train(theirs, others, range(2))
    for i, q in enumerate(others):
        torch.testing.assert_close(optimizer.state_dict()["state"][i]["exp_avg"], theirs.state[q]["exp_avg"])


def test_a_saved_file_holds_12_bytes_an_element_and_no_more() -> None:
    """Views of one array must not drag the whole array into the file, once per parameter."""
    params = [nn.Parameter(torch.randn(10)) for _ in range(300)]
    optimizer = offload(params)
    train(optimizer, params, [0])
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    with zipfile.ZipFile(buffer) as file:
        stored = sum(info.file_size for info in file.infolist() if "/data/" in info.filename)
    assert stored == 12 * 3000 + 4 * 300


def test_looking_at_the_state_of_a_parameter_does_not_hide_it() -> None:
    """`optimizer.state` is a defaultdict: a look leaves an empty entry, which must not pass for its state."""
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    assert optimizer.state[params[0]] == {}
    train(optimizer, params, [0])
    assert sorted(optimizer.state_dict()["state"][0]) == ["exp_avg", "exp_avg_sq", "master", "step"]


# ---- resuming


@every_mode
@every_wire
@pytest.mark.parametrize("moment", ["before the first step", "after some steps", "twice"])
def test_resume_is_bit_equal(moment: str, wire: str, schedule: str) -> None:
    """The run that stopped at step 4 and the one that never did; through a file read with weights_only."""
    params = make_params(DTYPES[wire], SHAPES)
    optimizer = offload(groups_of(params), schedule)
    train(optimizer, params, range(4))
    saved = through_a_file({"weights": [p.detach() for p in params], "optimizer": optimizer.state_dict()})
    train(optimizer, params, range(4, 7))

    others = make_params(DTYPES[wire], SHAPES, seed=9)
    resumed = offload(groups_of(others), schedule)
    if moment == "after some steps":
        train(resumed, others, range(20, 23))
    with torch.no_grad():
        for p, w in zip(others, saved["weights"]):
            p.copy_(w)
    resumed.load_state_dict(saved["optimizer"])
    if moment == "twice":
        resumed.load_state_dict(saved["optimizer"])
    train(resumed, others, range(4, 7))
    assert_same_run(optimizer, params, resumed, others)
    for p, q in zip(params, others):
        for name in ("step", "exp_avg", "exp_avg_sq", "master"):
            assert same_bits(state(optimizer, p, name), state(resumed, q, name)), name


@every_mode
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", ["weights first", "state first"])
def test_either_order_of_loading_keeps_the_masters(order: str, wire: str, schedule: str) -> None:
    """Weights that round from the loaded masters keep them, whichever comes first."""
    params = make_params(DTYPES[wire], SHAPES)
    optimizer = offload(params, schedule, lr=1e-3)
    train(optimizer, params, range(4))
    saved, weights = frozen_state_dict(optimizer), [p.detach().clone() for p in params]
    train(optimizer, params, range(4, 7))
    others = make_params(DTYPES[wire], SHAPES, seed=9)
    resumed = offload(others, schedule, lr=1e-3)
    bag = Bag(others)
    loads: list[Callable[[], Any]] = [
        lambda: bag.load_state_dict({f"items.{i}": w for i, w in enumerate(weights)}),
        lambda: resumed.load_state_dict(saved),
    ]
    for load in loads if order == "weights first" else reversed(loads):
        load()
    train(resumed, others, range(4, 7))
    assert all(same_bits(state(optimizer, p, "master"), state(resumed, q, "master")) for p, q in zip(params, others))


@every_mode
@every_wire
def test_loading_its_own_live_state_changes_nothing(wire: str, schedule: str) -> None:
    """accelerate does it when it wraps the optimizer."""
    params = make_params(DTYPES[wire], SHAPES)
    optimizer = offload(params, schedule)
    train(optimizer, params, range(3))
    before = snapshot(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())
    assert snapshot(optimizer, params) == before


def test_loading_live_state_in_another_order_is_safe() -> None:
    """A pre-hook that renumbers parameters hands us views of the very memory we write to."""
    params = make_params(shapes=[(5,), (5,), (5,)])
    optimizer = offload(params)
    train(optimizer, params, range(2))
    expected = [state(optimizer, params[i], "exp_avg") for i in (2, 0, 1)]
    saved = optimizer.state_dict()
    saved["state"] = {0: saved["state"][2], 1: saved["state"][0], 2: saved["state"][1]}
    optimizer.load_state_dict(saved)
    for p, e in zip(params, expected):
        assert same_bits(state(optimizer, p, "exp_avg"), e)


@every_mode
def test_a_loaded_state_is_a_copy(schedule: str) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, [0])
    saved = frozen_state_dict(optimizer)
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(optimizer, params, range(1, 4))
    assert all(same_bits(saved["state"][0][n], kept["state"][0][n]) for n in kept["state"][0])
    assert saved["param_groups"] == kept["param_groups"]


@every_mode
def test_partial_state(schedule: str) -> None:
    """A parameter that had never had a gradient, or was frozen, when the file was made starts anew."""
    params = make_params(shapes=[(5,), (6,)])
    others = make_params(shapes=[(5,), (6,)])
    optimizer, theirs = offload(params, schedule), torch.optim.AdamW(others, weight_decay=0.01)
    for o, own in ((optimizer, params), (theirs, others)):
        train(o, own, range(3))
        saved = copy.deepcopy(o.state_dict())
        del saved["state"][1]
        o.load_state_dict(saved)
        train(o, own, range(3, 6))
    for p, q, count in zip(params, others, (6, 3)):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
        assert state(optimizer, p, "step").item() == theirs.state[q]["step"].item() == count


@every_mode
@pytest.mark.parametrize("empty", [{}, {0: {}, 1: None}])
def test_an_empty_state_starts_anew(empty: dict[int, Any], schedule: str) -> None:
    params, others = make_params(shapes=[(5,), (6,)]), make_params(shapes=[(5,), (6,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(3))
    optimizer.load_state_dict({"state": empty, "param_groups": optimizer.state_dict()["param_groups"]})
    for p, q in zip(params, others):
        q.data.copy_(p)
    fresh = offload(others, schedule)
    train(optimizer, params, range(3, 6))
    train(fresh, others, range(3, 6))
    assert_same_run(optimizer, params, fresh, others)


@every_mode
def test_the_state_of_a_parameter_that_is_frozen_now_waits_for_it(schedule: str) -> None:
    params, others = make_params(shapes=[(5,), (6,)]), make_params(shapes=[(5,), (6,)])
    optimizer, resumed = offload(params, schedule), offload(others, schedule)
    train(optimizer, params, range(3))
    for p, q in zip(params, others):
        q.data.copy_(p)
    params[1].requires_grad_(False)
    others[1].requires_grad_(False)
    resumed.load_state_dict(frozen_state_dict(optimizer))
    for o, own in ((optimizer, params), (resumed, others)):
        give(own, [gradients(3, own)[0], None])
        o.step()
        own[1].requires_grad_(True)
        train(o, own, [4])
    assert_same_run(optimizer, params, resumed, others)
    assert state(resumed, others[1], "step").item() == 4


# ---- to and from torch.optim.AdamW


@every_mode
@pytest.mark.parametrize("decoupled", [True, False])
def test_from_torch(decoupled: bool, schedule: str) -> None:
    """A run that torch began goes on with us as it would have gone on with torch."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    others = make_params(shapes=SHAPES)
    theirs = kind(groups_of(others), weight_decay=0.1)
    train(theirs, others, range(4))
    params = twins(others)
    optimizer = offload(groups_of(params), schedule, weight_decay=0.5, decoupled_weight_decay=decoupled)
    optimizer.load_state_dict(through_a_file(theirs.state_dict()))
    train(optimizer, params, range(4, 8))
    train(theirs, others, range(4, 8))
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
        assert state(optimizer, p, "step").item() == 8
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@every_mode
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_to_torch(foreach: bool, decoupled: bool, schedule: str) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    params = make_params(shapes=SHAPES)
    optimizer = offload(groups_of(params), schedule, weight_decay=0.1, decoupled_weight_decay=decoupled)
    train(optimizer, params, range(4))
    others = twins(params)
    theirs = kind(groups_of(others), weight_decay=0.5, foreach=foreach)
    theirs.load_state_dict(through_a_file(optimizer.state_dict()))
    train(optimizer, params, range(4, 8))
    train(theirs, others, range(4, 8))
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)


@every_mode
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_there_and_back_with_16_bit_weights(wire: str, schedule: str) -> None:
    """torch's AdamW keeps moments in the weights' dtype and rounds ours; back here they are fp32 again, masters follow
    the weights."""
    params = make_params(DTYPES[wire], shapes=[(7,), (3, 40)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(3))
    theirs = torch.optim.AdamW(params, weight_decay=0.01)
    theirs.load_state_dict(frozen_state_dict(optimizer))
    train(theirs, params, range(3, 6))
    back = theirs.state_dict()
    assert back["state"][0]["exp_avg"].dtype == DTYPES[wire]
    for entry in back["state"].values():
        del entry["master"]
    optimizer.load_state_dict(back)
    for i, p in enumerate(params):
        assert state(optimizer, p, "exp_avg").dtype == torch.float32
        assert torch.equal(state(optimizer, p, "exp_avg"), back["state"][i]["exp_avg"].float())
        assert torch.equal(state(optimizer, p, "master"), p.detach().float())
        assert state(optimizer, p, "step").item() == 6


STEPS_AS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda s: int(s),
    "float": lambda s: float(s),
    "tensor int64": lambda s: s.to(torch.int64),
    "tensor of one": lambda s: s.reshape(1),
    "tensor fp64": lambda s: s.double(),
}


@pytest.mark.parametrize("kind", STEPS_AS)
def test_step_as(kind: str) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    train(optimizer, params, range(3))
    saved = frozen_state_dict(optimizer)
    saved["state"][0]["step"] = STEPS_AS[kind](saved["state"][0]["step"])
    optimizer.load_state_dict(saved)
    assert state(optimizer, params[0], "step").item() == 3.0
    assert optimizer.state_dict()["state"][0]["step"].shape == ()


@every_wire
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_of_another_dtype_becomes_fp32_and_it_is_said(
    dtype: torch.dtype, wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = make_params(DTYPES[wire], shapes=[(5,), (3, 4)])
    optimizer = offload(params)
    train(optimizer, params, range(2))
    saved = frozen_state_dict(optimizer)
    for entry in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            entry[name] = entry[name].to(dtype)
    with caplog.at_level(logging.WARNING, "hf_offload"):
        optimizer.load_state_dict(saved)
    assert f"exp_avg_sq of 2 parameters was {str(dtype).removeprefix('torch.')}" in caplog.text
    train(optimizer, params, [2])
    optimizer.load_state_dict(saved)
    for i, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            loaded = state(optimizer, p, name)
            assert loaded.dtype == torch.float32 and same_bits(loaded, saved["state"][i][name].float())


def test_state_in_other_strides() -> None:
    params = make_params(shapes=[(4, 6)])
    optimizer = offload(params)
    train(optimizer, params, range(2))
    saved = frozen_state_dict(optimizer)
    entry = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in saved["state"][0].items()}
    optimizer.load_state_dict({**saved, "state": {0: entry}})
    assert all(same_bits(state(optimizer, params[0], n), t) for n, t in saved["state"][0].items())


# ---- masters and weights that disagree


@every_mode
@every_wire
def test_a_master_that_is_not_the_weights_follows_it_with_a_warning_that_counts(
    wire: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer's file of one step beside the weights of another (field.md, 5 and 6)."""
    params = make_params(DTYPES[wire], shapes=[(100,), (5,)])
    optimizer = offload(params, schedule, lr=0.5)
    train(optimizer, params, range(3))
    saved = frozen_state_dict(optimizer)
    with torch.no_grad():
        params[0][:40].add_(8.0)
    masters = [state(optimizer, p, "master") for p in params]
    optimizer.load_state_dict(saved)
    expected = masters[0].clone()
    expected[:40] = params[0].detach()[:40].float()
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        give(params, [torch.zeros_like(p) for p in params])
        for g in optimizer.param_groups:
            g.update(lr=0.0, weight_decay=0.0)
        optimizer.step()
        optimizer.synchronize()
    assert same_bits(state(optimizer, params[0], "master"), expected)
    assert same_bits(state(optimizer, params[1], "master"), masters[1])
    assert [r for r in caplog.records if "40 weights were changed from outside" in r.message]


@every_mode
@every_wire
def test_an_older_state_beside_newer_weights(wire: str, schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    """The weights were last written by our own step, so nothing but the loaded masters tells that they disagree."""
    params = make_params(DTYPES[wire], shapes=[(100,), (5,)])
    optimizer = offload(params, schedule, lr=0.1)
    train(optimizer, params, range(3))
    saved = frozen_state_dict(optimizer)
    train(optimizer, params, range(3, 6))
    weights = [p.detach().clone() for p in params]
    optimizer.load_state_dict(saved)
    loaded = [state(optimizer, p, "master") for p in params]
    differ = sum((m.to(w.dtype) != w).sum().item() for m, w in zip(loaded, weights))
    assert differ > 50
    for g in optimizer.param_groups:
        g.update(lr=0.0, weight_decay=0.0)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        train(optimizer, params, [6])
    assert [r for r in caplog.records if f" {differ} weights were changed from outside" in r.message]
    for p, w, m in zip(params, weights, loaded):
        assert same_bits(p, w), "the next step starts from the weights, not from stale masters"
        assert same_bits(state(optimizer, p, "master"), torch.where(m.to(w.dtype) == w, m, w.float()))


@every_mode
def test_loading_the_state_that_fits_warns_of_nothing(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(torch.bfloat16, shapes=[(100,), (5,)])
    optimizer = offload(params, schedule)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        train(optimizer, params, range(3))
        optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        train(optimizer, params, [3])
    assert not caplog.records


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_file_without_masters_takes_them_from_the_weights(waiting: bool, stepped: bool) -> None:
    """Whatever the optimizer did before; a fresh one may have fp32 values waiting, which are those weights' digits."""
    others = make_params(shapes=[(300,)])
    theirs = torch.optim.AdamW(others, weight_decay=0.01)
    train(theirs, others, range(2))
    params = twins(others, torch.float32 if waiting else torch.bfloat16)
    bag = Bag(params)
    if waiting:
        cast_trainable(bag, torch.bfloat16)
    optimizer = offload(params)
    if stepped:
        train(optimizer, params, range(2))
    optimizer.load_state_dict(theirs.state_dict())
    expected = others[0].detach() if waiting and not stepped else params[0].detach().float()
    assert params[0].dtype == torch.bfloat16
    assert same_bits(state(optimizer, params[0], "master"), expected)


# ---- groups, hooks, schedulers


@every_mode
def test_the_groups_settings_come_from_the_file(schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload([{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.5)}], schedule)
    train(optimizer, params, [0])
    saved = frozen_state_dict(optimizer)
    saved["param_groups"][0].update(lr=0.25, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.7, maximize=True, mine="kept")
    held = optimizer.param_groups, *optimizer.param_groups
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert [group[n] for n in ("lr", "betas", "eps", "weight_decay", "maximize", "mine")] == [
        0.25, (0.1, 0.2), 1e-3, 0.7, True, "kept",
    ]  # fmt: skip
    assert group["params"][0] is params[0]
    assert optimizer.param_groups[1]["lr"].item() == 0.5
    # Who holds the list or a group goes on holding it: an optimizer that ours took over from, and its scheduler.
    assert all(a is b for a, b in zip(held, (optimizer.param_groups, *optimizer.param_groups)))
    saved["param_groups"][0]["lr"] = 99.0
    saved["param_groups"][1]["lr"].fill_(99.0)
    assert group["lr"] == 0.25 and optimizer.param_groups[1]["lr"].item() == 0.5, "settings are copied"


@pytest.mark.parametrize(
    "name", ["lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay", "amsgrad"]
)
def test_a_setting_that_the_file_lacks_stays(name: str) -> None:
    """Files of older versions of torch."""
    given = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.3, "maximize": True}
    params = make_params(shapes=[(5,)])
    optimizer = offload(params, **given, decoupled_weight_decay=False)
    train(optimizer, params, [0])
    saved = frozen_state_dict(optimizer)
    del saved["param_groups"][0][name]
    before = optimizer.param_groups[0][name]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][name] == before
    train(optimizer, params, [1])


@every_mode
def test_a_resumed_scheduler_drives_the_loaded_groups(schedule: str) -> None:
    def make(params: list[Any]) -> tuple[OffloadAdam, LambdaLR]:
        optimizer = offload(groups_of(params), schedule)
        return optimizer, LambdaLR(optimizer, lambda s: 0.8**s)

    params, others = make_params(shapes=SHAPES), make_params(shapes=SHAPES)
    optimizer, scheduler = make(params)
    for step in range(3):
        train(optimizer, params, [step])
        scheduler.step()
    resumed, again = make(others)
    for p, q in zip(params, others):
        q.data.copy_(p)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    again.load_state_dict(scheduler.state_dict())
    for step in range(3, 6):
        for o, own, s in ((optimizer, params, scheduler), (resumed, others, again)):
            train(o, own, [step])
            s.step()
    assert_same_run(optimizer, params, resumed, others)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in resumed.param_groups]


def hooked(optimizer: Any, p: Tensor) -> list[Any]:
    """Registers every hook on saving and loading, each noting what it is given."""
    log: list[Any] = []

    def facts(state_dict: dict[str, Any]) -> Any:
        entry = state_dict["state"][0]
        return sorted(state_dict), sorted(set(entry) - {"master"}), tuple(entry["exp_avg"].shape), float(entry["step"])

    def before_load(o: Any, state_dict: dict[str, Any]) -> None:
        log.append(("before load", o is optimizer, facts(state_dict), state_dict["param_groups"][0]["lr"]))

    def change_in_place(o: Any, state_dict: dict[str, Any]) -> None:
        state_dict["added"] = state_dict["state"] = dict(state_dict["state"])

    def change(o: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**g, "lr": 0.125} for g in state_dict["param_groups"]]
        entry = {**state_dict["state"][0], "step": torch.tensor(7.0)}
        return {**state_dict, "param_groups": groups, "state": {0: entry}}

    def after_load(o: Any) -> None:
        log.append(("after load", o is optimizer, o.param_groups[0]["lr"], float(o.state[p]["step"])))

    optimizer.register_state_dict_pre_hook(lambda o: log.append(("before save", o is optimizer, len(o.state))))
    optimizer.register_state_dict_post_hook(lambda o, s: log.append(("after save", facts(s))))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "more": 1})
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_pre_hook(change_in_place)
    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    return log


def test_hooks_on_saving_and_loading_get_what_they_get_with_torch() -> None:
    logs = []
    for kind in (offload, torch.optim.AdamW):
        params = make_params(shapes=[(5,)])
        optimizer = kind(params, lr=0.5, weight_decay=0.01)
        train(optimizer, params, range(2))
        log = hooked(optimizer, params[0])
        saved = optimizer.state_dict()
        assert saved.pop("more") == 1
        kept = copy.deepcopy(saved)
        optimizer.load_state_dict(saved)
        assert sorted(saved) == sorted(kept), "what a hook puts into the dict stays out of the caller's"
        assert saved["param_groups"] == kept["param_groups"]
        logs.append(log)
    assert logs[0] == logs[1]
    assert [entry[0] for entry in logs[0]] == ["before save", "after save", "before load", "before load", "after load"]
    assert logs[0][-1] == ("after load", True, 0.125, 7.0)


# ---- state edited by hand

EDITS: dict[str, Callable[[Any, Tensor], Any]] = {
    "cleared": lambda o, p: o.state.clear(),
    "made anew": lambda o, p: setattr(o, "state", {}),
    "an entry deleted": lambda o, p: o.state.pop(p),
    "an entry emptied": lambda o, p: o.state.update({p: {}}),
    "a tensor replaced": lambda o, p: o.state[p].update(exp_avg=torch.zeros_like(p)),
    "a tensor deleted": lambda o, p: o.state[p].pop("exp_avg_sq"),
}


@every_mode
@pytest.mark.parametrize("edit", EDITS)
def test_state_replaced_by_hand_is_refused_at_the_step(edit: str, schedule: str) -> None:
    """torch would step the new tensors; ours steps the memory behind the old ones, so it must not go on silently."""
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    EDITS[edit](optimizer, params[1])
    before = snapshot(optimizer, params)
    give(params, gradients(2, params))
    with pytest.raises(RuntimeError, match=r"optimizer\.state.*replaced by hand.*load_state_dict"):
        optimizer.step()
    assert snapshot(optimizer, params) == before


def test_json_is_refused_not_ignored() -> None:
    """JSON makes text of the numbers of parameters: torch finds none of them and starts anew, in silence."""
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    train(optimizer, params, range(2))
    saved = frozen_state_dict(optimizer)
    keys = json.loads(json.dumps(dict.fromkeys(saved["state"], 0)))
    with pytest.raises(RuntimeError, match=r"\['0'\].*no group has parameters of these numbers.*JSON"):
        optimizer.load_state_dict({**saved, "state": {k: saved["state"][int(k)] for k in keys}})


def test_saving_and_loading_under_inference_mode() -> None:
    """An evaluation loop that saves: the views must not become inference tensors, which nobody may write to later."""
    params = make_params(shapes=[(5,)])
    bag = Bag(params)
    optimizer = OffloadAdam(params, model=bag)
    bag()  # makes the state; nobody has looked at it yet
    with torch.inference_mode():
        saved = optimizer.state_dict()
        assert not any(t.is_inference() for t in saved["state"][0].values())
        optimizer.load_state_dict(saved)
    optimizer.state[params[0]]["exp_avg"].mul_(2.0)
    train(optimizer, params, [1])


def test_files_on_disk(tmp_path: Path) -> None:
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = offload(params)
    train(optimizer, params, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True, map_location="cpu")
    optimizer.load_state_dict(loaded)
    for i, p in enumerate(params):
        assert all(same_bits(loaded["state"][i][n], state(optimizer, p, n)) for n in loaded["state"][i])


@every_mode
def test_torch_distributed_checkpoints_way_of_saving_and_loading(schedule: str) -> None:
    """Entries by parameter name; it takes a step with zero gradients and lr 0 itself, to make state to load into."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    params, others = make_params(torch.bfloat16, SHAPES), make_params(torch.bfloat16, SHAPES, seed=9)
    bag, again = Bag(params), Bag(others)
    optimizer, resumed = (OffloadAdam(b.parameters(), model=b, config=config(schedule)) for b in (bag, again))
    train(optimizer, params, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(bag, optimizer))
    assert sorted(saved["state"]) == [f"items.{i}" for i in range(len(SHAPES))]
    weights = copy.deepcopy(bag.state_dict())
    train(optimizer, params, range(3, 5))
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, resumed, saved)
    train(resumed, others, range(3, 5))
    assert_same_run(optimizer, params, resumed, others)
