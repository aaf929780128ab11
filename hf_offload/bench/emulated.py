"""An emulated device: a model that waits instead of computing, so that a host without a GPU can show what hides.

Each module sleeps, without the GIL, from the moment Python calls it until its time is over. On a GPU Python launches
kernels ahead of the device, so a little Python between two modules costs nothing there; here all of it, the engine's
hooks and waits above all, lengthens the step. That errs against the engine.

One thing is not charged: that the system wakes the sleeping thread late, because other threads hold the cores. A GPU
works through its queue meanwhile. So the next module counts from the moment the thread should have been woken, unless
somebody held it up before its forward: then it counts from when it was let go, since it may not run before its weights
are there. At the start of a step nothing is carried over.

Weights and gradients are real memory with random values. A gradient is handed to autograd as a fresh alias of a buffer
that is filled once: autograd takes such a tensor over as `.grad` instead of copying it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

EDGE_SHARE = 0.07
"""The embedding's share of all parameters, and the head's."""


HELD_UP_S = 100e-6
"""Seconds off the processor before a module's forward from which on it counts as held up."""


class Clock:
    """The emulated device's time.

    Attributes:
        late_seconds: by how much the system woke the thread too late, in all.
    """

    def __init__(self) -> None:
        self.late_seconds = 0.0
        self._owed = 0.0

    def forget(self) -> None:
        """What the thread was late until now is charged: the next module counts from when it is called."""
        self._owed = 0.0

    def work(self, seconds: float) -> None:
        """The device is busy for `seconds`, from now on or from when the thread should have been woken last."""
        if seconds <= 0:
            return
        now = time.perf_counter()
        end = now - self._owed + seconds
        time.sleep(max(0.0, end - now))
        woken = time.perf_counter()
        self.late_seconds += max(0.0, woken - max(end, now))
        self._owed = max(0.0, woken - end)


class Memory:
    """Initial weights and gradients of a model: two flat bf16 tensors of `numel` elements, made once, read by all."""

    def __init__(self, sizes: Sequence[Sequence[int]], seed: int) -> None:
        """`sizes[module][tensor]`: elements."""
        self.sizes = sizes
        numel = sum(map(sum, sizes))
        made = torch.Generator().manual_seed(seed)
        self.weights = torch.empty(numel, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=made)
        self.gradients = torch.empty(numel, dtype=torch.bfloat16).normal_(0.0, 1e-3, generator=made)

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
        module.clock.work(module.forward_s)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        module: EmulatedModule = ctx.module
        passed_on = grads[0] if ctx.needs_input_grad[0] else None
        found = (passed_on, None, *(g.detach() for g in module.gradients))
        module.clock.work(module.backward_s)
        return found


class EmulatedModule(nn.Module):
    """One module: `forward_s` and `backward_s` seconds of waiting, its own copy of the weights, shared gradients."""

    def __init__(
        self, clock: Clock, weights: Sequence[Tensor], gradients: Sequence[Tensor], forward_s: float, backward_s: float
    ) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.gradients = list(gradients)
        self._called = 0.0
        self._flat = [nn.Parameter(w.clone()) for w in weights]
        for i, p in enumerate(self._flat):
            self.register_parameter(f"weight_{i}", p)

    def __call__(self, x: Tensor) -> Tensor:
        self._called = time.perf_counter() - time.thread_time()
        return super().__call__(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if time.perf_counter() - time.thread_time() - self._called > HELD_UP_S:
            self.clock.forget()
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
        self.clock = Clock()
        weights, gradients = memory.split(memory.weights), memory.split(memory.gradients)
        last = len(memory.sizes) - 1
        made = [
            EmulatedModule(self.clock, w, g, *(edge_seconds if i in (0, last) else block_seconds))
            for i, (w, g) in enumerate(zip(weights, gradients, strict=True))
        ]
        self.embedding = made[0]  # registered in the order in which they run, as the engine's first guess of it
        self.blocks = nn.ModuleList(made[1:-1])
        self.head = made[-1]

    def forward(self, x: Tensor) -> Tensor:
        """x: one element; returns one element, the loss."""
        self.clock.forget()
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_output_embeddings(self) -> nn.Module:
        return self.head
