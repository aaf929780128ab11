"""How many bytes a parameter our state really keeps resident: RssAnon before and after, Linux only."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hf_offload import hostmem
from hf_offload.config import STATE_DTYPES, OffloadConfig
from hf_offload.errors import UnsupportedError, explain
from hf_offload.optimizer import OffloadAdam

PARAMS, TENSOR = 64_000_000, 4_000_000
_WARM = 200_000
"""Elements of a first optimizer, which compiles the kernels: that takes memory, too."""


@dataclass(frozen=True)
class Resident:
    """What one optimizer keeps resident.

    Attributes:
        construction_bytes: after construction, less before.
        step_bytes: after three steps, less after construction.
        ring_bytes: the plan's pinned ring of both ways, as far as it was touched a part of the two above.
    """

    params: int
    construction_bytes: int
    step_bytes: int
    ring_bytes: int

    @property
    def bytes_per_param(self) -> float:
        """Everything, the ring too."""
        return (self.construction_bytes + self.step_bytes) / self.params

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_param": self.bytes_per_param}


def measure(say: Callable[[str], None], threads: int, params: int = PARAMS) -> dict[str, Resident]:
    """Each state dtype, by name.

    Raises:
        UnsupportedError: the system does not tell (no /proc/self/status).
    """
    if not hostmem.own_bytes():
        cause = "/proc/self/status has no RssAnon"
        raise UnsupportedError(explain("--resident", True, cause, "Run it on Linux 4.5 or newer"))
    found = {}
    for dtype in STATE_DTYPES:
        # a small ring, which does not depend on the model: 0.07 bytes a parameter
        config = OffloadConfig(
            schedule="in_order",
            transport="host",
            threads=threads,
            state_dtype=dtype,
            bucket_bytes=1 << 20,
            ring_slots=2,
        )
        say(f"Measuring the resident state in {dtype} ...")
        _of(config, _WARM)
        found[dtype] = _of(config, params)
    return found


def _of(config: OffloadConfig, params: int) -> Resident:
    sizes = [TENSOR] * (params // TENSOR) + ([params % TENSOR] if params % TENSOR else [])
    weights = [nn.Parameter(torch.full((n,), 0.5, dtype=torch.bfloat16)) for n in sizes]
    for p in weights:
        p.grad = torch.full_like(p, 0.01)
    before = _now()
    with OffloadAdam(weights, config=config) as optimizer:
        built = _now()
        for _ in range(3):
            optimizer.step()
        optimizer.synchronize()
        stepped = _now()
        ring = optimizer.stats().host_bytes["pinned"]
    return Resident(params, built - before, stepped - built, ring)


def _now() -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc: what was freed goes back to the system
    if trim is not None:
        trim(0)
    return hostmem.own_bytes()
