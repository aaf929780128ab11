"""The host memory of a CUDA transport: one pinned slab, or less where the system refuses."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload.transport.cuda_device import CudaDevice

logger = logging.getLogger(__name__)
_ALIGN = 64  # bytes: one cache line, and the widest vector register


@dataclass(frozen=True)
class Slab:
    """Two rings of equal slots in one piece of memory, which lives as long as any view of it.

    Attributes:
        down, up: uint8 arrays, one a slot.
        pinned_bytes: bytes that are page-locked: all of them, or 0.
    """

    down: tuple[np.ndarray, ...]
    up: tuple[np.ndarray, ...]
    pinned_bytes: int


def reserve(device: CudaDevice, slots: int, slot_bytes: int) -> Slab:
    """The ring that was asked for; where it cannot be pinned a shorter one; else one in pageable memory.

    Exactly 2 * slots * stride bytes, in one piece: neither CuPy's nor torch's pool, which round up to powers of two.
    A slot is rounded up to whole cache lines. The device must be current.
    """
    stride = -(-slot_bytes // _ALIGN) * _ALIGN
    refusal: Exception | None = None
    for n in _ladder(slots):
        try:
            memory = np.ctypeslib.as_array(device.pin(2 * n * stride))
        except Exception as error:
            refusal = error
            continue
        if refusal is not None:
            _warn(refusal, slots, stride, f"Going on with {n} instead: copies and host steps overlap less.")
        return _carve(memory, n, stride, memory.size)
    _warn(
        refusal, slots, stride, "Going on with pageable memory: results are the same, but copies run at about half the "
        "speed, and whoever asks for one waits until it has ended, so that little of the host's work is hidden.",
    )  # fmt: skip
    raw = np.empty(2 * slots * stride + _ALIGN, np.uint8)
    return _carve(raw[-raw.ctypes.data % _ALIGN :], slots, stride, 0)


def _ladder(slots: int) -> list[int]:
    """Slots of each ring to try for, most first; two suffice to copy one while the other is stepped."""
    found = [slots]
    while found[-1] > 2:
        found.append(max(2, found[-1] // 2))
    return found


def _carve(memory: np.ndarray, slots: int, stride: int, pinned: int) -> Slab:
    views = tuple(memory[i * stride : (i + 1) * stride] for i in range(2 * slots))
    return Slab(views[:slots], views[slots:], pinned)


def _warn(refusal: Exception | None, slots: int, stride: int, cost: str) -> None:
    logger.warning(
        "hf_offload: ring_slots=%d: the system would not pin %d bytes for the ring (%s). %s Limit on locked memory: "
        "%s. Raise it (ulimit -l unlimited; docker run --ulimit memlock=-1), free host memory, or lower ring_slots or "
        "bucket_bytes.",
        slots, 2 * slots * stride, refusal, cost, _limit(),
    )  # fmt: skip


def _limit() -> str:
    """RLIMIT_MEMLOCK, which is what containers set; WSL has a limit of its own that nothing tells."""
    try:
        import resource
    except ImportError:
        return "unknown"
    soft: Any = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
