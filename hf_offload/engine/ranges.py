"""The phases of a step as NVTX ranges, for Nsight Systems; on a CPU there is nobody to show them to."""

from __future__ import annotations

from typing import Protocol

import torch


class Ranges(Protocol):
    """Named ranges that may begin on one thread and end on another."""

    def start(self, phase: str, name: str) -> int:
        """Begin the range `phase: name`. Returns what `end` takes."""
        ...

    def end(self, handle: int) -> None: ...


class NoRanges:
    """Shows nothing."""

    def start(self, phase: str, name: str) -> int:
        return 0

    def end(self, handle: int) -> None:
        return None


class NvtxRanges:
    """`torch.cuda.nvtx`: a range costs well under a microsecond while no profiler listens."""

    def start(self, phase: str, name: str) -> int:
        return int(torch.cuda.nvtx.range_start(f"{phase}: {name}"))

    def end(self, handle: int) -> None:
        torch.cuda.nvtx.range_end(handle)


NO_RANGES = NoRanges()


def ranges_for(device: str) -> Ranges:
    """Ranges for parameters on a device of type `device`."""
    return NvtxRanges() if device == "cuda" else NO_RANGES
