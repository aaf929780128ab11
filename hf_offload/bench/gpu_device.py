"""The device that `bench.gpu` measures on: peak memory, and how fast it copies. A GPU, or a CPU to try the code on."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

COPY_BYTES = 256 << 20
REPEATS = 4


class Peak(NamedTuple):
    """Bytes of the caching allocator: in tensors, and taken from the device. None where nobody counts."""

    allocated: int | None
    reserved: int | None


class Device(Protocol):
    name: str
    nbytes: int | None
    """Memory of the device; None where it is the host's."""

    def synchronize(self) -> None:
        """Return when the device has done all it was asked for."""
        ...

    def start_peak(self) -> None:
        """Give back what is free, and measure the peak from now on."""
        ...

    def peak(self) -> Peak: ...

    def facts(self) -> dict[str, Any]:
        """Plain data for the report: name, memory, driver."""
        ...

    def copy_gb_s(self) -> dict[str, float]:
        """1e9 bytes/s of large copies, by kind of host memory and direction."""
        ...


class Cuda:
    """torch's current CUDA device."""

    name = "cuda"

    def __init__(self) -> None:
        self.nbytes: int | None = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def start_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> Peak:
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def facts(self) -> dict[str, Any]:
        number = torch.cuda.current_device()
        return {
            "name": torch.cuda.get_device_name(number),
            "bytes": self.nbytes,
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(number))),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }

    def copy_gb_s(self) -> dict[str, float]:
        """`both`: down and up at once, the sum of the two."""
        there = [torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        found = {}
        for kind, pinned in (("pinned", True), ("pageable", False)):
            here = [torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            found[f"{kind}_d2h"] = self._gb_s(lambda here=here: _copy(there[0], here[0]), 1)  # type: ignore[misc]
            found[f"{kind}_h2d"] = self._gb_s(lambda here=here: _copy(here[1], there[1]), 1)  # type: ignore[misc]
            if pinned:
                streams = [torch.cuda.Stream() for _ in range(2)]

                def both(here: list[Tensor] = here, streams: list[torch.cuda.Stream] = streams) -> None:
                    with torch.cuda.stream(streams[0]):
                        _copy(there[0], here[0])
                    with torch.cuda.stream(streams[1]):
                        _copy(here[1], there[1])

                found[f"{kind}_both"] = self._gb_s(both, 2)
        return found

    def _gb_s(self, copy: Callable[[], None], copies: int) -> float:
        return _gb_s(copy, copies * COPY_BYTES, self.synchronize)


class Cpu:
    """No GPU: shows that the benchmark runs, and nothing about speed. There is no peak."""

    name = "cpu"
    nbytes: int | None = None

    def synchronize(self) -> None:
        pass

    def start_peak(self) -> None:
        pass

    def peak(self) -> Peak:
        return Peak(None, None)

    def facts(self) -> dict[str, Any]:
        return {"name": "none (cpu)", "bytes": None, "compute_capability": None, "driver": None, "cuda": None}

    def copy_gb_s(self) -> dict[str, float]:
        here, there = (torch.ones(1 << 20, dtype=torch.uint8) for _ in range(2))
        return {"pageable_d2h": _gb_s(lambda: _copy(there, here), here.nbytes, self.synchronize)}


def device_of(name: str) -> Device:
    """`cuda` or `cpu`."""
    return Cuda() if name == "cuda" else Cpu()


def driver_version() -> str | None:
    """The NVIDIA driver's, as `nvidia-smi` tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return (answer.splitlines() or [""])[0].strip() or None


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _gb_s(copy: Callable[[], None], nbytes: int, synchronize: Callable[[], None]) -> float:
    """Of the fastest of REPEATS, after one to warm up."""
    copy()
    synchronize()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return nbytes / best / 1e9
