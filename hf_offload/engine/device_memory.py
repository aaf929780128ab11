"""How much memory the device has left, and whether it ran short."""

from __future__ import annotations

from typing import Protocol

import torch

from hf_offload.planner import DEVICE_MARGIN, DEVICE_MARGIN_BYTES


class DeviceMemory(Protocol):
    """The memory of one device."""

    def free_bytes(self) -> int | None:
        """What nobody has taken, torch's own reserve left out. None: there is nothing to measure."""
        ...

    def room_bytes(self) -> int | None:
        """What an allocation may find: that, and what torch has reserved and not given to anybody. None: as above."""
        ...

    def margin_bytes(self) -> int:
        """What of `free_bytes` is better left alone."""
        ...

    def ran_short(self) -> bool:
        """Whether an allocation did not find room at first since `free_bytes` or this was asked last."""
        ...


class NoDeviceMemory:
    """A CPU that stands for a device: its memory is the host's."""

    def free_bytes(self) -> int | None:
        return None

    def room_bytes(self) -> int | None:
        return None

    def margin_bytes(self) -> int:
        return 0

    def ran_short(self) -> bool:
        return False


class CudaMemory:
    """Of `device`, by what torch's allocator counts: how often it had to flush its reserve (`num_alloc_retries`), and
    how often that was of no use (`num_ooms`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen = 0

    def free_bytes(self) -> int | None:
        self._seen = self._count()
        return self._free()

    def room_bytes(self) -> int | None:
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return self._free() + int(idle)

    def margin_bytes(self) -> int:
        return int(max(DEVICE_MARGIN * torch.cuda.mem_get_info(self._device)[1], DEVICE_MARGIN_BYTES))

    def ran_short(self) -> bool:
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _count(self) -> int:
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))


def memory_of(device: str) -> DeviceMemory:
    where = torch.device(device)
    return CudaMemory(where) if where.type == "cuda" else NoDeviceMemory()
