"""What the tests of outside changes share: a model whose gradients do not depend on its weights, and its oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from support.engine import MODES, settings
from support.optimizer import Twin, same_bits, state

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EVERY = tuple(MODES)
Made = Callable[[int, int], Tensor]


class Piece(nn.Module):
    """A weight and a bias; its output is their inner product with what it is given."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size).to(dtype))
        self.bias = nn.Parameter(torch.randn(size).to(dtype))

    def forward(self, made: Iterable[Tensor]) -> Tensor:
        return sum(((t.float() * g).sum() for t, g in zip((self.weight, self.bias), made)), torch.zeros(()))


class Pieces(nn.Module):
    """Three blocks and a head. The gradients of backward are, whatever the weights are, the numbers it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32, size: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Piece(size, dtype) for _ in range(3)])
        self.head = Piece(size, dtype)
        self.size = size

    def forward(self, seed: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)

        def made() -> list[Tensor]:
            return [torch.randn(s, generator=generator) * scale for s in ((self.size, self.size), (self.size,))]

        return sum((m(made()) for m in (*self.blocks, self.head)), torch.zeros(()))


class Pair:
    """A model trained by an OffloadAdam, and one trained by the oracle: fp32 masters in plain torch and NumPy.

    Args:
        mode: one of `support.engine.MODES`.
        accumulation: backwards a step.
    """

    def __init__(self, mode: str, wire: str = "float32", accumulation: int = 1, **config: Any) -> None:
        self.model, self.other = Pieces(DTYPES[wire]), Pieces(DTYPES[wire])
        self.optimizer = OffloadAdam(
            self.model.parameters(), lr=1e-2, config=settings(mode, threads=1, **config), model=self.model
        )
        self.twin = Twin([{"params": list(self.other.parameters()), "lr": 1e-2}])
        self.params, self.others = list(self.model.parameters()), list(self.other.parameters())
        self.accumulation = accumulation
        self.taken = 0

    def backward(self, micro: int = 0) -> None:
        for model in (self.model, self.other):
            model(100 * self.taken + micro).backward()

    def step(self, then: Callable[[], None] = lambda: None, at: str = "step") -> None:
        """One step of both. `then` is called before the step, or at "micro" between its first two backwards."""
        for micro in range(self.accumulation):
            self.backward(micro)
            if at == "micro" and micro == 0:
                then()
        if at == "step":
            then()
        self.optimizer.step()
        self.follow()
        self.twin.step()
        self.optimizer.zero_grad()
        self.other.zero_grad()
        self.taken += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def write(self, how: Callable[[nn.Module], None], wait: bool = True) -> None:
        """Do the same to both models."""
        if wait:
            self.optimizer.synchronize()
        how(self.model)
        how(self.other)

    def follow(self) -> None:
        """The oracle's rule: a weight that equals its rounded master keeps it, any other becomes the master."""
        for q in self.others:
            master = torch.from_numpy(self.twin.master[q])
            weight = q.detach().reshape(-1)
            stays = (master.to(q.dtype) == weight) | (master.isnan() & weight.isnan())
            master.copy_(torch.where(stays, master, weight.float()))

    def check(self) -> None:
        """Bits of weights and state."""
        self.optimizer.synchronize()
        for p, q in zip(self.params, self.others):
            assert same_bits(p, q)
            for name, arrays in (("master", self.twin.master), ("exp_avg", self.twin.m), ("exp_avg_sq", self.twin.v)):
                assert same_bits(state(self.optimizer, p, name).reshape(-1), torch.from_numpy(arrays[q])), name
            assert state(self.optimizer, p, "step").item() == self.twin.steps[q]


def changed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state dict, a third of each tensor another."""
    values = copy.deepcopy(values)
    for t in values.values():
        t.reshape(-1)[::3] = 2.0
    return values
