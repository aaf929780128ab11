"""The figures of a step, all measured: what `optimizer.stats()` returns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hf_offload.engine.ranges import NO_RANGES, Ranges
from hf_offload.timeline import PHASES, NoTimeline, Timeline

NO_TIMELINE = NoTimeline()
COMPUTE = "forward and backward"


@dataclass(frozen=True)
class Stats:
    """Figures of the last finished step; units as in the names: bytes, bytes a step, seconds a step, counts.

    Attributes:
        params: trainable parameters with state, elements.
        wire_dtype: bfloat16, float16, float32 or mixed.
        schedule: what ran: in_order, overlapped or delayed, with +streamed and +speculative where they apply.
        transport: name of the transport.
        device_bytes: weights, gradients, optimizer: peak on the device, of trainable parameters. Streamed gradients
            are counted from the end of their accumulation until their copies have ended. optimizer: state that stays.
        host_bytes: master, exp_avg, exp_avg_sq, pinned, store, shadow.
        d2h_bytes, h2d_bytes: bytes a step, counted at the copies.
        seconds: busy seconds of each phase: compute (from the step before to this one, less waits; the device's own
            step of state that stays there is part of it), d2h, host_step, h2d, wait.
        exposed_seconds: time the training thread waited for the engine: in `step()`, in hooks, in waits for all.
        hidden_fraction: 1 - exposed / (d2h + host_step + h2d), between 0 and 1.
        step: the number of the step the figures are of, from 1; 0 before the first has finished.
        steps, skipped_steps: since construction.
        speculation_hits, speculation_misses: buckets stepped during backward on a guess that `step()` accepted, or
            dropped, since construction.
    """

    params: int
    wire_dtype: str
    schedule: str
    transport: str
    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    d2h_bytes: int
    h2d_bytes: int
    seconds: Mapping[str, float]
    exposed_seconds: float
    hidden_fraction: float
    step: int
    steps: int
    skipped_steps: int
    speculation_hits: int = 0
    speculation_misses: int = 0


class StepRecord:
    """The figures of one step while it runs.

    `d2h`, `host_step` and `h2d` are added to by the step's thread alone, the rest by the training thread. Whatever is
    added goes to the timeline as well.
    """

    def __init__(self, step: int, timeline: Timeline | NoTimeline = NO_TIMELINE, **seconds: float) -> None:
        self.step = step
        self.timeline = timeline
        self._seconds = {**dict.fromkeys(PHASES, 0.0), **seconds}
        self.d2h_bytes = 0
        self.h2d_bytes = 0
        self.finished = False

    @property
    def exposed(self) -> float:
        return self._seconds["wait"]

    def add(self, phase: str, name: str, start: float, end: float) -> None:
        """Phase `phase` was busy from `start` to `end`, seconds on `time.perf_counter`'s clock."""
        self._seconds[phase] += end - start
        self.timeline.add(phase, name, start, end, self.step)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """`phase` was busy for `seconds` at a time that the timeline knows already."""
        self._seconds[phase] += seconds

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def hidden_fraction(self) -> float:
        busy = sum(self._seconds[phase] for phase in ("d2h", "host_step", "h2d"))
        return min(1.0, max(0.0, 1.0 - self.exposed / busy)) if busy > 0 else 0.0


class Meter:
    """Keeps the record of the running step, of the one before it, and of the one whose gradients are arriving."""

    def __init__(self, timeline: Timeline | NoTimeline = NO_TIMELINE, ranges: Ranges = NO_RANGES) -> None:
        self.timeline = timeline
        self._ranges = ranges
        self._range = ranges.start("compute", COMPUTE)
        self.current: StepRecord | None = None
        self.upcoming = StepRecord(1, timeline)
        self._previous: StepRecord | None = None
        self._compute_from = time.perf_counter()
        self._in_wait = False

    def begin(self, step: int) -> StepRecord:
        """A new step starts: the time since the last one, less the waits in it, was compute."""
        if self.current is None or self.current.finished:  # else an interrupt kept that step from being taken
            self._previous = self.current
        self._computed(time.perf_counter())
        self.current, self.upcoming = self.upcoming, StepRecord(step + 1, self.timeline)
        self.current.step = step
        return self.current

    def end(self) -> None:
        """`step()` returns to the training loop."""
        self._compute_from = time.perf_counter()

    def record_to(self, timeline: Timeline | NoTimeline) -> None:
        """From now on spans go to `timeline`."""
        self.timeline = self.upcoming.timeline = timeline
        if self.current is not None:
            self.current.timeline = timeline

    @contextmanager
    def waiting(self, name: str = "weights") -> Iterator[None]:
        """Time spent in here is exposed; nested uses count once."""
        if self._in_wait:
            yield
            return
        start = time.perf_counter()
        self._computed(start)
        self._next_range("wait", name)
        try:
            self._in_wait = True
            yield
        finally:
            self._in_wait = False
            end = time.perf_counter()
            self._compute_from = end
            self._next_range("compute", COMPUTE)
            if self.current is not None:
                self.current.add("wait", name, start, end)

    def close(self) -> None:
        """Write the timeline, and show no range any more."""
        self.timeline.write()
        self._ranges.end(self._range)
        self._ranges, self._range = NO_RANGES, 0

    def last_finished(self) -> StepRecord | None:
        """The newest step whose weights are all on the device."""
        if self.current is not None and self.current.finished:
            return self.current
        return self._previous

    def _computed(self, now: float) -> None:
        """Between two waits the training thread computed, or had the device compute, for the step to come."""
        self.upcoming.add("compute", COMPUTE, self._compute_from, now)
        self._compute_from = now

    def _next_range(self, phase: str, name: str) -> None:
        self._ranges.end(self._range)
        self._range = self._ranges.start(phase, name)
