"""From param groups to the kernel's rows of coefficients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_offload.kernels import cpu


class Coefficients:
    """Rows of coefficients for one step: equal for parameters of one group that have taken equally many steps.

    Hyper-parameters are read here, when the step is taken, as Python floats: schedulers rewrite them right after.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], grad_scale: float) -> None:
        self._groups = groups
        self._grad_scale = grad_scale
        self._rows: dict[tuple[int, int], np.ndarray] = {}

    def row(self, group: int, step: int) -> np.ndarray:
        """float32[NUM_COEF] for a parameter of `group` that takes its `step`-th step."""
        if (group, step) not in self._rows:
            g = self._groups[group]
            self._rows[group, step] = cpu.coefficients(
                lr=float(g["lr"]),
                beta1=float(g["betas"][0]),
                beta2=float(g["betas"][1]),
                eps=float(g["eps"]),
                weight_decay=float(g["weight_decay"]),
                step=step,
                grad_scale=self._grad_scale,
                decoupled=g["decoupled_weight_decay"],
                maximize=g["maximize"],
            )
        return self._rows[group, step]
