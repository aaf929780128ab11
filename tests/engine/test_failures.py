"""What goes wrong in the step's thread or on the link is told in the training thread, with its cause. Nothing hangs."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.errors import StateError, TransportError, WaitTimeout
from support.engine import (
    LONG,
    Hold,
    TinyLM,
    batches,
    copies,
    handmade,
    kernels,
    optimizer_of,
    ours,
    same,
    settings,
    watched_gradients,
    weights,
)
from support.transport import FailAt, exit_code


class Boom(RuntimeError):
    pass


@contextmanager
def failing_kernel(after: int) -> Iterator[None]:
    """Kernel number `after` (from 0) raises."""
    count = [0]

    def before() -> None:
        count[0] += 1
        if count[0] > after:
            raise Boom("injected: the kernel failed")

    with kernels(before):
        yield


def broken(how: str, schedule: str) -> tuple[nn.Module, OffloadAdam, type[BaseException]]:
    """A model whose step fails in the middle; overlapped: after step() has returned."""
    fail = FailAt("none", 3)
    with copies(fail):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(schedule, bucket_bytes=480))
        model(next(batches()))  # binds: that takes copies, too
    fail.direction = how
    handmade(model)
    return model, optimizer, Boom if how == "kernel" else OSError


def root_cause(error: BaseException | None) -> BaseException | None:
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return error


NEXT: dict[str, Callable[[nn.Module, OffloadAdam], object]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "forward": lambda model, optimizer: model(next(batches())),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "eval": lambda model, optimizer: optimizer.eval(),
    "train": lambda model, optimizer: optimizer.train(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "reseed": lambda model, optimizer: optimizer.reseed(),
    "close": lambda model, optimizer: optimizer.close(),
}


@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("how", ["d2h", "h2d", "kernel"])
def test_an_error_in_an_overlapped_step_is_told_by_whatever_comes_next(how: str, then: str) -> None:
    model, optimizer, kind = broken(how, "overlapped")
    with failing_kernel(3) if how == "kernel" else kernels(lambda: None):
        with contextlib.suppress(StateError):  # the step may fail before `step()` has returned
            optimizer.step()
        deadline = time.monotonic() + LONG
        while not optimizer.engine._pipeline.failed and time.monotonic() < deadline:
            time.sleep(0.001)
    for _ in range(2):  # and by what comes after that
        with pytest.raises(StateError, match=r"step failed \(.*injected.*half stepped.*checkpoint") as caught:
            NEXT[then](model, optimizer)
        assert isinstance(root_cause(caught.value), kind)
    with pytest.raises(StateError):
        optimizer.close()


@pytest.mark.parametrize("how", ["d2h", "h2d", "kernel"])
def test_an_error_while_a_hook_waits_is_told_by_that_hook(how: str) -> None:
    model, optimizer, kind = broken(how, "overlapped")
    with failing_kernel(3) if how == "kernel" else kernels(lambda: time.sleep(0.003)):
        with contextlib.suppress(StateError):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(StateError, match="injected") as caught:
            model(next(batches()))
    assert isinstance(root_cause(caught.value), kind)
    with pytest.raises(StateError):
        optimizer.close()


@pytest.mark.parametrize("how", ["d2h", "h2d", "kernel"])
def test_in_order_the_error_is_told_by_step_itself(how: str) -> None:
    _, optimizer, kind = broken(how, "in_order")
    with failing_kernel(3) if how == "kernel" else kernels(lambda: None):
        with pytest.raises(StateError, match="injected") as caught:
            optimizer.step()
        assert isinstance(root_cause(caught.value), kind)
    with pytest.raises(StateError):
        optimizer.close()


def test_a_failed_optimizer_goes_like_any_other() -> None:
    """The error's traceback must not keep the transport, nor the gradients, in a cycle."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer, _ = broken("kernel", "overlapped")
        grads = watched_gradients(model)
        with failing_kernel(0):
            with contextlib.suppress(StateError):
                optimizer.step()
            with pytest.raises(StateError):
                optimizer.synchronize()
        optimizer.zero_grad()
        del optimizer
        assert not ours()
        assert [g() for g in grads if g() is not None] == []
    finally:
        gc.enable()


# ---- timeouts


def held(direction: str, timeout_s: float, schedule: str = "overlapped") -> tuple[Hold, nn.Module, OffloadAdam]:
    hold = Hold(direction)
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(schedule, bucket_bytes=480, timeout_s=timeout_s))
        model(next(batches()))
    handmade(model)
    return hold, model, optimizer


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("then", ["forward", "synchronize", "step"])
def test_a_wait_in_vain_names_what_it_waited_for(direction: str, then: str) -> None:
    hold, model, optimizer = held(direction, timeout_s=0.15)
    hold.close()
    optimizer.step()
    optimizer.zero_grad()
    handmade(model) if then == "step" else None
    # the step's own thread waits for the copy, too, and may give up first
    with pytest.raises((WaitTimeout, StateError), match=r"timeout_s=0\.15") as caught:
        NEXT[then](model, optimizer)
    named = r"bucket \d+ of unit|copy of (gradients|weights)|end of the step"
    assert any(re.search(named, str(e)) for e in (caught.value, root_cause(caught.value)))
    pipeline = optimizer.engine._pipeline
    deadline = time.monotonic() + LONG
    while not pipeline.failed and time.monotonic() < deadline:
        time.sleep(0.01)  # until the step's thread has given up as well
    hold.release()
    with pytest.raises(StateError):
        optimizer.synchronize()
    with pytest.raises(StateError):
        optimizer.close()


def test_a_wait_of_the_training_thread_alone_can_be_taken_up_again() -> None:
    """A kernel that takes longer than timeout_s: the wait gives up, the step does not."""
    _, model, optimizer = held("d2h", timeout_s=0.1)
    slow = threading.Event()
    with kernels(lambda: (slow.wait(LONG), None)[1]):
        optimizer.step()
        with pytest.raises(WaitTimeout, match=r"timeout_s=0\.1: waited in vain for (bucket|the end)"):
            optimizer.synchronize()
        with pytest.raises(WaitTimeout, match=r"bucket 0 of unit 'embeddings'"):
            model(next(batches()))
        slow.set()
        optimizer.engine.wait_all()
        optimizer.zero_grad()
        model(next(batches())).backward()
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("then", ["forward", "synchronize", "step"])
def test_a_slow_step_that_goes_on_is_not_cut_off(direction: str, then: str) -> None:
    """Every copy takes a third of timeout_s, the whole step many times as long, the drain of the ring longer, too."""
    delay = lambda d, n: 0.1 if d == direction else 0.0  # noqa: E731
    slow = [False]
    with copies(lambda d, n: delay(d, n) if slow[0] else 0.0):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=900, ring_slots=5, timeout_s=0.3))
        model(next(batches()))
    handmade(model)
    slow[0] = True
    optimizer.step()
    NEXT[then](model, optimizer)
    optimizer.close()


# ---- Ctrl-C that arrives while step() waits


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_a_real_ctrl_c_in_a_wait_leaves_the_step_to_end_by_itself(schedule: str) -> None:
    hold, model, optimizer = held("h2d", LONG, schedule)
    _, twin, reference = held("none", LONG, "in_order")
    reference.step()
    hold.close()

    def interrupt() -> None:
        hold.reached.wait(LONG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
        while True:
            model(next(batches()))
    hold.release()
    for o, m in ((optimizer, model), (reference, twin)):
        o.zero_grad()
        m(next(batches())).backward()
        o.step()
        o.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(weights(model).values(), weights(twin).values()))
    assert {float(e["step"]) for e in optimizer.state_dict()["state"].values()} == {2.0}
    optimizer.close()
    reference.close()


# ---- processes and threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("when", ["before binding", "between steps", "in the middle of a step"])
def test_a_forked_child_that_uses_the_optimizer_is_told(when: str) -> None:
    hold = Hold("d2h")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    handmade(model)
    if when != "before binding":
        optimizer.step()
        optimizer.synchronize()
    if when == "in the middle of a step":
        hold.close()
        optimizer.step()
        assert hold.reached.wait(LONG)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises((StateError, TransportError), match="fork"):
                optimizer.step()
            if when == "in the middle of a step":
                with pytest.raises(StateError, match="fork"):
                    model(next(batches()))
            del optimizer, model  # must not wait for threads that do not exist here
            code = 0
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    hold.release()
    optimizer.close()


def losses_of(model: nn.Module, seed: int, schedule: str, steps: int = 6) -> list[float]:
    data, losses = batches(seed), []
    optimizer = optimizer_of(model, settings(schedule))
    for _ in range(steps):
        loss = model(next(data))
        loss.backward()
        losses.append(loss.item())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return losses


def test_two_optimizers_in_turn() -> None:
    expected = [losses_of(TinyLM(seed=seed), seed, "in_order") for seed in (1, 2)]
    models, found = [TinyLM(seed=seed) for seed in (1, 2)], [[], []]
    optimizers = [optimizer_of(m, settings("overlapped")) for m in models]
    data = [batches(seed) for seed in (1, 2)]
    for _ in range(6):
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            loss = model(next(data[i]))
            loss.backward()
            found[i].append(loss.item())
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert found == expected
    for optimizer in optimizers:
        optimizer.close()


def test_two_optimizers_in_two_threads() -> None:
    """The gradients are given: torch's own sums round by the thread they run in."""

    def stepped(model: TinyLM, seed: int, schedule: str) -> dict[str, torch.Tensor]:
        optimizer = optimizer_of(model, settings(schedule))
        for k in range(10):
            handmade(model, 100 * seed + k)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(next(batches(seed)))
        optimizer.close()
        return weights(model)

    expected = {seed: stepped(TinyLM(seed=seed), seed, "in_order") for seed in (1, 2, 3)}
    models = {seed: TinyLM(seed=seed) for seed in expected}  # here, since torch.manual_seed is the process's
    found: dict[int, dict[str, torch.Tensor]] = {}

    def work(seed: int) -> None:
        found[seed] = stepped(models[seed], seed, "overlapped")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG)
    assert found.keys() == expected.keys()
    assert all(same(found[seed], expected[seed]) for seed in expected)
    assert not ours()


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_results_do_not_depend_on_the_callers_flush_to_zero(schedule: str) -> None:
    """Denormal gradients, moments and weights; their norm, too, which the training thread computes."""
    tiny = torch.tensor([1e-40, -3e-42, 1e-38, 2e-45, 5e-20] * 8)

    def run(flush: bool) -> list[torch.Tensor]:
        params = [nn.Parameter(tiny.clone()), nn.Parameter((tiny * 7).to(torch.bfloat16))]
        model = nn.ParameterList(params)
        optimizer = OffloadAdam(params, lr=1e-41, eps=1e-30, config=settings(schedule), model=model)
        for p in params:
            p.grad = (tiny * 3).to(p.dtype)
        torch.set_flush_denormal(flush)
        try:
            norm = optimizer.clip_grad_norm_(1e-43)
            optimizer.step()
            optimizer.synchronize()
        finally:
            torch.set_flush_denormal(False)
        saved = [t for e in optimizer.state_dict()["state"].values() for t in e.values()]
        optimizer.close()
        return [norm.view(1), *(p.detach().clone() for p in params), *saved]

    plain, flushed = run(False), run(True)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(plain[1:3], flushed[1:3]))
    assert all(torch.equal(a, b) for a, b in zip(plain, flushed))
