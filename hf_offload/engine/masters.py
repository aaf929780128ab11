"""fp32 weights become 16-bit ones, and their fp32 values wait on the host to become the master weights."""

from __future__ import annotations

from collections.abc import Callable

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


def take_master(p: Tensor) -> Tensor | None:
    """The fp32 values that waited for `p`, handed over for good, or None."""
    return _waiting.pop(p, None)
