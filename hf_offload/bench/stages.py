"""Each stage of a step alone: d2h, host_step and h2d of every bucket, nothing else running.

The same bucket plan, transport and kernel as the engine's, without the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_offload.bench.bound import BucketTimes
from hf_offload.bench.emulated import Memory, device_memory
from hf_offload.engine.plan import Bucket, BucketPlan, ParamSpec, plan_buckets
from hf_offload.kernels import cpu
from hf_offload.transport import HostTransport, Segment

REPEATS = 7


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage of each bucket, of the fastest of REPEATS passes, by unit in forward order.

    The fastest: the bound is what the machine can do, not what other programs left of it at the time.

    Attributes:
        threads: threads of the host step that these are for.
    """

    units: tuple[tuple[BucketTimes, ...], ...]
    threads: int

    def total(self, stage: str) -> float:
        """Seconds of `stage` (d2h, host_step or h2d) for the whole model."""
        return sum(getattr(times, stage) for unit in self.units for times in unit)

    @property
    def seconds(self) -> float:
        """All three stages, one after the other."""
        return self.total("d2h") + self.total("host_step") + self.total("h2d")


def bucket_plan(memory: Memory, bucket_bytes: int) -> BucketPlan:
    """The engine's plan for the emulated model: every module is a unit."""
    specs = [ParamSpec(n, "bfloat16", unit) for unit, sizes in enumerate(memory.sizes) for n in sizes]
    return plan_buckets(specs, bucket_bytes)


def measure(memory: Memory, bucket_bytes: int, slots: int, link_gb_s: float, threads: int) -> Stages:
    """Time every stage alone; `threads` are those of the host step."""
    plan = bucket_plan(memory, bucket_bytes)
    host_steps = _host_steps(plan, memory, threads)
    d2h, h2d = _copies(plan, memory, min(bucket_bytes, 2 * plan.numel), slots, link_gb_s)
    units: list[list[BucketTimes]] = [[] for _ in memory.sizes]
    for bucket, *times in zip(plan.buckets, d2h, host_steps, h2d, strict=True):
        units[bucket.unit].append(BucketTimes(*times))
    return Stages(tuple(map(tuple, units)), threads)


def _host_steps(plan: BucketPlan, memory: Memory, threads: int) -> list[float]:
    """Seconds of each bucket's host step."""
    state = [memory.weights.float().numpy(), np.zeros(plan.numel, np.float32), np.zeros(plan.numel, np.float32)]
    gradients = memory.gradients.view(torch.int16).numpy().view(np.uint16)
    largest = max(b.numel for b in plan.buckets)
    down, up = np.empty(largest, np.uint16), np.empty(largest, np.uint16)
    row = cpu.coefficients(
        lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=100, grad_scale=1.0, decoupled=True,
        maximize=False,
    )  # fmt: skip

    def step(bucket: Bucket) -> float:
        at, n = slice(bucket.start, bucket.start + bucket.numel), bucket.numel
        down[:n] = gradients[at]  # as after a copy: just written
        bounds = np.array([p.offset for p in bucket.pieces] + [n], np.int64)
        coefficients = np.tile(row, (len(bucket.pieces), 1))
        begin = time.perf_counter()
        cpu.adam_step(*(s[at] for s in state), down[:n], up[:n], bounds, coefficients, wire="bfloat16", threads=threads)
        return time.perf_counter() - begin

    return _fastest([[step(b) for b in plan.buckets] for _ in range(REPEATS + 1)])


def _copies(
    plan: BucketPlan, memory: Memory, slot_bytes: int, slots: int, link_gb_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of each bucket's copy down and up, as the transport itself measures them."""
    sources = [g for module in memory.split(memory.gradients) for g in module]
    targets = [w for module in memory.split(device_memory(memory.weights.numel()).zero_()) for w in module]
    transport = HostTransport(slots, slot_bytes, link_gb_s=link_gb_s)
    try:

        def copy(k: int, bucket: Bucket, tensors: Sequence[Tensor], down: bool) -> float:
            segments = [
                Segment(tensors[p.param].data_ptr() + 2 * p.start, 2 * p.length, 2 * p.offset, tensors[p.param])
                for p in bucket.pieces
            ]
            start = transport.to_host if down else transport.to_device
            event = start(segments, k % slots, None)
            event.wait(60.0)
            begin, end = event.span()
            return end - begin

        passes = [
            [[copy(k, b, tensors, down) for k, b in enumerate(plan.buckets)] for _ in range(REPEATS + 1)]
            for tensors, down in ((sources, True), (targets, False))
        ]
    finally:
        transport.close()
    return _fastest(passes[0]), _fastest(passes[1])


def _fastest(passes: Sequence[Sequence[float]]) -> list[float]:
    """The pass that took least; not the first, which touches the memory and compiles the kernel."""
    return list(min(passes[1:], key=sum))
