"""Whether many tensors are like their examples, told in one call.

To ask each of 300 tensors for its dtype, shape and strides takes Python longer than their step takes the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo import guards as _torch
except ImportError:  # a torch that has none: everybody looks at each tensor by itself
    _torch = None  # type: ignore[assignment]
_guards_of: Any = getattr(_torch, "TensorGuards", None)


def alike(examples: Sequence[Tensor]) -> Callable[[Sequence[Tensor | None]], bool]:
    """A function that says whether as many tensors have, each, its example's type, dtype, device, shape, layout,
    strides (of dimensions longer than 1) and neg and conj bits. These are the guards of torch.compile.

    False means nothing: it is what remains to be said where they cannot tell, and in other modes of torch (of
    gradients, where an example requires one; autocast) than they were made in. No mode is set here: Ctrl-C may come
    between a mode's being set and its being known that it has to be set back. The examples are not kept.
    """
    if _guards_of is None or not examples or any(t.layout != torch.strided for t in examples):
        return _cannot_tell
    try:
        guards = _guards_of(
            *examples, dynamic_dims_sizes=[list(t.shape) for t in examples],
            dynamic_dims_strides=[[st if n > 1 else None for st, n in zip(t.stride(), t.shape)] for t in examples],
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeError, SystemError):
        return _cannot_tell
    count = len(examples)
    return lambda tensors: len(tensors) == count and guards.check(*tensors)


def _cannot_tell(tensors: Sequence[Tensor | None]) -> bool:
    return False
