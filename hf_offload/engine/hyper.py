"""From param groups to the kernel's rows of coefficients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hf_offload.errors import ConfigError, UnsupportedError, explain
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

    def table(self, groups: np.ndarray, steps: np.ndarray, params: np.ndarray) -> np.ndarray:
        """The rows of parameters `params`, float32[len(params), NUM_COEF].

        Args:
            groups: int64, the group of every parameter; those of `params` must not be negative.
            steps: int64, the step that every parameter takes.
            params: int64, indices into both.
        """
        groups, steps = groups[params], steps[params]
        if (groups == groups[0]).all() and (steps == steps[0]).all():  # one group in step, as most buckets are
            return np.repeat(self.row(int(groups[0]), int(steps[0]))[None], len(params), axis=0)
        return np.stack([self.row(group, step) for group, step in zip(groups.tolist(), steps.tolist())])


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse a group's hyper-parameters outside the range Adam is defined for.

    Raises:
        ConfigError: a number that is none or is out of range, `betas` that are not two, a switch that is not a bool.
        UnsupportedError: amsgrad.
    """
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(explain("betas", betas, "not two numbers", "Give two numbers in [0, 1)"))
    for name, value in (("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if not 0.0 <= _number(name, value) < 1.0:
            raise ConfigError(explain(name, value, "outside the range Adam is defined for", "Give a number in [0, 1)"))
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= _number(name, group[name]) < math.inf:
            remedy = "Give a finite number of at least 0"
            raise ConfigError(explain(name, group[name], "outside the range Adam is defined for", remedy))
    for name in ("decoupled_weight_decay", "maximize"):
        if not isinstance(group[name], bool):
            raise ConfigError(explain(name, group[name], "not a bool", "Give True or False"))
    if group.get("amsgrad"):
        raise UnsupportedError(
            explain("amsgrad", True, "the host step keeps no maximum of the second moment", "Leave amsgrad out")
        )


def _number(name: str, value: Any) -> float:
    with contextlib.suppress(OverflowError):  # an int that no float can hold
        if isinstance(value, Tensor):
            if value.numel() == 1 and not value.is_meta and not value.is_complex():
                return float(value.detach())
        elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
            return float(value)
    raise ConfigError(explain(name, value, "not a number", "Give a number, or a tensor of one element"))
