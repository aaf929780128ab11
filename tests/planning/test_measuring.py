"""What a calibration measures: whose time is whose, what is refused, what is left behind. No timing is asserted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import measuring
from hf_offload.bench import busy
from hf_offload.bench.cores import STEP_THREAD, engine_threads
from hf_offload.calibration import Engine
from hf_offload.config import OffloadConfig
from hf_offload.engine.formats import FORMATS
from hf_offload.engine.units import find_units
from hf_offload.errors import ConfigError
from hf_offload.measuring import Stepped
from hf_offload.measuring_host import PASSES, Bench, Measured, kept_busy, seconds_a_turn
from hf_offload.measuring_queue import Queued, Spans, queued
from hf_offload.optimizer import OffloadAdam
from hf_offload.simulation import HostCost
from hf_offload.stopwatch import Passed, Stopwatch

ABOUT = {"name": "tiny", "digest": "0"}


class _Takes(torch.autograd.Function):
    """Passes `forward` seconds on the clock in forward, `backward` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: list[float], forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward_s, ctx.weight = clock, backward, weight
        clock[0] += forward
        return x + 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock[0] += ctx.backward_s
        return grads[0], torch.ones_like(ctx.weight), None, None, None


class Slow(nn.Module):
    def __init__(self, clock: list[float], forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        self.taken = clock, forward, backward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Takes.apply(x, self.weight, *self.taken)
        return out


class Model(nn.Module):
    """An embedding, three blocks, a head; block 1 is frozen. `outside`: seconds before the first module."""

    def __init__(self, outside: float = 0.0) -> None:
        super().__init__()
        self.clock = [0.0]
        self.outside = outside
        self.embedding = Slow(self.clock, 1, 2)
        self.blocks = nn.ModuleList(Slow(self.clock, 10 * (k + 1), 20 * (k + 1)) for k in range(3))
        self.blocks[1].weight.requires_grad_(False)
        self.head = Slow(self.clock, 3, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.outside
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Fake:
    """A subject whose clock is the model's."""

    seq_len = 4

    def __init__(self, model: Model) -> None:
        self.model = model
        self.settled = 0
        self.optimizer: OffloadAdam | None = None
        self.schedules: list[str] = []

    def forward(self, rows: int) -> Tensor:
        assert all(p.grad is None for p in self.model.parameters()), "a gradient would be added to, which takes time"
        return self.model(torch.zeros(1, requires_grad=True)).sum()

    def mark(self) -> float:
        return self.model.clock[0]

    def between(self, first: float, second: float) -> float:
        return second - first

    def synchronize(self) -> None:
        pass

    def settle(self) -> None:
        self.settled += 1

    def join(self, optimizer: OffloadAdam) -> None:
        self.optimizer = optimizer
        self.schedules.append(optimizer.config.schedule)


def test_forward_and_backward_are_told_apart_by_unit() -> None:
    subject = Fake(Model())
    watch = Stopwatch(subject, find_units(subject.model))
    for _ in range(2):
        subject.model.zero_grad()
        # the frozen block has no gradient: its backward counts to what comes after it, the first block's
        assert watch.run(1) == Passed((1, 10, 20, 30, 3), (2, 20 + 40, 0, 60, 6))


def test_no_time_is_lost() -> None:
    """What passes before the first module is the first unit's."""
    subject = Fake(Model(outside=100))
    found = Stopwatch(subject, find_units(subject.model)).run(1)
    assert found.forward == (101, 10, 20, 30, 3)
    assert found.seconds == subject.model.clock[0]


def test_a_closed_stopwatch_leaves_no_hook() -> None:
    model = Model()
    watch = Stopwatch(Fake(model), find_units(model))
    assert any(m._forward_pre_hooks for m in model.modules())
    watch.close()
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WARM": 1, "REPEATS": 3, "LATENCIES": 3, "BESIDE_S": 0.005}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "_refuse_busy", lambda *given: None)


@pytest.mark.parametrize("sample", [measuring.SAMPLE, 100])
def test_a_whole_calibration(quick: None, monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    """Also of a model that is larger than the sample: a part of it is stepped, and no gradient stays of the rest."""
    monkeypatch.setattr(measuring, "SAMPLE", sample)
    subject, said = Fake(Model()), list[str]()
    before = {name: p.clone() for name, p in subject.model.named_parameters()}
    threads = set(threading.enumerate())
    slow_link = {"link_gb_s": 0.001, "link_latency_us": 1e5}
    config = OffloadConfig(schedule="overlapped", stream_gradients=True, threads=1, **slow_link)
    found = measuring.measure(subject, config, (1, 3), ABOUT, say=said.append)

    assert [(u.params, u.wire) for u in found.units] == [(64, "bfloat16"), (64, "bfloat16"), (0, "bfloat16")] + [
        (64, "bfloat16")
    ] * 2
    # the same time whatever the rows: all of it fixed
    assert [u.forward for u in found.units] == [(1, 0), (10, 0), (20, 0), (30, 0), (3, 0)]
    assert [u.backward for u in found.units] == [(2, 0), (60, 0), (0, 0), (60, 0), (6, 0)]
    assert (found.threads, found.rows, found.seq_len, found.model) == (1, (1, 3), 4, ABOUT)
    assert all(getattr(found.host, name) > 0 for name in HostCost.__slots__)
    assert found.link.transport == "host" and found.link.emulates
    assert 0 < found.link.down.latency < 0.05, "the emulated link, of 100 ms, is left out"
    assert 0 <= found.link.emulation_s < 0.05
    kinds = ("device", "host", "copy")
    assert set(found.rates) == {f"{a} beside {b}" for a in kinds for b in kinds if a != b}
    assert all(0 < rate <= 1 for rate in found.rates.values())
    assert subject.settled and subject.optimizer is not None and subject.optimizer.engine.closed
    assert subject.optimizer.engine.bound == (4 if sample > 100 else 1)
    assert said

    assert set(threading.enumerate()) <= threads
    for name, p in subject.model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name]), name


def test_a_busy_machine_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "usable_cores", lambda: 2)
    calm, wild = Measured(1.0, 0.02), Measured(1.0, 0.4)
    measuring._refuse_busy({"host step": calm}, 0.1, 0.15)
    measuring._refuse_busy({"host step": calm}, None, 0.15)
    with pytest.raises(ConfigError, match=r"host step 40%; at most 15%\).*Nothing was stored") as caught:
        measuring._refuse_busy({"host step": wild, "norm": calm}, None, 0.15)
    assert "norm" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"other programs kept 1\.5 cores busy"):
        measuring._refuse_busy({"norm": calm}, 1.5, 0.15)
    measuring._refuse_busy({"host step": wild}, None, 0.5)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 64)
    measuring._refuse_busy({"norm": calm}, 1.5, 0.15)  # a server on which somebody always runs


def test_a_spread_of_what_no_step_feels_is_let_through() -> None:
    trained = measuring._Trained(
        {4: [Passed((0.2,), (0.3,))], 8: [Passed((2.0,), (3.0,))]}, [Stepped(0.5, 0, 0, 0, 0, 0)], Queued([], []),
        ([0.0], [0.0]), 0.0, threads=1, transport="host", params=5, buckets=1, nbytes=10,
    )  # fmt: skip
    light, heavy = Measured(0.0018, 0.5), Measured(0.0022, 0.5)  # times 10 parameters, of a step of 1 second
    figures = {"norm": light, "kernel add": heavy, "host step": heavy, "compute of 4 rows": Measured(0.001, 1.0)}
    assert list(trained.of_weight(figures, 10)) == ["kernel add", "host step", "compute of 4 rows"]


def test_programs_on_cores_that_are_not_this_process_s_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(busy, "affinity", lambda pid: frozenset({0, 2}))
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    monkeypatch.setattr(busy, "time", clock)
    second = os.sysconf("SC_CLK_TCK")

    def rows(*seconds: int) -> str:
        return "".join(f"cpu{n} {s * second} 0 0 7 7 0 0 0 0 0\n" for n, s in zip(("", 0, 1, 2), seconds))

    stat.write_text(rows(90, 10, 50, 30))
    cores = busy.BusyCores()
    now[0] = 10.0
    stat.write_text(rows(120, 18, 60, 32))
    assert cores.others() == pytest.approx(0.5)  # 10 seconds on two cores, of which 5 are its own
    stat.write_text("nothing of the kind\n")
    assert cores.others() is None


@pytest.mark.parametrize(
    ("values", "value", "spread"),
    [([2.0], 2, 0), ([1.0, 3.0], 2, 0.5), ([1, 2, 3, 4, 5], 3, 2 / 3), ([1, 1, 1, 1, 99], 1, 0)],
)
def test_spread_is_the_interquartile_range_over_the_median(values: list[float], value: float, spread: float) -> None:
    assert Measured.of(values) == Measured(value, pytest.approx(spread))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(10, 7.0), (20, 12.0)], (2, 0.5)),
        ([(10, 5.0), (20, 10.0)], (0, 0.5)),
        ([(10, 5.0), (20, 5.0)], (5, 0)),
        # faster with more: noise; nothing is negative
        ([(10, 5.0), (20, 4.0)], (5, 0)),
        # more than twice the time of half: through the larger one, and nothing fixed
        ([(10, 4.0), (20, 10.0)], (0, 0.5)),
    ],
)
def test_the_line_through_two_batch_sizes(points: list[tuple[int, float]], line: tuple[float, float]) -> None:
    assert measuring._line(points) == pytest.approx(line)


def steps(rest: float) -> list[Stepped]:
    return [Stepped(wall=1 + 2 + 3 + 4 + rest, main=1, norm=9, d2h=2, host_step=3, h2d=4)] * 3


@pytest.mark.parametrize(
    ("rest", "queue", "parts"),
    [
        # of 10 / 4 less 1 of latency, in order; where buckets queue up, 0.5 and 0.25
        (10, Queued(up=[0.25, 0.5, 9.0], down=[0.25]), (0.5, 0.25, 0.75)),
        # none did
        (10, Queued([], []), (1.5, 0, 0)),
        (10, Queued([0.5], []), (0.5, 1.0, 0)),
        (10, Queued([], [0.5]), (1.0, 0.5, 0)),
        (10, Queued([], [9.0]), (0, 9.0, 0)),
        (10, Queued([9.0], []), (9.0, 0, 0)),
        # more than in order: as measured, and nothing of idleness
        (10, Queued([1.0], [9.0]), (1.0, 9.0, 0)),
        # latencies that are more than a step has
        (2, Queued([0.5], [0.25]), (0.5, 0.25, 0)),
        (2, Queued([], []), (0, 0, 0)),
    ],
)
def test_what_is_left_of_a_step_in_order_is_the_engines(
    rest: float, queue: Queued, parts: tuple[float, float, float]
) -> None:
    trained = measuring._Trained(
        {}, steps(rest), queue, ([0.25], [0.75]), 0.0, threads=1, transport="host", params=10, buckets=4, nbytes=20
    )
    found = measuring._engine(trained)
    assert (found.step_s, found.bucket_s, found.fetch_s, found.idle_s) == (1, *parts)
    assert measuring._engine(replace(trained, buckets=0, queued=Queued([], []))) == Engine(
        step_s=1, bucket_s=0, fetch_s=0, idle_s=0
    )


def test_buckets_queue_up_where_gradients_or_slot_were_there_before_the_last_one_ended() -> None:
    spans = Spans()
    kernels = [(16, 20), (21, 30), (33, 40), (44, 50), (50, 52), (53, 55), (59, 61), (62, 64)]
    down = [(0, 9), (9, 20), (20, 31), (31, 32)]
    up = [(52, 58), (58, 60), (61, 62), (64, 65)]
    for phase, times in {"d2h": down, "host_step": kernels, "h2d": up}.items():
        for number in (1, 2):  # in the second, each takes twice as long
            for start, end in times:
                spans.add(phase, "bucket", start * number, end * number, number)
    # with two slots, the third waits for the first's weights; of the gradients, the third's come too late
    assert queued(spans, slots=2) == Queued(up=[1, 1, 2, 2], down=[1, 4, 2, 8])
    assert queued(spans, slots=9).up == [1, 4, 1, 2, 8, 2]


@pytest.mark.parametrize(("seconds", "steps"), [(measuring.SECONDS, measuring.QUEUED_STEPS), (0.0, 3)])
def test_steps_without_anything_between_them_are_recorded(
    quick: None, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    """*Delayed*: all buckets are stepped as their gradients come down, and then their weights go up."""
    seen: list[tuple[Spans, int]] = []

    def spy(spans: Spans, slots: int) -> Queued:
        seen.append((spans, slots))
        return Queued([1e-9], [2e-9])

    monkeypatch.setattr(measuring, "queued", spy)
    monkeypatch.setattr(measuring, "SECONDS", seconds)
    config = OffloadConfig(threads=1, ring_slots=3)
    subject = Fake(Model())
    found = measuring.measure(subject, config, (1, 3), ABOUT)
    assert subject.schedules == ["delayed", "in_order"]
    ((spans, slots),) = seen
    taken = [phases for phases in spans.of.values() if "host_step" in phases]
    assert slots == 3 and len(taken) == steps
    for phases in taken:
        assert [len(phases[name]) for name in ("d2h", "host_step", "h2d")] == [4, 8, 4]
        assert phases["host_step"] == sorted(phases["host_step"])
        assert all(end <= phases["h2d"][0][0] for _, end in phases["host_step"][:4])
        assert all(down[1] <= kernel[0] for down, kernel in zip(phases["d2h"], phases["host_step"]))
    assert found.engine.bucket_s <= 1e-9 and found.engine.fetch_s <= 2e-9


def test_the_link_of_a_gpu_takes_no_core_and_the_hosts_takes_one() -> None:
    host, cuda = (measuring._link(name, steps(0), 8, ([0.1], [0.2])) for name in ("host", "cuda"))
    assert (host.emulates, host.down.per_byte, host.down.core_per_byte, host.up.core_per_byte) == (True, 0, 0.25, 0.5)
    assert (cuda.emulates, cuda.down.per_byte, cuda.up.per_byte, cuda.up.core_per_byte) == (False, 0.25, 0.5, 0)
    assert (cuda.down.latency, cuda.up.latency) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("wire", "held"),
    [("bfloat16", "float32"), ("bfloat16", "int8"),
     *(pytest.param(w, h, marks=pytest.mark.slow) for w, h in (("float16", "float32"), ("float32", "bfloat16")))],
)  # fmt: skip
def test_the_kernels_run_on_every_parameter_of_the_sample(
    wire: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench([1000, 300], wire, threads=1, kind=FORMATS[held])
    seen: list[int] = []
    works: dict[str, Callable[[int, slice, int], Any]] = {}

    def spy(self: Bench, work: Callable[[int, slice, int], Any]) -> Measured:
        works[work.__name__] = work
        seen.clear()
        return Measured.of([self._once(lambda k, at, n: (seen.append(n), work(k, at, n)))])

    monkeypatch.setattr(Bench, "_passes", spy)
    assert set(bench.measure()) | {"norm"} == set(HostCost.__slots__)
    assert seen == [1000, 300]
    bench._room[:] = 0
    bench.move_and_rest()
    assert (bench._room == bench._gradients[:1000]).all(), "the largest bucket"


@pytest.mark.parametrize(("seconds", "times"), [(0.5, 1), (0.009, 3), (1e-7, 100)])
def test_a_kernel_that_is_done_in_no_time_is_run_often_for_each_measure(
    seconds: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, runs = Bench([10], "bfloat16", threads=1), list[int]()
    monkeypatch.setattr(Bench, "_once", lambda self, work: (runs.append(1), seconds)[1])
    assert bench._passes(lambda k, at, n: None) == Measured(pytest.approx(seconds / 10), pytest.approx(0, abs=1e-9))
    assert len(runs) == 2 + PASSES * times


@pytest.mark.parametrize(
    ("kind", "beside", "took", "rate"),
    [
        ("device", "host", {"device": 20.0, "host": 8.0}, 0.5),
        ("host", "device", {"device": 20.0, "host": 8.0}, 0.5),
        # copies work 2 and rest 2: beside the device they work 6 of 8, in which it does a third of what it could
        ("copy", "device", {"device": 20.0, "copy": 8.0}, 2 / 6),
        ("device", "copy", {"device": 20.0, "copy": 8.0}, 1 / 3),
        ("device", "copy", {"device": 9.0, "copy": 4.0}, 1.0),
        ("device", "copy", {"device": 90.0, "copy": 4.0}, 0.01),
        ("copy", "host", {"host": 4.0, "copy": 2.0}, 1.0),
    ],
)
def test_rates_are_those_of_the_time_in_which_both_are_at_work(
    kind: str, beside: str, took: dict[str, float], rate: float
) -> None:
    alone = {"device": 10.0, "host": 4.0, "copy": 4.0}
    assert measuring._rate(kind, beside, alone, took) == pytest.approx(rate)


def test_turns_are_counted_with_all_the_time_that_passes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("hf_offload.measuring_host.time.perf_counter", lambda: float(next(clock)))
    done: list[int] = []
    assert seconds_a_turn(lambda: done.append(1), at_least_s=9) == 2
    assert len(done) == 1 + 5
    assert seconds_a_turn(lambda: (done.append(1), next(clock)), at_least_s=0) == 4  # type: ignore[arg-type]
    assert len(done) == 6 + 1 + 3


def test_another_thread_is_kept_busy_at_least_once_and_then_ends() -> None:
    done: list[str] = []
    told: list[bool] = []
    before = set(engine_threads())  # of other tests' optimizers, say

    def mine() -> list[str]:
        return [thread.name for thread in engine_threads() if thread not in before]

    def started() -> None:
        told.append(mine() == [STEP_THREAD])

    with kept_busy(lambda: done.append(threading.current_thread().name), "step", started) as turns:
        pass
    assert told == [True]
    assert turns.count == len(done) >= 1 and turns.seconds_a_turn >= 0
    assert set(done) == {STEP_THREAD}
    assert not mine()
