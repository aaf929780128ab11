"""One test for each wait of the engine. README.md lists which wait each test is for; each fails when it is removed.

Copies or kernels are held up exactly where the wait stands, for longer than the training thread needs to run ahead.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine.pipeline import Pipeline
from hf_offload.errors import StateError
from support.engine import (
    LATE,
    LONG,
    VOCAB,
    WIDTH,
    Delay,
    Hold,
    Plan,
    TinyLM,
    batches,
    copies,
    handmade,
    kernels,
    late,
    optimizer_of,
    same,
    settings,
    state,
    train,
    weights,
)


def expected(steps: int = 1, make: Callable[[], nn.Module] = TinyLM, **more: object) -> tuple[nn.Module, OffloadAdam]:
    """A model and an optimizer after `steps` in-order steps with handmade gradients."""
    model = make()
    optimizer = optimizer_of(model, settings("in_order", **more))
    for step in range(steps):
        handmade(model, step)
        optimizer.step()
    return model, optimizer


@contextmanager
def under_way(
    delay: Delay | None,
    make: Callable[[], nn.Module] = TinyLM,
    warm_up: bool = True,
    keep: bool = False,
    **more: object,
) -> Iterator[tuple[nn.Module, OffloadAdam]]:
    """A model and an optimizer whose first (handmade) step is still under way.

    Args:
        warm_up: a forward ran before, so it is known who reads what.
        keep: the gradients are still there after the step.
    """
    with copies(delay):
        model = make()
        optimizer = optimizer_of(model, settings("overlapped", **more))
    if warm_up:
        model(next(batches()))
    handmade(model, 0)
    optimizer.step()
    if not keep:
        optimizer.zero_grad()
    yield model, optimizer
    optimizer.close()


# ---- the model's hooks


def test_a_unit_waits_for_its_weights() -> None:
    """Whatever reads weights in a forward finds the new ones, though they arrive late, one bucket after the other."""
    plan = Plan(steps=3)
    assert train(settings("overlapped"), plan, late("h2d", 4e-3)) == train(settings("in_order"), plan)


def test_the_tail_is_awaited_after_the_last_block() -> None:
    """TRL's fused head reads `lm_head.weight` without calling the head, and nothing else announces the tail."""

    def fused() -> nn.Module:
        return TinyLM(fused_head=True)

    plan = Plan(steps=3)
    found = train(settings("overlapped"), plan, late("h2d", 4e-3), fused)
    assert found == train(settings("in_order"), plan, make=fused)


class ReadsFirst(nn.Module):
    """Reads `gain.weight` before it calls anything, and never calls `gain`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm = TinyLM()
        self.gain = nn.Linear(1, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1 + self.gain.weight.square().mean()
        return self.lm(ids) * scale


def test_weights_behind_no_hook_are_awaited_at_the_root() -> None:
    plan = Plan(steps=4)
    found = train(settings("overlapped"), plan, late("h2d", 2e-3), ReadsFirst)
    assert found == train(settings("in_order"), plan, make=ReadsFirst)


class BaseOnly(nn.Module):
    """Its `base` is called by others; the root never is. `base` reads `gain.weight` after its first module ran."""

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)  # nothing to wait for on its own account
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.gain = nn.Linear(1, WIDTH, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) * (1 + self.gain.weight.view(-1))
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = BaseOnly.Base()

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("never called")


def test_where_the_root_is_never_called_the_first_hook_stands_for_it() -> None:
    def run(schedule: str, delay: Delay | None) -> tuple[list[float], dict[str, Tensor]]:
        with copies(delay):
            model, data, losses = BaseOnly(), batches(), []
            optimizer = optimizer_of(model, settings(schedule))
        for _ in range(4):
            loss = model.base(next(data)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.close()
        return losses, weights(model)

    reference, found = run("in_order", None), run("overlapped", late("h2d", 3e-3))
    assert found[0] == reference[0] and same(found[1], reference[1])


def test_where_no_forward_was_seen_everything_is_awaited_at_the_root() -> None:
    """The optimizer was attached after the forward: nothing was learnt about who reads what."""
    with under_way(late("h2d", 3e-3), ReadsFirst, warm_up=False) as (found, _):
        twin = ReadsFirst()
        reference = optimizer_of(twin, settings("in_order"))
        handmade(twin, 0)
        reference.step()
        ids = next(batches())
        assert found(ids).item() == twin(ids).item()
        reference.close()


def test_train_waits_for_what_no_hook_guards() -> None:
    """`optimizer.train()` stands before every micro-batch of a Trainer: bare weights are right after it."""
    hold = Hold("h2d")
    with copies(hold):
        model = ReadsFirst()
        optimizer = optimizer_of(model, settings("overlapped"))
    twin = ReadsFirst()
    reference = optimizer_of(twin, settings("in_order"))
    data = batches()
    for last in (False, True):
        ids = next(data)
        for m, o in ((twin, reference), (model, optimizer)):
            m(ids).backward()
            if last and m is model:
                hold.close()
            o.step()
            o.zero_grad()
    hold.release(after=LATE)
    optimizer.train()
    assert torch.equal(model.gain.weight, twin.gain.weight)
    optimizer.close()
    reference.close()


# ---- inside the pipeline


def test_the_host_step_waits_for_the_gradients() -> None:
    plan = Plan(steps=3, clip=None)
    found = train(settings("overlapped", ring_slots=4), plan, late("d2h", 3e-3))
    assert found == train(settings("in_order"), plan)


@pytest.mark.parametrize("mode", ["overlapped", "streamed", "speculative"])
@pytest.mark.parametrize("ring_slots", [1, 2, 3])
def test_an_up_slot_is_the_copys_until_it_has_arrived(ring_slots: int, mode: str) -> None:
    """Else the host step of bucket k + ring overwrites the weights of bucket k on their way."""
    plan = Plan(steps=2)
    found = train(settings(mode, ring_slots=ring_slots), plan, late("h2d", 3e-3))
    assert found == train(settings("in_order"), plan)


def test_an_up_slot_is_the_copys_where_a_pending_update_goes_up() -> None:
    """Delayed has a reference of its own: a ring so long that no slot is used twice."""
    plan = Plan(steps=3)
    found = train(settings("delayed", delay_warmup_steps=0), plan, late("h2d", 3e-3))
    assert found == train(settings("delayed", delay_warmup_steps=0, ring_slots=128), plan)


@pytest.mark.parametrize("ring_slots", [1, 2, 3])
def test_a_down_slot_is_the_host_steps_until_it_has_returned(ring_slots: int) -> None:
    """Else the gradients of bucket k + ring overwrite those of bucket k before they are used."""
    plan = Plan(steps=2)
    with kernels(lambda: time.sleep(3e-3)):
        found = train(settings("overlapped", ring_slots=ring_slots), plan)
    assert found == train(settings("in_order"), plan)


@pytest.mark.parametrize("ring_slots", [1, 2, 3])
def test_a_down_slot_is_the_stores_until_its_gradients_are_there(ring_slots: int) -> None:
    """Else the gradients of a bucket that leaves later overwrite those that are still to be put away."""
    plan = Plan(steps=2, accumulation=2)
    with kernels(lambda: time.sleep(3e-3), ("put", "add")):
        found = train(settings("streamed", ring_slots=ring_slots), plan)
    assert found == train(settings("in_order"), plan)


def test_a_step_ends_only_when_all_weights_have_arrived() -> None:
    """After the last host step, while the last copies are still under way, the pipeline is not at rest."""
    hold = Hold("h2d")
    with under_way(None) as (_, warm):
        warm.synchronize()  # compiled and loaded: what follows is quick
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20, ring_slots=8))
    hold.close()
    handmade(model, 0)
    optimizer.step()
    assert hold.reached.wait(LONG)
    time.sleep(LATE)  # the step's thread has nothing more to do than to wait
    assert optimizer.engine._pipeline is not None and optimizer.engine._pipeline.running
    hold.release(after=LATE)
    optimizer.eval()
    twin, in_order = expected()
    assert same(weights(model), weights(twin))
    for o in (optimizer, in_order):
        o.close()


def test_the_next_step_waits_for_this_one() -> None:
    """Two steps with nothing in between that waits."""
    model, reference = expected(steps=2)
    with under_way(late("d2h", 5e-3)) as (found, optimizer):
        handmade(found, 1)
        optimizer.step()
        optimizer.synchronize()
        assert same(weights(found), weights(model))
        assert same(state(optimizer), state(reference))
    reference.close()


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_in_order_a_step_has_ended_when_it_returns(direction: str) -> None:
    with copies(late(direction, 3e-3)):
        found = TinyLM()
        optimizer = OffloadAdam(found.parameters(), config=settings("in_order"))
        twin = TinyLM()
        other = OffloadAdam(twin.parameters(), config=settings("in_order"))
    for m, o in ((twin, other), (found, optimizer)):
        handmade(m)
        o.step()
        now = weights(m)
    other.synchronize()
    assert same(now, weights(twin))
    assert not same(weights(found), weights(TinyLM()))
    for o in (optimizer, other):
        o.close()


# ---- gradients after step()


def test_kept_gradients_wait_for_their_copies() -> None:
    """As soon as one guarded module has run, `.grad` may be written to."""
    model, reference = expected()
    with under_way(late("d2h", 3e-3), keep=True) as (found, optimizer):
        found.embed(next(batches()))  # the first bucket is enough for it
        for p in found.parameters():
            p.grad.zero_()
        optimizer.synchronize()
        assert same(weights(found), weights(model))
    reference.close()


def test_kept_gradients_go_on_accumulating() -> None:
    plan = Plan(steps=4, zero="keep", clip=None)
    delay = late("d2h", 2e-3)
    assert train(settings("overlapped"), plan, delay) == train(settings("in_order"), plan)


def test_zeroing_in_place_waits_for_the_copies() -> None:
    model, reference = expected()
    with under_way(late("d2h", 3e-3), keep=True) as (found, optimizer):
        optimizer.zero_grad(set_to_none=False)
        optimizer.synchronize()
        assert same(weights(found), weights(model))
        assert all(not p.grad.any() for p in found.parameters())
    reference.close()


def test_a_write_to_a_gradient_behind_our_back_raises() -> None:
    """`model.zero_grad(set_to_none=False)` goes past the optimizer: right or an error, never a mixture."""
    hold = Hold("d2h")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    model(next(batches()))  # binds
    hold.close()
    handmade(model, 0)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    hold.release()
    with pytest.raises(StateError, match=r"gradient was written to.*zero_grad"):
        optimizer.synchronize()
    assert same(weights(model), weights(TinyLM())), "none was stepped with it"
    with pytest.raises(StateError):
        optimizer.close()


def test_a_write_whose_version_moves_late_raises_too() -> None:
    """torch moves the counter when the writing operation ends: by then the bucket may be stepped. All are looked at
    again at the end of the step."""
    hold = Hold("h2d")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped", bucket_bytes=1 << 20))
    hold.close()
    handmade(model, 0)
    optimizer.step()
    assert hold.reached.wait(LONG)  # the first bucket was copied, looked at and stepped
    model.embed.weight.grad.zero_()
    hold.release()
    with pytest.raises(StateError, match="gradient was written to"):
        optimizer.synchronize()
    with pytest.raises(StateError):
        optimizer.close()


def test_a_write_to_weights_before_their_copy_raises() -> None:
    """Before the copy, which would overwrite it: what was written stays."""
    hold = Hold("d2h")
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    model(next(batches()))  # binds
    hold.close()
    handmade(model, 0)
    optimizer.step()
    with torch.no_grad():
        model.embed.weight.zero_()
    hold.release()
    with pytest.raises(StateError, match="a weight was written to while the step was still under way"):
        optimizer.synchronize()
    assert not model.embed.weight.any()
    with pytest.raises(StateError):
        optimizer.close()


# ---- gradients that left, and are not put away yet


def after_a_slow_put(then: Callable[[nn.Module, OffloadAdam], object]) -> None:
    """Backward, `then(model, optimizer)` while the first gradients still lie in their slots, and a step: bits of in
    order."""

    def run(mode: str, gate: threading.Event) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode, bucket_bytes=1 << 20, ring_slots=16))
        model(next(batches())).backward()
        threading.Timer(LATE, gate.set).start()
        then(model, optimizer)
        optimizer.step()
        optimizer.synchronize()
        result = weights(model), state(optimizer)
        optimizer.close()
        return result

    gate = threading.Event()
    with kernels(lambda: gate.wait(LONG), ("put",)):
        found = run("streamed", gate)
    expected = run("in_order", threading.Event())
    assert same(found[0], expected[0]) and same(found[1], expected[1])


def test_the_norm_waits_for_gradients_that_left() -> None:
    after_a_slow_put(lambda model, optimizer: optimizer.clip_grad_norm_(0.5))


def test_gradients_by_hand_are_copied_when_step_returns() -> None:
    """Whoever put them there may go on writing to them."""
    model, reference = expected()
    hold = Hold("d2h")
    with copies(hold):
        found = TinyLM()
        optimizer = optimizer_of(found, settings("streamed", bucket_bytes=1 << 20, ring_slots=16))
    optimizer.engine.bind_trainable()
    handmade(found, 0)
    given = [p.grad for p in found.parameters()]
    hold.close()
    hold.release(after=LATE)
    optimizer.step()
    for grad in given:
        grad.fill_(-7.0)
    optimizer.synchronize()
    assert same(weights(found), weights(model))
    for o in (optimizer, reference):
        o.close()


def test_binding_waits_for_gradients_that_left() -> None:
    """Seeding goes through the ring: else weights lie where gradients did."""
    after_a_slow_put(lambda model, optimizer: optimizer.engine.bind([nn.Parameter(torch.ones(500))]))


def test_a_look_at_changed_weights_waits_for_gradients_that_left() -> None:
    """They come down through the ring as well."""

    def change(model: nn.Module, optimizer: OffloadAdam) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)

    after_a_slow_put(change)


def test_zeroing_in_place_waits_for_gradients_that_left() -> None:
    """Else they come after the zeros."""
    after_a_slow_put(lambda model, optimizer: optimizer.zero_grad(set_to_none=False))


def test_close_waits_for_gradients_that_left() -> None:
    """Else the transport ends under them, which is told as a failed step."""
    with copies(late("d2h", 5e-3)):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("streamed", bucket_bytes=1 << 20, ring_slots=16))
    model(next(batches())).backward()
    optimizer.close()


# ---- a step that was taken, of which an interrupt kept its thread from being told


def untold_step(optimizer: OffloadAdam) -> None:
    with patch.object(Pipeline, "_wake", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.step()


def test_gradients_that_leave_after_an_untold_step_come_after_it() -> None:
    """Else the step is taken with the gradients of the next."""

    def run(mode: str) -> dict[str, Tensor]:
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode))
        optimizer.engine.bind_trainable()
        for factor in (1.0, -2.0):
            sum((p * factor).sum() for p in model.parameters()).backward()
            if mode == "streamed" and factor == 1.0:
                untold_step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return weights(model)

    assert same(run("streamed"), run("in_order"))


def test_an_untold_step_is_taken_though_close_is_interrupted_as_well() -> None:
    model, reference = expected()
    found = TinyLM()
    optimizer = optimizer_of(found, settings("overlapped"))
    handmade(found, 0)
    untold_step(optimizer)
    with patch.object(Pipeline, "wait_all", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert same(weights(found), weights(model))
    reference.close()


# ---- whoever else reads or writes weights


READERS: dict[str, Callable[[nn.Module, OffloadAdam], object]] = {
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "eval": lambda model, optimizer: optimizer.eval(),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "optimizer.state": lambda model, optimizer: optimizer.state[next(model.parameters())]["exp_avg"],
    "close": lambda model, optimizer: optimizer.close(),
    "reseed": lambda model, optimizer: optimizer.reseed(),
    "attach again": lambda model, optimizer: optimizer.attach(model.layers),
    "add_param_group, then bind": lambda model, optimizer: optimizer.engine.bind([nn.Parameter(torch.ones(3))]),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_all(reader: str) -> None:
    model, reference = expected()
    with under_way(late("h2d", 3e-3)) as (found, optimizer):
        READERS[reader](found, optimizer)
        assert same(weights(found), weights(model))
    reference.close()


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS: dict[str, Callable[[nn.Module], dict[str, Tensor]]] = {
    "model.state_dict": lambda model: dict(model.state_dict()),
    "state_dict of a part": lambda model: {f"layers.1.up.{k}": v for k, v in model.layers[1].up.state_dict().items()},
    "state_dict of a list": lambda model: {f"layers.{k}": v for k, v in model.layers.state_dict().items()},
    "deepcopy": lambda model: dict(copy.deepcopy(model).named_parameters()),
    "pickle": lambda model: dict(pickled(model).named_parameters()),
    "torch.save": lambda model: dict(saved(model).named_parameters()),
}


@pytest.mark.parametrize("copier", COPIERS)
def test_copies_of_the_model_wait_for_all(copier: str) -> None:
    model, reference = expected()
    with under_way(late("h2d", 3e-3)) as (found, _):
        copied = {k: v.detach().clone() for k, v in COPIERS[copier](found).items()}
        assert copied
        new = weights(model)
        assert same(copied, {k: new[k] for k in copied})
    reference.close()


@pytest.mark.parametrize("part", ["", "layers.1", "layers.2.down"])
def test_loading_weights_waits_for_all_and_wins(part: str) -> None:
    """Else the step's late weights overwrite the loaded ones. The masters follow what was loaded."""
    other = TinyLM(seed=9)
    with under_way(late("h2d", 3e-3)) as (found, optimizer):
        found.get_submodule(part).load_state_dict(other.get_submodule(part).state_dict())
        time.sleep(LATE)
        loaded = weights(found.get_submodule(part))
        assert same(loaded, weights(other.get_submodule(part)))
        handmade(found, 1)
        optimizer.step()
        optimizer.synchronize()
        for name, p in found.get_submodule(part).named_parameters():
            assert torch.equal(optimizer.state[p]["master"], p), "fp32: the master is the weight"
            assert (p - loaded[name]).abs().max() < 0.1, "the step started from what was loaded"


def test_loading_optimizer_state_waits_for_all() -> None:
    """Else the step under way goes on writing into what was loaded."""
    _, reference = expected(steps=3)
    wanted = copy.deepcopy(reference.state_dict())
    with under_way(late("d2h", 3e-3)) as (_, optimizer):
        optimizer.load_state_dict(wanted)
        time.sleep(LATE)
        found_state = {k: v for k, v in state(optimizer).items() if "exp_avg" in k}
        assert same(found_state, {k: v for k, v in state(reference).items() if "exp_avg" in k})
    reference.close()


def test_parameters_outside_the_model_are_awaited_in_step() -> None:
    """No hook tells when they are read."""

    def run(schedule: str, delay: Delay | None) -> tuple[Tensor, ...]:
        model, outside = TinyLM(), nn.Parameter(torch.linspace(-1, 1, 50))
        with copies(delay):
            optimizer = OffloadAdam([*model.parameters(), outside], config=settings(schedule), model=model)
        handmade(model)
        outside.grad = torch.ones(50)
        optimizer.step()
        now = outside.detach().clone()
        optimizer.close()
        return (now,)

    assert torch.equal(run("overlapped", late("h2d", 3e-3))[0], run("in_order", None)[0])


def test_a_forward_in_another_thread_waits_as_well() -> None:
    model, reference = expected()
    with under_way(late("h2d", 3e-3)) as (found, _):
        losses: list[float] = []
        ids = next(batches())
        thread = threading.Thread(target=lambda: losses.append(found(ids).item()))
        thread.start()
        thread.join(LONG)
        assert losses == [model(ids).item()]
    reference.close()


def test_a_unit_is_told_when_its_bucket_is_on_its_way_and_not_at_the_end_of_the_step() -> None:
    """The first bucket comes when forward waits for it already, the last one not before the first block has run."""
    with under_way(None) as (model, optimizer):
        model(next(batches()))  # else everything is awaited at the root
        last = len(optimizer.engine.arenas[0].plan.buckets)
        ran, in_vain, count = threading.Event(), [], 0

        def before() -> None:
            nonlocal count
            count += 1
            if count == 1:
                time.sleep(LATE)
            elif count == last and not ran.wait(10 * LATE):
                in_vain.append(count)

        model.layers[0].register_forward_hook(lambda *args: ran.set())
        handmade(model, 1)
        with kernels(before):
            optimizer.step()
            optimizer.zero_grad()  # kept gradients would be waited for
            model(next(batches()))
        assert count == last and not in_vain
