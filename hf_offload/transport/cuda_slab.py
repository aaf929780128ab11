"""The host memory of a CUDA transport: one pinned slab, smaller where the system refuses."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from hf_offload.errors import HostMemoryError, explain
from hf_offload.hostmem import available_host_bytes, lockable_bytes
from hf_offload.preflight import any_of, as_bytes, ring_within
from hf_offload.transport.cuda_device import CudaDevice, refuses_to_pin

logger = logging.getLogger(__name__)
_ALIGN = 64  # bytes: one cache line, and the widest vector register


@dataclass(frozen=True)
class Slab:
    """Two rings of equal slots in one piece of memory, which lives as long as any view of it.

    Attributes:
        down, up: uint8 arrays, one a slot.
        pinned_bytes: what it takes; all of it is page-locked.
    """

    down: tuple[np.ndarray, ...]
    up: tuple[np.ndarray, ...]
    pinned_bytes: int


def reserve(device: CudaDevice, slots: int, slot_bytes: int) -> Slab:
    """The ring that was asked for; where it cannot be pinned, a shorter one, with a warning.

    Exactly 2 * slots * stride bytes, in one piece: neither CuPy's nor torch's pool, which round up to powers of two.
    A slot is rounded up to whole cache lines. The device must be current.

    Raises:
        HostMemoryError: not even two slots each way can be pinned; nothing is.
    """
    stride = -(-slot_bytes // _ALIGN) * _ALIGN
    refusal: Exception | None = None
    for n in _ladder(slots):
        try:
            memory = np.ctypeslib.as_array(device.pin(2 * n * stride))
        except Exception as error:
            if not refuses_to_pin(error):
                raise
            refusal = error
            continue
        if refusal is not None:
            logger.warning(
                "hf_offload: ring_slots=%d: %s. Going on with %d instead: copies and host steps overlap less. %s.",
                slots, _cause(refusal, 2 * slots * stride), n, _remedy(f"set ring_slots={n}"),
            )  # fmt: skip
        return _carve(memory, n, stride)
    assert refusal is not None
    raise HostMemoryError(_refusal(device, refusal, slots, stride)) from refusal


def _ladder(slots: int) -> list[int]:
    """Slots of each ring to try for, most first; two suffice to copy one while the other is stepped."""
    found = [slots]
    while found[-1] > 2:
        found.append(max(2, found[-1] // 2))
    return found


def _carve(memory: np.ndarray, slots: int, stride: int) -> Slab:
    views = tuple(memory[i * stride : (i + 1) * stride] for i in range(2 * slots))
    return Slab(views[:slots], views[slots:], memory.size)


def _refusal(device: CudaDevice, refusal: Exception, slots: int, stride: int) -> str:
    fewest = 2 * min(slots, 2) * stride
    most = _pinnable(device, fewest)
    cause = f"{_cause(refusal, 2 * slots * stride)}, nor {as_bytes(fewest)}; what it does pin is {as_bytes(most)}"
    memory = available_host_bytes()
    left = f". Of host memory, {as_bytes(memory.available)} are left" if memory.known else ""
    fits = ring_within(most, slots, stride)
    return explain("ring_slots", slots, cause + left, _remedy(fits))


def _pinnable(device: CudaDevice, refused: int) -> int:
    """Bytes that the system pins, to a 64th of the `refused` ones: found by trying."""
    low, high = 0, refused
    while high - low > max(refused // 64, _ALIGN):
        middle = (low + high) // 2
        try:
            device.pin(middle)  # and freed at once
        except Exception as error:
            if not refuses_to_pin(error):
                raise
            high = middle
        else:
            low = middle
    return low


def _cause(refusal: Exception, nbytes: int) -> str:
    return f"the system would not pin {as_bytes(nbytes)} of host memory for the ring ({refusal})"


def _remedy(smaller: str | None) -> str:
    """The limit on locked memory is what containers set, though not every driver minds it. WSL's own nothing tells."""
    locked = lockable_bytes()
    options = [] if smaller is None else [smaller]
    if locked is not None:
        how = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        options.append(f"raise the limit on locked memory, {as_bytes(locked)} ({how})")
    return (
        f"{any_of([*options, 'free host memory'])}. WSL and some containers call it out of memory when more than 0.5 "
        "to 1 GB is to be pinned, whatever ulimit says"
    )
