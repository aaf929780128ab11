"""While a step is under way: gradients are let go as soon as they are copied, and a lost write is never silent."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_offload.errors import StateError
from support.engine import (
    LONG,
    Hold,
    TinyLM,
    batches,
    copies,
    handmade,
    optimizer_of,
    settings,
    watched_gradients,
)


def until(reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    return reached()


def storages(model: TinyLM) -> list[StorageWeakRef]:
    return [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]


def test_gradients_are_let_go_when_they_are_copied_not_when_the_weights_are_back() -> None:
    hold = Hold("h2d")

    def delay(direction: str, nbytes: int) -> float:  # the gradients are dropped by then, as they are in a large model
        return 0.1 if direction == "d2h" else hold(direction, nbytes)

    with copies(delay):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches()))
    handmade(model)
    held = storages(model)
    hold.close()
    optimizer.step()
    optimizer.zero_grad()
    assert until(lambda: all(s.expired() for s in held)), "a gradient is held though its copy has ended"
    assert optimizer.engine._pipeline.running  # no weight is back yet
    hold.release()
    optimizer.close()


def test_gradients_live_until_they_are_copied_whatever_takes_their_place() -> None:
    """`.data = ...` gives a gradient other memory; the version counter does not move."""
    hold = Hold("d2h")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
        model(next(batches()))
    held = watched_gradients(model)
    hold.close()
    optimizer.step()
    for p in model.parameters():
        p.grad.data = torch.zeros_like(p)
    assert all(memory() is not None for memory in held)
    hold.release()
    optimizer.synchronize()
    assert until(lambda: all(memory() is None for memory in held))
    optimizer.close()


def test_gradients_that_wait_to_leave_are_let_go_when_they_are_dropped() -> None:
    """Of a bucket whose other gradients never came."""
    model = TinyLM()
    optimizer = optimizer_of(model, settings("streamed", bucket_bytes=1 << 20))
    model(next(batches()))
    held: list[StorageWeakRef] = []
    weight = model.layers[1].norm.weight
    weight.register_hook(lambda grad: held.append(StorageWeakRef(grad.untyped_storage())))
    weight.square().sum().backward()
    assert len(held) == 1 and not held[0].expired()
    optimizer.zero_grad()
    assert held[0].expired()
    optimizer.close()


def test_gradients_that_the_parameters_keep_are_not_lost() -> None:
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    model(next(batches()))
    handmade(model)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.synchronize()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))
    optimizer.close()


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_weight_written_during_its_copy_up_raises(steps_before: int) -> None:
    """The copy overwrites what was written: nobody else would ever tell."""
    hold = Hold("h2d")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches()))
    for _ in range(steps_before):
        handmade(model)
        optimizer.step()
        optimizer.engine._pipeline.wait_all()  # looks at each bucket, though the step may have ended
    handmade(model)
    hold.close()
    optimizer.step()
    optimizer.zero_grad()
    pipeline = optimizer.engine._pipeline
    assert until(lambda: len(pipeline._step.events) == len(pipeline._step.delivered))  # every copy up is on its way
    weight: Tensor = next(model.parameters())
    with torch.no_grad():
        weight.zero_()
    hold.release()
    with pytest.raises(StateError, match=r"a weight was written to"):
        optimizer.synchronize()
    with torch.no_grad():
        weight.zero_()  # again, now that the step's result is there
    optimizer.synchronize()
    assert not weight.any()
    optimizer.close()


def test_a_weight_that_was_awaited_may_be_written_while_others_are_under_way() -> None:
    """By an embedding with `max_norm` in its forward, say: what arrived was looked at then."""
    hold = Hold("h2d")
    copied: list[int] = []

    def all_but_the_first(direction: str, nbytes: int) -> float:
        if direction == "h2d":
            copied.append(nbytes)
            return hold(direction, nbytes) if len(copied) > 1 else 0.0
        return 0.0

    with copies(all_but_the_first):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches()))
    handmade(model)
    hold.close()
    optimizer.step()
    optimizer.zero_grad()
    pipeline = optimizer.engine._pipeline
    assert until(lambda: bool(pipeline._step.events) and pipeline._step.events[0].done())
    model.embed(next(batches()))  # awaits the first bucket, which is there
    with torch.no_grad():
        model.embed.weight.zero_()
    assert pipeline.running
    hold.release()
    optimizer.synchronize()
    assert not model.embed.weight.any()
    optimizer.close()
