"""The figures: bytes counted at the copies, busy seconds of the phases, what is exposed and what is hidden."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine.stats import PHASES, Meter, StepRecord
from support.engine import (
    Hold,
    TinyLM,
    batches,
    copies,
    handmade,
    kernels,
    late,
    optimizer_of,
    settings,
)


def wire_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (8, 1), (2, 5)])
@pytest.mark.parametrize("bucket_bytes", [30, 1 << 20])
def test_a_step_moves_each_weight_and_gradient_once(
    schedule: str, dtype: torch.dtype, batch: int, accumulation: int, bucket_bytes: int
) -> None:
    """Whatever the batch size and the accumulation."""
    model = TinyLM(dtype)
    optimizer = optimizer_of(model, settings(schedule, bucket_bytes=bucket_bytes))
    ids = torch.zeros(batch, 5, dtype=torch.long)
    for _ in range(2):
        for _ in range(accumulation):
            model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    stats = optimizer.stats()
    assert stats.d2h_bytes == stats.h2d_bytes == wire_bytes(model)
    assert stats.params == sum(p.numel() for p in model.parameters())
    assert stats.wire_dtype == str(dtype).removeprefix("torch.")
    assert stats.host_bytes == {
        "master": 4 * stats.params, "exp_avg": 4 * stats.params, "exp_avg_sq": 4 * stats.params,
        "pinned": 2 * 2 * -(-max(bucket_bytes, 4) // 64) * 64, "store": 0, "shadow": 0,
    }  # fmt: skip
    assert stats.device_bytes == {"weights": wire_bytes(model), "gradients": wire_bytes(model), "optimizer": 0}
    optimizer.close()


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_only_what_is_stepped_is_moved(schedule: str) -> None:
    model = TinyLM()
    optimizer = optimizer_of(model, settings(schedule))
    handmade(model)
    model.layers[1].up.weight.grad = None
    model.head.weight.grad = None
    optimizer.step()
    optimizer.synchronize()
    stats = optimizer.stats()
    missing = 4 * (model.layers[1].up.weight.numel() + model.head.weight.numel())
    assert stats.d2h_bytes == stats.h2d_bytes == wire_bytes(model) - missing
    optimizer.close()


def test_mixed_wires() -> None:
    model = TinyLM(torch.bfloat16, adapters=True)
    optimizer = optimizer_of(model, settings("overlapped"))
    model(next(batches())).backward()
    optimizer.step()
    optimizer.synchronize()
    stats = optimizer.stats()
    assert stats.wire_dtype == "mixed"
    assert stats.d2h_bytes == stats.h2d_bytes == wire_bytes(model)
    optimizer.close()


def test_before_the_first_step_everything_is_zero() -> None:
    optimizer = optimizer_of(TinyLM(), settings("overlapped"))
    stats = optimizer.stats()
    assert (stats.step, stats.steps, stats.d2h_bytes, stats.exposed_seconds, stats.hidden_fraction) == (0, 0, 0, 0, 0)
    assert tuple(stats.seconds) == PHASES
    assert not any(stats.seconds.values())
    assert stats.schedule == "overlapped" and stats.transport == "host"
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.step = 3  # type: ignore[misc]
    optimizer.close()


def test_step_is_the_step_the_figures_are_of_and_steps_how_many_were_taken() -> None:
    hold = Hold("h2d")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    for number in range(1, 4):
        handmade(model, number)
        if number == 2:
            model.head.weight.grad = None
        hold.close()
        optimizer.step()
        stats = optimizer.stats()  # of the step before: this one is under way
        assert (stats.step, stats.steps) == (number - 1, number)
        hold.release()
        optimizer.synchronize()
        stats = optimizer.stats()
        assert (stats.step, stats.steps) == (number, number)
        missing = 4 * model.head.weight.numel() if number == 2 else 0
        assert stats.h2d_bytes == wire_bytes(model) - missing, "these are the figures of this very step"
        for p in model.parameters():
            p.grad = None
    optimizer.close()


def test_skipped_steps_are_counted_apart() -> None:
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    for value in (1.0, float("nan"), 1.0):
        handmade(model)
        model.head.weight.grad.mul_(value)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.synchronize()
    stats = optimizer.stats()
    assert (stats.step, stats.steps, stats.skipped_steps) == (2, 2, 1)
    optimizer.close()


# ---- seconds: lower bounds only, from sleeps in known places


def test_each_phase_counts_its_own_time() -> None:
    """d2h and h2d as long as an emulated link holds each copy, host_step as long as the kernels take."""
    model = TinyLM()
    latency = 4e-3
    optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=900, link_latency_us=latency * 1e6))
    model(next(batches())).backward()
    with kernels(lambda: time.sleep(6e-3)):
        optimizer.step()
        optimizer.synchronize()
    buckets = len(optimizer.engine.arenas[0].plan.buckets)
    stats = optimizer.stats()
    assert stats.seconds["d2h"] >= buckets * latency
    assert stats.seconds["h2d"] >= buckets * latency
    assert stats.seconds["wait"] == stats.exposed_seconds >= buckets * 6e-3, "nothing else was done meanwhile"
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    optimizer.close()


def test_compute_is_the_time_between_steps_less_the_waits() -> None:
    with copies(late("h2d", 0.05)):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20))
    for _ in range(2):
        handmade(model)
        time.sleep(0.06)
        optimizer.step()
        started = time.perf_counter()
        optimizer.synchronize()
        waited = time.perf_counter() - started
    first = optimizer.stats()
    assert first.step == 2
    assert first.seconds["compute"] >= 0.06
    assert 0.05 <= first.exposed_seconds <= waited + 1.0
    handmade(model)
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.stats().seconds["compute"] < 0.05, "the wait of synchronize() is no computing"
    optimizer.close()


class Slow(TinyLM):
    """Its blocks take time, so that there is something to hide behind."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda *args: time.sleep(0.03))

    def forward(self, ids: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(ids)


def test_behind_a_slow_model_most_of_a_step_is_hidden() -> None:
    """A lower bound with a wide margin: about 0.1 s of link behind 0.14 s of forward."""

    def fraction(schedule: str) -> float:
        model, data = Slow(), batches()
        config = settings(schedule, bucket_bytes=900, ring_slots=4, link_latency_us=8000.0)
        optimizer = optimizer_of(model, config)
        for _ in range(4):
            model(next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(next(data))
        optimizer.synchronize()
        stats = optimizer.stats()
        optimizer.close()
        assert 0.0 <= stats.hidden_fraction <= 1.0
        busy = stats.seconds["d2h"] + stats.seconds["host_step"] + stats.seconds["h2d"]
        assert stats.hidden_fraction == pytest.approx(max(0.0, 1 - stats.exposed_seconds / busy))
        return stats.hidden_fraction

    assert fraction("overlapped") > 0.5
    assert fraction("in_order") < 0.1


# ---- the meter by itself


def test_nested_waits_count_once() -> None:
    meter = Meter()
    record = meter.begin(1)
    with meter.waiting(), meter.waiting():
        time.sleep(0.01)
    assert 0.01 <= record.exposed < 1.0
    with pytest.raises(ZeroDivisionError), meter.waiting():
        time.sleep(0.01)
        _ = 1 / 0
    assert record.exposed >= 0.02


def test_a_step_that_was_never_taken_leaves_the_last_figures() -> None:
    """Ctrl-C fell between the measuring of a step and its being taken."""
    meter = Meter()
    first = meter.begin(1)
    first.finished = True
    meter.begin(2)
    assert meter.last_finished() is first
    meter.begin(2)
    assert meter.last_finished() is first


def test_the_hidden_fraction_stays_between_0_and_1() -> None:
    assert StepRecord(1).hidden_fraction() == 0.0
    assert StepRecord(1, wait=9.0, d2h=1.0).hidden_fraction() == 0.0
    assert StepRecord(1, wait=-1.0, d2h=1.0).hidden_fraction() == 1.0
    assert StepRecord(1, wait=1.0, d2h=1.0, host_step=2.0, h2d=1.0).hidden_fraction() == 0.75


def test_stats_know_an_optimizer_without_a_model() -> None:
    p = nn.Parameter(torch.ones(10))
    optimizer = OffloadAdam([p], config=settings("auto"))
    p.grad = torch.ones(10)
    optimizer.step()
    stats = optimizer.stats()
    assert (stats.schedule, stats.d2h_bytes, stats.h2d_bytes, stats.step) == ("in_order", 40, 40, 1)
    optimizer.close()
