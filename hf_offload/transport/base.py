"""What moves bytes between the device and the host: the `Transport` protocol and the plain data it speaks.

A transport owns one slab of host memory (pinned where there is a GPU), cut into two rings of equal slots: `down` for
device-to-host copies, `up` for the way back. Copies are asynchronous and run in the order they were asked for, one
queue each way. Who may touch a slot when is the engine's business (`hf_offload.engine.pipeline`); a transport only
moves the bytes and says when they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def to_host(self, segments: Sequence[Segment], slot: int, after: Any) -> Event:
        """Copy `segments` into `down[slot]`, after `after` (a mark or None) has been reached on the device."""
        ...

    def to_device(self, segments: Sequence[Segment], slot: int, after: Any) -> Event:
        """Copy `up[slot]` into `segments`, after `after` (a mark or None) has been reached on the device."""
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
