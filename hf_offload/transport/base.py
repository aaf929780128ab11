"""What moves bytes between the device and the host: the `Transport` protocol and the plain data it speaks.

A transport owns one slab of host memory (pinned where there is a GPU), cut into two rings of equal slots: `down` for
device-to-host copies, `up` for the way back. Copies are asynchronous and run in the order they were asked for, one
queue each way. Who may touch a slot when is the engine's business (`hf_offload.engine.pipeline`); a transport only
moves the bytes and says when they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from hf_offload.transport.in_place import DeviceAdam


class Segment(NamedTuple):
    """One contiguous run of device memory, and where it lies in a slot.

    Attributes:
        pointer: device address of the first byte.
        nbytes: length, bytes.
        offset: byte offset inside the slot.
        owner: whatever keeps the device memory alive; the transport holds it until the copy is done.
    """

    pointer: int
    nbytes: int
    offset: int
    owner: Any


class Segments(Sequence[Segment]):
    """Many segments, kept as columns.

    Attributes:
        pointers, nbytes, offsets: int64[n] each.
        owners: of each.
    """

    __slots__ = ("nbytes", "offsets", "owners", "pointers")

    def __init__(self, pointers: np.ndarray, nbytes: np.ndarray, offsets: np.ndarray, owners: Sequence[Any]) -> None:
        self.pointers = pointers
        self.nbytes = nbytes
        self.offsets = offsets
        self.owners = owners

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        """`segments`, in columns."""
        if isinstance(segments, Segments):
            return segments
        pointers, nbytes, offsets, owners = zip(*segments) if segments else ((), (), (), ())
        return cls(np.array(pointers, np.int64), np.array(nbytes, np.int64), np.array(offsets, np.int64), owners)

    def __len__(self) -> int:
        return len(self.owners)

    def __iter__(self) -> Iterator[Segment]:
        columns = zip(self.pointers.tolist(), self.nbytes.tolist(), self.offsets.tolist(), self.owners)
        return map(Segment._make, columns)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def total_bytes(segments: Sequence[Segment]) -> int:
    if isinstance(segments, Segments):
        return int(segments.nbytes.sum())
    return sum([s.nbytes for s in segments])


class Event(Protocol):
    """The end of one copy. Once a copy has failed, every later copy of its direction fails too."""

    nbytes: int

    def done(self) -> bool:
        """Whether the copy has ended, well or badly."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block the calling thread, without the GIL, until the copy has ended.

        Raises:
            WaitTimeout: it did not end in `timeout_s` seconds.
            TransportError: the copy failed, or the transport was closed before it ran.
        """
        ...

    def span(self) -> tuple[float, float]:
        """Start and end of the copy, seconds on `time.perf_counter`'s clock. Valid once done."""
        ...


class Transport(Protocol):
    """Asynchronous copies between device memory and a fixed ring of host slots."""

    name: str
    pinned_bytes: int
    down: Sequence[np.ndarray]
    """The device-to-host ring: one uint8 array per slot."""
    up: Sequence[np.ndarray]
    """The host-to-device ring: one uint8 array per slot."""

    def mark(self) -> Any:
        """A point in the calling thread's current device stream; copies can be told to start after it."""
        ...

    def here(self) -> int:
        """Which device stream is the calling thread's current one; 0 without a device. `join` counts for that alone."""
        ...

    def to_host(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        """Copy `segments` into `down[slot]`, after `after` (a mark or None) has been reached on the device.

        Args:
            awaited: the caller does nothing before it has waited for the copy, and is a thread that no
                KeyboardInterrupt reaches: without a device it may make the copy itself.
        """
        ...

    def to_device(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        """Copy `up[slot]` into `segments`; the rest as `to_host`."""
        ...

    def join(self, event: Event, timeout_s: float) -> None:
        """Let the calling thread's current device stream wait for `event`; without a device, the thread itself."""
        ...

    def adam(self, threads: int) -> DeviceAdam:
        """What steps state that stays on the device; `threads`: of a CPU that stands for the device.

        Raises:
            ConfigError: the device cannot do it.
        """
        ...

    def close(self) -> None:
        """End the threads and free the slab. Copies still queued fail with TransportError. May be called twice."""
        ...
