"""Any training loop gives the bits of in order in every exact schedule: loops that are made up at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_offload import OffloadAdam
from support.engine import EXACT, KERNELS, TinyLM, batches, copies, dice, kernels, optimizer_of, same, state, weights
from support.engine import settings as config

MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": TinyLM,
    "bf16": lambda: TinyLM(torch.bfloat16),
    "fp16": lambda: TinyLM(torch.float16),
    "mixed": lambda: TinyLM(torch.bfloat16, adapters=True),
}
ALL = 1 << 20


# ---- what a loop consists of


AFTER_BACKWARD = ["zero", "none", "model none", "half", "state", "read norm", "forward"]
MICRO_BATCH = st.fixed_dictionaries(
    {
        "fails_at": st.sampled_from([None, None, None, None, 0, 2]),
        "then": st.none() | st.sampled_from(AFTER_BACKWARD),
    }
)
AFTER_STEP = [
    "generate",
    "eval",
    "train",
    "state_dict",
    "synchronize",
    "save",
    "swap",
    "stats",
    "pause",
    "edit",
    "load",
]
STEP = st.fixed_dictionaries(
    {
        "freeze": st.none() | st.integers(0, 18),
        "micro_batches": st.lists(MICRO_BATCH, min_size=1, max_size=3),
        "scale": st.sampled_from([None, None, 2.0**4, 2.0**40]),
        "clip": st.sampled_from([None, 0.1, 10.0]),
        "missing": st.none() | st.integers(0, 18),
        "change": st.sampled_from([None, None, "lr", "betas", "eps", "weight_decay"]),
        "step": st.sampled_from([True, True, True, True, False]),
        "zero": st.sampled_from(["none", "none", "model none", "zero", "keep"]),
        "after": st.lists(st.sampled_from(AFTER_STEP), max_size=2),
    }
)
LOOPS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(EXACT),
        "model": st.sampled_from(sorted(MODELS)),
        "bucket_bytes": st.sampled_from([17, 60, 333, 1500, ALL]),
        "ring_slots": st.integers(1, 4),
        "seed": st.integers(0, 10_000),
        "steps": st.lists(STEP, min_size=2, max_size=6),
    }
)
CHANGES: dict[str, Any] = {"lr": 5e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}


class Boom(torch.autograd.Function):
    """A backward that fails in the middle of a model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("injected: backward fails")


class Loop:
    """One run of a loop; `seen` is what the user saw of it."""

    def __init__(self, loop: dict[str, Any], mode: str) -> None:
        self.model = MODELS[loop["model"]]()
        sizes = {name: loop[name] for name in ("bucket_bytes", "ring_slots")}
        self.optimizer: OffloadAdam = optimizer_of(self.model, config(mode, **sizes))
        self.params = list(self.model.parameters())
        self.data = batches(loop["seed"])
        self.seen: list[str] = []
        self.failed = False
        self.saved: Any = None

    def see(self, value: Any) -> None:
        self.seen.append(repr(value))  # so that NaN equals NaN

    def follow(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            frozen = self.params[step["freeze"] % len(self.params)] if step["freeze"] is not None else None
            if frozen is not None:
                frozen.requires_grad_(False)
            for micro in step["micro_batches"]:
                self.backward(micro["fails_at"], step["scale"] or 1.0)
                if micro["then"] is not None:
                    self.after_backward(micro["then"])
            if frozen is not None:
                frozen.requires_grad_(True)
            self.step(step)
            for action in step["after"]:
                ACTIONS[action](self)

    def backward(self, fails_at: int | None, scale: float) -> None:
        handles = []
        if fails_at is not None:
            layer = self.model.layers[fails_at]
            handles.append(layer.register_forward_hook(lambda module, args, out: Boom.apply(out)))
        loss = self.model(next(self.data))
        self.see(loss.item())
        try:
            (loss * scale).backward()
        except RuntimeError as error:
            if "injected" not in str(error):
                raise
            self.failed = True
        for handle in handles:
            handle.remove()

    def after_backward(self, what: str) -> None:
        if what == "half":
            self.look()
            for p in self.params[::2]:
                p.grad = None
        elif what == "state":
            self.see(total(self.optimizer))
        elif what == "read norm":
            self.see(self.optimizer.clip_grad_norm_(float("inf")).item())
        elif what == "forward":
            generate(self)
        else:
            self.zero(what)

    def look(self) -> None:
        """After a backward that failed, single gradients can be dropped only once we have heard that it did: by a
        forward, or a call of the optimizer's."""
        if self.failed:
            generate(self)
            self.failed = False

    def zero(self, how: str) -> None:
        if how == "model none":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how == "none")

    def step(self, step: dict[str, Any]) -> None:
        group = self.optimizer.param_groups[0]
        before = {name: group[name] for name in CHANGES}
        if step["missing"] is not None:
            self.look()
            self.params[step["missing"] % len(self.params)].grad = None
        if step["scale"] is not None:
            self.see(self.optimizer.unscale_(1.0 / step["scale"]).item())
        if step["clip"] is not None:
            self.see(self.optimizer.clip_grad_norm_(step["clip"]).item())
        if step["change"] is not None:
            group[step["change"]] = CHANGES[step["change"]]
        if step["step"]:
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()  # clipped, and not stepped after all
        group.update(before)
        lr, group["lr"] = group["lr"], 1e9  # a scheduler writes right after step(); it must not matter
        if step["zero"] != "keep":
            self.zero(step["zero"])
        group["lr"] = lr


def total(optimizer: OffloadAdam) -> float:
    """Of all state that was ever stepped: streamed, a parameter that was unfrozen gets its own a little earlier."""
    entries = [e for e in optimizer.state_dict()["state"].values() if float(e["step"])]
    return sum(float(e[name].double().sum()) for e in entries for name in ("exp_avg", "exp_avg_sq", "master", "step"))


def generate(loop: Loop) -> None:
    with torch.no_grad():
        loop.see(loop.model(next(loop.data)).item())


def evaluate(loop: Loop) -> None:
    loop.optimizer.eval()
    loop.see(sum(float(p.detach().double().sum()) for p in loop.params))


def save(loop: Loop) -> None:
    loop.see(sum(float(t.double().sum()) for t in loop.model.state_dict().values()))


def swap(loop: Loop) -> None:
    """What loads a checkpoint: other weights, then back."""
    mine = {k: v.clone() for k, v in loop.model.state_dict().items()}
    loop.model.load_state_dict({k: v * 1.5 for k, v in mine.items()})
    loop.see(loop.model(next(loop.data)).item())
    loop.model.load_state_dict(mine)


def edit(loop: Loop) -> None:
    """A callback that changes a weight, in a way that no version counter tells."""
    loop.optimizer.synchronize()
    loop.params[3].data.copy_(loop.params[3].data * 1.25)


def load(loop: Loop) -> None:
    """The state as it was at the last time this came up."""
    saved, loop.saved = loop.saved, pickled(loop.optimizer)
    if saved is not None:
        loop.optimizer.load_state_dict(saved)


def pickled(optimizer: OffloadAdam) -> Any:
    saved = optimizer.state_dict()
    entries = {i: {k: torch.as_tensor(v).clone() for k, v in e.items()} for i, e in saved["state"].items()}
    return {"state": entries, "param_groups": [dict(g) for g in saved["param_groups"]]}


ACTIONS: dict[str, Callable[[Loop], None]] = {
    "generate": generate,
    "eval": evaluate,
    "train": lambda loop: loop.optimizer.train(),
    "state_dict": lambda loop: loop.see(total(loop.optimizer)),
    "synchronize": lambda loop: loop.optimizer.synchronize(),
    "save": save,
    "swap": swap,
    "stats": lambda loop: loop.see(loop.optimizer.stats().skipped_steps),
    "pause": lambda loop: time.sleep(2e-3),
    "edit": edit,
    "load": load,
}


# ---- and that it gives the same bits


def slowed(seed: int) -> Iterator[Any]:
    roll = random.Random(seed)
    yield copies(dice(seed, 1e-3))
    yield kernels(lambda: time.sleep(roll.choice((0.0, 0.0, 0.0, 5e-4))), KERNELS)


def run(loop: dict[str, Any], mode: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Train as `loop` says; in order without any delay."""
    with ExitStack() as stack:
        for slow in slowed(loop["seed"]) if mode != "in_order" else ():
            stack.enter_context(slow)
        one = Loop(loop, mode)
        try:
            one.follow(loop["steps"])
            one.optimizer.synchronize()
            return one.seen, weights(one.model), state(one.optimizer)
        finally:
            one.optimizer.close()


def both_agree(loop: dict[str, Any]) -> None:
    expected, found = run(loop, "in_order"), run(loop, loop["mode"])
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
    assert same(found[2], expected[2])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loop=LOOPS)
def test_any_loop_gives_the_same_bits(loop: dict[str, Any]) -> None:
    both_agree(loop)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loop=LOOPS)
def test_any_of_many_loops_gives_the_same_bits(loop: dict[str, Any]) -> None:
    both_agree(loop)
