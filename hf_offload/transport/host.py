"""`HostTransport`: the transport without a GPU. Device memory is ordinary memory; the copies are real and asynchronous.

Two worker threads stand for the two directions of a link, so order and ownership are exercised as on a GPU. Bandwidth
and latency can be emulated ("what would this schedule do on a 16 GB/s link?") and tests can inject delays. Where
neither is, a small copy that its caller would do nothing but wait for is made by the caller.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_offload.errors import TransportError, WaitTimeout, explain
from hf_offload.kernels import cpu
from hf_offload.transport.base import Event, Segment, Segments, total_bytes
from hf_offload.transport.bell import Bell
from hf_offload.transport.threads import Worker

if TYPE_CHECKING:
    from hf_offload.transport.in_place import DeviceAdam

logger = logging.getLogger(__name__)

_ALIGN = 64  # bytes: one cache line, and the widest vector register
PART_BYTES = 1 << 20
"""What is moved in one go of gradients: about 0.1 ms of a core."""
AT_ONCE_BYTES = 1 << 18
"""To hand a copy to another thread and to hear of its end takes as long as to move so many bytes."""
LET_PASS_S = 20e-6
"""Seconds between two looks whether weights have passed."""

Delay = Callable[[str, int], float]
"""`delay(direction, nbytes) -> seconds` to sleep before a copy; direction is "d2h" or "h2d"."""


Runs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Addresses to copy to, addresses to copy from, bytes: int64[n] each."""


class _Mover:
    """What moves the bytes of both directions: one copy at a time, since each takes one of the host's cores, which a
    GPU's copy engines would not. Weights go first, because the next forward waits for them: gradients move in parts,
    and between two parts they let weights pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the lanes' and the step's threads take it: no KeyboardInterrupt comes
        self._weights_wait = False

    def up(self, runs: Runs) -> None:
        """Copy weights. Without the GIL."""
        self._weights_wait = True
        try:
            with self._lock:
                cpu.move(*runs)
        finally:
            self._weights_wait = False

    def down(self, runs: Runs) -> None:
        """Copy gradients: the same."""
        for part in _parts(runs):
            while self._weights_wait:
                time.sleep(LET_PASS_S)
            with self._lock:
                cpu.move(*part)


def _parts(runs: Runs) -> Iterator[Runs]:
    """Runs cut to at most PART_BYTES each, those of about as much together: what is moved in one go."""
    to, source, nbytes = runs
    if nbytes.sum() <= PART_BYTES:
        yield runs
        return
    counts = np.maximum(-(-nbytes // PART_BYTES), 1)
    first = np.cumsum(counts) - counts
    at = (np.arange(counts.sum()) - np.repeat(first, counts)) * PART_BYTES
    to, source = np.repeat(to, counts) + at, np.repeat(source, counts) + at
    nbytes = np.minimum(np.repeat(nbytes, counts) - at, PART_BYTES)
    cuts = np.flatnonzero(np.diff(np.cumsum(nbytes) // PART_BYTES)) + 1
    yield from zip(np.split(to, cuts), np.split(source, cuts), np.split(nbytes, cuts))


class HostCopy:
    """The `Event` of one copy of a `HostTransport`.

    Args:
        mover: moves the bytes.
        what: its name in messages.
        segments: device memory; held, with its owners, until the copy has ended.
        ring: the slab's slots; held as well.
        slot: which of them it is to or from.
        after: not before this time on `time.perf_counter`'s clock, seconds.
        down: whether it is from the device.
        alive: whether the thread that is to run it lives.
    """

    __slots__ = (
        "_after", "_alive", "_bell", "_down", "_ended", "_error", "_held", "_mover", "_slot", "_span", "nbytes", "what",
    )  # fmt: skip

    def __init__(
        self, mover: _Mover, what: str, segments: Sequence[Segment], ring: Sequence[np.ndarray], slot: int,
        after: float, down: bool, alive: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._mover = mover
        self._alive = alive
        self.what = what
        self.nbytes = total_bytes(segments)
        self._held: tuple[Sequence[Segment], Sequence[np.ndarray]] | None = (segments, ring)
        self._slot = slot
        self._after = after
        self._down = down
        self._bell = Bell()
        self._ended = False
        self._error: BaseException | None = None
        self._span = (0.0, 0.0)

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout_s: float) -> None:
        if not self._bell.wait(self.done, timeout_s, alive=self._alive):
            if not self._alive():
                raise TransportError(f"{self.what} failed: the thread that was to make it has died")
            raise WaitTimeout(
                explain(
                    "timeout_s", timeout_s, f"{self.what} did not end in time", "Raise timeout_s if it is only slow"
                )
            )
        if self._error is not None:
            raise TransportError(f"{self.what} failed: {self._error}") from self._error

    def span(self) -> tuple[float, float]:
        return self._span

    def is_early(self) -> bool:
        """Whether it would have to wait for an emulated device."""
        return self._after > time.perf_counter()

    def run(self, seconds: float, moving: float) -> float:
        """Move the bytes so that they arrive `seconds` from now at the earliest, and not before.

        Args:
            seconds: what an emulated link takes; 0 for none.
            moving: what the move itself is expected to take of that.

        Returns:
            The seconds the move itself took.
        """
        start = max(time.perf_counter(), self._after)
        sleep_until(start + seconds - moving)
        begin = time.perf_counter()
        self._move()
        took = time.perf_counter() - begin
        sleep_until(start + seconds)
        self._span = (start, time.perf_counter())
        self.finish(None)
        return took

    def _move(self) -> None:
        assert self._held is not None
        segments, ring = self._held
        base = ring[self._slot].ctypes.data
        device = Segments.of(segments)
        there, here, nbytes = device.pointers, device.offsets + base, device.nbytes
        if self._down:
            self._mover.down((here, there, nbytes))
        else:
            self._mover.up((there, here, nbytes))

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._held = None
        self._ended = True
        self._bell.ring()


class _Lane(Worker):
    """One direction of the link: runs its copies in the order they came."""

    def __init__(self, direction: str, link_gb_s: float | None, link_latency_us: float, delay: Delay | None) -> None:
        super().__init__(direction)
        self._direction = direction
        self._seconds_per_byte = 0.0 if link_gb_s is None else 1.0 / (link_gb_s * 1e9)
        self._latency_s = link_latency_us * 1e-6
        self._moving_per_byte = 0.0  # seconds, as the last copy showed
        self._delay = delay
        self._jobs: queue.SimpleQueue[HostCopy | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # only threads take it that no KeyboardInterrupt reaches
        self._unfinished: deque[HostCopy] = deque()  # as many as there are: those of two threads may stand in turn
        self._closed = False
        self._served = False
        self._broken: BaseException | None = None

    def submit(self, copy: HostCopy, awaited: bool) -> HostCopy:
        if os.getpid() != self._pid:
            raise TransportError(
                f"{copy.what}: this process was forked off, and the threads that copy live in its parent only. Make a "
                "new optimizer here."
            )
        if self._closed:
            raise TransportError(f"{copy.what}: the transport is closed. Make a new optimizer.")
        if awaited and self._made_at_once(copy):
            return copy
        self._unfinished.append(copy)
        self._jobs.put(copy)
        if self._served:  # closed meanwhile: the thread may have looked through the queue for the last time
            self._fail_rest()
        return copy

    def stop(self) -> None:
        self._broken = self._broken or TransportError("the transport was closed")
        self._closed = True
        self._jobs.put(None)

    def work(self) -> None:
        try:
            while (copy := self._jobs.get()) is not None:
                with self._turn:
                    self._carry_out(copy)
                self._unfinished.popleft()
                del copy  # it would be kept while the next one is waited for
        finally:  # whatever ended it: nobody waits for copies that nobody makes
            self._broken = self._broken or TransportError("the thread that copies has died")
            self._served = True
            self._fail_rest()

    def _made_at_once(self, copy: HostCopy) -> bool:
        """Carry out a small copy here and now, on the calling thread, where none before it is under way."""
        slow = self._delay is not None or self._latency_s or self._seconds_per_byte or copy.is_early()
        if slow or copy.nbytes > AT_ONCE_BYTES:
            return False
        if not self._turn.acquire(blocking=False):  # one is under way, and may be stuck: who waits has a time limit
            return False
        try:
            if self._unfinished:
                return False
            self._carry_out(copy)
        finally:
            self._turn.release()
        return True

    def _carry_out(self, copy: HostCopy) -> None:
        if self._broken is not None:
            copy.finish(self._broken)
            return
        try:
            if self._delay is not None:
                time.sleep(self._delay(self._direction, copy.nbytes))
            self._copy(copy)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # their locals hold the device memory
            self._broken = error  # later copies would go out of order: they fail too
            copy.finish(error)

    def _fail_rest(self) -> None:
        while True:
            try:
                copy = self._jobs.get_nowait()
            except queue.Empty:
                return
            if copy is not None:
                copy.finish(self._broken)

    def _copy(self, copy: HostCopy) -> None:
        seconds = self._latency_s + copy.nbytes * self._seconds_per_byte
        took = copy.run(seconds, copy.nbytes * self._moving_per_byte)
        self._moving_per_byte = took / copy.nbytes if copy.nbytes else self._moving_per_byte


class HostTransport:
    """Real copies on two worker threads between memory blocks of one process; small ones that the step's thread waits
    for are made by it.

    Args:
        slots: slots in each of the two rings.
        slot_bytes: bytes of one slot, rounded up to whole cache lines of 64.
        link_gb_s: emulated speed of each direction, 1e9 bytes/s; None: as fast as memory.
        link_latency_us: emulated latency added to each copy, microseconds.
        timeout_s: seconds that `close` waits for the copies under way.
        delay: for tests: seconds to sleep before each copy.

    Attributes:
        clock: when an emulated device will have done all that it was given until now, seconds on
            `time.perf_counter`'s clock. Without one it has at once: a CPU does what it is asked for right away.

    Raises:
        TransportError: the system gives no thread; nothing is left over.
    """

    name = "host"

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        *,
        link_gb_s: float | None = None,
        link_latency_us: float = 0.0,
        timeout_s: float = 600.0,
        delay: Delay | None = None,
    ) -> None:
        stride = -(-slot_bytes // _ALIGN) * _ALIGN
        self.pinned_bytes = 2 * slots * stride
        slab = _aligned(self.pinned_bytes)
        views = [slab[i * stride : (i + 1) * stride] for i in range(2 * slots)]
        self.down: Sequence[np.ndarray] = views[:slots]
        self.up: Sequence[np.ndarray] = views[slots:]
        self.clock: Callable[[], float] = float
        self._mover = _Mover()
        self._lanes = [_Lane(d, link_gb_s, link_latency_us, delay) for d in ("d2h", "h2d")]
        self._pid = os.getpid()
        self._timeout_s = timeout_s
        self._finalizer = weakref.finalize(self, _stop, self._lanes, self._pid, timeout_s)
        try:
            for lane in self._lanes:  # last: an interrupt in here leaves no thread that nobody ends
                lane.begin()
        except TransportError:
            self.close()
            raise

    def mark(self) -> float:
        return self.clock()

    def here(self) -> int:
        return 0

    def to_host(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        what = "the copy of gradients to the host"
        return self._submit(self._lanes[0], what, segments, self.down, slot, after, awaited)

    def to_device(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        what = "the copy of weights to the device"
        return self._submit(self._lanes[1], what, segments, self.up, slot, after, awaited)

    def join(self, event: Event, timeout_s: float) -> None:
        event.wait(timeout_s)

    def adam(self, threads: int) -> DeviceAdam:
        from hf_offload.transport.in_place import HostAdam  # imports numba

        return HostAdam(threads)

    def close(self) -> None:
        """A copy that does not end in `timeout_s` is told of in the log, and keeps its memory."""
        _stop(self._lanes, self._pid, self._timeout_s)
        self._finalizer.detach()
        self.down = self.up = ()
        self.pinned_bytes = 0

    def _submit(
        self, lane: _Lane, what: str, segments: Sequence[Segment], ring: Sequence[np.ndarray], slot: int, after: Any,
        awaited: bool,
    ) -> Event:  # fmt: skip
        if not ring:
            raise TransportError("the transport is closed: its threads and its memory are gone. Make a new optimizer.")
        down = lane is self._lanes[0]
        copy = HostCopy(self._mover, what, segments, ring, slot, after or 0.0, down=down, alive=lane.lives)
        return lane.submit(copy, awaited)


def sleep_until(when: float) -> None:
    """`when`: seconds on `time.perf_counter`'s clock. If that is past, not at all: even sleep(0) takes 0.1 ms."""
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


def _stop(lanes: list[_Lane], pid: int, timeout_s: float) -> None:
    if os.getpid() != pid:
        return  # a forked child has the objects but not the threads
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        if not lane.end(timeout_s):
            logger.error("hf_offload: the copy under way on %s did not end in %s s.", lane.name, timeout_s)
