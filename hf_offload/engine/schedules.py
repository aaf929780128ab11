"""The order in which a step's buckets are copied, stepped and copied back. One object per schedule.

A schedule's `run` is called on the step's thread with the buckets in the order forward needs them; it calls
`posted(k, event)` once the weights of delivered bucket k are on their way to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from hf_offload.config import OffloadConfig
from hf_offload.engine.plan import Bucket
from hf_offload.engine.ranges import NO_RANGES, Ranges
from hf_offload.engine.speculation import Speculation
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.tensors import NUMPY_WIRE
from hf_offload.engine.work import BucketWork, StepWork
from hf_offload.kernels import cpu
from hf_offload.transport import Event, Transport

Posted = Callable[[int, Event], None]


class Begun(NamedTuple):
    """Work of the host that has begun: its range, and when, seconds on `time.perf_counter`'s clock."""

    shown: int
    at: float


class Schedule(Protocol):
    """How the phases `d2h`, `host_step` and `h2d` of a step's buckets follow each other."""

    name: str
    returns_at_once: bool
    """Whether `step()` returns while the buckets are still under way."""

    def run(self, stage: Stages, step: StepWork, mark: object, posted: Posted) -> None: ...


class Stages:
    """The three phases of one bucket over a transport. What each slot holds, and until when, is decided here.

    A down slot is the copy's until its event, then the host step's until the kernel returns. An up slot is the
    kernel's while it writes, then the copy's until its event.
    """

    def __init__(self, transport: Transport, threads: int, timeout_s: float, ranges: Ranges = NO_RANGES) -> None:
        self.ranges = ranges
        self.transport = transport
        self.threads = threads
        self.timeout_s = timeout_s
        self.moved = 0
        """Copies and kernels that have ended: a wait goes on as long as this does."""
        self._up_busy: dict[int, tuple[Event, str, int]] = {}  # by slot, the oldest copy first
        self._down_ranges: dict[int, int] = {}
        self.record: StepRecord = StepRecord(0)

    @property
    def slots(self) -> int:
        """Slots in each ring."""
        return len(self.transport.up)

    def work(self, name: str) -> Begun:
        """The host begins to work on `name`."""
        return Begun(self.ranges.start("host_step", name), time.perf_counter())

    def down(self, slot: int, bucket: Bucket) -> np.ndarray:
        """wire[numel]: the gradients of `bucket` in down slot `slot`."""
        return self.transport.down[slot][: bucket.nbytes].view(NUMPY_WIRE[bucket.wire])

    def d2h(self, work: BucketWork, slot: int, mark: object, awaited: bool = False) -> Event:
        """Start the copy of a bucket's gradients into down slot `slot`; `awaited` as the transport's."""
        self._down_ranges[slot] = self.ranges.start("d2h", work.name)
        return self.transport.to_host(work.gradient_segments(), slot, mark, awaited=awaited)

    def arrived(self, event: Event, name: str, record: StepRecord, shown: int) -> None:
        """Wait for a copy of gradients; `shown`: its range."""
        event.wait(self.timeout_s)
        self.ranges.end(shown)
        self.moved += 1
        record.add("d2h", name, *event.span())
        record.d2h_bytes += event.nbytes

    def received(self, work: BucketWork, slot: int, event: Event) -> np.ndarray:
        """Wait for the gradients in down slot `slot`, and return them."""
        self.arrived(event, work.name, self.record, self._down_ranges.pop(slot, 0))
        work.check_gradients_unchanged()
        return self.down(slot, work.bucket)

    def host_step(self, work: BucketWork, grads: np.ndarray, weights: np.ndarray, held: str | None = None) -> None:
        """Step the bucket with `grads` (of format `held`; None: the wire's); its new weights go to `weights`."""
        arena = work.work.arena
        begun = self.work(work.name)
        arena.kind.step(arena.state_of(work.index), work.task(grads, weights, held, self.threads))
        self.worked(self.record, work.name, begun)

    def worked(self, record: StepRecord, name: str, begun: Begun) -> None:
        """The host has done what it began, for the step of `record`."""
        record.add("host_step", name, begun.at, time.perf_counter())
        self.ranges.end(begun.shown)
        self.moved += 1

    def room(self, work: BucketWork, slot: int) -> np.ndarray:
        """Wait until up slot `slot` is free, and return it: the bucket's new weights go there."""
        self._release(slot)
        return self.transport.up[slot][: work.bucket.nbytes].view(NUMPY_WIRE[work.bucket.wire])

    def h2d(self, work: BucketWork, slot: int, mark: object, awaited: bool = False) -> Event:
        """Start the copy of a bucket's weights from up slot `slot` to the device; `awaited` as the transport's."""
        work.check_weights_unwritten()
        shown = self.ranges.start("h2d", work.name)
        event = self.transport.to_device(work.weight_segments(), slot, mark, awaited=awaited)
        self._up_busy[slot] = event, work.name, shown
        return event

    def drain(self) -> None:
        """Wait until every up slot is free: all weights have arrived."""
        for slot in list(self._up_busy):
            self._release(slot)

    def _release(self, slot: int) -> None:
        event, name, shown = self._up_busy.pop(slot, (None, "", 0))
        if event is not None:
            event.wait(self.timeout_s)
            self.ranges.end(shown)
            self.moved += 1
            self.record.add("h2d", name, *event.span())
            self.record.h2d_bytes += event.nbytes


class InOrder:
    """Copy, step, copy back, one bucket after the other, before `step()` returns: the reference."""

    name = "in_order"
    returns_at_once = False

    def run(self, stage: Stages, step: StepWork, mark: object, posted: Posted) -> None:
        for k, work in enumerate(step.buckets):
            grads = stage.received(work, 0, stage.d2h(work, 0, mark, awaited=True))
            stage.host_step(work, grads, stage.room(work, 0))
            event = stage.h2d(work, 0, mark, awaited=True)
            event.wait(stage.timeout_s)
            posted(k, event)


class Overlapped:
    """While bucket k+1 comes down and bucket k is stepped, bucket k-1 flies back and the next forward runs."""

    name = "overlapped"
    returns_at_once = True

    def run(self, stage: Stages, step: StepWork, mark: object, posted: Posted) -> None:
        for k, work, grads in _coming_down(stage, step, mark):
            stage.host_step(work, grads, stage.room(work, k % stage.slots))
            posted(k, stage.h2d(work, k % stage.slots, mark))


class Delayed:
    """The weights of the step before go up; this step's are computed behind forward and backward. Not exact.

    Its own are computed from the masters once more when they go up: that costs the host 6 bytes a parameter, and saves
    keeping 2 more.
    """

    name = "delayed"
    returns_at_once = True

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def run(self, stage: Stages, step: StepWork, mark: object, posted: Posted) -> None:
        if step.delivered is step.buckets:  # one of the exact steps at the start
            Overlapped().run(stage, step, mark, posted)
            return
        for k, work in enumerate(step.delivered):
            room = stage.room(work, k % stage.slots)
            begun = stage.work(work.name)
            cpu.narrow(work.work.arena.state_of(work.index)[0], room, work.bucket.wire, stage.threads)
            stage.worked(stage.record, work.name, begun)
            posted(k, stage.h2d(work, k % stage.slots, mark))
        for _, work, grads in _coming_down(stage, step, mark):
            stage.host_step(work, grads, self._nowhere(work))

    def _nowhere(self, work: BucketWork) -> np.ndarray:
        """Where the kernel writes weights that nobody needs yet."""
        if self._scratch.size < work.bucket.nbytes:
            self._scratch = np.empty(work.bucket.nbytes, np.uint8)
        return self._scratch[: work.bucket.nbytes].view(NUMPY_WIRE[work.bucket.wire])


class FromStore:
    """The gradients have left during backward. Buckets guessed right have only their weights to send.

    Args:
        base: whose `returns_at_once` holds.
        speculation: what was stepped ahead, if anything ever is.
    """

    def __init__(self, base: InOrder | Overlapped, speculation: Speculation | None) -> None:
        self.name = f"{base.name}+streamed" + ("+speculative" if speculation else "")
        self.returns_at_once = base.returns_at_once
        self._speculation = speculation

    def run(self, stage: Stages, step: StepWork, mark: object, posted: Posted) -> None:
        for k, work in enumerate(step.buckets):
            self._step(stage, work, stage.room(work, k % stage.slots))
            posted(k, stage.h2d(work, k % stage.slots, mark))
        if self._speculation is not None:
            self._speculation.clear()

    def _step(self, stage: Stages, work: BucketWork, room: np.ndarray) -> None:
        guess = self._speculation.accept(work) if self._speculation is not None else None
        if guess is None:
            grads, held = work.stored_gradients()
            stage.host_step(work, grads, room, held)
        else:
            begun = stage.work(work.name)
            room[:] = guess.weights
            stage.record.add_seconds("host_step", guess.seconds)
            stage.worked(stage.record, work.name, begun)


def _coming_down(stage: Stages, step: StepWork, mark: object) -> Iterator[tuple[int, BucketWork, np.ndarray]]:
    """Each bucket with its gradients, while those of the next ones, as many as there are slots, come down."""
    works, ring = step.buckets, stage.slots
    coming: list[Event] = []
    for k, work in enumerate(works):
        while len(coming) < min(len(works), k + ring):  # slot of bucket k + ring is free once k is stepped
            ahead = len(coming)
            coming.append(stage.d2h(works[ahead], ahead % ring, mark))
        grads = stage.received(work, k % ring, coming[k])
        work.let_go_of_gradients()  # the training loop may have let go of them: their memory goes back to the device
        yield k, work, grads


def make_schedule(name: str, config: OffloadConfig, speculation: Speculation | None) -> Schedule:
    """The schedule `in_order`, `overlapped` or `delayed`, as the other settings change it."""
    if name == "delayed":
        return Delayed()
    base = InOrder() if name == "in_order" else Overlapped()
    return FromStore(base, speculation) if config.stream_gradients else base
