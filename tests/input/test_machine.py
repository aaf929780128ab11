"""Calls of the optimizer in any sensible order, in every exact schedule, beside the NumPy twin: the same bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.engine.norm import clip_factor
from support.fuzz import both_sizes, examples_of
from support.optimizer import DTYPES, EXACT, Bag, Twin, assert_twin, config, offload, same_bits

SHAPES = ((), (7,), (3, 5), (0, 2), (301,))
indices, seeds = st.integers(0, 9), st.integers(0, 999)
bounds = st.sampled_from((0.0, 1e-3, 0.5, 1e9, math.inf))


def normal(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


class Calls(RuleBasedStateMachine):
    """`params` belong to the optimizer, `others` to the twin.

    Attributes:
        bound: the tightest clip that is pending; None: no norm was asked for.
        held: whether there may be gradients.
        untold: parameters changed from outside, which the optimizer notices when it steps them, or is told to look.
    """

    mode = "in_order"

    @initialize(wire=st.sampled_from(sorted(DTYPES)), seed=seeds)
    def begin(self, wire: str, seed: int) -> None:
        dtype = DTYPES[wire]
        self.params: list[Any] = [
            nn.Parameter(normal(torch.empty(s, dtype=dtype), seed + i)) for i, s in enumerate(SHAPES)
        ]
        self.others: list[Any] = [nn.Parameter(p.detach().clone()) for p in self.params]
        self.optimizer = offload(self._groups(self.params), self.mode, lr=1e-2)
        self.bag = getattr(self.optimizer, "_bag", None)
        self.twin = Twin(self._groups(self.others), lr=1e-2)
        self.bound: float | None = None
        self.held = False
        self.untold: set[Any] = set()

    @staticmethod
    def _groups(params: list[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "weight_decay": 0.1},
            {"params": []},
            {"params": params[2:], "betas": (0.5, 0.9)},
        ]

    # ---- gradients

    @precondition(lambda self: self.bound is None)
    @rule(chosen=st.lists(indices, min_size=1, max_size=4), seed=seeds)
    def backward(self, chosen: list[int], seed: int) -> None:
        """Adds to what is there."""
        numbers = sorted({i % len(self.params) for i in chosen})
        pairs = [(self.params[i], self.others[i]) for i in numbers if self.params[i].requires_grad]
        if self.bag is not None:
            self.bag()
        if pairs:
            grads = [normal(q, seed + i) for i, (_, q) in enumerate(pairs)]
            torch.autograd.backward([p for p, _ in pairs], grads)
            torch.autograd.backward([q for _, q in pairs], [g.clone() for g in grads])
            self.held = True

    @precondition(lambda self: self.bound is None)
    @rule(i=indices)
    def drop_a_gradient(self, i: int) -> None:
        self.params[i % len(self.params)].grad = None
        self.others[i % len(self.params)].grad = None

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for q in self.others:
            q.grad = None if set_to_none or q.grad is None else torch.zeros_like(q)
        self.bound = None
        self.held = self.held and not set_to_none

    # ---- steps

    @rule(bound=bounds)
    def clip(self, bound: float) -> None:
        self.optimizer.clip_grad_norm_(bound)
        squares = [q.grad.double().square().sum().item() for q in self.others if q.grad is not None]
        assert self.optimizer.last_grad_norm == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-12, nan_ok=True)
        self.bound = bound if self.bound is None else min(bound, self.bound)

    @rule()
    def step(self) -> None:
        norm = self.optimizer.last_grad_norm
        self.optimizer.step()
        if self.bound is None or self.bound == math.inf:
            self.twin.step(1.0)
        else:
            assert norm is not None
            self.twin.step(clip_factor(self.bound, norm))
        self.bound = None
        self.untold -= {p for p, q in zip(self.params, self.others) if q.grad is not None}

    @precondition(lambda self: self.bound is None)
    @rule(
        chosen=st.lists(indices, min_size=2, max_size=6), seed=seeds, bound=st.none() | bounds, times=st.integers(1, 2)
    )
    def steps_as_usual(self, chosen: list[int], seed: int, bound: float | None, times: int) -> None:
        """So that most sequences have some."""
        for _ in range(times):
            self.backward(chosen, seed)
            if bound is not None:
                self.clip(bound)
            self.step()
            self.zero_grad(True)

    @precondition(lambda self: not self.held)
    @rule(seed=seeds)
    def a_step_that_is_skipped(self, seed: int) -> None:
        p = next(p for p in self.params if p.requires_grad and p.numel())
        if self.bag is not None:
            self.bag()
        p_grad = normal(p, seed)
        p_grad.view(-1)[seed % p.numel()] = math.inf
        torch.autograd.backward([p], [p_grad])
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bound = None

    @rule(group=indices, lr=st.sampled_from((0.0, 1e-3, 0.1)), as_tensor=st.booleans())
    def set_lr(self, group: int, lr: float, as_tensor: bool) -> None:
        """Right after a step as well: the one under way has taken its own."""
        number = group % len(self.twin.groups)
        self.optimizer.param_groups[number]["lr"] = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr
        self.twin.groups[number]["lr"] = lr

    # ---- saving, and other parameters and models

    @precondition(lambda self: not self.held)
    @rule(mode=st.none() | st.sampled_from(EXACT), bucket_bytes=st.sampled_from((4, 100, 1000, 1 << 20)))
    def save_and_load(self, mode: str | None, bucket_bytes: int) -> None:
        """Into the same optimizer, or into one of other settings that takes its place."""
        saved = copy.deepcopy(self.optimizer.state_dict())
        if mode is not None:
            self.optimizer.close()
            groups = [{"params": list(g["params"])} for g in self.optimizer.param_groups]
            self.bag = None if mode == "in_order" else Bag(self.params)
            settings = config(mode, bucket_bytes=bucket_bytes)
            self.optimizer = OffloadAdam(groups, config=settings, model=self.bag)
        self.optimizer.load_state_dict(saved)
        self.bound = None

    @precondition(lambda self: not self.held and len(self.params) < 9)
    @rule(seed=seeds, shape=st.sampled_from(SHAPES))
    def add_a_group(self, seed: int, shape: tuple[int, ...]) -> None:
        p = nn.Parameter(normal(torch.empty(shape, dtype=self.params[0].dtype), seed))
        q = nn.Parameter(p.detach().clone())
        self.optimizer.add_param_group({"params": [p], "lr": 0.05})
        self.twin.groups.append({**self.twin.groups[1], "params": [q], "lr": 0.05})
        self.twin.steps[q] = 0
        self.twin.master[q] = q.detach().float().numpy().reshape(-1).copy()
        self.twin.m[q], self.twin.v[q] = self.twin.master[q] * 0, self.twin.master[q] * 0
        self.params.append(p)
        self.others.append(q)

    @precondition(lambda self: not self.held)
    @rule(i=indices)
    def freeze_or_unfreeze(self, i: int) -> None:
        p = self.params[i % len(self.params)]
        trainable = [q for q in self.params if q.requires_grad and q.numel() and q is not p]
        if trainable or not p.requires_grad:
            self.optimizer.synchronize()
            p.requires_grad_(not p.requires_grad)

    @precondition(lambda self: not self.held and self.bag is not None)
    @rule()
    def attach_another_model(self) -> None:
        self.bag = Bag(self.params)
        self.optimizer.attach(self.bag)

    # ---- from outside

    @rule()
    def synchronize(self) -> None:
        self.optimizer.synchronize()

    @precondition(lambda self: not self.held)
    @rule(i=indices, seed=seeds, told=st.booleans(), hidden=st.booleans(), looked=st.booleans())
    def change_a_weight(self, i: int, seed: int, told: bool, hidden: bool, looked: bool) -> None:
        """Some elements get other values, with or without the version counter, and with or without a word about it."""
        self.optimizer.synchronize()
        p, q = self.params[i % len(self.params)], self.others[i % len(self.params)]
        new = torch.where(normal(q, seed) > 0, normal(q, seed + 1), q.detach())
        with torch.no_grad():
            (p.data if hidden else p).copy_(new)
            q.copy_(new)
        master = torch.from_numpy(self.twin.master[q]).view(q.shape)
        master.copy_(torch.where(master.to(q.dtype) == new, master, new.float()))
        self.untold.add(p)
        if told:
            self.optimizer.reseed()
            self.untold.clear()
        if looked:
            self.look()

    # ---- what must hold

    @rule()
    def look(self) -> None:
        self.optimizer.synchronize()
        pairs = list(zip(self.params, self.others))
        assert all(same_bits(p, q) for p, q in pairs)
        if self.untold:
            self.optimizer.reseed()
            self.untold.clear()
        stepped = [(p, q) for p, q in pairs if self.twin.steps[q]]
        assert_twin(self.optimizer, [p for p, _ in stepped], self.twin, [q for _, q in stepped])

    def teardown(self) -> None:
        if hasattr(self, "optimizer"):
            try:
                self.look()
            finally:
                self.optimizer.close()


@both_sizes
@pytest.mark.parametrize("mode", EXACT)
def test_calls_in_any_order(mode: str, examples: int) -> None:
    machine = type(f"Calls_{mode}", (Calls,), {"mode": mode})
    few = examples < 500
    run_state_machine_as_test(machine, settings=examples_of(examples // 2, stateful_step_count=20 if few else 40))
