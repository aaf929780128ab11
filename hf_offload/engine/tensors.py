"""Looking at torch tensors as flat memory: dtypes, layouts, and NumPy views over what lies on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hf_offload.errors import UnsupportedError, explain

WIRE = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
NUMPY_WIRE = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}


def check_parameter(p: Tensor, number: int) -> None:
    """Refuse parameter `number` of its list if it cannot be offloaded.

    Raises:
        UnsupportedError: a dtype other than bf16, fp16 and fp32, a DTensor, memory with gaps or overlaps, a parameter
            without values yet, or one made under `torch.inference_mode()`.
    """
    if is_lazy(p):
        raise UnsupportedError(
            explain(f"type of parameter {number}", type(p).__name__, "a lazy module has not made it yet",
                    "Run one forward of the model before making the optimizer")
        )  # fmt: skip
    name = f"parameter {number}, shape {tuple(p.shape)}"
    if p.dtype not in WIRE:
        remedy = "Convert the parameter to bfloat16, float16 or float32, or keep it out of the optimizer"
        raise UnsupportedError(explain(f"dtype of {name}", str(p.dtype), "no host step exists for it", remedy))
    if hasattr(p, "device_mesh"):
        raise UnsupportedError(
            explain(f"type of {name}", type(p).__name__, "sharded parameters (FSDP2, tensor parallel) come later",
                    "Use one process, or DDP with schedule='in_order'")
        )  # fmt: skip
    if p.layout != torch.strided or not is_dense(p) or p.is_neg():
        raise UnsupportedError(
            explain(f"stride of {name}", tuple(p.stride()) if p.layout == torch.strided else str(p.layout),
                    "its elements do not fill one block of memory", "Make the parameter from .contiguous() data")
        )  # fmt: skip
    if p.is_inference():
        raise UnsupportedError(
            explain(name, "an inference tensor", "made under torch.inference_mode(), it cannot be trained by autograd",
                    "Make the model outside of inference_mode")
        )  # fmt: skip


def check_apart(params: Iterable[Tensor]) -> None:
    """Refuse trainable parameters that share memory: each would be stepped, and the last to arrive would win.

    Raises:
        UnsupportedError: two of them overlap.
    """
    runs = sorted((str(p.device), p.data_ptr(), p.numel() * p.element_size(), tuple(p.shape)) for p in params)
    runs = [run for run in runs if run[2]]
    for (device, start, nbytes, shape), (next_device, next_start, _, next_shape) in pairwise(runs):
        if device == next_device and next_start < start + nbytes:
            raise UnsupportedError(
                explain("params", f"shapes {shape} and {next_shape}", "two parameters share memory (`a.data = b.data`)",
                        "Tie them by using one Parameter in both places, or give one of them memory of its own")
            )  # fmt: skip


Layout = tuple[torch.device, tuple[int, ...], tuple[int, ...]]


def layout_of(p: Tensor) -> Layout:
    """Device, shape, and strides where there is a choice: equal layouts of dense tensors are equal orders in memory."""
    contiguous = p.is_contiguous()
    strides = tuple(0 if contiguous or size == 1 else st for st, size in zip(p.stride(), p.shape))
    return p.device, tuple(p.shape), strides


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one block of memory, each once, in whatever order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(t.stride(), t.shape) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(t: Tensor) -> Tensor:
    """A dense tensor's elements, 1-D, in memory order; shares the memory."""
    t = t.detach()
    return t.view(-1) if t.is_contiguous() else torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())


def like_layout(grad: Tensor, p: Tensor) -> Tensor:
    """`grad` with its elements in the memory order of `p`; a copy only where the orders differ."""
    if grad.stride() == p.stride() or (grad.is_contiguous() and p.is_contiguous()):
        return grad
    return torch.empty_strided(p.shape, p.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def host_array(t: Tensor) -> np.ndarray:
    """A NumPy view (uint16 bits or float32) over a dense CPU tensor's elements in memory order."""
    t = flat(t)
    return t.numpy() if t.dtype == torch.float32 else t.view(torch.uint16).numpy()


def shaped_view(elements: np.ndarray | Tensor, p: Tensor) -> Tensor:
    """A tensor of `p`'s shape and strides over the memory of its elements, 1-D in memory order."""
    t = torch.from_numpy(elements) if isinstance(elements, np.ndarray) else elements
    return t.view(p.shape) if p.is_contiguous() else torch.as_strided(t, p.shape, p.stride())
