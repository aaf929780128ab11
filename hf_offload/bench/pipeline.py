"""What hides behind an emulated device: `hf-offload bench pipeline`.

A real engine, the real kernel and the host transport at a given speed, under a model that waits instead of computing
(`hf_offload.bench.emulated`). One run measures each stage alone, computes from that the least exposed time any engine
could have (`hf_offload.bench.bound`), and then interleaves rounds of every schedule.

Each round of a schedule builds its own model and optimizer, so that only one optimizer's state is in memory at a time,
takes warm-up steps, and then measures from the start of one step to the start of a later one: the steady state. A last
step with no forward behind it would have nothing to hide under.

Clipping: `streamed` and `speculative_*` clip, as training does. On a GPU the norm of gradients that stay there takes
it well under a millisecond at 3 TB/s; here the host's cores would compute it in the training thread. So `in_order`,
`overlapped` and `delayed` run without clipping: their emulated device computes the norm in no time.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_offload.bench import stages as stage_times
from hf_offload.bench.bound import Bound, UnitTimes, bound
from hf_offload.bench.busy import BusyCores
from hf_offload.bench.cores import ENGINE, Cores, divide, engine_threads, spare, usable_cores
from hf_offload.bench.emulated import EmulatedModel, Memory, module_sizes
from hf_offload.config import OffloadConfig
from hf_offload.engine.speculation import Confidence
from hf_offload.engine.stats import Stats
from hf_offload.engine.step_threads import step_threads
from hf_offload.errors import ConfigError, explain, nearest
from hf_offload.optimizer import OffloadAdam
from hf_offload.preflight import check_host_budget

NONE = "none"
NEVER, ALWAYS = 2.0, 0.5
"""Clipping bounds as multiples of the gradients' norm: one that never bites, one that always does."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is emulated, and how often it is measured.

    Raises:
        ConfigError: a value outside its range.
    """

    blocks: int = 24
    params_per_block: int = 2_800_000
    tensors_per_block: int = 12
    link_gb_s: float = 16.0
    forward_ms: float = 4.0
    backward_ms: float = 8.0
    edge_ms: float = 0.0
    """Forward of the embedding, and of the head; their backward takes twice as long."""
    steps: int = 6
    warmup_steps: int = 3
    rounds: int = 3
    threads: int | None = None
    bucket_bytes: int = OffloadConfig().bucket_bytes
    ring_slots: int = OffloadConfig().ring_slots
    schedules: tuple[str, ...] = ()
    """Names of CONTENDERS; none: all. `none` always runs."""
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("blocks", self.blocks, 2)
        for name in ("params_per_block", "tensors_per_block", "steps", "rounds", "bucket_bytes", "ring_slots"):
            _at_least(name, getattr(self, name), 1)
        _at_least("warmup_steps", self.warmup_steps, 2)
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
            step_threads(self.threads)
        for name in ("forward_ms", "backward_ms", "edge_ms"):
            _at_least(name, getattr(self, name), 0)
        if not 0 < self.link_gb_s < math.inf:
            raise ConfigError(explain("link_gb_s", self.link_gb_s, "not above 0", "Give a speed in GB/s, as 16"))
        if self.tensors_per_block > self.params_per_block:
            cause = f"a block has only {self.params_per_block} parameters"
            raise ConfigError(explain("tensors_per_block", self.tensors_per_block, cause, "Give fewer tensors"))
        for name in self.schedules:
            if name not in CONTENDERS:
                raise ConfigError(explain("schedules", name, "unknown schedule", nearest(name, CONTENDERS)))

    @property
    def step_threads(self) -> int:
        """Threads of the host step: as asked for, else as many as leave a core to copies and training thread."""
        cores = len(usable_cores())
        return self.threads or min(max(1, cores - spare(cores)), step_threads().most)

    def memory(self) -> Memory:
        """The model's weights and gradients. Raises HostMemoryError where a run would not fit."""
        sizes = module_sizes(self.blocks, self.params_per_block, self.tensors_per_block)
        params = sum(map(sum, sizes))
        # one optimizer at a time; speculation's shadow and the streamed store are the most any of them takes
        need = {"weights, twice": 4 * params, "gradients": 2 * params, "state": 12 * params,
                "gradient store": 2 * params, "shadow": self.shadow_bytes(sizes)}  # fmt: skip
        check_host_budget(need, None)
        return Memory(sizes, self.seed)

    @staticmethod
    def shadow_bytes(sizes: Sequence[Sequence[int]]) -> int:
        """Room for all buckets, 14 bytes a parameter."""
        return 14 * sum(map(sum, sizes))

    def model(self, memory: Memory) -> EmulatedModel:
        block = (self.forward_ms * 1e-3, self.backward_ms * 1e-3)
        return EmulatedModel(memory, block, (self.edge_ms * 1e-3, 2 * self.edge_ms * 1e-3))

    def units(self, measured: stage_times.Stages, step_seconds: float) -> list[UnitTimes]:
        """What the bound is computed from: the stages' times, and the emulated device's as they really were.

        Args:
            step_seconds: of a step without an optimizer, a little more than forward and backward ask for.
        """
        edge = (self.edge_ms, 2 * self.edge_ms)
        block = (self.forward_ms, self.backward_ms)
        asked = self.blocks * sum(block) + 2 * sum(edge)
        per_ms = step_seconds / asked if asked else 0.0
        last = len(measured.units) - 1
        times = [edge if u in (0, last) else block for u in range(last + 1)]
        return [UnitTimes(f * per_ms, b * per_ms, buckets) for (f, b), buckets in zip(times, measured.units)]


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ConfigError(explain(name, value, f"below {least}", f"Give a number of at least {least}"))


class _Stubborn(Confidence):
    """Goes on guessing however the guesses turn out."""

    def guess(self) -> bool:
        return True


def force_guessing(optimizer: OffloadAdam) -> None:
    """Let `optimizer` go on guessing where every guess fails: steps that miss are what is measured."""
    stream = optimizer.engine.stream
    assert stream is not None, "after the first step"
    stream.confidence = _Stubborn()


@dataclass(frozen=True)
class Contender:
    """One schedule as it is run.

    Attributes:
        settings: fields of OffloadConfig.
        clip: None, or the bound for `clip_grad_norm_` as a multiple of the gradients' norm.
        prepare: called with the optimizer after the warm-up.
        exact: whether its weights must be those of *in order*.
        shadow: whether it gets a shadow for all buckets.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    prepare: Callable[[OffloadAdam], None] = lambda optimizer: None
    exact: bool = True
    shadow: bool = False


_STREAMED = {"schedule": "overlapped", "stream_gradients": True}
CONTENDERS: dict[str, Contender] = {
    "in_order": Contender({"schedule": "in_order"}),
    "overlapped": Contender({"schedule": "overlapped"}),
    "streamed": Contender(_STREAMED, NEVER),
    "speculative_hit": Contender(_STREAMED, NEVER, shadow=True),
    "speculative_miss": Contender(_STREAMED, ALWAYS, force_guessing, shadow=True),
    "delayed": Contender({"schedule": "delayed", "delay_warmup_steps": 1}, exact=False),
}


@dataclass(frozen=True)
class Round:
    """One round of one schedule, per step: means over the measured window, seconds.

    Attributes:
        step, main, process: wall, CPU of the training thread, CPU of the process.
        stepping: of `main`, what clip_grad_norm_(), step() and zero_grad() took.
        threads: CPU of each of the engine's threads, by name.
        engine_exposed: what the optimizer's stats say of its last finished step.
        hits, misses: guesses, counted by the optimizer.
        digest: of the weights after all steps of the round.
    """

    step: float
    main: float
    process: float
    stepping: float
    threads: Mapping[str, float]
    engine_exposed: float = 0.0
    hits: int = 0
    misses: int = 0
    digest: str = ""


class _Spent:
    """What has been spent so far, to be subtracted: wall, CPU of this thread, of the process, of the engine's."""

    def __init__(self) -> None:
        self.wall, self.main, self.process = time.perf_counter(), time.thread_time(), time.process_time()
        self.threads = thread_seconds()

    def since(self, start: _Spent, steps: int, stepping: float) -> Round:
        return Round(
            stepping=stepping / steps,
            step=(self.wall - start.wall) / steps,
            main=(self.main - start.main) / steps,
            process=(self.process - start.process) / steps,
            threads={n: (s - start.threads.get(n, 0.0)) / steps for n, s in self.threads.items()},
        )


def thread_seconds() -> dict[str, float]:
    """CPU seconds of each living thread of the engine, by name; none where the system cannot tell."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return {}
    ours = [t for t in engine_threads() if t.ident is not None]
    return {t.name.removeprefix(ENGINE): time.clock_gettime(clock_of(t.ident)) for t in ours}


def _train(setting: Setting, model: EmulatedModel, step: Callable[[], None], warm: Callable[[], None]) -> Round:
    """Warm-up steps, `warm()`, then the window: from the start of one step to the start of a later one."""
    x = torch.zeros(1)

    def steps(count: int) -> float:
        stepping = 0.0
        for _ in range(count):
            model(x).backward()
            model.device.synchronize()
            before = time.thread_time()
            step()
            stepping += time.thread_time() - before
        return stepping

    steps(setting.warmup_steps)
    warm()
    start = _Spent()
    stepping = steps(setting.steps)
    return _Spent().since(start, setting.steps, stepping)


def _train_with(
    setting: Setting, model: EmulatedModel, optimizer: OffloadAdam, max_norm: float | None,
    prepare: Callable[[OffloadAdam], None],
) -> Round:  # fmt: skip
    """The same with an optimizer, its own figures and the weights it leaves."""
    before: list[Stats] = []

    def step() -> None:
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def warm() -> None:
        prepare(optimizer)
        before.append(optimizer.stats())

    found = _train(setting, model, step, warm)
    after = optimizer.stats()
    optimizer.synchronize()
    return dataclasses.replace(
        found,
        engine_exposed=after.exposed_seconds,
        hits=after.speculation_hits - before[0].speculation_hits,
        misses=after.speculation_misses - before[0].speculation_misses,
        digest=digest(model),
    )


def digest(model: EmulatedModel) -> str:
    """Of every weight's bits."""
    found = hashlib.blake2b(digest_size=16)
    for p in model.parameters():
        found.update(p.detach().view(torch.int16).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class Lab:
    """One run: the setting, the memory that all models share, the threads of the host step, the gradients' norm."""

    setting: Setting
    memory: Memory
    threads: int
    norm: float

    @property
    def cores(self) -> Cores:
        return divide(usable_cores(), self.threads)

    def none(self) -> Round:
        model = self.setting.model(self.memory)
        cores = self.cores
        with cores.unpinned():
            return _train(self.setting, model, model.zero_grad, cores.pin)

    def round(self, contender: Contender) -> Round:
        setting = self.setting
        config = {
            "link_gb_s": setting.link_gb_s,
            "transport": "host",
            "bucket_bytes": setting.bucket_bytes,
            "ring_slots": setting.ring_slots,
            "threads": self.threads,
            "shadow_bytes": setting.shadow_bytes(self.memory.sizes) if contender.shadow else 0,
            **contender.settings,
        }
        model = setting.model(self.memory)
        max_norm = None if contender.clip is None else contender.clip * self.norm
        cores = self.cores

        def prepare(optimizer: OffloadAdam) -> None:
            contender.prepare(optimizer)
            cores.pin()

        try:
            with (
                cores.unpinned(),
                OffloadAdam(model.parameters(), config=OffloadConfig(**config), model=model) as optimizer,
            ):
                optimizer.engine.placement.transport.clock = model.device.end  # type: ignore[attr-defined]
                return _train_with(setting, model, optimizer, max_norm, prepare)
        finally:
            del model
            gc.collect()  # the state of one optimizer, before the next allocates its own

    def reference(self, clip: float | None) -> str:
        """The digest that *in order*, on a device that takes no time, leaves."""
        quick = dataclasses.replace(self.setting, forward_ms=0.0, backward_ms=0.0, edge_ms=0.0)
        return dataclasses.replace(self, setting=quick).round(Contender({"schedule": "in_order"}, clip)).digest


@dataclass(frozen=True)
class Row:
    """One schedule's figures, medians over the rounds; seconds a step. See `as_json` for what they mean."""

    step: float
    exposed: float
    bound: Bound
    hidden: float
    bound_hidden: float
    main: float
    rounds: tuple[Round, ...]
    clip: str
    same_bits: bool | None

    def median(self, get: Callable[[Round], float]) -> float:
        return statistics.median(map(get, self.rounds))


@dataclass(frozen=True)
class Result:
    """A whole run.

    Attributes:
        params, tensors: of the model.
        cores: who ran where.
        others: cores that other programs kept busy meanwhile, on average; None where the system cannot tell.
    """

    setting: Setting
    stages: stage_times.Stages
    params: int
    tensors: int
    rows: Mapping[str, Row]
    cores: Cores
    others: float | None


def run(setting: Setting, say: Callable[[str], None] = lambda text: None) -> Result:
    """Measure the stages alone, then every schedule.

    Args:
        say: told what is being done.

    Raises:
        HostMemoryError: the largest schedule's memory does not fit.
    """
    memory = setting.memory()
    busy = BusyCores()
    say("Measuring each stage alone ...")
    threads = setting.step_threads
    measured = stage_times.measure(memory, setting.bucket_bytes, setting.ring_slots, setting.link_gb_s, threads)
    gc.collect()
    lab = Lab(setting, memory, threads, math.sqrt(float(memory.gradients.float().square().sum())))
    chosen = {n: c for n, c in CONTENDERS.items() if not setting.schedules or n in setting.schedules}
    rounds: dict[str, list[Round]] = {name: [] for name in (NONE, *chosen)}
    for number in range(setting.rounds):
        names = [NONE, *chosen]
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:  # no schedule always follows the same one at the same time
            say(f"Round {number + 1} of {setting.rounds}: {name} ...")
            rounds[name].append(lab.none() if name == NONE else lab.round(chosen[name]))
    say("Comparing weights ...")
    bits = {biting: lab.reference(ALWAYS if biting else None) for biting in {c.clip == ALWAYS for c in chosen.values()}}
    base = statistics.median(r.step for r in rounds[NONE]), statistics.median(r.main - r.stepping for r in rounds[NONE])
    units = setting.units(measured, base[0])
    none = _row(rounds[NONE], base, Bound(0.0, ()), measured, "none", None)
    rows = {NONE: dataclasses.replace(none, main=0.0)}
    for name, contender in chosen.items():
        same = all(r.digest == bits[contender.clip == ALWAYS] for r in rounds[name]) if contender.exact else None
        clip = {None: "none", NEVER: "never bites", ALWAYS: "always bites"}[contender.clip]
        rows[name] = _row(rounds[name], base, bound(name, units), measured, clip, same)
    return Result(
        setting, measured, sum(map(sum, memory.sizes)), sum(map(len, memory.sizes)), rows, lab.cores, busy.others()
    )


def _row(
    rounds: Sequence[Round], base: tuple[float, float], least: Bound, measured: stage_times.Stages, clip: str,
    same: bool | None,
) -> Row:  # fmt: skip
    step = statistics.median(r.step for r in rounds)
    exposed = step - base[0]
    hooks = statistics.median(r.main - r.stepping for r in rounds) - base[1]
    main = statistics.median(r.stepping for r in rounds) + hooks
    hidden, bound_hidden = (1 - seconds / measured.seconds for seconds in (exposed, least.exposed))
    return Row(step, exposed, least, hidden, bound_hidden, main, tuple(rounds), clip, same)
