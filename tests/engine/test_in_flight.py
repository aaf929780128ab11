"""While a step is under way: gradients are let go as soon as they are copied, and a lost write is never silent."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_offload.errors import StateError
from support.engine import LONG, Hold, TinyLM, batches, copies, handmade, optimizer_of, settings


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


def test_a_weight_written_during_its_copy_up_raises() -> None:
    """The copy overwrites what was written: nobody else would ever tell."""
    hold = Hold("h2d")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches()))
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
