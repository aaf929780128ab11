"""The order in which a step's buckets are copied, stepped and copied back. One object per schedule.

A schedule's `run` is called on the step's thread with the buckets in the order forward needs them; it calls
`posted(k, event)` once bucket k's weights are on their way to the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hf_offload.engine.stats import StepRecord
from hf_offload.engine.tensors import NUMPY_WIRE
from hf_offload.engine.work import BucketWork
from hf_offload.kernels import cpu
from hf_offload.transport import Event, Transport

Posted = Callable[[int, Event], None]


class Schedule(Protocol):
    """How the phases `d2h`, `host_step` and `h2d` of a step's buckets follow each other."""

    name: str
    returns_at_once: bool
    """Whether `step()` returns while the buckets are still under way."""

    def run(self, stage: Stages, works: Sequence[BucketWork], mark: object, posted: Posted) -> None: ...


class Stages:
    """The three phases of one bucket over a transport. What each slot holds, and until when, is decided here.

    A down slot is the copy's until its event, then the host step's until the kernel returns. An up slot is the
    kernel's while it writes, then the copy's until its event.
    """

    def __init__(self, transport: Transport, threads: int, timeout_s: float) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self.moved = 0
        """Copies and kernels that have ended: a wait goes on as long as this does."""
        self._threads = threads
        self._up_busy: dict[int, Event] = {}  # by slot, the oldest copy first
        self.record: StepRecord = StepRecord(0)

    @property
    def slots(self) -> int:
        return len(self.transport.up)

    def d2h(self, work: BucketWork, slot: int, mark: object) -> Event:
        """Start the copy of a bucket's gradients into down slot `slot`."""
        return self.transport.to_host(work.gradient_segments(), slot, mark)

    def host_step(self, work: BucketWork, slot: int, arrived: Event) -> None:
        """Wait for the gradients in down slot `slot`, then step the bucket; its weights are left in up slot `slot`."""
        arrived.wait(self.timeout_s)
        self.moved += 1
        start, end = arrived.span()
        self.record.d2h += end - start
        self.record.d2h_bytes += arrived.nbytes
        work.check_gradients_unchanged()
        work.let_go_of_gradients()
        self._release(slot)
        bucket, arena = work.bucket, work.work.arena
        at = slice(bucket.start, bucket.start + bucket.numel)
        kind, n = NUMPY_WIRE[bucket.wire], bucket.numel
        begin = time.perf_counter()
        cpu.adam_step(
            arena.master[at],
            arena.exp_avg[at],
            arena.exp_avg_sq[at],
            self.transport.down[slot].view(kind)[:n],
            self.transport.up[slot].view(kind)[:n],
            arena.bucket_bounds[work.index],
            work.coefficients(),
            wire=bucket.wire,
            threads=self._threads,
        )
        self.record.host_step += time.perf_counter() - begin
        self.moved += 1

    def h2d(self, work: BucketWork, slot: int, mark: object) -> Event:
        """Start the copy of a bucket's weights from up slot `slot` to the device."""
        work.check_weights_unwritten()
        event = self.transport.to_device(work.weight_segments(), slot, mark)
        self._up_busy[slot] = event
        return event

    def drain(self) -> None:
        """Wait until every up slot is free: all weights have arrived."""
        for slot in list(self._up_busy):
            self._release(slot)

    def _release(self, slot: int) -> None:
        event = self._up_busy.pop(slot, None)
        if event is not None:
            event.wait(self.timeout_s)
            self.moved += 1
            start, end = event.span()
            self.record.h2d += end - start
            self.record.h2d_bytes += event.nbytes


class InOrder:
    """Copy, step, copy back, one bucket after the other, before `step()` returns: the reference."""

    name = "in_order"
    returns_at_once = False

    def run(self, stage: Stages, works: Sequence[BucketWork], mark: object, posted: Posted) -> None:
        for k, work in enumerate(works):
            stage.host_step(work, 0, stage.d2h(work, 0, mark))
            event = stage.h2d(work, 0, mark)
            event.wait(stage.timeout_s)
            posted(k, event)


class Overlapped:
    """While bucket k+1 comes down and bucket k is stepped, bucket k-1 flies back and the next forward runs."""

    name = "overlapped"
    returns_at_once = True

    def run(self, stage: Stages, works: Sequence[BucketWork], mark: object, posted: Posted) -> None:
        ring = stage.slots
        coming: list[Event] = []
        for k, work in enumerate(works):
            while len(coming) < min(len(works), k + ring):  # slot of bucket k + ring is free once k is stepped
                ahead = len(coming)
                coming.append(stage.d2h(works[ahead], ahead % ring, mark))
            stage.host_step(work, k % ring, coming[k])
            posted(k, stage.h2d(work, k % ring, mark))


SCHEDULES: dict[str, Schedule] = {s.name: s for s in (InOrder(), Overlapped())}
