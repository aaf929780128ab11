"""`CudaTransport`: copies between an NVIDIA GPU and pinned memory, on two streams of their own, by CuPy.

Everything is asked of the device at once and from the thread that asks; there are no threads here. torch and CuPy share
a device's primary context, so torch's pointers and streams mean the same to CuPy.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_offload.errors import ConfigError, HostMemoryError, TransportError, explain
from hf_offload.transport.base import Event, Segment
from hf_offload.transport.cuda_device import CudaDevice, DeviceMemoryError, as_ours, until
from hf_offload.transport.cuda_in_place import CudaAdam, InPlace
from hf_offload.transport.cuda_lane import CudaCopy, Lane
from hf_offload.transport.cuda_pack import Packer
from hf_offload.transport.cuda_slab import Slab, reserve
from hf_offload.transport.in_place import DeviceAdam

__all__ = ["CudaTransport", "DeviceMemoryError"]

logger = logging.getLogger(__name__)
_STUCK: list[_Parts] = []
"""What must not be freed here: a device may still write to it, or it is the parent's. Kept for good."""


class CudaTransport:
    """Asynchronous copies between device `device` and two rings of pinned slots.

    Where the system refuses to pin that much, a warning is logged and there are fewer slots (`len(transport.down)`).

    Args:
        slots: slots in each of the two rings.
        slot_bytes: bytes of one slot, rounded up to whole cache lines of 64.
        device: torch's index of the device, which counts within CUDA_VISIBLE_DEVICES.
        current_stream: gives the calling thread's current torch stream on that device, a cudaStream_t as int.
        timeout_s: seconds that `close` waits for the copies under way.
        cupy: the CuPy module; None imports it.

    Raises:
        ConfigError: CuPy cannot be imported.
        HostMemoryError: the system does not pin even two slots each way.
        DeviceMemoryError: the device has no memory left.
        TransportError: the device cannot be used.
    """

    name = "cuda"

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        device: int,
        *,
        current_stream: Callable[[], int],
        timeout_s: float = 600.0,
        cupy: Any = None,
    ) -> None:
        self._device = CudaDevice(cupy or _import_cupy(), device, current_stream)
        parts = _build(self._device, slots, slot_bytes, timeout_s)
        self.down: Sequence[np.ndarray] = parts.slab.down
        self.up: Sequence[np.ndarray] = parts.slab.up
        self.pinned_bytes = parts.slab.pinned_bytes
        self._adam: CudaAdam | None = None
        self._down, self._up = parts.lanes
        self._parts = parts
        self._finalizer = weakref.finalize(self, parts.close)

    def mark(self) -> Any:
        self._device.check_process("a mark in the device's work")
        return self._down.mark()

    def here(self) -> int:
        return self._device.current_stream()

    def to_host(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        return self._copy(self._down, self.down, segments, slot, after)

    def to_device(self, segments: Sequence[Segment], slot: int, after: Any, *, awaited: bool = False) -> Event:
        return self._copy(self._up, self.up, segments, slot, after)

    def join(self, event: Event, timeout_s: float) -> None:
        """Does not block. Raises TransportError where the copy is known to have failed."""
        assert isinstance(event, (CudaCopy, InPlace))
        event.join()

    def adam(self, threads: int) -> DeviceAdam:
        if self._adam is None:
            self._adam = CudaAdam(self._device)
        return self._adam

    def close(self) -> None:
        """Wait for the copies under way, which cannot be called back, then free everything. May be called twice."""
        self.down = self.up = ()
        self.pinned_bytes = 0
        if self._adam is not None and not self._device.forked:
            self._adam.close()
        self._parts.close()
        self._finalizer.detach()

    def _copy(
        self, lane: Lane, ring: Sequence[np.ndarray], segments: Sequence[Segment], slot: int, after: Any
    ) -> CudaCopy:
        self._device.check_process(lane.what)
        if not ring:
            raise TransportError(f"{lane.what}: the transport is closed. Make a new optimizer.")
        return lane.copy(segments, ring[slot].ctypes.data, after)


class _Parts:
    """What a transport is made of; freed once, by `close` or when the transport is forgotten."""

    def __init__(self, device: CudaDevice, lanes: tuple[Lane, Lane], slab: Slab, timeout_s: float) -> None:
        self.lanes = lanes
        self.slab = slab
        self._device = device
        self._timeout_s = timeout_s

    def close(self) -> None:
        if self._device.forked:
            _STUCK.append(self)  # the device's work and memory are the parent's
            return
        if any(lane.entered for lane in self.lanes):  # the collector runs in there: this thread holds that lock
            threading.Thread(target=self.close, name="hf_offload-close").start()
            return
        for lane in self.lanes:
            lane.shut()
        for lane in self.lanes:
            if not until(lane.idle, self._timeout_s):
                _STUCK.append(self)
                logger.error("hf_offload: %s did not end in %s s; its memory is kept.", lane.what, self._timeout_s)
                return
        for lane in self.lanes:
            lane.close()
        self.slab = Slab((), (), 0)
        with self._device.current():
            self._device.close()


def _build(device: CudaDevice, slots: int, slot_bytes: int, timeout_s: float) -> _Parts:
    slab = None
    try:
        with device.current():
            slab = reserve(device, slots, slot_bytes)
            packer = Packer(device, slot_bytes)
            down = Lane(device, packer, "the copy of gradients to the host", up=False)
            up = Lane(device, packer, "the copy of weights to the device", up=True)
            return _Parts(device, (down, up), slab, timeout_s)
    except HostMemoryError:
        raise
    except Exception as error:
        slab = None  # at once, though this frame stays with the error
        ours = as_ours(error, "the streams of the transport")
        if ours is not error:
            raise ours from error
        raise TransportError(
            explain("device", f"cuda:{device.index}", f"CuPy cannot use it ({error})",
                    "Check that the driver works and that CuPy was built for the same CUDA as torch")
        ) from error  # fmt: skip


def _import_cupy() -> Any:
    try:
        import cupy
    except Exception as error:
        cause = f"CuPy is installed, but cannot be imported ({error})"
        raise ConfigError(explain("transport", "cuda", cause, "Reinstall the CuPy that fits torch's CUDA")) from error
    return cupy
