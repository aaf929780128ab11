"""What `.grad` is while the gradient itself is on the host: a tensor without memory that cannot be read by mistake."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_offload.errors import StateError, explain


class Collector(Protocol):
    """Who takes gradients: `hf_offload.engine.streaming.GradientStream`."""

    def accumulating(self, into: StreamedGradient) -> None: ...


class StreamedGradient(Tensor):
    """Stands in `p.grad` for a gradient that left during backward. It has the shape and dtype, and holds no memory.

    `None` there would say that there is no gradient: torch's `clip_grad_norm_` would return 0 and clip nothing.
    Whatever reads or writes it raises StateError. Autograd alone may add to it: then the gradient it wanted to add is
    kept in `incoming` for the hook that follows.

    Args:
        p: the parameter.
        collector: who takes what autograd adds.
    """

    incoming: Tensor | None
    _collector: weakref.ref[Any]

    @staticmethod
    def __new__(cls, p: Tensor, collector: Collector) -> StreamedGradient:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        made.incoming = None
        made._collector = weakref.ref(collector)
        return made  # type: ignore[no-any-return]

    def __init__(self, p: Tensor, collector: Collector) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"StreamedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, on its way to the host)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.add_.Tensor and graph_task() != -1 and isinstance(args[0], cls):
            collector = args[0]._collector()
            if collector is not None:
                args[0].incoming = args[1]
                collector.accumulating(args[0])
                return args[0]
        raise StateError(
            explain(
                "stream_gradients", True,
                f"this gradient has left the device during backward, so .grad cannot be read or written ({func})",
                "Clip with optimizer.clip_grad_norm_() or the Trainer's max_grad_norm, drop gradients with "
                "optimizer.zero_grad(), and otherwise set stream_gradients=false",
            )
        )  # fmt: skip


def graph_task() -> int:
    """Which backward autograd runs on this thread, -1 if none; a backward inside a backward has its own number."""
    return int(torch._C._current_graph_task_id())
