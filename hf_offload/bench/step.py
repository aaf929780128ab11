"""The full host step of every contender on the same work, and of memory itself: `hf-offload bench step`.

A 16-bit gradient in host memory goes in; updated master, m, v and the 16-bit weight come out. All contenders step the
same arrays, on as many threads, in one process, taking turns A B C, B C A, ...: what a machine does to one of them it
does to all. Each turn begins with steps that are not timed, which wake its threads.

Rooflines, run among the contenders: read-modify-write of three float32 arrays, and the step's own pattern of loads and
stores without its arithmetic, once with plain stores and once with the weights written past the cache. The faster of
these two is *the* step pattern.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hf_offload import hostmem
from hf_offload.bench import step_memory, step_threads
from hf_offload.bench.pipeline import BusyCores
from hf_offload.bench.step_adam import MissingPeer
from hf_offload.bench.step_check import check
from hf_offload.bench.step_contenders import CONTENDERS, Contender
from hf_offload.bench.step_memory import Memory
from hf_offload.errors import ConfigError, StateError, UnsupportedError, explain, nearest
from hf_offload.kernels.cpu import roofline
from hf_offload.preflight import allocating, as_bytes, check_host_budget

RMW = "read-modify-write"
PATTERNS: Mapping[str, Callable[..., None]] = {
    "step pattern": roofline.step_pattern,
    "step pattern, streamed weights": roofline.step_pattern_streamed,
}
RMW_BYTES, PATTERN_BYTES = 24, 28
_WAKE_S, _SAMPLE_S = 0.03, 0.02
"""A turn's untimed steps and its timed ones take at least so long, several where one is shorter. The threads of another
OpenMP library, whose turn it was, spin for milliseconds before they sleep."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured, and how often.

    Raises:
        ConfigError: a value outside its range, an unknown contender.
    """

    params: int = 64_000_000
    threads: int | None = None
    """None: as many as the process may use."""
    rounds: int = 11
    only: tuple[str, ...] = ()
    """Names of CONTENDERS; none: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("params", self.params), ("rounds", self.rounds)):
            if value < 1:
                raise ConfigError(explain(name, value, "below 1", "Give a number of at least 1"))
        for name in self.only:
            if name not in CONTENDERS:
                raise ConfigError(explain("only", name, "unknown contender", nearest(name, CONTENDERS)))
        step_threads.chosen(self.threads)

    @property
    def contenders(self) -> dict[str, Contender]:
        return {name: c for name, c in CONTENDERS.items() if not self.only or name in self.only}


@dataclass(frozen=True)
class Lane:
    """Times of one contender or roofline.

    Attributes:
        seconds: of one step, round by round.
        bytes_per_param: what `gb_per_s` counts.
        cores: processor seconds of this process a second of its steps: how many threads really ran. Threads that spin
            count too.
    """

    params: int
    bytes_per_param: float
    seconds: tuple[float, ...]
    cores: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gparams_per_s(self) -> float:
        return self.params / self.median / 1e9

    @property
    def gb_per_s(self) -> float:
        return self.gparams_per_s * self.bytes_per_param

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median round."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def times(self, other: Lane) -> float:
        """How many times as fast as `other` this is: the median over the rounds, each of which ran both."""
        return statistics.median(theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        contenders: lanes by name.
        patterns: lanes of PATTERNS.
        missing: contenders that were not run, each with the reason and what helps.
        others: cores that other programs kept busy meanwhile; None where the system cannot tell.
    """

    setting: Setting
    threads: int
    contenders: Mapping[str, Lane]
    rmw: Lane
    patterns: Mapping[str, Lane]
    missing: Mapping[str, str]
    others: float | None

    @property
    def pattern(self) -> str:
        """The faster of the two: the roofline."""
        return max(self.patterns, key=lambda name: self.patterns[name].gparams_per_s)


@dataclass
class _Turn:
    """Whose turn comes again and again."""

    begin: Callable[[], None]
    step: Callable[[], None]
    bytes_per_param: float
    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0

    def take(self) -> None:
        """One turn: untimed steps, then timed ones."""
        self.begin()
        repeats = self._warm()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            self.step()
        wall = time.perf_counter() - start
        self.wall, self.cpu = self.wall + wall, self.cpu + time.process_time() - cpu
        self.seconds.append(wall / repeats)

    def _warm(self) -> int:
        """How many steps a timed sample needs, from the untimed ones."""
        start, taken, passed = time.perf_counter(), 0, 0.0
        while not taken or passed < _WAKE_S:
            self.step()
            taken, passed = taken + 1, time.perf_counter() - start
        return max(1, math.ceil(_SAMPLE_S * taken / max(passed, 1e-9)))

    def lane(self, params: int) -> Lane:
        return Lane(params, self.bytes_per_param, tuple(self.seconds), self.cpu / self.wall)


@dataclass(frozen=True)
class Lab:
    """Contenders that can run here, checked, and the memory they share."""

    setting: Setting
    contenders: Mapping[str, Contender]
    memory: Memory
    missing: Mapping[str, str]

    def measure(self, threads: int, say: Callable[[str], None] = lambda text: None) -> Result:
        """Time everybody in turns.

        Raises:
            StateError: the state is no longer finite after it.
        """
        params = self.setting.params
        turns = _rooflines(self.memory, threads)
        for name, contender in self.contenders.items():
            stepper = contender.make(self.memory, threads)
            turns[name] = _Turn(stepper.begin, stepper.step, contender.bytes_per_param)
        busy = BusyCores()
        with step_threads.everywhere(threads):
            _take_turns(turns, self.setting.rounds, say)
        others = busy.others()
        if not self.memory.finite():
            raise StateError("The stepped state is no longer finite: these times are worth nothing. Please report it.")
        lanes = {name: turn.lane(params) for name, turn in turns.items()}
        chosen = {name: lanes[name] for name in self.contenders}
        patterns = {name: lanes[name] for name in PATTERNS}
        return Result(self.setting, threads, chosen, lanes[RMW], patterns, self.missing, others)


def run(setting: Setting, say: Callable[[str], None] = lambda text: None) -> Result:
    """`prepare` and `measure`; raises as they do."""
    return prepare(setting, say).measure(step_threads.chosen(setting.threads), say)


def prepare(setting: Setting, say: Callable[[str], None] = lambda text: None) -> Lab:
    """Check every contender at a small size, and make the memory.

    Args:
        say: told what is being done.

    Raises:
        HostMemoryError: state, gradient and weight do not fit.
        UnsupportedError: no contender can run here.
        WrongResult: a contender does not compute what it should.
    """
    threads, params = step_threads.chosen(setting.threads), setting.params
    check_host_budget(step_memory.need(params, 0), None)
    missing: dict[str, str] = {}
    able = _able(setting, threads, missing, say)
    fitting = _fitting(able, params, missing)
    if not fitting:
        raise UnsupportedError("No contender can run. " + " ".join(missing.values()))
    scratch = max(c.scratch_bytes for c in fitting.values())
    say(f"Filling {as_bytes(sum(step_memory.need(params, scratch).values()))} ...")
    with allocating(step_memory.need(params, scratch)):
        memory = step_memory.make(params, scratch, threads, setting.seed)
    return Lab(setting, fitting, memory, missing)


def _able(setting: Setting, threads: int, missing: dict[str, str], say: Callable[[str], None]) -> dict[str, Contender]:
    """Those that can run and compute the right thing; the others go to `missing`."""
    found = {}
    for name, contender in setting.contenders.items():
        say(f"Checking {name} ...")
        try:
            with step_threads.everywhere(threads):
                check(name, contender, threads)
        except MissingPeer as error:
            missing[name] = str(error)
        else:
            found[name] = contender
    return found


def _fitting(able: Mapping[str, Contender], params: int, missing: dict[str, str]) -> dict[str, Contender]:
    """Those whose memory fits, too."""
    memory = hostmem.available_host_bytes()
    found = {}
    for name, contender in able.items():
        needed = sum(step_memory.need(params, contender.scratch_bytes).values())
        if contender.scratch_bytes and memory.known and needed > memory.available:
            cause = f"with {params} parameters it takes {as_bytes(needed)} of host memory, of which {memory.source} "
            cause += f"leaves {as_bytes(memory.available)}"
            missing[name] = explain("contender", name, cause, "Give fewer --params, or end other programs")
        else:
            found[name] = contender
    return found


def _rooflines(memory: Memory, threads: int) -> dict[str, _Turn]:
    def pattern(kernel: Callable[..., None]) -> Callable[[], None]:
        return lambda: kernel(memory.state, memory.grad, memory.weight, threads=threads)

    turns = {RMW: _Turn(_nothing, lambda: roofline.read_modify_write(memory.state, threads=threads), RMW_BYTES)}
    return {**turns, **{name: _Turn(_nothing, pattern(kernel), PATTERN_BYTES) for name, kernel in PATTERNS.items()}}


def _nothing() -> None:
    pass


def _take_turns(turns: Mapping[str, _Turn], rounds: int, say: Callable[[str], None]) -> None:
    names = list(turns)
    for number in range(rounds):
        say(f"Round {number + 1} of {rounds} ...")
        first = number % len(names)
        for name in names[first:] + names[:first]:  # nobody always follows the same one
            turns[name].take()
