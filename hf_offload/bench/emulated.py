"""An emulated device: a model that waits instead of computing, so that a host without a GPU can show what hides.

Python fills a GPU's queue ahead of the device. So it does here: each module is put into the device's queue and begins
when the one before has ended, but not before Python got there; Python goes on `AHEAD_S` before the end of what it has
queued, sleeping, without the GIL. A hook that waits for weights keeps Python from queueing the next module, and the
device stands idle once it has done the rest. Copies wait for the device as a CUDA stream waits for an event.

Before each `step()` the training loop waits for the device, as it does where a loss or a norm is read. From there until
the next forward is queued the device is idle: all that the training thread does in `step()` is charged.

Weights and gradients are real memory with random values. A gradient is handed to autograd as a fresh alias of a buffer
that is filled once: autograd takes such a tensor over as `.grad` instead of copying it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_offload.transport.host import sleep_until

EDGE_SHARE = 0.07
"""The embedding's share of all parameters, and the head's."""

AHEAD_S = 2e-3
"""Seconds before the device has done what is queued at which Python goes on: so much of its own work hides. A GPU's
queue holds about a thousand kernels, often a whole step."""


class Device:
    """The emulated device's queue."""

    def __init__(self) -> None:
        self._end = 0.0

    def end(self) -> float:
        """When all that was queued will be done, seconds on `time.perf_counter`'s clock."""
        return self._end

    def work(self, seconds: float) -> None:
        """Queue work of so many seconds; returns when Python would go on."""
        self._end = max(self._end, time.perf_counter()) + seconds
        sleep_until(self._end - AHEAD_S)

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        sleep_until(self._end)


def device_memory(numel: int) -> Tensor:
    """bf16[numel] in one piece and, where the system has them, huge pages, which NumPy asks for and torch does not: a
    device's memory has large pages, too."""
    return torch.from_numpy(np.empty(numel, np.int16)).view(torch.bfloat16)


class Memory:
    """Initial weights and gradients of a model: two flat bf16 tensors of `numel` elements, made once, read by all."""

    def __init__(self, sizes: Sequence[Sequence[int]], seed: int) -> None:
        """`sizes[module][tensor]`: elements."""
        self.sizes = sizes
        numel = sum(map(sum, sizes))
        made = torch.Generator().manual_seed(seed)
        self.weights = device_memory(numel).normal_(0.0, 0.02, generator=made)
        self.gradients = device_memory(numel).normal_(0.0, 1e-3, generator=made)

    def split(self, flat: Tensor) -> list[list[Tensor]]:
        """Views of `flat`, one a tensor, by module."""
        views = iter(flat.split([n for module in self.sizes for n in module]))
        return [[next(views) for _ in module] for module in self.sizes]


def module_sizes(blocks: int, params_per_block: int, tensors_per_block: int) -> list[list[int]]:
    """Elements of every tensor: the embedding, the blocks, the head. Embedding and head hold EDGE_SHARE each."""
    edge = max(1, round(EDGE_SHARE * blocks * params_per_block / (1 - 2 * EDGE_SHARE)))
    each, rest = divmod(params_per_block, tensors_per_block)
    block = [each + (i < rest) for i in range(tensors_per_block)]
    return [[edge], *(list(block) for _ in range(blocks)), [edge]]


class _Wait(torch.autograd.Function):
    """Waits in forward; waits in backward, and then hands every parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: EmulatedModule, *params: Tensor) -> Tensor:
        ctx.module = module
        out = x.clone()
        module.device.work(module.forward_s)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        module: EmulatedModule = ctx.module
        passed_on = grads[0] if ctx.needs_input_grad[0] else None
        found = (passed_on, None, *(g.detach() for g in module.gradients))
        module.device.work(module.backward_s)
        return found


class EmulatedModule(nn.Module):
    """One module: `forward_s` and `backward_s` seconds of waiting, its weights, shared gradients."""

    def __init__(
        self,
        device: Device,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        forward_s: float,
        backward_s: float,
    ) -> None:
        super().__init__()
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s
        self.gradients = list(gradients)
        self._flat = [nn.Parameter(w) for w in weights]
        for i, p in enumerate(self._flat):
            self.register_parameter(f"weight_{i}", p)

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self, *self._flat)  # type: ignore[no-any-return,no-untyped-call]


class EmulatedModel(nn.Module):
    """An embedding, blocks and a head.

    Args:
        memory: sizes, initial weights (copied) and gradients (shared).
        block_seconds: (forward, backward) of one block.
        edge_seconds: (forward, backward) of the embedding, and of the head.
    """

    def __init__(
        self, memory: Memory, block_seconds: tuple[float, float], edge_seconds: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        super().__init__()
        self.device = Device()
        mine = device_memory(memory.weights.numel()).copy_(memory.weights)
        weights, gradients = memory.split(mine), memory.split(memory.gradients)
        last = len(memory.sizes) - 1
        made = [
            EmulatedModule(self.device, w, g, *(edge_seconds if i in (0, last) else block_seconds))
            for i, (w, g) in enumerate(zip(weights, gradients, strict=True))
        ]
        self.embedding = made[0]  # registered in the order in which they run, as the engine's first guess of it
        self.blocks = nn.ModuleList(made[1:-1])
        self.head = made[-1]

    def forward(self, x: Tensor) -> Tensor:
        """x: one element; returns one element, the loss."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_output_embeddings(self) -> nn.Module:
        return self.head
