"""One CUDA device as a transport sees it: streams, reused events, waiting. CuPy is handed in, never imported here."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_offload.errors import TransportError, explain

_NOT_READY = 600  # cudaErrorNotReady
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_REFUSALS = (_NO_MEMORY, 304, 801)  # and cudaErrorOperatingSystem, cudaErrorNotSupported
_SHORTEST_S, _LONGEST_S = 30e-6, 500e-6


class DeviceMemoryError(TransportError):
    """The device has no memory left. accelerate's `auto_find_batch_size` knows it by its text and tries fewer rows."""


def as_ours(error: Exception, what: str) -> Exception:
    """CuPy's "out of memory", a MemoryError or a status, as the RuntimeError that torch would raise; else `error`."""
    if isinstance(error, MemoryError) or getattr(error, "status", None) == _NO_MEMORY:
        ours = DeviceMemoryError(
            f"CUDA out of memory. It ran out at {what} ({error}). Lower the batch size, or train fewer parameters."
        )
        ours.__cause__ = error
        return ours
    return error


def refuses_to_pin(error: Exception) -> bool:
    """Whether `CudaDevice.pin` failed because the system would not lock that much memory, and not the device."""
    return isinstance(error, MemoryError) or getattr(error, "status", None) in _REFUSALS


def until(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Look until `reached()`, asleep without the GIL in between; whether it was reached in time.

    CUDA's own blocking waits know no timeout and hear no Ctrl-C. Naps grow with the time waited, so that a look comes
    at most 6 % late.
    """
    since = time.monotonic()
    while not reached():
        waited = time.monotonic() - since
        if waited >= timeout_s:
            return reached()
        time.sleep(min(timeout_s - waited, max(_SHORTEST_S, min(waited / 16, _LONGEST_S))))
    return True


class Mark:
    """A point in a stream of the device. Its CUDA event is reused once nobody holds the mark."""

    __slots__ = ("_give", "event")

    def __init__(self, event: int, give: Callable[[int], None]) -> None:
        self._give = give
        self.event = event

    def __del__(self) -> None:
        if hasattr(self, "event"):  # Ctrl-C may have come before
            self._give(self.event)


class CudaDevice:
    """The few CUDA calls that a transport makes, each with the device current.

    Args:
        cupy: the CuPy module, or a stand-in.
        index: of the device, among those CUDA_VISIBLE_DEVICES leaves: torch's index.
        current_stream: the calling thread's current torch stream on that device, a cudaStream_t as int.
    """

    def __init__(self, cupy: Any, index: int, current_stream: Callable[[], int]) -> None:
        self.cupy = cupy
        self.index = index
        self.current_stream = current_stream
        self.events = 0
        """How many CUDA events were ever created."""
        self.closed = False
        self._runtime = cupy.cuda.runtime
        self._pid = os.getpid()
        self._timed: deque[int] = deque()
        self._plain: deque[int] = deque()
        self._all: list[int] = []

    def check_process(self, what: str) -> None:
        """Raises TransportError in a process that was forked off: CUDA does not work there."""
        if os.getpid() != self._pid:
            raise TransportError(
                f"{what}: this process was forked off, and CUDA works in its parent only. Make a new optimizer in a "
                "process that was started with 'spawn'."
            )

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device is the calling thread's current one inside."""
        before = self.enter()
        try:
            yield
        finally:
            self.leave(before)

    def enter(self) -> int | None:
        """Make the device the calling thread's current one: stream 0 means each device's own. Returns what was."""
        before = int(self._runtime.getDevice())
        if before == self.index:
            return None
        self._runtime.setDevice(self.index)
        return before

    def leave(self, before: int | None) -> None:
        """A thread of ours stays: going back to device 0, where it never was, would take some 500 MB of that one."""
        if before is not None and not threading.current_thread().name.startswith("hf_offload-"):
            self._runtime.setDevice(before)

    def stream(self) -> Any:
        """A new stream that does not wait for the default stream. The device must be current."""
        return self.cupy.cuda.Stream(non_blocking=True)

    def timed_event(self) -> int:
        return self._take(self._timed, self._runtime.eventDefault)

    def give_timed(self, event: int) -> None:
        self._timed.append(event)

    def mark(self, stream: int | None = None) -> Mark:
        """A mark in `stream`; None: in the calling thread's current stream. The device must be current."""
        mark = Mark(self._take(self._plain, self._runtime.eventDisableTiming), self._plain.append)
        self.record(mark.event, self.current_stream() if stream is None else stream)
        return mark

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def hold(self, stream: int, event: int) -> None:
        """Nothing that is asked of `stream` from now on starts before `event` was reached."""
        self._runtime.streamWaitEvent(stream, event)

    def reached(self, event: int) -> bool:
        """Raises CUDARuntimeError where the device failed."""
        return self._ready(self._runtime.eventQuery(event))

    def idle(self, stream: int) -> bool:
        """Whether everything asked of `stream` has ended. Raises as `reached`."""
        return self._ready(self._runtime.streamQuery(stream))

    def seconds(self, start: int, end: int) -> float:
        """Between two timed events that were reached."""
        return float(self._runtime.eventElapsedTime(start, end)) * 1e-3

    def down(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(host, device, nbytes, self._runtime.memcpyDeviceToHost, stream)

    def up(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(device, host, nbytes, self._runtime.memcpyHostToDevice, stream)

    def pin(self, nbytes: int) -> Any:
        """Page-locked memory of exactly `nbytes` as a ctypes array, freed when the last view of it goes.

        Raises CUDARuntimeError where the system refuses. The device must be current.
        """
        address = self._runtime.hostAlloc(nbytes, self._runtime.hostAllocPortable)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, _free_host, self, address)
        return memory

    def close(self) -> None:
        """Destroy the events. Nothing may use them any longer. The device must be current."""
        self.closed = True
        events, self._all = self._all, []
        self._timed.clear()
        self._plain.clear()
        for event in events:
            self._runtime.eventDestroy(event)

    def _take(self, free: deque[int], flags: int) -> int:
        try:
            return free.popleft()
        except IndexError:
            event = int(self._runtime.eventCreateWithFlags(flags))
            self._all.append(event)
            self.events += 1
            return event

    def _ready(self, status: int) -> bool:
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return status == 0


def _free_host(device: CudaDevice, address: int) -> None:
    if not device.forked:
        with device.current():
            device.cupy.cuda.runtime.freeHost(address)


def too_late(what: str, timeout_s: float) -> str:
    return explain("timeout_s", timeout_s, f"{what} did not end in time", "Raise timeout_s if it is only slow")
