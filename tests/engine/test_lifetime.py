"""What an optimizer leaves behind: nothing, at the moment it goes, without the cycle collector; and nothing grows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_offload import OffloadAdam
from hf_offload.errors import StateError
from support.engine import (
    EXACT,
    Hold,
    TinyLM,
    batches,
    copies,
    handmade,
    late,
    optimizer_of,
    ours,
    same,
    settings,
    watched_gradients,
    weights,
)
from support.transport import FailAt


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parts(optimizer: OffloadAdam) -> dict[str, weakref.ref[Any]]:
    """Everything that must go with the optimizer."""
    engine = optimizer.engine
    assert engine._pipeline is not None and engine.gates is not None
    found = {
        "optimizer": optimizer, "engine": engine, "pipeline": engine._pipeline, "stages": engine._pipeline._stages,
        "transport": engine.placement.transport, "gates": engine.gates, "arena": engine.arenas[0],
        "master": engine.arenas[0].master,
    }  # fmt: skip
    if engine.stream is not None:
        found |= {"stream": engine.stream, "store": engine.stream.stores[0]._memory}
    if engine.speculation is not None:
        found["speculation"] = engine.speculation
    return {name: weakref.ref(part) for name, part in found.items()}


EVERY = pytest.mark.parametrize("schedule", ["in_order", *EXACT, "delayed"])


@EVERY
@pytest.mark.parametrize("clip", [True, False])
def test_del_frees_everything_at_once_though_the_model_lives(schedule: str, clip: bool) -> None:
    with no_collector():
        model = TinyLM()
        optimizer = optimizer_of(model, settings(schedule))
        for _ in range(2):
            model(next(batches()))
            grads = watched_gradients(model)
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert sys.getrefcount(optimizer) == 2, "this name, and the call's argument"
        alive = parts(optimizer)
        del optimizer
        assert [name for name, part in alive.items() if part() is not None] == []
        assert not ours()
        assert not [g for g in grads if g() is not None]
        model(next(batches())).backward()  # with hooks that find nobody
        assert model.head.weight.grad.norm() > 0


def test_del_in_the_middle_of_a_step_ends_the_step_first() -> None:
    twin = TinyLM()
    reference = optimizer_of(twin, settings("in_order"))
    handmade(twin)
    reference.step()
    before = ours()
    with no_collector(), copies(late("h2d", 3e-3)):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
        handmade(model)
        optimizer.step()
        alive = parts(optimizer)
        del optimizer
        assert [name for name, part in alive.items() if part() is not None] == []
        assert ours() == before
    assert same(weights(model), weights(twin))
    reference.close()


def test_a_dead_copy_in_backward_keeps_nothing_alive() -> None:
    """The error's traceback must not keep the transport, the store or gradients in a cycle."""
    fail = FailAt("none", 1)
    with no_collector(), copies(fail):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("speculative"))
        model(next(batches()))
        fail.direction = "d2h"
        with pytest.raises(StateError):
            for _ in range(100):
                model(next(batches())).backward()
        engine = optimizer.engine
        alive = [weakref.ref(part) for part in (engine, engine.stream, engine.placement.transport)]
        del optimizer, engine
        assert [part for part in alive if part() is not None] == []
        assert not ours()


def test_an_optimizer_that_never_stepped_goes_as_well() -> None:
    with no_collector():
        optimizer = optimizer_of(TinyLM(), settings("overlapped"))
        assert ours()
        alive = weakref.ref(optimizer.engine)
        del optimizer
        assert alive() is None
        assert not ours()


def test_a_scheduler_keeps_the_optimizer_only_until_it_goes() -> None:
    """torch's schedulers patch `optimizer.step`; that makes no cycle with us in it that the collector cannot free."""
    optimizer = optimizer_of(TinyLM(), settings("overlapped"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer.step()
    scheduler.step()
    alive = weakref.ref(optimizer.engine)
    del optimizer, scheduler
    gc.collect()
    assert alive() is None
    assert not ours()


def test_the_model_goes_though_the_optimizer_lives() -> None:
    """An attached optimizer holds the modules it waits for, as it holds the parameters; close() lets go of them."""
    model = TinyLM()
    optimizer = optimizer_of(model, settings("in_order"))
    alive = weakref.ref(model)
    optimizer.close()
    del model
    gc.collect()
    assert alive() is None
    assert optimizer.state_dict()["param_groups"]


def test_gradients_live_until_they_are_copied_and_no_longer_than_the_step() -> None:
    hold = Hold("d2h")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    model(next(batches()))
    with no_collector():
        grads = watched_gradients(model)
        hold.close()
        optimizer.step()
        optimizer.zero_grad()
        assert all(g() is not None for g in grads), "the copies read from there"
        hold.release()
        optimizer.synchronize()
        assert [g for g in grads if g() is not None] == []
    optimizer.close()


@pytest.mark.parametrize(
    "schedule",
    ["in_order", "overlapped", *(pytest.param(m, marks=pytest.mark.slow) for m in ("speculative", "delayed"))],
)
def test_nothing_grows_from_step_to_step(schedule: str) -> None:
    """Objects of Python's, and memory that our own code allocates, are flat over 50 steps."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(schedule, bucket_bytes=200))

    def steps(count: int) -> None:
        for _ in range(count):
            model(next(data)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.stats()
        optimizer.synchronize()
        gc.collect()

    tracemalloc.start()
    try:
        steps(60)  # CPython's own free lists fill up
        threads, objects, before = len(ours()), len(gc.get_objects()), _allocated()
        steps(50)
        after, more = _allocated(), len(gc.get_objects()) - objects
    finally:
        tracemalloc.stop()
    assert len(ours()) == threads == 3
    assert more < 40, "fewer than one object a step"
    assert after - before < 16384, "not even 33 bytes for each of 500 buckets"
    assert len(optimizer.engine.arenas[0].plan.buckets) >= 10
    optimizer.close()


def _allocated() -> int:
    """Bytes that files of hf_offload hold."""
    ours_only = [tracemalloc.Filter(True, "*/hf_offload/*"), tracemalloc.Filter(True, "*/kernels/cpu/*")]
    return sum(s.size for s in tracemalloc.take_snapshot().filter_traces(ours_only).statistics("filename"))


def test_close_is_idempotent_and_final() -> None:
    model = TinyLM()
    with optimizer_of(model, settings("overlapped")) as optimizer:
        model(next(batches())).backward()
        optimizer.step()
        assert optimizer.stats().host_bytes["pinned"] > 0
    optimizer.close()
    assert not ours()
    assert optimizer.stats().host_bytes["pinned"] == 0
    assert optimizer.state_dict()["state"], "what was trained can still be saved"
    optimizer.synchronize()
    with pytest.raises(StateError, match="closed"):
        optimizer.step()
    model(next(batches()))


def test_a_process_that_forgets_to_close_ends(tmp_path: Any) -> None:
    """At exit a step is under way and its copies are slow: the process neither hangs nor crashes."""
    root = Path(__file__).resolve().parents[2]
    code = (
        "import torch\n"
        "from hf_offload import OffloadAdam, OffloadConfig\n"
        "model = torch.nn.Linear(64, 64)\n"
        "config = OffloadConfig(schedule='overlapped', bucket_bytes=4096, link_latency_us=50_000)\n"
        "optimizer = OffloadAdam(model.parameters(), config=config, model=model)\n"
        "model(torch.ones(2, 64)).sum().backward()\n"
        "optimizer.step()\n"
        "print('end of script')\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)}, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "end of script" in done.stdout, done.stderr
    assert "Fatal" not in done.stderr and "Exception ignored" not in done.stderr
