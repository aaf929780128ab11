"""The figures of a step, all measured: what `optimizer.stats()` returns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

PHASES = ("compute", "d2h", "host_step", "h2d", "wait")


@dataclass(frozen=True)
class Stats:
    """Figures of the last finished step; units as in the names: bytes, bytes a step, seconds a step, counts.

    Attributes:
        params: trainable parameters with state, elements.
        wire_dtype: bfloat16, float16, float32 or mixed.
        schedule: what ran: in_order or overlapped.
        transport: name of the transport.
        device_bytes: weights, gradients, optimizer: peak on the device, of trainable parameters.
        host_bytes: master, exp_avg, exp_avg_sq, pinned, store, shadow.
        d2h_bytes, h2d_bytes: bytes a step, counted at the copies.
        seconds: busy seconds of each phase: compute (from the step before to this one, less waits), d2h, host_step,
            h2d, wait.
        exposed_seconds: time the training thread waited for the engine: in `step()`, in hooks, in waits for all.
        hidden_fraction: 1 - exposed / (d2h + host_step + h2d), between 0 and 1.
        step: the number of the step the figures are of, from 1; 0 before the first has finished.
        steps, skipped_steps: since construction.
        speculation_hits, speculation_misses: since construction.
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


@dataclass
class StepRecord:
    """The figures of one step while it runs. `d2h`, `host_step` and `h2d` are written by the step's thread alone,
    the rest by the training thread."""

    step: int
    compute: float = 0.0
    exposed: float = 0.0
    d2h: float = 0.0
    host_step: float = 0.0
    h2d: float = 0.0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    finished: bool = False

    def seconds(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "d2h": self.d2h,
            "host_step": self.host_step,
            "h2d": self.h2d,
            "wait": self.exposed,
        }

    def hidden_fraction(self) -> float:
        busy = self.d2h + self.host_step + self.h2d
        return min(1.0, max(0.0, 1.0 - self.exposed / busy)) if busy > 0 else 0.0


class Meter:
    """Keeps the record of the running step and of the one before it."""

    def __init__(self) -> None:
        self.current: StepRecord | None = None
        self._previous: StepRecord | None = None
        self._compute_from = time.perf_counter()
        self._waited_since = 0.0
        self._in_wait = False

    def begin(self, step: int) -> StepRecord:
        """A new step starts: the time since the last one, less the waits in it, was compute."""
        now = time.perf_counter()
        if self.current is None or self.current.finished:  # else an interrupt kept that step from being taken
            self._previous = self.current
        self.current = StepRecord(step)
        self.current.compute = max(0.0, now - self._compute_from - self._waited_since)
        return self.current

    def end(self) -> None:
        """`step()` returns to the training loop."""
        self._compute_from = time.perf_counter()
        self._waited_since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in here is exposed; nested uses count once."""
        if self._in_wait:
            yield
            return
        start = time.perf_counter()
        try:
            self._in_wait = True
            yield
        finally:
            self._in_wait = False
            spent = time.perf_counter() - start
            self._waited_since += spent
            if self.current is not None:
                self.current.exposed += spent

    def last_finished(self) -> StepRecord | None:
        """The newest step whose weights are all on the device."""
        if self.current is not None and self.current.finished:
            return self.current
        return self._previous
