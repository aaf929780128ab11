"""The gradients of a step: which parameters have one, and whether it is one we can step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_offload.engine.tensors import is_dense, like_layout
from hf_offload.errors import UnsupportedError, explain


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter that has a gradient: `value` lies in the parameter's memory order, `group` is its group's index.

    `value` is `.grad` itself unless that had another layout.
    """

    param: Tensor
    value: Tensor
    group: int


def collect(groups: Sequence[Mapping[str, Any]]) -> list[Gradient]:
    """Every gradient of `param_groups`, in their order; a parameter listed twice counts once.

    Raises:
        UnsupportedError: a gradient that is sparse, or whose dtype, device or shape is not its parameter's.
    """
    found: list[Gradient] = []
    for number, group in enumerate(groups):
        seen: set[int] = set()
        for p in group["params"]:
            grad = p.grad
            if grad is None or id(p) in seen:
                continue
            seen.add(id(p))
            if grad.layout != torch.strided or (grad.dtype, grad.device, grad.shape) != (p.dtype, p.device, p.shape):
                _refuse(p, grad)
            # The gradient of an imaginary part may be a view whose memory holds the values with the other sign.
            value = grad.resolve_neg()
            if is_dense(p):  # else the step refuses it, for what happened to the parameter
                value = like_layout(value, p)
            found.append(Gradient(p, value, number))
    return found


def _refuse(p: Tensor, grad: Tensor) -> None:
    shape = tuple(p.shape)
    if grad.layout != torch.strided:
        raise UnsupportedError(
            explain(f"gradient of a parameter of shape {shape}", str(grad.layout), "sparse gradients are not supported",
                    "Make the layer with sparse=False (nn.Embedding's default)")
        )  # fmt: skip
    raise UnsupportedError(
        explain(f"gradient of a parameter of shape {shape}", f"{tuple(grad.shape)} {grad.dtype} on {grad.device}",
                f"the parameter is {shape} {p.dtype} on {p.device}",
                "Let autograd make the gradients, in the parameter's own dtype")
    )  # fmt: skip
