"""One direction of the link to a CUDA device: a stream, the copies under way on it, and who keeps what alive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hf_offload.errors import TransportError, WaitTimeout
from hf_offload.transport.base import Segment, total_bytes
from hf_offload.transport.cuda_device import CudaDevice, Mark, as_ours, too_late, until
from hf_offload.transport.cuda_pack import Packer

T = TypeVar("T")


class CudaCopy:
    """The `Event` of one copy: two CUDA events around it. Written by its lane alone, under the lane's lock.

    The owners are held until somebody sees that the copy has ended: `wait`, `done`, or the next copy of the lane.
    """

    __slots__ = ("_lane", "asked", "ended", "error", "events", "nbytes", "owners", "recorded", "when")

    def __init__(self, lane: Lane, owners: Sequence[Segment]) -> None:
        self._lane = lane
        self.nbytes = total_bytes(owners)
        self.owners: Sequence[Segment] = owners
        self.asked = time.perf_counter()
        self.events: tuple[int, ...] = ()  # start and end while it is under way
        self.recorded = False  # whether all of it was handed to the device
        self.ended = False
        self.error: BaseException | None = None
        self.when = (0.0, 0.0)

    def done(self) -> bool:
        return self._lane.has_ended(self)

    def wait(self, timeout_s: float) -> None:
        if not until(self.done, timeout_s):
            raise WaitTimeout(too_late(self._lane.what, timeout_s))
        if self.error is not None:
            raise TransportError(f"{self._lane.what} failed: {self.error}") from self.error

    def span(self) -> tuple[float, float]:
        """To about 20 microseconds: a reading of the host's clock next to an event on the idle stream ties the two
        clocks together anew each time the lane was idle. The length is good to one microsecond."""
        return self.when

    def join(self) -> None:
        """Let the calling thread's current stream wait for it. Raises TransportError where it has failed."""
        self._lane.join(self)
        if self.error is not None:
            self.wait(0.0)


class Lane:
    """Copies of one direction, in the order they are asked for. Any thread may ask for one, and for how it went.

    Args:
        what: the name of its copies in messages.
        up: to the device.
    """

    def __init__(self, device: CudaDevice, packer: Packer, what: str, up: bool) -> None:
        self.what = what
        self._device = device
        self._packer = packer
        self._up = up
        self._stream: Any = device.stream()
        self._flight: deque[CudaCopy] = deque()
        self._anchor = device.timed_event()  # reached at `_anchored` of the host's clock
        self._anchored = 0.0
        self._lock = threading.Lock()
        self._holder = 0  # the thread inside, 0: none
        self._broken: BaseException | None = None
        self._closed = False

    @property
    def entered(self) -> bool:
        """Whether the calling thread is inside one of these methods (the garbage collector may call from there)."""
        return self._holder == threading.get_ident()

    def copy(self, segments: Sequence[Segment], slot: int, after: Mark | None) -> CudaCopy:
        """Start a copy between `segments` and the slot at host address `slot`, after `after`. Where the device fails it
        is the copy that tells.

        Raises:
            TransportError: the lane is closed.
        """
        copy = CudaCopy(self, segments)
        self._inside(lambda: self._start(copy, segments, slot, after))
        return copy

    def has_ended(self, copy: CudaCopy) -> bool:
        if not copy.ended:
            self._device.check_process(self.what)
            self._inside(self._settle)
        return copy.ended

    def join(self, copy: CudaCopy) -> None:
        """Let the calling thread's current stream wait for the copy."""

        def hold() -> None:
            if not copy.ended:
                self._device.hold(self._device.current_stream(), copy.events[1])

        self._inside(hold)

    def mark(self) -> Mark:
        def mark() -> Mark:
            self._check_open()
            return self._device.mark()

        return self._inside(mark)

    def shut(self) -> None:
        """Take no more copies."""

        def shut() -> None:
            self._closed = True

        self._inside(shut)

    def idle(self) -> bool:
        """Whether the device has finished all that was asked of it, failed copies included."""

        def idle() -> bool:
            try:
                return self._stream is None or self._device.idle(self._stream.ptr)
            except Exception:
                return True  # the device failed: nothing runs there any more

        return self._inside(idle)

    def close(self) -> None:
        """Let go of everything. The lane must be shut and idle."""

        def close() -> None:
            self._settle()
            for copy in self._flight:
                _fail(copy, TransportError("the transport was closed"))
                copy.owners = ()
            self._flight.clear()
            self._stream = None

        self._inside(close)

    def _inside(self, do: Callable[[], T]) -> T:
        """No context manager, nor more than a call in the body: an interrupt in between would leave the lock held."""
        with self._lock:
            return self._locked(do)

    def _locked(self, do: Callable[[], T]) -> T:
        before = None
        try:
            self._holder = threading.get_ident()
            before = self._device.enter()
            return do()
        finally:
            self._holder = 0
            self._device.leave(before)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"{self.what}: the transport is closed. Make a new optimizer.")

    def _start(self, copy: CudaCopy, segments: Sequence[Segment], slot: int, after: Mark | None) -> None:
        self._check_open()
        self._settle()
        if self._broken is not None:
            copy.owners = ()
            _fail(copy, self._broken)
            return
        self._flight.append(copy)  # from here on its owners live, wherever an interrupt hits
        try:
            self._enqueue(copy, segments, slot, after)
        except Exception as error:
            self._broken = _bare(as_ours(error, self.what))
            _fail(copy, self._broken)

    def _enqueue(self, copy: CudaCopy, segments: Sequence[Segment], slot: int, after: Mark | None) -> None:
        device, stream = self._device, self._stream.ptr
        if len(self._flight) == 1 or self._anchored == 0.0:  # idle: an event is reached as soon as it is recorded
            device.record(self._anchor, stream)
            self._anchored = time.perf_counter()
        copy.events = (device.timed_event(), device.timed_event())
        if after is not None:
            device.hold(stream, after.event)
        device.record(copy.events[0], stream)
        single, packed = self._packer.split(segments)
        one = device.up if self._up else device.down
        for s in single:
            one(slot + s.offset, s.pointer, s.nbytes, stream)
        self._packer.move(self._stream, packed, slot, self._up)
        device.record(copy.events[1], stream)
        copy.recorded = True

    def _settle(self) -> None:
        """Note every copy that has ended, and let go of what it held. One that Ctrl-C cut short ends with the next one
        behind it, or at close; so nothing here minds being cut short and done again."""
        try:
            while (copy := self._oldest()) is not None and self._device.reached(copy.events[1]):
                self._note_span(copy)
                while self._flight[0] is not copy:
                    _finish(self._flight[0], self._device)
                    self._flight.popleft()
                _finish(copy, self._device)
                self._flight.popleft()
        except Exception as error:  # the device failed, and with it all that was under way
            self._broken = self._broken or _bare(as_ours(error, self.what))
            for each in self._flight:
                _fail(each, self._broken)

    def _oldest(self) -> CudaCopy | None:
        return next((c for c in self._flight if c.recorded), None)

    def _note_span(self, copy: CudaCopy) -> None:
        start, end = (self._anchored + self._device.seconds(self._anchor, e) for e in copy.events)
        last = min(end, time.perf_counter())
        copy.when = (max(copy.asked, min(start, last)), last)


def _finish(copy: CudaCopy, device: CudaDevice) -> None:
    copy.ended = True
    copy.recorded = False
    copy.owners = ()
    events, copy.events = copy.events, ()
    for event in events:
        device.give_timed(event)


def _fail(copy: CudaCopy, error: BaseException) -> None:
    """Its owners stay with it until close: who knows what the device still does."""
    if not copy.ended:
        copy.recorded = False
        copy.error = error
        copy.ended = True


def _bare(error: BaseException) -> BaseException:
    """Without its traceback, whose frames hold the owners."""
    error.__traceback__ = None
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None
    return error
