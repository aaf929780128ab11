"""Gradients that leave during backward: that they do, what is left in `.grad`, what the device and the host hold."""

from __future__ import annotations

import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.errors import ConfigError, HostMemoryError, StateError, UnsupportedError, WaitTimeout
from support.engine import (
    LONG,
    STREAMED,
    Hold,
    TinyLM,
    batches,
    bits,
    copies,
    late,
    optimizer_of,
    same,
    settings,
    state,
    weights,
)
from support.transport import FailAt

Body = Callable[[Any, OffloadAdam], None]


class Items(nn.Module):
    """Parameters of five elements; `forward` squares the ones that are asked for."""

    def __init__(self, count: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.ParameterList([nn.Parameter(torch.randn(5).to(dtype)) for _ in range(count)])

    def forward(self, *which: int, times: float = 1.0) -> Tensor:
        return sum((self.items[i] * times).square().sum() for i in which)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("injected: backward fails")


def failing(model: Items, *which: int) -> None:
    """A backward in which `which` get their gradients, in this order, before it fails."""
    rest = Boom.apply(model.items[0].new_zeros(5) + model.items[0]).sum()
    loss = rest
    for i in reversed(which):
        loss = model.items[i].square().sum() + loss  # what was added last goes first
    with pytest.raises(RuntimeError, match="injected"):
        loss.backward()


def ran(mode: str, body: Body, make: Callable[[], nn.Module] = Items, attach: bool = True, **more: Any) -> Any:
    model = make()
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=settings(mode, **more), model=model if attach else None)
    try:
        body(model, optimizer)
        optimizer.synchronize()
        return weights(model), state(optimizer)
    finally:
        optimizer.close()


def agree(body: Body, make: Callable[[], nn.Module] = Items, modes: tuple[str, ...] = STREAMED, **more: Any) -> None:
    """`body(model, optimizer)` gives the same bits in order and streamed."""
    expected = ran("in_order", body, make)
    for mode in modes:
        found = ran(mode, body, make, **more)
        assert same(found[0], expected[0]) and same(found[1], expected[1]), mode


def one(mode: str = "streamed", delay: Any = None, **more: Any) -> tuple[Items, OffloadAdam]:
    with copies(delay):
        model = Items()
        optimizer = OffloadAdam(
            model.parameters(), lr=1e-2, config=settings(mode, **{"bucket_bytes": 20, **more}), model=model
        )
        model(0)  # binds
        return model, optimizer


# ---- they leave in backward


def test_buckets_leave_in_the_middle_of_backward() -> None:
    with copies(None):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("streamed"))
    seen: list[tuple[bool, int]] = []
    optimizer.engine.bind_trainable()

    def look(grad: Tensor) -> None:
        stream = optimizer.engine.stream
        assert stream is not None
        stream.settle()
        seen.append((model.head.weight.grad is not None, optimizer.engine.meter.upcoming.d2h_bytes))

    model.embed.weight.register_hook(look)
    model(next(batches())).backward()
    whole = 4 * sum(p.numel() for p in model.parameters())
    ((gone, nbytes),) = seen
    assert gone and 0.5 * whole < nbytes < whole, "the embedding comes last in backward"
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.engine.meter.upcoming.d2h_bytes == whole
    optimizer.close()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("mode", ["streamed", "speculative"])
def test_bytes_over_the_link_and_on_the_host(mode: str, accumulation: int) -> None:
    """(2A + 2) bytes a parameter over the link, 2 in the store, and no pinned byte beyond the plan."""
    model, data = TinyLM(torch.bfloat16), batches()
    optimizer = optimizer_of(model, settings(mode, bucket_bytes=128, ring_slots=3))
    params = sum(p.numel() for p in model.parameters())
    for _ in range(3):
        for _ in range(accumulation):
            model(next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = optimizer.stats()
    assert (found.d2h_bytes, found.h2d_bytes) == (2 * accumulation * params, 2 * params)
    assert found.host_bytes["store"] == 2 * params == optimizer.engine.stream.stores[0]._memory.nbytes
    assert found.host_bytes["pinned"] == 2 * 3 * 128
    assert found.host_bytes["shadow"] == (14 * params if mode == "speculative" else 0)
    assert found.schedule == "overlapped+streamed" + ("+speculative" if mode == "speculative" else "")
    optimizer.close()


def test_a_float32_store_takes_4_bytes() -> None:
    model = TinyLM(torch.bfloat16)
    optimizer = optimizer_of(model, settings("streamed", accumulate_dtype="float32"))
    model(next(batches())).backward()
    assert optimizer.stats().host_bytes["store"] == 4 * sum(p.numel() for p in model.parameters())
    optimizer.close()


class Feed(torch.autograd.Function):
    """Gives each parameter, one after the other, a gradient in memory of its own that can be watched."""

    watched: ClassVar[list[weakref.ref[Any]]] = []
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        memory = np.ones(tuple(ctx.shape), np.float32)
        Feed.watched.append(weakref.ref(memory))
        Feed.most = max(Feed.most, sum(4 * r().size for r in Feed.watched if r() is not None))
        return grad, torch.from_numpy(memory)


@pytest.mark.parametrize("ring_slots", [1, 2, 4])
def test_gradients_on_the_device_are_bounded_by_the_ring(ring_slots: int) -> None:
    """However slow the link: what the figures say, and what memory really lives."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(25)) for _ in range(24)])
    config = settings("streamed in order", bucket_bytes=200, ring_slots=ring_slots)  # two parameters a bucket
    with copies(late("d2h", 2e-3)):
        optimizer = OffloadAdam(model.parameters(), config=config)
        optimizer.engine.bind_trainable()
    Feed.watched, Feed.most = [], 0
    x = torch.zeros((), requires_grad=True)
    for p in model:
        x = Feed.apply(x, p)
    x.backward()
    bound = ring_slots * 200 + 200 + 100  # the ring, the bucket that fills, and the gradient that autograd holds
    assert len(Feed.watched) == 24
    assert 200 <= Feed.most <= bound
    optimizer.step()
    assert 200 <= optimizer.stats().device_bytes["gradients"] <= bound < 2400
    assert not any(r() is not None for r in Feed.watched)
    optimizer.close()


def test_a_slot_never_waits_for_the_norm() -> None:
    """One slot, three micro-batches, always-biting clipping: backward ends though nobody steps."""
    model, optimizer = one(ring_slots=1, timeout_s=5.0)
    for _ in range(3):
        model(0, 1, 2, 3).backward()
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    optimizer.close()


def test_parameters_larger_than_the_ring() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 3), nn.Linear(3, 50))

    def body(model: nn.Module, optimizer: OffloadAdam) -> None:
        for _ in range(3):
            for scale in (1.0, 0.3):
                model(torch.full((2, 40), scale)).square().sum().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, make, bucket_bytes=28, ring_slots=2)


# ---- what stands in .grad


READS: dict[str, Callable[[nn.Module, Any], object]] = {
    "clip_grad_norm_": lambda model, grad: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model, grad: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model, grad: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "norm": lambda model, grad: grad.norm(),
    "add_": lambda model, grad: grad.add_(1.0),
    "zero_": lambda model, grad: grad.zero_(),
    "mul_": lambda model, grad: grad.mul_(0.5),
    "clone": lambda model, grad: grad.clone(),
    "float": lambda model, grad: float(grad[0]),
    "isnan": lambda model, grad: torch.isnan(grad).any(),
    "data": lambda model, grad: grad.data.norm(),
    "detach": lambda model, grad: grad.detach(),
    "to": lambda model, grad: grad.to(torch.float64),
    "copy_ from it": lambda model, grad: torch.zeros(5).copy_(grad),
    "foreach": lambda model, grad: torch._foreach_norm([grad]),
    "model.zero_grad in place": lambda model, grad: model.zero_grad(set_to_none=False),
    "model.to": lambda model, grad: model.to(torch.float64),
}


@pytest.mark.parametrize("read", READS)
def test_reading_or_writing_grad_raises_with_the_remedy(read: str) -> None:
    model, optimizer = one()
    model(0, 1, 2, 3).backward()
    with pytest.raises(StateError, match=r"stream_gradients=True: .*left the device.*optimizer\.clip_grad_norm_\(\)"):
        READS[read](model, model.items[0].grad)
    optimizer.close()


@pytest.mark.parametrize("read", ["numpy", "tolist", "__array__"])
def test_its_values_cannot_be_had_by_other_ways_either(read: str) -> None:
    model, optimizer = one()
    model(0, 1, 2, 3).backward()
    with pytest.raises((StateError, RuntimeError)):
        getattr(model.items[0].grad, read)()
    optimizer.close()


def test_what_grad_still_tells() -> None:
    """There is a gradient, of this shape and dtype; it can be printed and dropped."""
    model, optimizer = one()
    assert model.items[0].grad is None
    model(0, 1, 2).backward()
    grad = model.items[0].grad
    assert grad is not None and grad is not None
    assert (grad.shape, grad.dtype, grad.device) == ((5,), torch.float32, torch.device("cpu"))
    assert "on its way" in repr(grad) and "on its way" in f"{grad}" and "on its way" in str([grad])
    assert model.items[3].grad is None
    for drop in (optimizer.zero_grad, model.zero_grad):
        model(0, 1, 2).backward()
        drop()
        assert all(p.grad is None for p in model.parameters())
    optimizer.close()


@pytest.mark.parametrize("how", ["closed", "gone"])
def test_another_optimizers_gradients_are_refused(how: str) -> None:
    model, first = one()
    model(0, 1, 2, 3).backward()
    if how == "closed":
        first.close()
        assert all(p.grad is None for p in model.parameters())
    del first
    second = OffloadAdam(model.parameters(), config=settings("streamed"), model=model)
    if how == "gone":
        for call in (
            second.step,
            lambda: second.clip_grad_norm_(1.0),
            lambda: torch.optim.SGD(model.parameters()).step(),
        ):
            with pytest.raises(StateError, match=r"another optimizer|one that is gone|left the device"):
                call()
        with pytest.raises(StateError):
            model(0).backward()
    second.zero_grad()
    model(0, 1, 2, 3).backward()
    second.step()
    second.close()


# ---- accumulation


def test_buckets_that_come_in_parts() -> None:
    """In the second micro-batch the first of a bucket has no gradient, in the third only the last has one."""

    def body(model: Items, optimizer: OffloadAdam) -> None:
        for _ in range(2):
            model(0, 1, 2, 3).backward()
            model(1, 2, times=2.0).backward()
            model(3, times=3.0).backward()
            model(0, 2, times=0.7).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, bucket_bytes=96)
    agree(body, bucket_bytes=12)


def test_gradients_that_are_kept_go_on_accumulating() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        for k in range(5):
            model(*range(k % 3, 4), times=1 + k / 10).backward()
            optimizer.step()
            if k == 2:
                optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # once more with the same gradients

    agree(body)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_checkpointing(reentrant: bool, accumulation: int) -> None:
    class Checkpointed(TinyLM):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.embed(ids[:, :-1])
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.norm(x)

    def body(model: Any, optimizer: OffloadAdam) -> None:
        data = batches()
        for _ in range(3):
            for _ in range(accumulation):
                model(next(data)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, Checkpointed)


def test_a_block_that_is_checkpointed_twice_in_one_backward() -> None:
    """Reentrant: the same parameters get two gradients, each in a backward of its own inside the outer one."""

    class Twice(TinyLM):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.embed(ids[:, :-1])
            for layer in [self.layers[0], self.layers[1], self.layers[0], self.layers[0]]:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.norm(x)

    def body(model: Any, optimizer: OffloadAdam) -> None:
        data = batches()
        for step in range(4):
            for _ in range(1 + step % 2):
                model(next(data)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, Twice)


def test_tied_weights() -> None:
    def make() -> nn.Module:
        model = TinyLM()
        model.head.weight = model.embed.weight
        return model

    def body(model: Any, optimizer: OffloadAdam) -> None:
        data = batches()
        for _ in range(3):
            for _ in range(2):
                model(next(data)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, make)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_model_and_one_that_is_compiled_again_in_between(backend: str) -> None:
    """Batches of another size make torch compile again while placeholders stand in `.grad`."""
    torch._dynamo.reset()

    def body(model: Any, optimizer: OffloadAdam) -> None:
        compiled = torch.compile(model, backend=backend, dynamic=False)
        generator = torch.Generator().manual_seed(2)
        for step in range(3):
            for size in (2, 3 + step):
                compiled(torch.randint(0, 13, (size, 5), generator=generator)).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body, TinyLM, ("streamed", "speculative"))


def test_several_graphs_and_single_parameters() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        losses = [model(0, 1, 2, 3), model(1, 3, times=2.0), model(2, times=0.1)]
        for loss in losses[1:]:
            loss.backward(retain_graph=True)
        losses[0].backward(inputs=[model.items[1], model.items[2]])
        losses[1].backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()

    agree(body)


DROPS: dict[str, Callable[[Items, OffloadAdam], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "not at all": lambda model, optimizer: None,
}


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("forward_between", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_backward_that_fails_midway(drop: str, forward_between: bool, first: bool) -> None:
    """Into fresh gradients or onto earlier ones; then they are dropped, or not, and training goes on."""

    def body(model: Items, optimizer: OffloadAdam) -> None:
        model(0, 1, 2, 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        retry = model(0, 1, 2, 3, times=3.0)
        if not first:
            model(0, 1, 2, 3, times=0.5).backward()
        failing(model, 3, 2)
        DROPS[drop](model, optimizer)
        (model(0, 1, 2, 3, times=3.0) if forward_between else retry).backward()
        optimizer.step()

    agree(body, bucket_bytes=40)
    expected = ran("in_order", body)
    found = ran("streamed in order", body, attach=False, bucket_bytes=40)  # no hooks on a model
    assert same(found[0], expected[0]) and same(found[1], expected[1])


@pytest.mark.parametrize("clip", [True, False])
def test_a_step_right_after_a_backward_that_failed(clip: bool) -> None:
    """What was there before it, and what it added, is stepped."""

    def body(model: Items, optimizer: OffloadAdam) -> None:
        model(0, 1, 2, 3).backward()
        failing(model, 3, 2)
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()

    agree(body, bucket_bytes=40)
    agree(body, bucket_bytes=20)


def test_gradients_by_hand() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        for k in range(3):
            model(0, 1, 2).backward()
            model.items[1].grad = torch.full((5,), 2.0 + k)  # instead of what left
            model.items[3].grad = torch.full((5,), -1.0)
            if k == 1:
                model(1, 3).backward()  # onto them
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    agree(body)


def test_a_gradient_by_hand_that_is_written_to_while_it_is_copied() -> None:
    """Right or an error, never a mixture."""
    hold = Hold("d2h")
    model, optimizer = one(delay=hold)
    twin, reference = one("in_order")
    given = [torch.ones(5) for _ in model.items]
    for p, q, g in zip(model.items, twin.items, given):
        p.grad, q.grad = g, g.clone()
    reference.step()
    hold.close()
    threading.Timer(0.1, hold.release).start()  # a step that waits for the copies is as good
    try:
        optimizer.step()
        for g in given:
            g.fill_(-7.0)
        hold.release()
        optimizer.synchronize()
    except StateError as error:
        assert "gradient was written to" in str(error)
    else:
        assert same(weights(model), weights(twin))
    for o in (optimizer, reference):
        try:
            o.close()
        except StateError:
            assert o is optimizer


def test_clip_counts_for_the_gradients_it_saw() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        model(0, 1, 2, 3).backward()
        optimizer.clip_grad_norm_(0.1)
        model.zero_grad()  # goes past the optimizer
        model(0, 1, 2, 3, times=2.0).backward()
        optimizer.clip_grad_norm_(0.2)
        optimizer.step()

    agree(body)
    model, optimizer = one()
    model(0, 1, 2, 3).backward()
    optimizer.clip_grad_norm_(0.1)
    model(1).backward()
    with pytest.raises(StateError, match="changed after clip_grad_norm_"):
        optimizer.step()
    optimizer.close()


def test_parameters_unfrozen_or_added_later() -> None:
    """One of them larger than any bucket before it; guesses for others are pending."""

    def body(model: Items, optimizer: OffloadAdam) -> None:
        model.items[3].requires_grad_(False)
        large = nn.Parameter(torch.linspace(-1, 1, 200))
        for k in range(7):
            if k == 2:
                model.items[3].requires_grad_(True)
            if k == 4:
                optimizer.add_param_group({"params": [large], "lr": 0.1})
            loss = model(0, 2, *([3] if k >= 2 else ()))
            (loss + large.square().sum() if k >= 4 else loss).backward()
            optimizer.clip_grad_norm_(1e9)
            time.sleep(0.01)  # guesses are made
            optimizer.step()
            optimizer.zero_grad()
        model.register_parameter("large", large)

    agree(body, bucket_bytes=20)
    agree(body, bucket_bytes=1 << 16)


def test_sparse_gradients_are_refused_and_not_stepped() -> None:
    layer = nn.Embedding(6, 5, sparse=True)
    before = weights(layer)
    optimizer = OffloadAdam(layer.parameters(), config=settings("streamed in order"))
    optimizer.engine.bind_trainable()
    with pytest.raises((UnsupportedError, RuntimeError), match=r"[Ss]parse"):
        layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse gradients"):
        optimizer.step()
    assert same(weights(layer), before)
    optimizer.close()


@pytest.mark.parametrize("change", ["bfloat16", "double", "smaller", "larger"])
def test_a_model_that_was_converted_or_resized_is_told(change: str) -> None:
    """In the hook: there, its gradients would be read past their end."""
    model, optimizer = one()
    model(0, 1, 2, 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    if change in ("smaller", "larger"):
        model.items[1].data = torch.ones(3 if change == "smaller" else 9)
    else:
        getattr(model, change)()
    with pytest.raises((StateError, RuntimeError, UnsupportedError)):
        model(0, 1, 2, 3).backward()
        optimizer.step()
    optimizer.close()


def test_permuted_parameters_and_other_layouts() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            self.weight = nn.Parameter(torch.randn(6, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).square().sum() + (self.weight @ torch.ones(6)).square().sum()

    def body(model: nn.Module, optimizer: OffloadAdam) -> None:
        for k in range(4):
            model(torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4) * (k + 1)).backward()
            if k % 2:
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()

    agree(body, Conv)


def test_double_backward_is_refused_or_right() -> None:
    """`create_graph=True`: autograd adds out of place."""
    model, optimizer = one()
    model(0, 1, 2, 3).backward()
    with pytest.raises(StateError, match="stream_gradients"):
        model(0, 1).backward(create_graph=True)
    optimizer.close()


# ---- float32 accumulation: its own reference


def test_float32_accumulation_is_the_sum_in_float32_and_then_one_step() -> None:
    """Of bf16 gradients, in the order they came; the step is that of fp32 gradients of those values."""
    from hf_offload.kernels import cpu

    params = [nn.Parameter(torch.randn(37).bfloat16()) for _ in range(3)]
    masters = [p.detach().float().numpy().copy() for p in params]
    moments = [(np.zeros(37, np.float32), np.zeros(37, np.float32)) for _ in params]
    config = settings("streamed in order", accumulate_dtype="float32")
    optimizer = OffloadAdam(params, lr=1e-2, config=config)
    optimizer.engine.bind_trainable()
    generator = torch.Generator().manual_seed(4)
    for step in range(1, 4):
        sums = [np.zeros(37, np.float32) for _ in params]
        for k in range(5):
            grads = [(torch.randn(37, generator=generator) * 10.0 ** (k - 2)).bfloat16() for _ in params]
            torch.autograd.backward(list(params), [g.clone() for g in grads])
            for total, g in zip(sums, grads):
                total += g.float().numpy()
        norm = optimizer.clip_grad_norm_(0.5)
        exact = np.sqrt(sum(float((s.astype(np.float64) ** 2).sum()) for s in sums))
        assert abs(norm.item() - exact) <= 1e-6 * exact
        factor = min(1.0, 0.5 / (float(np.sqrt(sum(cpu.sum_of_squares(s, "float32", 1) for s in sums))) + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        row = cpu.coefficients(
            lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step, grad_scale=factor,
            decoupled=True, maximize=False,
        )  # fmt: skip
        for p, master, (m, v), total in zip(params, masters, moments, sums):
            weight = np.empty(37, np.uint16)
            cpu.adam_step(
                master,
                m,
                v,
                total,
                weight,
                np.array([0, 37]),
                row[None],
                wire="bfloat16",
                threads=1,
                grad_wire="float32",
            )
            assert np.array_equal(optimizer.state[p]["master"].numpy(), master)
            assert np.array_equal(optimizer.state[p]["exp_avg_sq"].numpy(), v)
            assert np.array_equal(bits(p).numpy().view(np.uint16), weight)
    optimizer.close()


# ---- a slow link, a dead one, Ctrl-C


def test_a_link_slower_than_backward_holds_the_hook_up() -> None:
    hold = Hold("d2h")
    model, optimizer = one(delay=hold, ring_slots=2)
    hold.close()
    ended = threading.Event()
    loss = model(0, 1, 2, 3)
    thread = threading.Thread(target=lambda: (loss.backward(), ended.set()))
    thread.start()
    assert hold.reached.wait(LONG)
    assert not ended.wait(0.1), "two slots, four buckets"
    hold.release()
    thread.join(LONG)
    assert ended.is_set()
    optimizer.step()
    optimizer.close()


def test_ctrl_c_gets_out_of_a_hook_that_waits() -> None:
    hold = Hold("d2h")
    model, optimizer = one(delay=hold, ring_slots=1)
    hold.close()

    def interrupt() -> None:
        hold.reached.wait(LONG)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        model(0, 1, 2, 3).backward()
    hold.release()
    optimizer.zero_grad()
    model(0, 1, 2, 3).backward()
    optimizer.step()
    twin, reference = one("in_order")
    twin(0, 1, 2, 3).backward()
    reference.step()
    optimizer.synchronize()
    assert same(weights(model), weights(twin))
    for o in (optimizer, reference):
        o.close()


def test_a_wait_for_a_slot_names_it() -> None:
    hold = Hold("d2h")
    model, optimizer = one(delay=hold, ring_slots=1, timeout_s=0.2)
    hold.close()
    with pytest.raises((WaitTimeout, StateError), match=r"timeout_s=0\.2") as caught:
        model(0, 1, 2, 3).backward()
    if type(caught.value) is WaitTimeout:  # the step's thread waits for the copy, too, and may give up first
        assert re.search(r"a free slot for the gradients of bucket \d", str(caught.value))
    deadline = time.monotonic() + LONG
    while not optimizer.engine._pipeline.failed and time.monotonic() < deadline:
        time.sleep(0.01)  # until the step's thread has given up as well
    hold.release()
    with pytest.raises(StateError):
        optimizer.close()


@pytest.mark.parametrize("mode", ["streamed", "speculative"])
@pytest.mark.parametrize("at", ["backward", "clip", "step", "synchronize"])
def test_a_dead_copy_is_told_with_its_cause(at: str, mode: str) -> None:
    fail = FailAt("none", 2)
    model, optimizer = one(mode, delay=fail, ring_slots=1)
    model(0, 1, 2, 3).backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    fail.direction = "d2h"
    with pytest.raises(StateError, match="injected") as caught:
        for _ in range(200):
            model(0, 1, 2, 3).backward()
    for _ in range(2):
        with pytest.raises(StateError, match="injected") as caught:
            {
                "backward": lambda: model(0).backward(), "clip": lambda: optimizer.clip_grad_norm_(1.0),
                "step": optimizer.step, "synchronize": optimizer.synchronize,
            }[at]()  # fmt: skip
    cause: BaseException | None = caught.value
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    assert isinstance(cause, OSError)
    with pytest.raises(StateError):
        optimizer.close()


def test_a_dead_copy_before_the_first_step_is_told_by_every_wait() -> None:
    fail = FailAt("none", 1)
    model, optimizer = one(delay=fail, ring_slots=1)
    fail.direction = "d2h"
    with pytest.raises(StateError, match="injected"):
        for _ in range(200):
            model(0, 1, 2, 3).backward()
    for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict, lambda: model(0)):
        with pytest.raises(StateError, match="injected"):
            call()
    with pytest.raises(StateError):
        optimizer.close()


# ---- refused settings


REFUSED: dict[str, dict[str, Any]] = {
    "shadow_bytes": {"shadow_bytes": 1 << 20},
    "accumulate_dtype": {"accumulate_dtype": "float32"},
    "stream_gradients": {"stream_gradients": True, "schedule": "delayed"},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_do_not_go_together(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        OffloadConfig(**REFUSED[setting])


def test_a_shadow_without_room_for_one_bucket() -> None:
    model = Items()
    with pytest.raises(ConfigError, match=r"shadow_bytes=10: .*bucket"):
        optimizer = OffloadAdam(model.parameters(), config=settings("speculative", shadow_bytes=10), model=model)
        try:
            model(0)
        finally:
            optimizer.close()


def test_del_in_the_middle_of_a_backward_leaves_nothing() -> None:
    hold = Hold("d2h")
    model, optimizer = one("speculative", delay=hold, ring_slots=4)
    alive = [weakref.ref(part) for part in (optimizer, optimizer.engine, optimizer.engine.stream)]
    memory = weakref.ref(optimizer.engine.stream.stores[0]._memory)
    hold.close()
    model(0, 1, 2, 3).backward()
    hold.release(after=0.05)
    del optimizer
    assert [part() for part in alive if part() is not None] == [] and memory() is None
    model.zero_grad()
    model(0, 1, 2, 3).backward()
    assert model.items[0].grad.norm() > 0, "an ordinary gradient again"


def test_zeroing_in_place_reaches_a_parameter_that_was_unfrozen_since() -> None:
    """Its gradient is still an ordinary one: it was never bound, so it has no hook."""
    outcomes = []
    for mode in ("in_order", "streamed"):
        model, data = TinyLM(), batches()
        frozen = model.embed.weight
        frozen.requires_grad_(False)
        optimizer = optimizer_of(model, settings(mode))
        for _ in range(2):
            model(next(data)).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
            frozen.requires_grad_(True)
        optimizer.synchronize()
        outcomes.append(weights(model))
        optimizer.close()
    assert same(*outcomes)


@pytest.mark.parametrize("cap", [None, 10**6])
def test_a_shadow_that_does_not_fit_is_refused_by_its_name(cap: int | None) -> None:
    """Against the machine's memory, and against the user's own cap."""
    shadow = 1 << 50 if cap is None else cap
    message = rf"^shadow_bytes={shadow}: everything else fits.*Lower shadow_bytes"
    with pytest.raises(HostMemoryError, match=message) as e:
        optimizer_of(TinyLM(), settings("streamed", shadow_bytes=shadow, max_host_bytes=cap))
    assert "gradient store" in str(e.value) and "\n  shadow" in str(e.value)
    optimizer_of(TinyLM(), settings("streamed", shadow_bytes=5000, max_host_bytes=10**6)).close()


def test_saving_the_state_settles_it_once_and_not_once_a_parameter() -> None:
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings("speculative"))
    model(next(data)).backward()
    optimizer.step()
    calls = []
    real = optimizer.engine.settle_state
    optimizer.engine.settle_state = lambda: (calls.append(1), real())[1]
    saved = optimizer.state_dict()["state"]
    assert len(calls) == 1 and all(type(entry) is dict for entry in saved.values())
    optimizer.close()
