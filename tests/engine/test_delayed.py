"""Delayed: one step stale, no more (not exact: it has a reference of its own). And poison, which shows early reads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine.engine import Engine
from hf_offload.engine.pipeline import Pipeline
from hf_offload.errors import ConfigError, StateError
from support.engine import (
    EXACT,
    Hold,
    Plan,
    TinyLM,
    batches,
    copies,
    dice,
    late,
    optimizer_of,
    same,
    settings,
    state,
    train,
    weights,
)
from support.engine_interrupts import Interrupter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def stale(dtype: torch.dtype, steps: int, warmup: int, clip: float | None = 0.5) -> Any:
    """By hand: a model that computes gradients, and another, stepped in order, whose weights it gets a step late."""
    front, back = TinyLM(dtype), TinyLM(dtype)
    optimizer, data, losses, pending = optimizer_of(back, settings("in_order")), batches(), [], None
    for step in range(steps):
        loss = front(next(data))
        losses.append(loss.item())
        loss.backward()
        for p, q in zip(front.parameters(), back.parameters()):
            p.grad, q.grad = None, p.grad
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        new = weights(back)
        arrives = new if step < warmup else pending
        pending = new
        if arrives is not None:
            front.load_state_dict(arrives, strict=False)
        optimizer.zero_grad()
    result = losses, weights(back), state(optimizer)
    optimizer.close()
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("warmup", [0, 2, 10])
@pytest.mark.parametrize("bucket_bytes", [60, 1 << 20])
def test_it_is_one_step_stale(dtype: str, warmup: int, bucket_bytes: int) -> None:
    config = settings("delayed", delay_warmup_steps=warmup, bucket_bytes=bucket_bytes)
    found = train(config, Plan(steps=6), dice(2, 1e-3), lambda: TinyLM(DTYPES[dtype]))
    expected = stale(DTYPES[dtype], 6, warmup)
    assert found.losses == expected[0]
    assert same(found.weights, expected[1]) and same(found.state, expected[2])
    exact = train(settings("in_order"), Plan(steps=6), make=lambda: TinyLM(DTYPES[dtype]))
    assert (found == exact) == (warmup == 10)


class Run:
    """A delayed run that can be saved, and gone on with by another optimizer."""

    def __init__(self, saved: Any = None, warmup: int = 2) -> None:
        self.model = TinyLM(torch.bfloat16)
        self.optimizer = optimizer_of(self.model, settings("delayed", delay_warmup_steps=warmup))
        self.losses: list[float] = []
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])

    def steps(self, data: list[Tensor]) -> None:
        for ids in data:
            loss = self.model(ids)
            self.losses.append(loss.item())
            loss.backward()
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> Any:
        saved = copy.deepcopy(self.optimizer.state_dict())
        return copy.deepcopy(self.model.state_dict()), saved

    def end(self) -> Any:
        self.optimizer.close()
        return weights(self.model), state(self.optimizer)


@pytest.mark.parametrize("reached", ["wait_step", "deliver", "submitted"])
def test_ctrl_c_in_close_does_not_lose_the_pending_update(monkeypatch: pytest.MonkeyPatch, reached: str) -> None:
    data = list(itertools.islice(batches(), 5))
    expected, run = Run(), Run()
    for each in (expected, run):
        each.steps(data)
    name = {"wait_step": "Engine._wait_step", "deliver": "Engine._deliver", "submitted": "Pipeline.wait_all"}[reached]
    module = "engine" if name.startswith("Engine") else "pipeline"
    real = getattr({"Engine": Engine, "Pipeline": Pipeline}[name.split(".")[0]], name.split(".")[1])
    interrupts = iter([KeyboardInterrupt])

    def interrupted(self: Any, *args: Any) -> Any:
        for error in interrupts:
            raise error
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(f"hf_offload.engine.{module}.{name}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.close()
    run.optimizer.close()
    assert same(weights(run.model), expected.end()[0])


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("model_first", [True, False])
def test_resume_gives_the_bits_of_the_run_that_saved_too(at: int, model_first: bool) -> None:
    data = list(itertools.islice(batches(), 8))
    whole = Run()
    whole.steps(data[:at])
    if model_first:
        weight = copy.deepcopy(whole.model.state_dict())
        saved = weight, copy.deepcopy(whole.optimizer.state_dict())
    else:
        saved = whole.save()
    whole.steps(data[at:])
    resumed = Run(saved)
    resumed.steps(data[at:])
    assert resumed.losses == whole.losses[at:]
    expected, found = whole.end(), resumed.end()
    assert same(found[0], expected[0]) and same(found[1], expected[1])


APPLIES: dict[str, Callable[[Run], object]] = {
    "synchronize": lambda run: run.optimizer.synchronize(),
    "eval": lambda run: run.optimizer.eval(),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(),
    "model.state_dict": lambda run: run.model.state_dict(),
    "deepcopy": lambda run: copy.deepcopy(run.model),
    "reseed": lambda run: run.optimizer.reseed(),
    "close": lambda run: run.optimizer.close(),
}


def rounded(run: Run) -> dict[str, Tensor]:
    return {
        name: run.optimizer.state[p]["master"].to(p.dtype) for name, p in run.model.named_parameters()
    }  # fmt: skip


@pytest.mark.parametrize("what", APPLIES)
def test_what_applies_the_pending_update(what: str) -> None:
    with copies(late("h2d", 3e-3)):
        run = Run(warmup=0)
    run.steps(list(itertools.islice(batches(), 2)))
    run.optimizer.engine.wait_gradients()
    new = rounded(run)
    assert not same(weights(run.model), new), "a step behind"
    APPLIES[what](run)
    assert same(weights(run.model), new)
    run.optimizer.synchronize()
    assert same(weights(run.model), new), "once"
    run.optimizer.close()


def test_a_forward_does_not_apply_it() -> None:
    run = Run(warmup=0)
    run.steps(list(itertools.islice(batches(), 1)))
    assert same(weights(run.model), weights(TinyLM(torch.bfloat16)))
    with torch.no_grad():
        run.model(next(batches()))
    run.optimizer.train()
    assert same(weights(run.model), weights(TinyLM(torch.bfloat16)))
    run.optimizer.close()


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.mul_(2.0),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "other memory": lambda p: setattr(p, "data", p.data.clone() * 2),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("then", ["step", "synchronize"])
def test_a_write_to_weights_with_a_pending_update_raises(write: str, then: str) -> None:
    run = Run(warmup=0)
    data = list(itertools.islice(batches(), 2))
    run.steps(data[:1])
    with torch.no_grad():
        WRITES[write](run.model.layers[1].up.weight)
    with pytest.raises(StateError, match=r"weight was written to.*synchronize"):
        run.steps(data[1:]) if then == "step" else run.optimizer.synchronize()
    with pytest.raises(StateError):
        run.optimizer.close()


def test_loading_weights_applies_it_first_and_wins() -> None:
    run, other = Run(warmup=0), TinyLM(torch.bfloat16, seed=9)
    data = list(itertools.islice(batches(), 3))
    run.steps(data[:1])
    run.model.load_state_dict(other.state_dict())
    assert same(weights(run.model), weights(other))
    run.steps(data[1:])
    run.optimizer.synchronize()
    assert all((a - b).abs().max() < 0.1 for a, b in zip(weights(run.model).values(), weights(other).values()))
    run.optimizer.close()


def test_loading_optimizer_state_applies_it_first() -> None:
    """AdamW's has no masters: they are taken from the weights, which must be those of the last step."""
    run, twin = Run(warmup=0), Run(warmup=0)
    for each in (run, twin):
        each.steps(list(itertools.islice(batches(), 2)))
    saved = twin.optimizer.state_dict()
    for entry in saved["state"].values():
        del entry["master"]
    run.optimizer.load_state_dict(saved)
    run.optimizer.synchronize()
    assert same(weights(run.model), weights(twin.model))
    for each in (run, twin):
        each.optimizer.close()


def test_a_skipped_step_leaves_it_pending() -> None:
    run = Run(warmup=0)
    data = list(itertools.islice(batches(), 2))
    run.steps(data[:1])
    run.optimizer.engine.wait_gradients()
    before, pending = weights(run.model), run.optimizer.engine._delay.pending
    run.model(data[1]).mul(float("inf")).backward()
    run.optimizer.clip_grad_norm_(1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert run.optimizer.stats().skipped_steps == 1
    assert same(weights(run.model), before) and run.optimizer.engine._delay.pending is pending
    run.optimizer.synchronize()
    assert same(weights(run.model), rounded(run))
    run.optimizer.close()


@pytest.mark.parametrize("wait", ["synchronize", "state_dict"])
def test_ctrl_c_while_it_is_applied_does_not_lose_it(wait: str) -> None:
    for moment in itertools.count(1, 5):
        model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
        config = settings("delayed", delay_warmup_steps=0, bucket_bytes=1 << 20)
        optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
        model(torch.ones(1, 1)).square().sum().backward()
        optimizer.step()
        interrupted = Interrupter(moment, ("/hf_offload/",)).run(getattr(optimizer, wait))
        optimizer.synchronize()
        for p in model.parameters():
            assert torch.equal(p, optimizer.state[p]["master"]), "fp32: the weight is the master"
        optimizer.close()
        if not interrupted:
            break
    assert moment > 50


def test_a_step_interrupted_anywhere_is_taken_or_not() -> None:
    """And the update of the step before is on its way or still pending."""

    def make() -> tuple[nn.Module, OffloadAdam]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
        config = settings("delayed", delay_warmup_steps=0, bucket_bytes=1 << 20)
        return model, OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)

    def give(model: nn.Module, k: int) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + k)

    for moment in itertools.count(1, 11):
        (model, optimizer), (twin, reference) = make(), make()
        for k in range(2):
            give(model, k)
            optimizer.step()
            optimizer.zero_grad()
        give(model, 2)
        interrupted = Interrupter(moment, ("/hf_offload/",)).run(optimizer.step)
        optimizer.zero_grad()
        optimizer.synchronize()
        taken = int(optimizer.state[next(model.parameters())]["step"])
        assert taken in (2, 3)
        for k in range(taken):
            give(twin, k)
            reference.step()
            reference.zero_grad()
        reference.synchronize()
        assert same(weights(model), weights(twin)) and same(state(optimizer), state(reference))
        for o in (optimizer, reference):
            o.close()
        if not interrupted:
            break
    assert moment > 50


def test_delayed_is_named_and_needs_a_model() -> None:
    run = Run()
    run.steps(list(itertools.islice(batches(), 1)))
    assert run.optimizer.stats().schedule == "delayed"
    run.optimizer.close()
    p = nn.Parameter(torch.ones(3))
    optimizer = OffloadAdam([p], config=OffloadConfig(schedule="delayed"))
    p.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="schedule='delayed': no model"):
        optimizer.step()
    optimizer.close()


# ---- poison


class ReadsEarly(TinyLM):
    """Reads a weight of the last block before that block's hook."""

    def hidden(self, ids: Tensor) -> Tensor:
        return super().hidden(ids) + self.layers[2].up.weight.mean()


@pytest.mark.parametrize("mode", ["overlapped", "streamed", "speculative"])
def test_poison_shows_who_reads_weights_early(mode: str) -> None:
    """Without it, the old weights would be used, and nobody would know."""
    losses = {}
    for poison in (True, False):
        hold = Hold("h2d")
        with copies(hold):
            model = TinyLM()
            optimizer = optimizer_of(model, settings(mode, poison=poison, bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches())).backward()
        hold.close()
        optimizer.step()
        early = model.layers[2].up.weight.detach().mean().item()  # past every hook
        hold.release()
        optimizer.synchronize()
        assert all(p.isfinite().all() for p in model.parameters())
        losses[poison] = early
        optimizer.close()
    assert losses[True] != losses[True], "NaN"
    assert losses[False] == losses[False]


@pytest.mark.parametrize("mode", [*EXACT, "in_order", "delayed"])
def test_poison_changes_nothing_for_who_waits(mode: str) -> None:
    plan = Plan(steps=4, accumulation=2, missing={1: 3})
    delay = late("h2d", 1e-3)
    assert train(settings(mode, poison=True), plan, delay) == train(settings(mode), plan)


# ---- Ctrl-C between one step and the next


def two_layers() -> tuple[nn.Sequential, OffloadAdam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
    config = OffloadConfig(schedule="delayed", delay_warmup_steps=0, bucket_bytes=12)
    return model, OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)


def give(model: nn.Sequential, *which: int) -> None:
    for i in which:
        model[i].weight.grad = torch.ones_like(model[i].weight)


@pytest.mark.parametrize("at", ["Engine._deliver", "Pipeline.submit"])
def test_a_step_that_is_not_taken_keeps_the_update_that_is_pending(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """That of the layer, above all, for which the interrupted step had no gradient."""
    model, optimizer = two_layers()
    give(model, 0, 1)
    optimizer.step()
    optimizer.zero_grad()
    give(model, 0)
    with monkeypatch.context() as patched:
        patched.setattr(f"hf_offload.engine.{at.split('.')[0].lower()}.{at}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    for layer in model:
        assert torch.equal(layer.weight, optimizer.state[layer.weight]["master"])
        assert optimizer.state[layer.weight]["step"] == 1
    optimizer.close()


def test_a_write_over_a_pending_update_is_told_after_an_interrupted_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = two_layers()
    give(model, 0, 1)
    optimizer.step()
    with monkeypatch.context() as patched:
        patched.setattr("hf_offload.engine.pipeline.Pipeline.submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.synchronize()
    optimizer.step()
    optimizer.engine.wait_gradients()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    with pytest.raises(StateError, match="a weight was written to while an update for it was pending"):
        optimizer.step()
    with pytest.raises(StateError):
        optimizer.close()


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt
