"""Measuring a machine with a model: what a `Calibration` holds, in under a minute.

The model trains for a few steps with the real optimizer, *in order* and on a link that is not emulated: from these come
forward and backward of each unit, host step, copies, the norm, and what the engine's own code takes where its thread
waits for every bucket. What that takes where buckets queue up comes from *delayed* steps (`measuring_queue`). What
neither runs is timed by itself (`measuring_host`). Then the device computes while a thread repeats host steps, and
while one repeats copies: that is who slows down whom.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_offload.bench.busy import BusyCores
from hf_offload.calibration import Calibration, Engine, Link, UnitCost, fingerprint
from hf_offload.config import OffloadConfig
from hf_offload.engine.formats import FORMATS
from hf_offload.engine.plan import ParamSpec, plan_buckets
from hf_offload.engine.tensors import WIRE
from hf_offload.engine.units import UnitMap, find_units
from hf_offload.environment import usable_cores
from hf_offload.errors import ConfigError, explain
from hf_offload.measuring_host import Bench, Measured, kept_busy, seconds_a_turn
from hf_offload.measuring_queue import Queued, Spans, queued
from hf_offload.optimizer import OffloadAdam
from hf_offload.simulation import COPY, DEVICE, HOST, HostCost, LinkCost
from hf_offload.stopwatch import Passed, Stopwatch, Subject
from hf_offload.transport import HostTransport, Segment, Transport

SAMPLE = 24_000_000
"""Parameters of the sample of the model that host figures are taken from: 0.6 GB of host memory."""
WARM, REPEATS = 2, 7
LEAST_PART = 0.01
QUEUED_STEPS = 12
SECONDS = 12.0
"""What the steps of one batch size may take; from three repeats on it ends there."""
LATENCIES, LATENCY_BYTES = 40, 1024
IDLE_S = 1e-3
"""Seconds of quiet before each of the small copies: a thread that has just worked wakes up sooner than in training."""
EMULATED_S = 3e-4
BESIDE_S = 1.0
WIDEST = 0.15
"""The widest spread of a figure that is stored: interquartile range over median."""
BUSIEST = 0.125
"""Part of the cores this process may use that other programs may keep busy meanwhile: on a large machine somebody
always runs, and what that does to the figures their spread shows."""


@dataclass(frozen=True)
class Stepped:
    """One step *in order*: wall seconds, CPU seconds of the training thread, and the optimizer's own figures."""

    wall: float
    main: float
    norm: float
    d2h: float
    host_step: float
    h2d: float

    @property
    def rest(self) -> float:
        """Seconds of hand-overs."""
        return max(0.0, self.wall - self.main - self.d2h - self.host_step - self.h2d)


def measure(
    subject: Subject, config: OffloadConfig, rows: tuple[int, int], model: dict[str, Any],
    *, widest: float | None = None, say: Callable[[str], None] = lambda text: None,
) -> Calibration:  # fmt: skip
    """Calibrate this machine with a model.

    Args:
        config: bucket size, ring and threads as in training; an emulated link is left out, see `calibration.Link`.
        rows: two batch sizes.
        model: what `Calibration.model` is to be.
        widest: the widest spread that is let through; None: WIDEST.
        say: told what is being done.

    Raises:
        ConfigError: the machine is busy: a measure that was repeated spreads too widely. Says which, and by how much.
        HostMemoryError: the state of the sample does not fit.
    """
    busy = BusyCores()
    plain = dataclasses.replace(config, schedule="in_order", stream_gradients=False, shadow_bytes=0, timeline=None,
                                accumulate_dtype="wire", link_gb_s=None, link_latency_us=0.0, poison=False)  # fmt: skip
    units = find_units(subject.model)
    trained = _train(subject, units, plain, rows, say)
    say("The host's kernels ...")
    kind = FORMATS[config.state_dtype]
    sizes = bucket_sizes(units, config.bucket_bytes, kind.block)
    bench = Bench(_sample(sizes), _wire(units), trained.threads, kind)
    kernels = bench.measure()
    say("Compute and host step side by side ...")
    rates = _rates(subject, rows[0], bench, copies=trained.transport == "host")
    figures = {**trained.figures(), **{f"kernel {name}": found for name, found in kernels.items()}}
    _refuse_busy(trained.of_weight(figures, sum(sizes)), busy.others(), WIDEST if widest is None else widest)
    alone = {name: found.value for name, found in kernels.items()}
    return Calibration(
        machine=fingerprint(),
        model=model,
        units=_unit_costs(units, trained.passes, rows, subject.seq_len),
        seq_len=subject.seq_len,
        rows=rows,
        threads=trained.threads,
        state_dtype=config.state_dtype,
        host=_host_cost(alone, figures["host step"].value, figures["norm"].value),
        link=_link(trained.transport, trained.steps, trained.nbytes, trained.latencies, trained.emulation_s),
        engine=_engine(trained),
        rates=rates,
        spread={name: found.spread for name, found in figures.items()},
    )


@dataclass(frozen=True)
class _Trained:
    """What the steps *in order* showed.

    Attributes:
        passes: micro-batches by their number of rows; steps: one after each.
        queued: what the engine takes between the kernels of buckets that queued up.
        latencies: of small copies down and up; emulation_s: what an emulated link adds to each.
        threads: of the host step; transport: its name.
        params, buckets, nbytes: parameters stepped, their buckets, and their bytes on the wire.
    """

    passes: dict[int, list[Passed]]
    steps: list[Stepped]
    queued: Queued
    latencies: tuple[list[float], list[float]]
    emulation_s: float
    threads: int
    transport: str
    params: int
    buckets: int
    nbytes: int

    def figures(self) -> dict[str, Measured]:
        """What was repeated: seconds, and seconds a parameter."""
        return {
            **{f"compute of {n} rows": Measured.of([p.seconds for p in found]) for n, found in self.passes.items()},
            "host step": Measured.of([s.host_step / self.params for s in self.steps]),
            "norm": Measured.of([s.norm / self.params for s in self.steps]),
        }

    def of_weight(self, figures: dict[str, Measured], params: int) -> dict[str, Measured]:
        """Without host figures whose spread comes to less than LEAST_PART of a step: it changes no prediction.

        Args:
            params: of the whole model; the steps may have been those of a sample.
        """
        compute = min(statistics.median(p.seconds for p in found) for found in self.passes.values())
        least = LEAST_PART * (compute + statistics.median(s.wall for s in self.steps))
        return {name: found for name, found in figures.items()
                if name.startswith("compute") or found.spread * found.value * params >= least}  # fmt: skip


def _train(
    subject: Subject, units: UnitMap, config: OffloadConfig, rows: tuple[int, int], say: Callable[[str], None]
) -> _Trained:
    say("Buckets that queue up ...")
    with _stepping(subject, units, dataclasses.replace(config, schedule="delayed", delay_warmup_steps=1)) as lab:
        queue = lab.queue(rows[0])
    with _stepping(subject, units, config) as lab:
        passes, steps = {}, []
        for count in rows:
            say(f"Steps with {count} rows of {subject.seq_len} tokens ...")
            passes[count], stepped = lab.steps(count)
            steps += stepped
        say("The link's latency ...")
        latencies = lab.latencies()
        return _Trained(
            passes, steps, queue, latencies, _emulation_s(latencies) if lab.transport_name == "host" else 0.0,
            lab.threads, lab.transport_name, lab.params, lab.buckets, lab.nbytes,
        )  # fmt: skip


def _host_cost(kernels: dict[str, float], step: float, norm: float) -> HostCost:
    """The kernels alone, but for the step, which is the engine's; a guess does the same over twice the state, and
    is scaled as the step is."""
    return HostCost(**{**kernels, "guess": kernels["guess"] * step / kernels["step"], "step": step, "norm": norm})


def bucket_sizes(units: UnitMap, bucket_bytes: int, block: int = 1) -> list[int]:
    """Parameters of each bucket of the engine's plan, in forward order."""
    specs = [
        ParamSpec(p.numel(), WIRE[p.dtype], u)
        for u, unit in enumerate(units.units) for p in unit.params if p.requires_grad
    ]  # fmt: skip
    return [b.numel for b in plan_buckets(specs, bucket_bytes, block).buckets]


def _sample(sizes: Sequence[int]) -> list[int]:
    """Buckets from the last on, since the first are cut finer, as many as are in the sample."""
    found: list[int] = []
    for size in reversed(sizes):
        if found and sum(found) + size > SAMPLE:
            break
        found.append(min(size, SAMPLE))
    return found


def _wire(units: UnitMap) -> str:
    """The dtype on the wire of most parameters."""
    counts: dict[str, int] = {}
    for unit in units.units:
        for p in unit.params:
            if p.requires_grad:
                counts[WIRE[p.dtype]] = counts.get(WIRE[p.dtype], 0) + p.numel()
    return max(counts, key=counts.__getitem__)


class _Lab:
    """The model with its optimizer, *in order*."""

    def __init__(self, subject: Subject, watch: Stopwatch, optimizer: OffloadAdam, stepped: set[int]) -> None:
        self._subject, self._watch, self._optimizer, self._stepped = subject, watch, optimizer, stepped
        self._others = [p for p in subject.model.parameters() if id(p) not in stepped]
        self.params = self.buckets = self.nbytes = 0

    @property
    def threads(self) -> int:
        return self._optimizer.engine.threads

    @property
    def transport_name(self) -> str:
        return self._optimizer.stats().transport

    def steps(self, rows: int) -> tuple[list[Passed], list[Stepped]]:
        passed, stepped = [], []
        begin = time.perf_counter()
        for number in range(WARM + REPEATS):
            each, step = self._watch.run(rows), self._step()
            if number == 0:
                self._subject.settle()
            if number >= WARM:
                passed.append(each)
                stepped.append(step)
            if len(passed) >= 3 and time.perf_counter() - begin > SECONDS:
                break
        return passed, stepped

    def _step(self) -> Stepped:
        optimizer = self._optimizer
        begin = time.perf_counter()
        optimizer.clip_grad_norm_(1e9)
        norm = time.perf_counter() - begin
        begin, main = time.perf_counter(), time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        wall, main = time.perf_counter() - begin, time.thread_time() - main
        self._drop_others()
        stats = optimizer.stats()
        self.params, self.nbytes = stats.params, stats.d2h_bytes
        self.buckets = sum(len(a.plan.buckets) for a in optimizer.engine.arenas)
        return Stepped(wall, main, norm, *(stats.seconds[name] for name in ("d2h", "host_step", "h2d")))

    def _drop_others(self) -> None:
        for p in self._others:
            p.grad = None

    def queue(self, rows: int) -> Queued:
        """Of steps that follow each other with nothing in between, on the same gradients, see `measuring_queue`."""
        engine, spans = self._optimizer.engine, Spans()
        self._watch.run(rows)
        begin = time.perf_counter()
        for number in range(QUEUED_STEPS + 2):
            self._optimizer.step()
            self._optimizer.synchronize()
            if number == 1:  # the first is exact and allocates, the second allocates what a delayed one has
                self._subject.settle()
                engine.record_to(spans)
            if number >= 4 and time.perf_counter() - begin > SECONDS:
                break
        self._optimizer.zero_grad()
        self._drop_others()
        return queued(spans, len(engine.placement.transport.up))

    def latencies(self) -> tuple[list[float], list[float]]:
        """Of small copies over the engine's transport, down and up."""
        self._subject.synchronize()
        device = next(self._subject.model.parameters()).device
        return _latencies(self._optimizer.engine.placement.transport, device)


def _latencies(transport: Transport, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds of small copies down and up, from asking for them to knowing of their end."""
    there = torch.zeros(LATENCY_BYTES, dtype=torch.uint8, device=device)
    segments = [Segment(there.data_ptr(), LATENCY_BYTES, 0, there)]
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(LATENCIES):
        for times, start in zip(found, (transport.to_host, transport.to_device)):
            time.sleep(IDLE_S)
            begin = time.perf_counter()
            start(segments, 0, None).wait(60.0)
            times.append(time.perf_counter() - begin)
    return found


def _emulation_s(plain: tuple[list[float], list[float]]) -> float:
    """What a copy over an emulated link takes more than its latency and a copy's without one."""
    transport = HostTransport(1, LATENCY_BYTES, link_latency_us=EMULATED_S * 1e6)
    try:
        emulated = _latencies(transport, torch.device("cpu"))
    finally:
        transport.close()
    return max(
        0.0, statistics.median([*emulated[0], *emulated[1]]) - EMULATED_S - statistics.median([*plain[0], *plain[1]])
    )


@contextmanager
def _stepping(subject: Subject, units: UnitMap, config: OffloadConfig) -> Iterator[_Lab]:
    chosen: list[Tensor] = []
    for unit in units.units:
        more = [p for p in unit.params if p.requires_grad]
        if chosen and sum(p.numel() for p in (*chosen, *more)) > SAMPLE:
            break
        chosen += more
    watch = Stopwatch(subject, units)
    try:
        # lr=0: the weights stay as they are
        with OffloadAdam(chosen, lr=0.0, weight_decay=0.0, config=config, model=subject.model) as made:
            subject.join(made)
            yield _Lab(subject, watch, made, set(map(id, chosen)))
    finally:
        watch.close()


def _rates(subject: Subject, rows: int, bench: Bench, copies: bool) -> dict[str, float]:
    """The part of its speed at which each kind of work goes on beside another; `copies`: those take a core of the host.

    The training thread computes, a thread named as the engine's steps, or copies: so they are bound to their cores.
    """

    def compute() -> None:
        subject.forward(rows).backward()  # type: ignore[no-untyped-call]
        subject.synchronize()
        for p in subject.model.parameters():
            p.grad = None

    works = {DEVICE: compute, HOST: bench.step_all, COPY: bench.move_and_rest}
    pairs = [(DEVICE, HOST, "step")] + ([(DEVICE, COPY, "d2h"), (COPY, HOST, "step")] if copies else [])
    alone = {kind: seconds_a_turn(works[kind], BESIDE_S / 2) for kind in {kind for *two, _ in pairs for kind in two}}
    found: dict[str, float] = {}
    for one, other, thread in pairs:
        with kept_busy(works[other], thread, subject.settle) as theirs:
            mine = seconds_a_turn(works[one], BESIDE_S)
        took = {one: mine, other: theirs.seconds_a_turn}
        for kind, beside in ((one, other), (other, one)):
            found[f"{kind} beside {beside}"] = _rate(kind, beside, alone, took)
    return found


def _rate(kind: str, beside: str, alone: dict[str, float], took: dict[str, float]) -> float:
    """The speed of `kind` while `beside` is at work. Copies rest for half of their time alone, as between buckets: a
    thread that never sleeps is treated otherwise by the system's scheduler.

    Args:
        alone, took: seconds of a turn, alone and side by side.
    """
    rest = alone[COPY] / 2 if COPY in alone else 0.0
    if kind == COPY:
        return _part(rest / max(took[COPY] - rest, 1e-9))
    busy = (took[COPY] - rest) / took[COPY] if beside == COPY else 1.0
    return _part(1 - (1 - alone[kind] / took[kind]) / max(busy, 1e-3))


def _part(rate: float) -> float:
    return min(1.0, max(0.01, rate))


def _refuse_busy(figures: dict[str, Measured], others: float | None, widest: float) -> None:
    """Raises ConfigError where a spread is too wide to be stored."""
    wide = {name: found.spread for name, found in figures.items() if found.spread > widest}
    crowded = others is not None and others > BUSIEST * usable_cores()
    if not wide and (not crowded or widest > WIDEST):
        return
    told = [f"{name} {spread:.0%}" for name, spread in sorted(wide.items(), key=lambda f: -f[1])]
    cause = f"repeated measures spread too widely ({', '.join(told)}; at most {widest:.0%})" if told else ""
    if crowded:
        cause += f"{' and ' if cause else ''}other programs kept {others:.1f} cores busy meanwhile"
    remedy = "Nothing was stored. End other programs, and calibrate again"
    raise ConfigError(explain("calibrate", "a busy machine", cause, remedy))


def _unit_costs(
    units: UnitMap, passes: dict[int, list[Passed]], rows: tuple[int, int], seq_len: int
) -> tuple[UnitCost, ...]:
    found = []
    for u, unit in enumerate(units.units):
        trainable = [p for p in unit.params if p.requires_grad]
        found.append(
            UnitCost(
                params=sum(p.numel() for p in trainable),
                wire=WIRE[trainable[0].dtype] if trainable else "bfloat16",
                forward=_line([(n * seq_len, _middle(passes[n], u, "forward")) for n in rows]),
                backward=_line([(n * seq_len, _middle(passes[n], u, "backward")) for n in rows]),
            )
        )
    return tuple(found)


def _middle(passes: Sequence[Passed], u: int, phase: str) -> float:
    return statistics.median(getattr(p, phase)[u] for p in passes)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per token) through two points; neither below 0."""
    (few, short), (many, long) = points
    slope = max(0.0, (long - short) / (many - few))
    return max(0.0, short - slope * few), slope if slope * few <= short else long / many


def _link(
    name: str,
    steps: Sequence[Stepped],
    nbytes: int,
    latencies: tuple[list[float], list[float]],
    emulation_s: float = 0.0,
) -> Link:
    emulates = name == "host"
    found = []
    for seconds, times in zip(([s.d2h for s in steps], [s.h2d for s in steps]), latencies):
        each = statistics.median(seconds) / nbytes if nbytes else 0.0
        latency = statistics.median(times)
        found.append(
            LinkCost(per_byte=0.0, core_per_byte=each, latency=latency)
            if emulates
            else LinkCost(per_byte=each, latency=latency)
        )
    return Link(transport=name, emulates=emulates, down=found[0], up=found[1], emulation_s=emulation_s)


def _engine(trained: _Trained) -> Engine:
    """The hand-overs of a bucket *in order*, less the latencies of its copies: what they take where buckets queue up,
    and `idle_s` more. What queued up is taken as measured: the latencies are of copies each made after a rest, and may
    be more than a step has. Where none did, since copies are slower than the host's kernels, no part is of idleness."""
    left = 0.0
    if trained.buckets:
        latency = sum(statistics.median(times) for times in trained.latencies)
        left = max(0.0, statistics.median(s.rest for s in trained.steps) / trained.buckets - latency)
    queued_up, queued_down = (statistics.median(of) if of else None for of in trained.queued)
    up = max(0.0, left - (queued_down or 0.0)) if queued_up is None else queued_up
    down = max(0.0, left - up) if queued_down is None else queued_down
    return Engine(
        step_s=statistics.median(s.main for s in trained.steps),
        bucket_s=up,
        fetch_s=down,
        idle_s=max(0.0, left - up - down),
    )
