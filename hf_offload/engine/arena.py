"""The host state: fp32 master weights, first and second moments, in flat pageable memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.plan import BucketPlan, ParamSpec, plan_buckets
from hf_offload.engine.tensors import WIRE, shaped_view


class Arena:
    """12 bytes of host memory per element for a list of parameters, fixed once made.

    Attributes:
        params: the parameters, on the device.
        plan: their buckets.
        master, exp_avg, exp_avg_sq: float32[plan.numel].
        steps: float32[len(params)], steps taken by each parameter; a float as in torch's AdamW.
    """

    def __init__(self, params: Sequence[Tensor], units: Sequence[int], bucket_bytes: int) -> None:
        self.params = list(params)
        specs = [ParamSpec(p.numel(), WIRE[p.dtype], u) for p, u in zip(params, units)]
        self.specs = specs
        self.plan: BucketPlan = plan_buckets(specs, bucket_bytes)
        self.master = np.empty(self.plan.numel, np.float32)
        # calloc's zero pages: the moments' memory is touched first by the step that fills it
        self.exp_avg = np.zeros(self.plan.numel, np.float32)
        self.exp_avg_sq = np.zeros(self.plan.numel, np.float32)
        self.steps = np.zeros(len(self.params), np.float32)
        self.bucket_params = [np.array([p.param for p in b.pieces]) for b in self.plan.buckets]
        self.bucket_bounds = [np.array([p.offset for p in b.pieces] + [b.numel], np.int64) for b in self.plan.buckets]

    def slice_of(self, index: int) -> slice:
        """Where parameter `index` lies in the flat arrays."""
        start = self.plan.param_start[index]
        return slice(start, start + self.specs[index].numel)

    def state_views(self, index: int) -> dict[str, Tensor]:
        """Parameter `index`'s entry of `optimizer.state`: live views in its shape, and its 0-dim step."""
        at, p = self.slice_of(index), self.params[index]
        return {
            "step": torch.from_numpy(self.steps)[index],
            "exp_avg": shaped_view(self.exp_avg[at], p),
            "exp_avg_sq": shaped_view(self.exp_avg_sq[at], p),
            "master": shaped_view(self.master[at], p),
        }
