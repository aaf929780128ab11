"""The oracle for state that is rounded: the kernels' NumPy twin, parameter by parameter, in place of torch's AdamW.

Stochastic rounding turns a difference in the last bit into one of a whole code, so nothing but equality can be asked
for; the twin gives it, since what it computes is what the kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.moments import INT8_NAMES, as_tensor
from hf_offload.engine.tensors import WIRE, host_array
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import codecs, dither, reference
from support.contracts import Oracle

SEED = 0


class CompactOracle(Oracle):
    """AdamW whose moments are held as `state_dtype` between steps. Each parameter is one piece of its own."""

    def __init__(self, state_dtype: str, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self._codec = cpu.CODECS[state_dtype]
        self._numbers = {p: i for i, p in enumerate(self.masters)}
        self._held = {p: self._codec.empty(p.numel(), codecs.blocks(p.numel())) for p in self.masters}
        self._steps = dict.fromkeys(self.masters, 0)

    def entry(self, p: Tensor) -> dict[str, Tensor]:
        if not self._steps[p]:
            return {}
        held = self._held[p]
        if self._codec.scaled:
            arrays = dict(zip(INT8_NAMES, (held.m, held.m_scale, held.v, held.v_scale)))
        else:
            arrays = {"exp_avg": held.m, "exp_avg_sq": held.v}
        shaped = {n: t if n.endswith("_scale") else t.view(p.shape) for n, t in
                  ((n, as_tensor(a)) for n, a in arrays.items())}  # fmt: skip
        return {"step": torch.tensor(float(self._steps[p])), **shaped}

    def _update(self, clip: float) -> None:
        for group in self.adam.param_groups:
            theirs = {id(master) for master in group["params"]}
            for p, master in self.masters.items():
                if id(master) in theirs and p.grad is not None:
                    self._steps[p] += 1
                    self._step_one(p, master, group, self._inverse * clip)

    def _step_one(self, p: Tensor, master: Tensor, group: dict[str, Any], scale: float) -> None:
        step, n = self._steps[p], p.numel()
        row = cpu.coefficients(
            lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"], step=step, grad_scale=scale, decoupled=True, maximize=False,
        )  # fmt: skip
        noise = dither.rows(SEED, np.array([self._numbers[p]]), np.array([0]), np.array([step]))
        state = cpu.CompactState(host_array(master), self._held[p])
        assert p.grad is not None
        reference.compact_step(
            state, state, host_array(p.grad), np.empty_like(host_array(p)), np.array([0, n]), row[None], noise,
            codec=self._codec, wire=WIRE[p.dtype],
        )  # fmt: skip

    def step(self) -> None:
        self.adam._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn
        clip = 1.0 if self._bound == math.inf else min(1.0, self._bound / (self.norm() + 1e-6))
        self._update(clip)
        self._round()
