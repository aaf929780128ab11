"""The ways to take a step that `bench.gpu` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_offload.config import OffloadConfig
from hf_offload.engine.stats import Stats
from hf_offload.optimizer import OffloadAdam

LR, BETAS, EPS, WEIGHT_DECAY = 1e-5, (0.9, 0.999), 1e-8, 0.01
NEVER_BITES = 1e9
SHADOW_BYTES = 14
"""Per parameter that speculation covers: another state, and another 16-bit weight."""
STATE_BYTES = 12
STORE_BYTES = 2
CHUNK = 1 << 26
"""Parameters whose fp32 gradients exist at once in `OnDevice`: 256 MiB."""


class Stepper(Protocol):
    def step(self) -> Tensor:
        """Clip, step, drop the gradients. Returns the norm before clipping, 0-dim."""
        ...

    def stats(self) -> Stats | None: ...

    def close(self) -> None: ...


class OnDevice:
    """No offload: bf16 weights, fp32 masters and moments on the device, `torch.optim.AdamW(fused=True)` on the masters.

    The 16-bit gradients are clipped by `torch.nn.utils.clip_grad_norm_`. They become fp32 a few layers at a time, so
    that the peak is the 16 bytes a parameter of the arithmetic and not 18 to 20: the least such training takes.
    """

    def __init__(self, model: nn.Module, max_norm: float) -> None:
        self._params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._max_norm = max_norm
        self._chunks: list[tuple[list[Tensor], list[Tensor], torch.optim.AdamW]] = []
        for params in _chunks(self._params):
            masters = [p.detach().float() for p in params]
            optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
            self._chunks.append((params, masters, optimizer))

    @torch.no_grad()
    def step(self) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self._params, self._max_norm)
        for params, masters, optimizer in self._chunks:
            for p, m in zip(params, masters):
                m.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            for p, m in zip(params, masters):
                p.copy_(m)
        return norm

    def stats(self) -> None:
        return None

    def close(self) -> None:
        self._chunks.clear()


class Offloaded:
    """`OffloadAdam`, as a training loop uses it."""

    def __init__(self, model: nn.Module, max_norm: float, config: OffloadConfig) -> None:
        self._max_norm = max_norm
        self._optimizer = OffloadAdam(
            model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, config=config, model=model
        )

    def step(self) -> Tensor:
        norm = self._optimizer.clip_grad_norm_(self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def stats(self) -> Stats:
        return self._optimizer.stats()

    def close(self) -> None:
        self._optimizer.close()


@dataclass(frozen=True)
class Variant:
    """One way to take a step.

    Attributes:
        settings: of `OffloadConfig`; None: no offload.
        shadow: whether every parameter is covered by speculation's shadow.
        bound: of the norm; None: what the user asked for.
    """

    settings: Mapping[str, Any] | None = None
    shadow: bool = False
    bound: float | None = None

    def config(self, params: int, **more: Any) -> OffloadConfig:
        assert self.settings is not None
        shadow = {"shadow_bytes": SHADOW_BYTES * params} if self.shadow else {}
        return OffloadConfig(**{**self.settings, **shadow, **more})

    def stepper(self, model: nn.Module, max_norm: float, params: int, **more: Any) -> Stepper:
        bound = max_norm if self.bound is None else self.bound
        if self.settings is None:
            return OnDevice(model, bound)
        return Offloaded(model, bound, self.config(params, **more))

    def host_bytes(self, params: int) -> int:
        """What the variant takes of the host's memory, the pinned ring included."""
        if self.settings is None:
            return 0
        config = self.config(params)
        ring = 2 * config.ring_slots * config.bucket_bytes
        store = STORE_BYTES * params if config.stream_gradients else 0
        return STATE_BYTES * params + store + config.shadow_bytes + ring


_STREAMED = {"schedule": "overlapped", "stream_gradients": True}
VARIANTS = {
    "no_offload": Variant(),
    "in_order": Variant({"schedule": "in_order"}),
    "overlapped": Variant({"schedule": "overlapped"}),
    "streamed": Variant(_STREAMED),
    "speculative": Variant(_STREAMED, shadow=True),
    "speculative_hit": Variant(_STREAMED, shadow=True, bound=NEVER_BITES),
}
"""`speculative_hit`: the norm is computed, and its bound never bites, so that every guess is right."""
EXACT = ("overlapped", "streamed", "speculative")
"""Those that must give the bits of in order."""


@dataclass
class Window:
    """The engine's figures over the steps of a window: of each step once."""

    seen: dict[int, Stats] = field(default_factory=dict)
    hits_before: int = 0
    misses_before: int = 0

    def start(self, stats: Stats | None) -> None:
        if stats is not None:
            self.hits_before, self.misses_before = stats.speculation_hits, stats.speculation_misses

    def add(self, stats: Stats | None) -> None:
        if stats is not None and stats.step:
            self.seen[stats.step] = stats

    def as_json(self) -> dict[str, Any] | None:
        """Means a step of seconds; counts of buckets over the window. None without an engine."""
        if not self.seen:
            return None
        all_steps = list(self.seen.values())
        last = all_steps[-1]
        seconds = {k: sum(s.seconds[k] for s in all_steps) / len(all_steps) for k in last.seconds}
        exposed = sum(s.exposed_seconds for s in all_steps) / len(all_steps)
        busy = seconds["d2h"] + seconds["host_step"] + seconds["h2d"]
        return {
            "schedule": last.schedule,
            "transport": last.transport,
            "steps_seen": len(all_steps),
            "seconds": seconds,
            "exposed_seconds": exposed,
            "hidden_fraction": min(1.0, max(0.0, 1 - exposed / busy)) if busy else None,
            "host_step_gparams_s": last.params / seconds["host_step"] / 1e9 if seconds["host_step"] else None,
            "d2h_bytes": last.d2h_bytes,
            "h2d_bytes": last.h2d_bytes,
            "device_bytes": dict(last.device_bytes),
            "host_bytes": dict(last.host_bytes),
            "speculation_hits": last.speculation_hits - self.hits_before,
            "speculation_misses": last.speculation_misses - self.misses_before,
        }


def _chunks(params: list[Tensor]) -> list[list[Tensor]]:
    """Neighbours, CHUNK elements together at most, or one that is larger."""
    found: list[list[Tensor]] = []
    room = 0
    for p in params:
        if p.numel() > room:
            found.append([])
            room = CHUNK
        found[-1].append(p)
        room -= p.numel()
    return found
