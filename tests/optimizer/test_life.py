"""From construction to the end: memory, copies, closing, gradients and graphs around a step, torch's global modes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, hostmem
from hf_offload.errors import HostMemoryError, StateError, UnsupportedError
from support.optimizer import (
    EXACT,
    SCHEDULES,
    Bag,
    assert_same_run,
    config,
    frozen_state_dict,
    give,
    gradients,
    make_params,
    offload,
    same_bits,
    snapshot,
    state,
    train,
    twins,
)

both_schedules = pytest.mark.parametrize("schedule", SCHEDULES)
every_mode = pytest.mark.parametrize("schedule", EXACT)
SLOW = {"link_latency_us": 5000.0}  # every copy takes 5 ms: a step is under way for as long as a test needs


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def attached(model: nn.Module, schedule: str, settings: dict[str, Any] | None = None, **kwargs: Any) -> OffloadAdam:
    return OffloadAdam(model.parameters(), config=config(schedule, **(settings or {})), model=model, **kwargs)


def learn(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 8), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---- memory


@every_mode
def test_state_is_made_at_the_first_training_forward_and_not_earlier(schedule: str) -> None:
    model = net()
    optimizer = attached(model, schedule)
    assert not optimizer.engine.arenas
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(torch.zeros(2, 8))
    optimizer.state_dict()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    model(torch.zeros(2, 8))
    assert sum(a.plan.numel for a in optimizer.engine.arenas) == sum(p.numel() for p in model.parameters())


def memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(
        hostmem, "available_host_bytes", lambda root=None: hostmem.HostMemory(available, 10**12, "a made-up machine")
    )


def forbid_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"something was allocated: {args}")

    monkeypatch.setattr("hf_offload.engine.placement.make_transport", allocated)
    for name in ("empty", "zeros"):
        original = getattr(np, name)

        def checked(shape: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            return original(shape, *args, **kwargs) if np.prod(shape, dtype=object) < 1000 else allocated(shape)

        monkeypatch.setattr(np, name, checked)


def test_too_little_memory_is_refused_at_construction_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(500)), nn.Parameter(torch.zeros(9), False)]
    need = 12 * 1500 + 2 * 2 * 1024
    memory(monkeypatch, need)
    OffloadAdam(params, config=config())
    memory(monkeypatch, need - 1)
    forbid_allocation(monkeypatch)
    with pytest.raises(HostMemoryError) as caught:
        OffloadAdam(params, config=config())
    for fact in (f"{need} bytes", f"{need - 1} bytes", "a made-up machine", "master", "exp_avg_sq", "pinned ring"):
        assert fact in str(caught.value), fact


def test_max_host_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(500))]
    need = 12 * 1500 + 2 * 2 * 1024
    optimizer = OffloadAdam(params, config=config(max_host_bytes=need))
    train(optimizer, params, [0])
    forbid_allocation(monkeypatch)
    with pytest.raises(HostMemoryError, match=rf"max_host_bytes={need - 1}: .*{need} bytes.*at least {need}"):
        OffloadAdam(params, config=config(max_host_bytes=need - 1))


@both_schedules
def test_the_cap_and_the_machine_are_asked_again_when_parameters_are_added(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(500))]
    base = 12 * 1000 + 2 * 2 * 1024
    optimizer = offload(params[:1], schedule, {"max_host_bytes": base + 12 * 500 - 1})
    train(optimizer, params[:1], [0])
    optimizer.add_param_group({"params": params[1:]})
    before = snapshot(optimizer, params)
    give(params, gradients(1, params))
    with pytest.raises(HostMemoryError) as caught:
        optimizer.step()
    # the setting as the user wrote it, what is taken already, and what it would have to be
    for fact in (f"max_host_bytes={base + 12 * 500 - 1}", "taken already", f"at least {base + 12 * 500}"):
        assert fact in str(caught.value)
    assert snapshot(optimizer, params) == before and len(optimizer.engine.arenas) == 1

    optimizer = offload(params[:1], schedule)
    train(optimizer, params[:1], [0])
    optimizer.add_param_group({"params": params[1:]})
    memory(monkeypatch, 12 * 500 - 1)
    give(params, gradients(1, params))
    with pytest.raises(HostMemoryError, match=f"{12 * 500} bytes.*{12 * 500 - 1} bytes"):
        optimizer.step()
    memory(monkeypatch, 12 * 500)
    optimizer.step()
    assert optimizer.stats().params == 1500


# ---- copies


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())])
def test_copies_of_the_optimizer_are_refused_with_the_remedy(how: Callable[[Any], Any]) -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    for stepped in (False, True):
        if stepped:
            train(optimizer, params, [0])
        with pytest.raises(UnsupportedError, match=r"threads and pinned memory.*optimizer\.state_dict\(\)"):
            how(optimizer)


@every_mode
def test_a_deep_copied_model_trains_with_an_optimizer_of_its_own(schedule: str) -> None:
    model = net()
    optimizer = attached(model, schedule)
    learn(model, optimizer, 2)
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    again = attached(twin, schedule)
    again.load_state_dict(frozen_state_dict(optimizer))
    for m, o in ((model, optimizer), (twin, again)):
        learn(m, o, 2)
        o.synchronize()
    assert all(same_bits(a, b) for a, b in zip(weights(model), weights(twin)))
    loaded(torch.zeros(2, 8))


# ---- the end


@every_mode
def test_closing(schedule: str) -> None:
    before = set(threading.enumerate())
    model = net()
    optimizer = attached(model, schedule, SLOW)
    learn(model, optimizer, 2)
    optimizer.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("hf_offload")]
    assert optimizer.stats().host_bytes["pinned"] == 0
    other = net()
    plain = attached(other, "in_order")
    learn(other, plain, 2)
    assert_same_run(
        optimizer, list(model.parameters()), plain, list(other.parameters())
    )  # the step under way was finished
    # what can still be done
    saved, expected = optimizer.state_dict(), plain.state_dict()["state"]
    assert all(
        same_bits(tensor, expected[i][name]) for i, entry in saved["state"].items() for name, tensor in entry.items()
    )
    optimizer.close()
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.train()
    optimizer.eval()
    model(torch.zeros(2, 8)).sum().backward()
    assert optimizer.stats().steps == 2
    plain.load_state_dict(saved)
    # and what not
    for use in (optimizer.step, optimizer.reseed, lambda: optimizer.attach(model)):
        with pytest.raises(StateError, match=r"closed.*Make a new one"):
            use()


@every_mode
def test_closed_before_the_first_step(schedule: str) -> None:
    model = net()
    optimizer = attached(model, schedule)
    optimizer.close()
    assert optimizer.state_dict()["state"] == {}
    model(torch.zeros(2, 8)).sum().backward()
    with pytest.raises(StateError, match="closed"):
        optimizer.step()


def test_the_context_manager_closes_whatever_happens() -> None:
    params = make_params(shapes=[(5,)])
    with offload(params) as optimizer:
        assert isinstance(optimizer, OffloadAdam)
        train(optimizer, params, [0])
    with pytest.raises(StateError, match="closed"):
        train(optimizer, params, [1])
    with pytest.raises(KeyError, match="mine"), offload(params) as optimizer:
        raise KeyError("mine")
    with pytest.raises(StateError, match="closed"):
        train(optimizer, params, [1])


@pytest.mark.parametrize("how", ["close", "with", "with, after another error"])
def test_a_step_that_failed_unseen_is_told_of_at_the_latest_when_closing(how: str) -> None:
    """overlapped: nobody waited for the last step, whose copy failed; the weights are half stepped."""
    model = net()
    optimizer = attached(model, "overlapped")
    learn(model, optimizer)
    optimizer.synchronize()

    returned = threading.Event()

    def broken(*args: Any, **kwargs: Any) -> Any:
        assert returned.wait(30.0)  # `step()` itself does not see it
        raise OSError("the link is down")

    def fail(model: nn.Module, optimizer: OffloadAdam) -> None:
        learn(model, optimizer)
        returned.set()

    optimizer.engine.placement.transport.to_device = broken  # type: ignore[method-assign]
    told = r"the link is down.*half stepped"
    if how == "close":
        fail(model, optimizer)
        with pytest.raises(StateError, match=told):
            optimizer.close()
    elif how == "with":
        with pytest.raises(StateError, match=told), optimizer:
            fail(model, optimizer)
    else:
        with pytest.raises(ZeroDivisionError), optimizer:
            fail(model, optimizer)
            raise ZeroDivisionError
    assert not optimizer.engine.placement.pinned_bytes


@every_mode
def test_del_frees_everything_though_the_model_lives_on(schedule: str) -> None:
    model = net()
    optimizer = attached(model, schedule, SLOW)
    learn(model, optimizer, 2)
    mine = [t for t in threading.enumerate() if t.name.startswith("hf_offload")]
    arena, transport = (weakref.ref(x) for x in (optimizer.engine.arenas[0], optimizer.engine.placement.transport))
    gone = weakref.ref(optimizer)
    model.zero_grad()
    del optimizer
    gc.collect()
    assert gone() is None and arena() is None and transport() is None
    for thread in mine:
        thread.join(10.0)
    assert not [t.name for t in mine if t.is_alive() and t.name.startswith("hf_offload")]
    model(torch.zeros(2, 8)).sum().backward()
    learn(model, attached(model, schedule))


def test_a_refused_construction_leaves_no_threads() -> None:
    before = set(threading.enumerate())
    with pytest.raises(Exception, match="none of them requires a gradient"):
        offload([nn.Parameter(torch.zeros(3), requires_grad=False)])
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UnsupportedError, match="sparse"):
        OffloadAdam(model.parameters(), model=model)
    gc.collect()
    assert {t for t in set(threading.enumerate()) - before if t.is_alive()} == set()


# ---- gradients around a step


@both_schedules
def test_zeroing_in_place_waits_for_the_copies(schedule: str) -> None:
    model, other = net(), net()
    optimizer, plain = attached(model, schedule, SLOW), attached(other, "in_order")
    for step in range(3):
        for m, o in ((model, optimizer), (other, plain)):
            m(torch.full((2, 8), step + 1.0)).square().sum().backward()
            o.step()
            o.zero_grad(set_to_none=False)
            assert not any(p.grad.any() for p in m.parameters())
    optimizer.synchronize()
    assert_same_run(optimizer, list(model.parameters()), plain, list(other.parameters()))


@both_schedules
def test_kept_gradients_go_on_accumulating(schedule: str) -> None:
    model, other = net(), net()
    optimizer = attached(model, schedule, SLOW, lr=1e-2)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(4):
        for m, o in ((model, optimizer), (other, theirs)):
            m(torch.full((2, 8), step + 1.0)).square().sum().backward()
            o.step()
    optimizer.synchronize()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@every_mode
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_of_all_micro_batches_count(micro: int, schedule: str) -> None:
    """field.md, 1."""
    model, other = net(), net()
    optimizer = attached(model, schedule, SLOW, lr=1e-2)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(3):
        for m, o in ((model, optimizer), (other, theirs)):
            o.zero_grad()
            for part in range(micro):
                m(torch.full((2, 8), step + part + 1.0)).square().sum().backward()
            o.step()
    optimizer.synchronize()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("edit", ["zero_", "mul_", "the model's zero_grad"])
def test_a_gradient_edited_while_it_is_copied_raises(edit: str) -> None:
    """Right or an error, never silently wrong."""
    model = net()
    optimizer = attached(model, "overlapped", SLOW)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    for p in reversed(list(model.parameters())):
        p.grad.zero_() if edit == "zero_" else p.grad.mul_(2) if edit == "mul_" else None
    if edit == "the model's zero_grad":
        model.zero_grad(set_to_none=False)
    with pytest.raises(StateError, match=r"gradient was written to while.*optimizer\.zero_grad\(\)"):
        optimizer.synchronize()


@pytest.mark.parametrize("write", ["clamp_", "copy_", "zero_"])
def test_a_weight_written_to_while_the_step_is_under_way_raises(write: str) -> None:
    """`optimizer.step(); with torch.no_grad(): p.clamp_(…)` without a wait: the step's result would overwrite it."""
    model = net()
    optimizer = attached(model, "overlapped", SLOW)
    learn(model, optimizer)
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last.clamp_(-0.1, 0.1) if write == "clamp_" else last.copy_(last + 1) if write == "copy_" else last.zero_()
    with pytest.raises(StateError, match=r"a weight was written to while.*synchronize\(\)"):
        optimizer.synchronize()


@every_mode
def test_weights_clamped_after_a_wait_are_trained_from(schedule: str) -> None:
    """A WGAN's critic."""
    model, other = net(), net()
    optimizer = attached(model, schedule, SLOW, lr=0.1)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(4):
        for m, o in ((model, optimizer), (other, theirs)):
            learn(m, o)
            if o is optimizer:
                o.synchronize()
            with torch.no_grad():
                for p in m.parameters():
                    p.clamp_(-0.15, 0.15)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=5e-6)


@every_mode
def test_dropping_gradients_right_after_the_step_is_safe(schedule: str) -> None:
    """`model.zero_grad()` frees them while they are copied: the memory must stay until then (field.md, 7)."""
    model, other = net(), net()
    optimizer, plain = attached(model, schedule, SLOW), attached(other, "in_order")
    for step in range(3):
        for m, o in ((model, optimizer), (other, plain)):
            m(torch.full((2, 8), step + 1.0)).square().sum().backward()
            o.step()
            m.zero_grad()
            noise = [torch.full((8, 8), float("nan")) for _ in range(50)]  # takes the freed memory
        del noise
    optimizer.synchronize()
    assert_same_run(optimizer, list(model.parameters()), plain, list(other.parameters()))


@every_mode
def test_backward_through_a_retained_graph_after_a_step_raises(schedule: str) -> None:
    """torch's own error for weights changed in place, whichever memory ours are written through."""
    model = net()
    optimizer = attached(model, schedule)
    loss = model(torch.ones(2, 8)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both_schedules
def test_backward_through_a_retained_graph_after_a_skipped_step_works(schedule: str) -> None:
    model = net()
    optimizer = attached(model, schedule)
    loss = model(torch.ones(2, 8)).square().sum()
    loss.backward(retain_graph=True)
    next(model.parameters()).grad.fill_(float("nan"))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    loss.backward()


# ---- weights around a step


def test_weights_that_no_hook_guards_are_there_when_step_returns() -> None:
    """A head beside the model, or one used before it: nothing would wait for it."""
    model, beside = net(), nn.Parameter(torch.ones(300))
    optimizer = OffloadAdam(
        [{"params": list(model.parameters())}, {"params": [beside], "lr": 0.5}],
        config=config("overlapped", **SLOW), model=model, weight_decay=0.0,
    )  # fmt: skip
    for step in range(1, 4):
        optimizer.zero_grad()
        ((model(torch.ones(2, 8)).square().sum()) + beside.sum()).backward()
        optimizer.step()
        assert beside.detach().tolist() == pytest.approx([1.0 - 0.5 * step] * 300, rel=1e-5)


@pytest.mark.parametrize("free", [False, True])
def test_data_swapped_while_the_weights_are_under_way(free: bool) -> None:
    """They arrive in the memory that the parameter had at `step()`, which stays until then; the new data are kept."""
    p, q = (nn.Parameter(torch.ones(4000)) for _ in range(2))
    optimizer, plain = offload([p], "overlapped", SLOW, lr=0.1), offload([q], "in_order", lr=0.1)
    optimizer._bag.items.append(nn.Parameter(torch.zeros(1)))  # type: ignore[attr-defined]
    for o, own in ((optimizer, p), (plain, q)):
        own.grad = torch.ones_like(own)
        o.step()
        old = None if free else own.data
        own.data = torch.full((4000,), 5.0)
        noise = [torch.full((4000,), 7.0) for _ in range(20)]  # takes the memory if it was freed
        o.synchronize()
        assert own.detach().eq(5.0).all() and all(n.eq(7.0).all() for n in noise)
        if old is not None:
            torch.testing.assert_close(old, torch.full((4000,), 0.899), rtol=1e-4, atol=0.0)
        own.grad = torch.ones_like(own)
        o.step()
        o.synchronize()
    assert same_bits(p, q) and p[0].item() == pytest.approx(4.895, rel=1e-3)


@every_mode
def test_evaluation_between_steps(schedule: str) -> None:
    """Under no_grad and inference_mode, through the hooks or after eval(): always the weights of the last step."""
    model, other = net(), net()
    optimizer, plain = attached(model, schedule, SLOW), attached(other, "in_order")
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    for _ in range(3):
        for m, o in ((model, optimizer), (other, plain)):
            learn(m, o)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert torch.equal(model(x), other(x))
        learn(model, optimizer)
        learn(other, plain)
        optimizer.eval()
        assert_same_run(optimizer, list(model.parameters()), plain, list(other.parameters()))
        optimizer.train()
    with torch.inference_mode():
        learn_free = [p.clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(learn_free, weights(other)))


# ---- torch's global modes


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "deterministic": deterministic,
}


@every_mode
@pytest.mark.parametrize("mode", MODES)
def test_global_modes_change_nothing(mode: str, schedule: str) -> None:
    values = [p.detach() for p in make_params(torch.bfloat16, shapes=[(5,), (30, 40)])]
    grads = [gradients(step, values) for step in range(4)]

    @torch.inference_mode(False)
    def parameters() -> list[Any]:
        return [nn.Parameter(v.clone()) for v in values]

    @torch.inference_mode(False)
    def backward(params: list[Any], step: int) -> None:
        give(params, grads[step])

    def run() -> list[Tensor]:
        params = parameters()
        optimizer = offload(params, schedule)
        for step in range(3):
            backward(params, step)
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm.dtype == torch.float32 and norm.device.type == "cpu"
            assert optimizer.unscale_(1.0).device.type == "cpu"
            optimizer.step()
        optimizer.load_state_dict(frozen_state_dict(optimizer))
        backward(params, 3)
        optimizer.step()
        entries = optimizer.state_dict()["state"]
        assert all(t.dtype == torch.float32 and t.device.type == "cpu" for e in entries.values() for t in e.values())
        return [*params, *(state(optimizer, p, n) for p in params for n in ("master", "exp_avg", "exp_avg_sq"))]

    expected = run()
    with MODES[mode]():
        found = run()
    assert all(same_bits(a, b) for a, b in zip(found, expected))


@every_mode
def test_two_optimizers_in_turn(schedule: str) -> None:
    """A generator and a discriminator."""
    models, others = [net(), net()], [net(), net()]
    optimizers = [attached(m, schedule, SLOW, lr=1e-2) for m in models]
    plains = [attached(m, "in_order", lr=1e-2) for m in others]
    for _ in range(3):
        for k in (0, 1, 1):
            learn(models[k], optimizers[k])
            learn(others[k], plains[k])
    for o in optimizers:
        o.synchronize()
    for m, n in zip(models, others):
        assert all(same_bits(a, b) for a, b in zip(weights(m), weights(n)))


@every_mode
def test_two_optimizers_in_two_threads(schedule: str) -> None:
    """Large enough for the kernels' one thread pool."""
    shapes = [(70_000,), (5,)]
    expected = make_params(shapes=shapes)
    train(offload(expected, "in_order", {"bucket_bytes": 1 << 20}), expected, range(4))
    results: list[list[Any]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            params = make_params(shapes=shapes)
            train(offload(params, schedule, {"bucket_bytes": 1 << 20}), params, range(4))
            results.append(params)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60.0)
    assert not errors and len(results) == 2
    assert all(same_bits(p, q) for params in results for p, q in zip(params, expected))


@every_mode
def test_attaching_again_is_free_and_another_model_takes_over(schedule: str) -> None:
    model, other = net(), net()
    optimizer, plain = attached(model, schedule, SLOW), attached(other, "in_order")
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    optimizer.attach(model)
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    for m, o in ((model, optimizer), (other, plain)):
        learn(m, o, 2)
    wrapper = nn.Sequential(model)
    optimizer.attach(wrapper)
    for m, o in ((wrapper, optimizer), (other, plain)):
        learn(m, o, 2)
    optimizer.synchronize()
    assert_same_run(optimizer, list(model.parameters()), plain, list(other.parameters()))


def test_a_bag_alone_trains() -> None:
    """Adam on a sum of squares, from the outside in: the loss falls."""
    params = make_params(torch.bfloat16, shapes=[(50,), (3, 4)])
    others = twins(params)
    bag = Bag(params)
    optimizer = OffloadAdam(params, lr=0.05, config=config("overlapped"), model=bag)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = bag()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4 and Bag(others)().item() == losses[0]
