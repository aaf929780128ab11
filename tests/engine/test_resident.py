"""State that stays on the device: the same bits whichever share it is, and nothing of it travels."""

from __future__ import annotations

import copy
import io
import itertools
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine import resident as resident_module
from hf_offload.engine.masters import cast_trainable
from hf_offload.engine.resident import ResidentArena, follow_by_torch
from hf_offload.engine.tensors import WIRE, host_array
from hf_offload.engine.work import BucketWork
from hf_offload.kernels import cpu
from hf_offload.transport.in_place import HostAdam
from support.engine import (
    EXACT,
    LATE,
    Outcome,
    Plan,
    TinyLM,
    batches,
    bits,
    dice,
    handmade,
    kernels,
    optimizer_of,
    same,
    settings,
    state,
    train,
    weights,
)
from support.engine_interrupts import Interrupter

MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": TinyLM,
    "mixed": lambda: TinyLM(torch.bfloat16, adapters=True),
    "fp16": lambda: TinyLM(torch.float16),
}
ALL = 1 << 30


def half(model: nn.Module) -> int:
    return 6 * sum(p.numel() for p in model.parameters())


def resident(optimizer: OffloadAdam) -> set[Tensor]:
    return {p for a in optimizer.engine.arenas if a.resident for p in a.params}


PLANS = {1: Plan(steps=3, missing={0: 3, 1: 0}), 3: Plan(steps=3, accumulation=3, missing={0: 3, 1: 0})}


@cache
def reference(model: str, accumulation: int) -> Outcome:
    return train(settings("in_order", bucket_bytes=1 << 20), PLANS[accumulation], make=MODELS[model])


QUICK = [("overlapped", "mixed", 3), ("streamed", "fp32", 1), ("speculative", "mixed", 3)]
REST = [(mode, model, n) for mode in ("in_order", *EXACT) for model in MODELS for n in (1, 3)]


@pytest.mark.parametrize(
    ("mode", "model", "accumulation"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST if case not in QUICK)],
)
def test_every_share_gives_the_bits_of_in_order_without_one(model: str, accumulation: int, mode: str) -> None:
    make = MODELS[model]
    for nbytes in (half(make()), ALL):
        found = train(settings(mode, device_state_bytes=nbytes), PLANS[accumulation], dice(nbytes, 5e-4), make)
        assert found == reference(model, accumulation), nbytes


@pytest.mark.parametrize("zero", ["zero", "keep"])
@pytest.mark.parametrize("mode", ["overlapped", "streamed", "speculative"])
def test_gradients_that_are_kept_or_zeroed_in_place_go_on(mode: str, zero: str) -> None:
    plan = Plan(steps=4, zero=zero, clip=None)
    expected = train(settings("in_order"), plan, make=MODELS["mixed"])
    nbytes = half(MODELS["mixed"]())
    assert train(settings(mode, device_state_bytes=nbytes), plan, dice(3, 5e-4), MODELS["mixed"]) == expected


@pytest.mark.parametrize("zero", ["zero", "keep"])
@pytest.mark.parametrize("mode", ["overlapped", "streamed", "delayed"])
def test_gradients_that_the_step_is_late_to_let_go_of_go_on(mode: str, zero: str) -> None:
    plan, check, step = Plan(steps=4, zero=zero, clip=None), BucketWork.check_gradients_unchanged, HostAdam.step_state
    expected = train(settings("delayed" if mode == "delayed" else "in_order"), plan)

    def checked_late(work: BucketWork) -> None:
        time.sleep(LATE / 6)
        check(work)

    def stepped_late(*args: Any) -> Any:
        time.sleep(LATE / 6)
        return step(*args)

    with (
        patch.object(BucketWork, "check_gradients_unchanged", checked_late),
        patch.object(HostAdam, "step_state", stepped_late),
    ):
        assert train(settings(mode, device_state_bytes=ALL), plan) == expected


def test_delayed_weights_are_as_stale_whichever_share_stays() -> None:
    """The losses show it: forward reads weights that are one step old, of resident parameters too."""
    runs = [
        train(settings("delayed", device_state_bytes=nbytes), Plan(steps=4), make=MODELS["mixed"])
        for nbytes in (0, half(MODELS["mixed"]()), ALL)
    ]
    assert runs[1] == runs[0] and runs[2] == runs[0]
    assert train(settings("in_order"), Plan(steps=4), make=MODELS["mixed"]) != runs[0]


def run(mode: str, nbytes: int, steps: int = 3, make: Callable[[], nn.Module] = MODELS["mixed"]) -> Any:
    model = make()
    optimizer = optimizer_of(model, settings(mode, device_state_bytes=nbytes))
    data = batches()
    for _ in range(steps):
        model(next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return model, optimizer


@pytest.mark.parametrize("mode", ["in_order", "overlapped", "streamed"])
def test_nothing_of_it_travels_and_the_figures_say_so(mode: str) -> None:
    nbytes = half(MODELS["mixed"]())
    model, optimizer = run(mode, nbytes)
    stay = resident(optimizer)
    leave = [p for p in model.parameters() if p not in stay]
    stats, wire = optimizer.stats(), sum(p.nbytes for p in leave)
    assert stay and leave and (stats.d2h_bytes, stats.h2d_bytes) == (wire, wire)
    held = 12 * sum(p.numel() for p in stay)
    assert 0.9 * nbytes < held <= nbytes and stats.device_bytes["optimizer"] == held
    assert stats.host_bytes["master"] == 4 * sum(p.numel() for p in leave)
    assert stats.params == sum(p.numel() for p in model.parameters())
    if mode == "streamed":
        runs = 2 * len(model.layers)  # of bf16, then of fp32, each from a new cache line on
        assert wire <= stats.host_bytes["store"] < wire + 64 * runs
        assert stats.device_bytes["gradients"] >= sum(p.nbytes for p in stay)
    optimizer.close()


@pytest.mark.parametrize(
    ("room", "stay"),
    [
        (78, {"embed.weight"}),
        (96, {"embed.weight", "layers.0.down.bias", "layers.0.up.bias"}),
        (24, {"layers.0.down.bias", "layers.0.up.bias", "layers.0.norm.bias"}),
        (5, set()),
    ],
)
def test_what_forward_needs_first_stays_and_what_does_not_fit_is_passed_over(room: int, stay: set[str]) -> None:
    """By units in the order of forward, within a unit in the order of `param_groups`, here from the end.

    `room`: in elements. The embedding has 78, a block, from its end, 6, 72, 12, 72, 6, 6.
    """
    model = TinyLM()
    config = settings("overlapped", device_state_bytes=12 * room + 11)
    optimizer = OffloadAdam(reversed(list(model.parameters())), config=config, model=model)
    optimizer.engine.bind_trainable()
    assert {name for name, p in model.named_parameters() if p in resident(optimizer)} == stay
    optimizer.close()


def test_streamed_gradients_of_it_stay_in_grad() -> None:
    model, optimizer = run("streamed", half(MODELS["mixed"]()))
    model(next(batches(9))).backward()
    for p in model.parameters():
        assert p.grad is not None
        assert (type(p.grad) is Tensor) == (p in resident(optimizer))
    optimizer.close()


@pytest.mark.parametrize("mode", ["in_order", "overlapped", "streamed"])
def test_a_skipped_step_leaves_every_byte(mode: str) -> None:
    model, optimizer = run(mode, half(MODELS["mixed"]()))
    before = weights(model), state(optimizer)
    model(next(batches(9))).backward()
    (p,) = [p for p in resident(optimizer) if p is model.embed.weight]
    p.grad[0, 0] = torch.inf
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.stats().skipped_steps == 1
    assert same(weights(model), before[0]) and same(state(optimizer), before[1])
    optimizer.close()


def test_a_checkpoint_goes_from_any_share_to_any_other() -> None:
    def go_on(saved: Any, nbytes: int) -> tuple[Any, ...]:
        model, optimizer = run("overlapped", nbytes, steps=0)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for seed in (5, 6):
            model(next(batches(seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found = weights(model), state(optimizer)
        optimizer.close()
        return found

    shares = (0, half(MODELS["mixed"]()), ALL)
    saved = []
    for nbytes in shares:
        model, optimizer = run("in_order", nbytes)
        saved.append(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        optimizer.close()
    assert all(t.device.type == "cpu" for e in saved[1]["optimizer"]["state"].values() for t in e.values())
    none, some, everything = shares
    found = [go_on(s, nbytes) for s, nbytes in zip((*saved, saved[0]), (some, none, some, none))]
    found.append(go_on(saved[1], everything))
    for other in found[1:]:
        assert same(other[0], found[0][0]) and same(other[1], found[0][1])


def test_a_saved_file_holds_it_once() -> None:
    """torch.save writes the memory under a view whole."""
    model, optimizer = run("overlapped", ALL, steps=1)[:2]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    numels = [p.numel() for p in model.parameters()]
    assert file.tell() < 12 * sum(numels) + 2000 * len(numels)
    optimizer.close()


def test_fp32_values_that_waited_become_its_masters() -> None:
    model = TinyLM()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    cast_trainable(model, torch.bfloat16)
    optimizer = optimizer_of(model, settings("in_order", device_state_bytes=ALL))
    optimizer.engine.bind_trainable()
    optimizer._fill_state()
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["master"], values[name])
    optimizer.close()


@pytest.mark.parametrize("nbytes", [ALL, 12 * 80])
def test_weights_changed_from_outside_become_its_masters_element_by_element(nbytes: int) -> None:
    model, optimizer = run("overlapped", nbytes)
    p = model.embed.weight
    before = optimizer.state[p]["master"].clone()
    p.data[0, 0] = 3.0
    assert optimizer.reseed() == 1
    before[0, 0] = 3.0
    assert torch.equal(optimizer.state[p]["master"], before) and p in resident(optimizer)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_torch_compares_weights_with_masters_as_the_kernel_does(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(0)
    master = torch.randn(1000, generator=dice) * 10.0 ** torch.randint(-9, 9, (1000,), generator=dice)
    weight = nn.Parameter(master.clone().to(dtype).view(20, 50).t())  # dense, and not contiguous
    with torch.no_grad():
        weight[3, ::2] = -0.0
        weight[4, :] += 1
    by_torch, by_kernel = master.clone(), master.clone()
    with patch.object(resident_module, "_CHUNK", 64):
        changed = follow_by_torch(weight, by_torch)
    assert changed == cpu.reseed(host_array(weight), by_kernel.numpy(), WIRE[dtype], 1) > 0
    assert torch.equal(bits(by_torch), bits(by_kernel)) and not torch.equal(by_torch, master)


@pytest.mark.parametrize("mode", ["overlapped", "speculative"])
def test_state_that_is_tensors_as_on_a_gpu(mode: str) -> None:
    def allocate(arena: ResidentArena, arrays: Sequence[tuple[int, Any]]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(count) for count, _ in arrays)

    with patch.object(ResidentArena, "_allocate", allocate):
        found = train(settings(mode, device_state_bytes=half(MODELS["mixed"]())), PLANS[3], make=MODELS["mixed"])
        assert found == reference("mixed", 3)
        model, optimizer = run(mode, ALL)
        saved = optimizer.state_dict()
        assert optimizer.engine.arenas[0].holds(saved["state"][0]["exp_avg"]), "on a CPU it is the memory itself"
        optimizer.load_state_dict(copy.deepcopy(saved))
        with torch.no_grad():
            model.embed.weight.fill_(0.5)
        assert optimizer.reseed() > 0
        optimizer.close()


def test_a_parameter_that_is_unfrozen_later_takes_what_room_is_left() -> None:
    model = TinyLM()
    late = [model.layers[0].norm.weight, model.layers[2].up.weight]
    for p in late:
        p.requires_grad_(False)
    others = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model, optimizer = run("overlapped", 12 * (others + late[0].numel()), make=lambda: model)
    assert len(resident(optimizer)) == len(list(model.parameters())) - 2
    for p in late:
        p.requires_grad_(True)
    model(next(batches())).backward()
    optimizer.step()
    assert late[0] in resident(optimizer) and late[1] not in resident(optimizer)
    optimizer.close()


def test_weights_that_no_hook_guards_are_there_when_step_returns() -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = OffloadAdam([p], lr=0.5, weight_decay=0.0, config=settings("in_order", device_state_bytes=ALL))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p[0].item() == 0.5
    assert (optimizer.stats().d2h_bytes, optimizer.stats().seconds["host_step"]) == (0, 0.0)
    optimizer.close()


@pytest.mark.parametrize("mode", ["in_order", "overlapped"])
def test_parameters_that_are_views_of_one_tensor_may_have_their_state_in_both_places(mode: str) -> None:
    """They share a version counter, which moves for all of them when one is written."""
    found = []
    for nbytes in (0, 12 * 80):
        whole = torch.linspace(-1, 1, 200)
        model = nn.ParameterList([nn.Parameter(w) for w in whole.split(50)])
        optimizer = OffloadAdam(model.parameters(), config=settings(mode, device_state_bytes=nbytes), model=model)
        for k in range(3):
            handmade(model, k)
            optimizer.step()
        optimizer.synchronize()
        assert optimizer.reseed() == 0
        found.append(weights(model))
        optimizer.close()
    assert same(*found)


def test_the_first_units_weights_are_new_as_soon_as_step_returns() -> None:
    """Nobody waits for what is on its way: it is the device that has done it."""
    model, optimizer = run("overlapped", 12 * 80)
    old = bits(model.embed.weight).clone()
    handmade(model)
    with kernels(lambda: time.sleep(LATE)):
        optimizer.step()
    assert optimizer.engine.arenas[-1].resident and not torch.equal(bits(model.embed.weight), old)
    optimizer.close()


@pytest.mark.parametrize("mode", ["overlapped", "streamed"])
def test_a_step_interrupted_anywhere_is_taken_whole_or_not_at_all(mode: str) -> None:
    def stepped(steps: int) -> tuple[Any, ...]:
        model = make()
        optimizer = optimizer_of(model, settings("in_order"))
        for k in range(steps):
            handmade(model, k)
            optimizer.step()
        found = weights(model), state(optimizer)
        optimizer.close()
        return found

    def make() -> nn.Module:
        return TinyLM(torch.bfloat16, blocks=1)

    expected = {steps: stepped(steps) for steps in (2, 3)}
    for moment in itertools.count(1, 23):
        model = make()
        optimizer = optimizer_of(model, settings(mode, device_state_bytes=half(model), bucket_bytes=1 << 20))
        for k in range(2):
            handmade(model, k)
            optimizer.step()
            optimizer.zero_grad()
        handmade(model, 2)
        interrupted = Interrupter(moment, ("/hf_offload/",)).run(optimizer.step)
        optimizer.zero_grad()
        optimizer.synchronize()
        taken = int(optimizer.state[model.embed.weight]["step"])
        assert same(weights(model), expected[taken][0]) and same(state(optimizer), expected[taken][1])
        optimizer.close()
        if not interrupted:
            break
    assert moment > 50


def test_the_arena_of_it_is_named_in_no_ring() -> None:
    _, optimizer = run("overlapped", ALL)
    (arena,) = optimizer.engine.arenas
    assert isinstance(arena, ResidentArena) and optimizer.engine.gates is not None
    assert len(arena.plan.buckets) >= len(optimizer.engine.gates.units.units), "one of each unit and wire dtype"
    assert max(b.nbytes for b in arena.plan.buckets) > optimizer.config.bucket_bytes, "none is cut to fit a slot"
    optimizer.close()
