"""fp32 weights become 16-bit ones, and their fp32 values wait on the host to become the master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# parameter -> fp32 CPU tensor of its shape, until an optimizer binds the parameter
_waiting: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def cast_trainable(model: nn.Module, dtype: torch.dtype, keep: Callable[[str], bool] = lambda name: False) -> int:
    """Cast each trainable fp32 parameter of `model` to `dtype` in place of its data.

    Buffers and frozen parameters stay as they are. The fp32 values are kept on the host (4 bytes a parameter) and
    become the master weights of the optimizer that binds the parameter.

    Args:
        model: its parameters may be on any device.
        dtype: torch.bfloat16 or torch.float16.
        keep: `keep(name)` is True for parameters that must stay in fp32.

    Returns:
        The number of elements cast.
    """
    cast = 0
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype == torch.float32 and not keep(name):
            values = p.data
            p.data = values.to(dtype)
            _waiting[p] = values.cpu()
            cast += p.numel()
    return cast


def waiting_bytes(params: Iterable[Tensor]) -> int:
    """Host memory of the fp32 values that wait for `params`, bytes."""
    return sum(4 * _waiting[p].numel() for p in params if p in _waiting)


def waiting_master(p: Tensor) -> Tensor | None:
    """The fp32 values that wait for `p`, or None."""
    return _waiting.get(p)


def drop_master(p: Tensor) -> None:
    """Nothing waits for `p` any more: its optimizer has the values."""
    _waiting.pop(p, None)


def give_back_master(p: Tensor, values: Tensor) -> None:
    """The optimizer could not be made: `values` wait for `p` again."""
    _waiting[p] = values
