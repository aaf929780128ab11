"""What the optimizer's tests share: parameters and gradients from seeds, references to compare with, snapshots."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import reference

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MODES: dict[str, dict[str, Any]] = {
    "in_order": {"schedule": "in_order"},
    "overlapped": {"schedule": "overlapped"},
    "streamed": {"schedule": "overlapped", "stream_gradients": True},
    "speculative": {"schedule": "overlapped", "stream_gradients": True, "shadow_bytes": 1 << 22},
}
"""Every exact way to take a step."""
EXACT = tuple(MODES)
SCHEDULES = ("in_order", "overlapped")
"""Those that leave `.grad` to be read."""
# A 0-dim, an empty, odd sizes, one that spans several buckets.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (7,), (3, 5), (2, 3, 4, 5), (129,), (1501,))


class Bag(nn.Module):
    """A model that is nothing but parameters; its forward is their sum of squares."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.items = nn.ParameterList(params)

    def forward(self) -> Tensor:
        return sum((p.float().square().sum() for p in self.items), torch.zeros(()))


def config(schedule: str = "in_order", **more: Any) -> OffloadConfig:
    """Small buckets, few slots: everything is cut, shared and reused."""
    return OffloadConfig(**{**MODES[schedule], "bucket_bytes": 1000, "ring_slots": 2, "threads": 2, **more})


def offload(
    params: Any, schedule: str = "in_order", settings: dict[str, Any] | None = None, **kwargs: Any
) -> OffloadAdam:
    """An OffloadAdam; all but `in_order` get a model to hook."""
    optimizer = OffloadAdam(params, config=config(schedule, **(settings or {})), **kwargs)
    if schedule != "in_order":
        bag = Bag(p for g in optimizer.param_groups for p in g["params"])
        optimizer.attach(bag)
        optimizer._bag = bag  # type: ignore[attr-defined]  # the engine holds it weakly
    return optimizer


def make_params(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[Any]:
    """Parameters with normal values; the same values, rounded, for any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int, like: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    """The gradients of step `step`: normal, of sizes from 1e-3 to 10, in each parameter's dtype."""
    generator = torch.Generator().manual_seed(1000 + step)
    sizes = (torch.randn((), generator=generator) for _ in like)
    return [
        (torch.randn(p.shape, generator=generator) * 10 ** s.item() * scale).to(p.dtype) for p, s in zip(like, sizes)
    ]


def give(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for p, g in zip(params, grads):
        p.grad = None if g is None else g.clone(memory_format=torch.preserve_format)


def train(optimizer: Any, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """Take `steps` with their gradients, and wait for the weights."""
    for step in steps:
        give(params, gradients(step, params))
        optimizer.step()
    if isinstance(optimizer, OffloadAdam):
        optimizer.synchronize()


def twins(params: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Any]:
    """Parameters of their own with the same values, for a second optimizer."""
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


def state(optimizer: Any, p: Tensor, name: str) -> Tensor:
    return optimizer.state[p][name].detach().clone()


def snapshot(optimizer: OffloadAdam, params: Sequence[Tensor]) -> dict[str, bytes]:
    """Every byte of weights, host state and step counts, and every setting of the groups."""
    optimizer.engine.wait_all()
    optimizer.engine.settle_state()
    found = {
        f"weight {i}": p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for i, p in enumerate(params)
    }
    for i, arena in enumerate(optimizer.engine.arenas):
        for number, held in enumerate(arena.state):
            found[f"state {number} of arena {i}"] = held.tobytes()
        found[f"steps {i}"] = arena.steps.tobytes()
    for i, group in enumerate(optimizer.param_groups):
        found[f"group {i}"] = repr({k: v for k, v in group.items() if k != "params"}).encode()
        found[f"group {i} params"] = repr([id(p) for p in group["params"]]).encode()
    return found


def bits(t: Tensor) -> np.ndarray:
    """The bits of a tensor, so that NaN equals NaN and 0.0 is not -0.0."""
    t = t.detach().contiguous().reshape(-1)
    return t.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[t.element_size()]).numpy().copy()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(bits(a), bits(b)))


class Twin:
    """What an OffloadAdam computes, one parameter after the other, by the kernels' NumPy twin: the bit oracle."""

    def __init__(self, groups: Sequence[dict[str, Any]], **given: Any) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, **given}
        self.groups = [{**defaults, **g} for g in groups]
        self.steps = {p: 0 for g in self.groups for p in g["params"]}
        self.master = {p: p.detach().float().numpy().reshape(-1).copy() for p in self.steps}
        self.m = {p: np.zeros_like(x) for p, x in self.master.items()}
        self.v = {p: np.zeros_like(x) for p, x in self.master.items()}

    def step(self, factor: float = 1.0, decoupled: bool = True, maximize: bool = False) -> None:
        """Steps the weights of its own parameters in place."""
        for g in self.groups:
            for p in g["params"]:
                if p.grad is not None:
                    self._step(p, g, factor, decoupled, maximize)

    def _step(self, p: Tensor, g: dict[str, Any], factor: float, decoupled: bool, maximize: bool) -> None:
        self.steps[p] += 1
        wire = str(p.dtype).removeprefix("torch.")
        row = cpu.coefficients(
            lr=float(g["lr"]), beta1=g["betas"][0], beta2=g["betas"][1], eps=g["eps"], weight_decay=g["weight_decay"],
            step=self.steps[p], grad_scale=factor, decoupled=decoupled, maximize=maximize,
        )  # fmt: skip
        weight, grad = _flat_bits(p.detach()), _flat_bits(p.grad)
        bounds = np.array([0, p.numel()])
        reference.adam_step(self.master[p], self.m[p], self.v[p], grad, weight, bounds, row[None], wire=wire)
        # p may be permuted: copy_ goes by index, and so does the order of `weight`
        stepped = torch.from_numpy(weight if wire == "float32" else weight.view(np.int16)).view(p.dtype)
        with torch.no_grad():
            p.copy_(stepped.view(p.shape))


def _flat_bits(t: Tensor | None) -> np.ndarray:
    assert t is not None
    t = t.detach().contiguous().reshape(-1).clone()
    return t.numpy() if t.dtype == torch.float32 else t.view(torch.int16).numpy().view(np.uint16)


def assert_twin(optimizer: OffloadAdam, params: Sequence[Tensor], twin: Twin, others: Sequence[Tensor]) -> None:
    """Bits of weights and state. Weights alone are not enough: Adam's first step hardly sees a gradient's size."""
    for p, q in zip(params, others):
        assert same_bits(p, q)
        for name, arrays in (("master", twin.master), ("exp_avg", twin.m), ("exp_avg_sq", twin.v)):
            assert same_bits(state(optimizer, p, name).reshape(-1), torch.from_numpy(arrays[q])), name
        assert state(optimizer, p, "step").item() == twin.steps[q]


def assert_same_run(a: OffloadAdam, params: Sequence[Tensor], b: OffloadAdam, others: Sequence[Tensor]) -> None:
    """Bits of weights and state of two optimizers."""
    for o in (a, b):
        o.synchronize()
    for p, q in zip(params, others):
        assert same_bits(p, q)
        assert (p in a.state) == (q in b.state)
        for name in a.state.get(p, {}):
            assert same_bits(state(a, p, name), state(b, q, name)), name


def frozen_state_dict(optimizer: Any) -> dict[str, Any]:
    """A copy of the state dict that no later step changes."""
    return copy.deepcopy(optimizer.state_dict())
