"""Ctrl-C at every single moment of step(), of a forward and of a wait: a step is taken whole or not at all, and
training goes on with the same bits. (`support.engine_interrupts` raises KeyboardInterrupt before the n-th line.)"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine.masters import cast_trainable
from support.engine import Hold, copies, same, settings, state, weights
from support.engine_interrupts import Interrupter

OURS = ("/hf_offload/engine/", "/hf_offload/transport/")
GRADIENTS = torch.Generator().manual_seed(3)
FAST = [torch.randn(5, generator=GRADIENTS) for _ in range(64)]


class Two(nn.Module):
    """Two units; small, since every moment of a step is tried."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 5, bias=False, dtype=dtype) for _ in range(2)])
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                layer.weight.copy_(torch.arange(5.0).view(5, 1) * (i + 1) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x).square().sum() for layer in self.layers)


def make(schedule: str, hold: Hold | None = None, **more: Any) -> tuple[Two, OffloadAdam]:
    with copies(hold):
        model = Two()
        return model, OffloadAdam(
            model.parameters(), lr=1e-2, config=settings(schedule, bucket_bytes=8, threads=1, **more), model=model
        )


def gradients(model: Two, number: int) -> None:
    for i, layer in enumerate(model.layers):
        layer.weight.grad = FAST[(number + 7 * i) % 64].view(5, 1).clone()


def taken(optimizer: OffloadAdam) -> int:
    """How many steps were taken; the same number for every parameter."""
    optimizer.synchronize()
    counts = {int(e["step"]) for e in optimizer.state_dict()["state"].values()}
    assert len(counts) <= 1, "a step is taken for all parameters or for none"
    return counts.pop() if counts else 0


@pytest.fixture(params=["in_order", "overlapped", "streamed", pytest.param("speculative", marks=pytest.mark.slow)])
def schedule(request: pytest.FixtureRequest) -> str:
    return request.param


def reference(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = make("in_order")
    for number in range(steps):
        gradients(model, number)
        optimizer.step()
    result = weights(model), state(optimizer)
    optimizer.close()
    return result


def test_a_step_is_taken_whole_or_not_at_all(schedule: str) -> None:
    model, optimizer = make(schedule)
    gradients(model, 0)
    optimizer.step()
    done, whole, none, untouched = 1, 0, 0, 0
    for moment in itertools.count(1):
        gradients(model, done)
        interrupted = Interrupter(moment).run(optimizer.step)
        now = taken(optimizer)
        assert now in (done, done + 1)
        if now == done:
            assert interrupted
            none += 1
            gradients(model, done)
            optimizer.step()
        else:
            whole += interrupted
        done += 1
        assert taken(optimizer) == done
        assert optimizer.stats().step == optimizer.stats().steps == done
        untouched += not interrupted
        if untouched > 20:  # a wait takes now more lines and now fewer
            break
    assert moment > 100 and none > 20 and whole > 5
    expected = reference(done)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


EVERY = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])  # every moment, or each 7th


@EVERY
@pytest.mark.parametrize("call", ["step", "forward"])
def test_the_first_step_and_binding(schedule: str, call: str, every: int) -> None:
    """State is allocated and seeded in it, the fp32 values that wait for 16-bit weights among the rest."""

    def cast() -> tuple[Two, OffloadAdam]:
        model = Two()
        assert cast_trainable(model, torch.bfloat16) == 10
        config = settings(schedule, bucket_bytes=8, threads=1)
        return model, OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)

    def bf16_gradients(model: Two) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    model, optimizer = cast()
    bf16_gradients(model)
    optimizer.step()
    optimizer.synchronize()
    expected = weights(model), state(optimizer)
    optimizer.close()
    assert not torch.equal(expected[1]["0.master"], expected[1]["0.master"].bfloat16().float())
    for moment in itertools.count(1, every):
        model, optimizer = cast()
        bf16_gradients(model)
        forward = lambda model=model: model(torch.ones(1, 1, dtype=torch.bfloat16))  # noqa: E731
        interrupted = Interrupter(moment, OURS).run(optimizer.step if call == "step" else forward)
        if taken(optimizer) == 0:
            if not optimizer.engine.arenas:  # given up before it was bound: another one finds everything as it was
                optimizer.close()
                config = settings(schedule, bucket_bytes=8, threads=1)
                optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
            bf16_gradients(model)
            optimizer.step()
        assert taken(optimizer) == 1
        assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
        optimizer.close()
        if not interrupted:
            break
    assert moment > 50


# ---- gradients that leave during backward


def loss(model: Two, number: int) -> Tensor:
    """Its gradients are those of `gradients(model, number)`; no forward of the model runs."""
    return sum((layer.weight.view(5) * FAST[(number + 7 * i) % 64]).sum() for i, layer in enumerate(model.layers))


def bound(mode: str) -> tuple[Two, OffloadAdam]:
    """One slot: a slot that is lost shows at once."""
    model, optimizer = make(mode, ring_slots=1)
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def of_numbers(numbers: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = make("in_order")
    for number in numbers:
        gradients(model, number)
        optimizer.step()
    result = weights(model), state(optimizer)
    optimizer.close()
    return result


MODES = pytest.mark.parametrize("mode", ["streamed", "streamed in order", "speculative"])


@EVERY
@MODES
@pytest.mark.parametrize("second", [False, True])
def test_an_interrupted_backward_can_be_dropped_and_tried_again(mode: str, second: bool, every: int) -> None:
    """`second`: the one that adds to gradients that have left."""
    model, optimizer = bound(mode)
    done = 1
    for moment in itertools.count(1, every):
        if second:
            loss(model, 40).backward()
        interrupted = Interrupter(moment, OURS).run(loss(model, done).backward)
        optimizer.zero_grad()
        loss(model, done).backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if not interrupted:
            break
    assert moment > 50
    expected = of_numbers(list(range(done)))
    optimizer.synchronize()
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


@EVERY
@MODES
def test_an_interrupted_step_and_the_next_backward_at_once(mode: str, every: int) -> None:
    """Nothing waits in between: a step that was taken must not see the gradients that come after it."""
    for moment in itertools.count(1, 3 * every):
        model, optimizer = bound(mode)
        loss(model, 1).backward()
        interrupted = Interrupter(moment, OURS).run(optimizer.step)
        optimizer.zero_grad()
        loss(model, 2).backward()
        optimizer.step()
        count = taken(optimizer)
        assert count in (2, 3)
        expected = of_numbers([0, 2] if count == 2 else [0, 1, 2])
        assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
        optimizer.close()
        if not interrupted:
            break
    assert moment > 100


@EVERY
@MODES
@pytest.mark.parametrize("call", ["clip", "zero_grad", "state_dict"])
def test_an_interrupted_wait_for_gradients(mode: str, call: str, every: int) -> None:
    """Between backward and step: what is asked for again is right."""
    calls: dict[str, Callable[[OffloadAdam], object]] = {
        "clip": lambda optimizer: optimizer.clip_grad_norm_(1e9),
        "zero_grad": lambda optimizer: optimizer.zero_grad(set_to_none=False),
        "state_dict": lambda optimizer: optimizer.state_dict(),
    }
    model, optimizer = bound(mode)
    done = 1
    for moment in itertools.count(1, every):
        loss(model, done).backward()
        interrupted = Interrupter(moment, OURS).run(lambda: calls[call](optimizer))
        if call == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
            loss(model, done).backward()
        calls["clip"](optimizer)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if not interrupted:
            break
    assert moment > 20
    expected = of_numbers(list(range(done)))
    optimizer.synchronize()
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


WAITS: dict[str, Callable[[Two, OffloadAdam], object]] = {
    "forward": lambda model, optimizer: model(torch.ones(1, 1)),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "reseed": lambda model, optimizer: optimizer.reseed(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


@EVERY
@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupted_wait_can_be_taken_up_again(wait: str, every: int) -> None:
    hold = Hold("h2d")
    model, optimizer = make("overlapped", hold)
    model(torch.ones(1, 1))
    done = 0
    for moment in itertools.count(1, every):
        gradients(model, done)
        hold.close()
        optimizer.step()
        hold.release(after=2e-3)
        interrupted = Interrupter(moment).run(lambda: WAITS[wait](model, optimizer))
        model(torch.ones(1, 1))
        done += 1
        assert taken(optimizer) == done
        if not interrupted:
            break
    assert moment > 20
    expected = reference(done)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


@EVERY
def test_an_interrupt_while_changed_weights_are_looked_at_loses_nothing(every: int) -> None:
    """Loaded weights whose masters are not yet compared must still be compared by the next step."""
    model, optimizer = make("in_order")
    gradients(model, 0)
    optimizer.step()
    for done, moment in enumerate(itertools.count(1, every), 1):
        value = float(done)
        model.load_state_dict({k: torch.full_like(v, value) for k, v in model.state_dict().items()})
        gradients(model, moment)
        interrupted = Interrupter(moment).run(optimizer.step)
        if taken(optimizer) == done:
            optimizer.step()
        assert taken(optimizer) == done + 1
        assert all((p - value).abs().max() < 0.5 for p in model.parameters()), "the step started from what was loaded"
        if not interrupted:
            break
    optimizer.close()


def test_close_can_be_interrupted_and_called_again(schedule: str) -> None:
    for moment in itertools.count(1):
        model, optimizer = make(schedule)
        gradients(model, 0)
        optimizer.step()
        interrupted = Interrupter(moment, OURS).run(optimizer.close)
        optimizer.close()
        assert same(weights(model), reference(1)[0])
        if not interrupted:
            break
    assert moment > 10


def test_a_load_that_was_interrupted_anywhere_can_be_done_again() -> None:
    model, optimizer = make("in_order")
    gradients(model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    expected = state(optimizer)
    for moment in itertools.count(1):
        gradients(model, moment)
        optimizer.step()
        load = Interrupter(moment, ("/hf_offload/state.py",))
        if not load.run(lambda: optimizer.load_state_dict(saved)):
            break
        assert len(optimizer.param_groups[0]["params"]) == 2, load.where
        optimizer.load_state_dict(saved)
        assert same(state(optimizer), expected), load.where
    assert moment > 50
    optimizer.close()
