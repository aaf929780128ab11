"""Stepping ahead on a guess: what is counted, what is written before `step()`; a wrong guess leaves no trace."""

from __future__ import annotations

import copy
import io
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine.arena import Arena
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.speculation import Basis, Speculation
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.store import GradientStore
from hf_offload.engine.work import ArenaWork, BucketWork
from hf_offload.kernels import cpu
from support.engine import LATE, LONG, TinyLM, batches, kernels, same, settings, state, weights


class Items(nn.Module):
    """Parameters of five elements, one bucket each in these tests; `forward` squares the ones that are asked for."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(count)])

    def forward(self, *which: int, times: float = 1.0) -> Tensor:
        return sum((self.items[i] * times).square().sum() for i in which or range(len(self.items)))


SLOT = 5 * 16  # bytes of shadow for one bucket


def one(mode: str = "speculative", **more: Any) -> tuple[Items, OffloadAdam]:
    model = Items()
    config = settings(mode, bucket_bytes=20, **more)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
    model()  # binds
    return model, optimizer


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reached()


def guessed(optimizer: OffloadAdam, count: int) -> None:
    """Wait until so many buckets have been stepped ahead."""
    until(lambda: len(optimizer.engine.speculation._guesses) == count)


def everything(model: nn.Module, optimizer: OffloadAdam) -> list[bytes]:
    """Weights, step counts and, wherever it lies now, the state; without moving any of it."""
    found = [p.detach().numpy().tobytes() for p in model.parameters()]
    for arena in optimizer.engine.arenas:
        found.append(arena.steps.tobytes())
        found += [a.tobytes() for k in range(len(arena.plan.buckets)) for a in arena.state_of(k)]
    return found


def counts(optimizer: OffloadAdam) -> tuple[int, int]:
    optimizer.synchronize()
    found = optimizer.stats()
    return found.speculation_hits, found.speculation_misses


def reference(body: Callable[[Items, OffloadAdam], None]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = one("in_order")
    body(model, optimizer)
    result = weights(model), state(optimizer)
    optimizer.close()
    return result


# ---- before step()


def test_before_step_nothing_but_shadow_is_written() -> None:
    """With the state at home (first step) and in the shadow (second), and guesses known to have been made."""
    model, optimizer = one()
    for step in range(4):
        before = everything(model, optimizer)
        model().backward()
        guessed(optimizer, 4)
        assert everything(model, optimizer) == before
        optimizer.step()
        optimizer.synchronize()
        assert everything(model, optimizer) != before
        optimizer.zero_grad()
        assert counts(optimizer) == (4 * (step + 1), 0)
    optimizer.close()


def test_hit_after_hit_the_state_moves_without_a_copy() -> None:
    model, optimizer = one()
    arena = optimizer.engine.arenas[0]
    homes = [arena.home_of(k) for k in range(4)]
    for step in range(5):
        model().backward()
        guessed(optimizer, 4)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        away = [arena.state_of(k) is not homes[k] for k in range(4)]
        assert away == [step % 2 == 0] * 4, "there and back"
    shadows = {k: slot.state[0].ctypes.data for (_, k), slot in optimizer.engine.speculation._slots.items()}
    assert all(arena.state_of(k)[0].ctypes.data == shadows[k] for k in range(4))
    optimizer.close()


@pytest.mark.parametrize("mode", ["speculative", "small shadow"])
def test_state_can_be_read_at_any_moment(mode: str) -> None:
    """Through `optimizer.state` and through `state_dict`, while states are here and there and guesses are pending."""
    model, optimizer = one(mode)
    twin, other = one("in_order")

    def agree() -> None:
        for p, q in zip(model.parameters(), twin.parameters()):
            assert (p in optimizer.state) == (q in other.state)
            for name in other.state.get(q, {}):
                assert torch.equal(optimizer.state[p][name], other.state[q][name]), name

    def read(at: int, step: int) -> None:
        if (step + at) % 3 == 0:
            agree()
        elif (step + at) % 3 == 1:
            assert same(state(optimizer), state(other))

    for step in range(9):
        for m in (twin, model):
            m().backward()
        time.sleep(0.005)  # some guesses are made, some perhaps not
        read(0, step)
        for o in (other, optimizer):
            o.step()
            o.zero_grad()
        read(1, step)
    optimizer.synchronize()
    agree()
    for o in (optimizer, other):
        o.close()


def test_checkpoints_are_plain(tmp_path: Any) -> None:
    """They load with `weights_only=True`, at any moment, with what was true before the step."""
    model, optimizer = one()
    for _ in range(3):
        model().backward()
        guessed(optimizer, 4)
        optimizer.step()
        optimizer.zero_grad()
    model().backward()
    guessed(optimizer, 4)
    expected = state(optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    size = len(file.getvalue())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(e) is dict for e in loaded["state"].values())
    found = {f"{i}.{k}": torch.as_tensor(v) for i, e in loaded["state"].items() for k, v in e.items()}
    assert same(found, expected) and {float(e["step"]) for e in loaded["state"].values()} == {3.0}
    assert size < 40_000
    torch.save(dict(optimizer.state), tmp_path / "raw.pt")  # the entries themselves
    assert len(torch.load(tmp_path / "raw.pt", weights_only=False)) == 4
    optimizer.close()


def test_the_state_is_brought_home_when_no_guess_is_under_way() -> None:
    """Else the guess is written over what is read: it is made where the state is not."""
    gate, reached = threading.Event(), threading.Event()
    gate.set()
    model, optimizer = one(ring_slots=4)
    with kernels(lambda: (reached.set(), gate.wait(LONG))[0], ("adam_step_into",)):
        model().backward()
        guessed(optimizer, 4)
        optimizer.step()  # hits: the state lies in the shadow now
        optimizer.zero_grad()
        optimizer.synchronize()
        gate.clear()
        reached.clear()
        model().backward()
        assert reached.wait(LONG)
        threading.Timer(LATE, gate.set).start()
        shown = optimizer.state_dict()["state"]  # live views
        before = copy.deepcopy(shown)
        time.sleep(2 * LATE)
    assert all(same(shown[i], before[i]) for i in before)
    assert counts(optimizer) == (4, 0)
    optimizer.close()


def test_state_is_loaded_over_what_lies_in_the_shadow() -> None:
    model, optimizer = one()
    twin, other = one("in_order")
    for m, o, times in ((model, optimizer, 1.0), (twin, other, 0.3)):
        m(times=times).backward()
        if o is optimizer:
            guessed(optimizer, 4)
        o.step()
    optimizer.load_state_dict(other.state_dict())
    assert same(state(optimizer), state(other))
    for o in (optimizer, other):
        o.close()


# ---- what makes a guess wrong


CHANGES: dict[str, Callable[[Items, OffloadAdam], Any]] = {
    "nothing": lambda model, optimizer: None,
    "lr": lambda model, optimizer: optimizer.param_groups[0].update(lr=5e-3),
    "betas": lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.8, 0.999)),
    "beta2": lambda model, optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.99)),
    "eps": lambda model, optimizer: optimizer.param_groups[0].update(eps=1e-6),
    "weight_decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
    "maximize": lambda model, optimizer: optimizer.param_groups[0].update(maximize=True),
    "L2": lambda model, optimizer: optimizer.param_groups[0].update(decoupled_weight_decay=False),
    "clipping": lambda model, optimizer: optimizer.clip_grad_norm_(1e-3),
    "unscaling": lambda model, optimizer: optimizer.unscale_(0.125),
}
HITS = ("nothing",)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_backward_and_step_is_a_miss(change: str) -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        for step in range(4):
            model().backward()
            if optimizer.engine.speculation is not None and step < 3:
                guessed(optimizer, 4)
            if step == 2:
                CHANGES[change](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = one()
    body(model, optimizer)
    hits, misses = counts(optimizer)
    assert (misses == 0) if change in HITS else (misses >= 4)
    assert hits >= 8
    expected = reference(body)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


def test_a_missing_gradient_is_a_miss_for_its_bucket_alone() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        for step in range(3):
            model().backward()
            if optimizer.engine.speculation is not None:
                guessed(optimizer, 4)
            if step == 1:
                model.items[2].grad = None
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = one()
    body(model, optimizer)
    hits, misses = counts(optimizer)
    # that parameter is a step behind from now on, which its row of coefficients knows
    assert hits == 4 + 3 + 4 and misses == 0, "a bucket that is not stepped is neither"
    expected = reference(body)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


DROPPED: dict[str, Callable[[Items, OffloadAdam], None]] = {
    "a second backward": lambda model, optimizer: model(times=0.5).backward(),
    "a second backward for some": lambda model, optimizer: model(1, 2, times=0.5).backward(),
    "zero_grad and another backward": lambda model, optimizer: (optimizer.zero_grad(), model(times=2.0).backward())[0],
    "zero_grad in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad, some come again": lambda model, optimizer: (model.zero_grad(), model(0, 3).backward())[0],
    "another gradient by hand": lambda model, optimizer: setattr(model.items[1], "grad", torch.ones(5)),
    "loaded state": lambda model, optimizer: halve(optimizer),
    "loaded weights": lambda model, optimizer: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
    "written weights": lambda model, optimizer: write(model, 1.5),
    "silently written weights": lambda model, optimizer: silently(model, optimizer),
    "reseed": lambda model, optimizer: (silently(model, optimizer), optimizer.reseed())[0],
    "written state": lambda model, optimizer: (
        optimizer.state[model.items[0]]["exp_avg"].mul_(0.5) if optimizer.state else None
    ),
}


def halve(optimizer: OffloadAdam) -> None:
    saved = optimizer.state_dict()
    entries = {
        i: {k: (v.clone() * 0.5 if k in ("exp_avg", "exp_avg_sq") else v.clone()) for k, v in e.items()}
        for i, e in saved["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": saved["param_groups"]})


@torch.no_grad()
def write(model: Items, factor: float) -> None:
    model.items[2].mul_(factor)


def silently(model: Items, optimizer: OffloadAdam) -> None:
    optimizer.synchronize()
    model.items[2].data.copy_(model.items[2].data * 1.5)


@pytest.mark.parametrize("what", DROPPED)
@pytest.mark.parametrize("away", [False, True])
def test_what_was_guessed_is_dropped(what: str, away: bool) -> None:
    """`away`: the state lies in the shadow then, and the guess at home."""

    def body(model: Items, optimizer: OffloadAdam) -> None:
        for step in range(4):
            model().backward()
            if optimizer.engine.speculation is not None and step <= 1 + away:
                guessed(optimizer, 4)
            if step == 1 + away:
                DROPPED[what](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = one()
    body(model, optimizer)
    optimizer.synchronize()
    expected = reference(body)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


def test_an_exception_in_backward_and_a_retry() -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("injected")

    def body(model: Items, optimizer: OffloadAdam) -> None:
        for step in range(4):
            loss = Boom.apply(model.items[0]).sum()
            for i in (1, 2, 3):
                loss = model.items[i].square().sum() * 3 + loss
            if step == 2:
                with pytest.raises(RuntimeError, match="injected"):
                    loss.backward()
                if optimizer.engine.speculation is not None:
                    guessed(optimizer, 3)
                optimizer.zero_grad()
            model().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = one()
    body(model, optimizer)
    optimizer.synchronize()
    expected = reference(body)
    assert same(weights(model), expected[0]) and same(state(optimizer), expected[1])
    optimizer.close()


def test_a_skipped_step_counts_nothing_and_changes_nothing() -> None:
    model, optimizer = one()
    model().backward()
    guessed(optimizer, 4)
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    before, kept = everything(model, optimizer), counts(optimizer)
    model(times=1e25).backward()
    guessed(optimizer, 4)
    assert math.isinf(optimizer.clip_grad_norm_(1.0).item())
    optimizer.step()
    assert everything(model, optimizer) == before and counts(optimizer) == kept
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.close()


# ---- whether to guess at all


def test_it_stops_guessing_where_guesses_fail_and_begins_again() -> None:
    model, optimizer = one()
    misses = []
    for step in range(20):
        model().backward()
        optimizer.clip_grad_norm_(1e-4 if 4 <= step < 14 else 1e9)
        time.sleep(0.004)  # time to guess
        optimizer.step()
        optimizer.zero_grad()
        misses.append(counts(optimizer)[1])
    assert misses[3] == 0 and misses[13] == misses[9] > 0, "it stops"
    assert misses[13] <= 4 * 4, "after no more than four steps"
    hits = counts(optimizer)[0]
    for _ in range(3):
        model().backward()
        optimizer.clip_grad_norm_(1e9)
        guessed(optimizer, 4)
        optimizer.step()
        optimizer.zero_grad()
    assert counts(optimizer)[0] == hits + 12, "it has begun again"
    assert counts(optimizer)[1] == misses[13]
    optimizer.close()


def test_settings_that_change_between_steps_are_guessed_right() -> None:
    """A guess begins anew with each step, and where gradients were dropped."""
    model, optimizer = one()
    for step in range(4):
        for dropped in (True, False) if step % 2 else (False,):
            optimizer.param_groups[0]["lr"] = 1e-3 * (2 * step + dropped + 1)
            model().backward()
            optimizer.engine.stream.settle()
            guessed(optimizer, 4)
            if dropped:
                optimizer.zero_grad()
        optimizer.step()
        model.zero_grad()  # the optimizer hears nothing of it
    assert counts(optimizer) == (16, 0)
    optimizer.close()


def test_without_clipping_it_never_misses() -> None:
    model = TinyLM(torch.bfloat16)
    optimizer = OffloadAdam(model.parameters(), config=settings("speculative"), model=model)
    buckets, data = None, batches()
    for _ in range(5):
        model(next(data)).backward()
        buckets = len(optimizer.engine.arenas[0].plan.buckets)
        guessed(optimizer, buckets)
        optimizer.step()
        optimizer.zero_grad()
    assert counts(optimizer) == (5 * buckets, 0)
    optimizer.close()


def test_several_micro_batches_are_guessed_after_the_last() -> None:
    """From the second step on it is known how many there are: no kernel runs in vain."""
    model, optimizer = one()
    ran = [0]

    def count() -> None:
        ran[0] += 1

    with kernels(count, ("adam_step_into",)):
        for step in range(4):
            for _ in range(3):
                model().backward()
                optimizer.engine.stream.settle()
                time.sleep(0.004)
            if step:
                guessed(optimizer, 4)
            before = ran[0]
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            ran[0] = before if step == 0 else ran[0]
            if step == 0:
                ran[0] = 0
    assert ran[0] == 3 * 4
    optimizer.close()


# ---- the pool


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pool_smaller_than_the_model(slots: int) -> None:
    model, optimizer = one(shadow_bytes=slots * SLOT + 5)
    arena = optimizer.engine.arenas[0]
    for step in range(6):
        model().backward()
        guessed(optimizer, slots)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        assert optimizer.stats().host_bytes["shadow"] == slots * SLOT
        away = [arena.state_of(k) is not arena.home_of(k) for k in range(4)]
        assert sum(away) == (slots if step % 2 == 0 else 0)
    assert counts(optimizer) == (6 * slots, 0)
    optimizer.close()


def test_close_and_del_leave_the_state_whole() -> None:
    def body(model: Items, optimizer: OffloadAdam) -> None:
        for _ in range(3):
            model().backward()
            if optimizer.engine.speculation is not None:
                guessed(optimizer, 4)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = one()
    body(model, optimizer)
    assert any(optimizer.engine.arenas[0].state_of(k) is not optimizer.engine.arenas[0].home_of(k) for k in range(4))
    model().backward()
    optimizer.close()
    expected = reference(body)
    assert same(state(optimizer), expected[1])
    assert torch.equal(optimizer.state[model.items[1]]["exp_avg"], expected[1]["1.exp_avg"])


def test_nothing_is_allocated_for_a_guess_after_the_second_step() -> None:
    """No NumPy array of more than a few rows of coefficients is made, by whoever."""
    model = nn.ParameterList([nn.Parameter(torch.randn(5000)) for _ in range(4)])
    config = settings("streamed in order", shadow_bytes=1 << 20, bucket_bytes=20_000)
    optimizer = OffloadAdam(model.parameters(), config=config)
    import tracemalloc

    peaks = []
    for step in range(6):
        loss = sum(p.square().sum() for p in model)
        if step >= 3:
            tracemalloc.start()
        loss.backward()
        if step:
            guessed(optimizer, 4)
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert max(peaks) < 20_000, "not even one bucket"
    assert counts(optimizer)[0] >= 12
    optimizer.close()


def test_fp16_scale_is_part_of_the_guess() -> None:
    """A loss scale that stays is guessed right; when it changes, one step misses."""
    model, optimizer = one()
    found = []
    for step in range(8):
        scale = 2.0**8 if step < 4 else 2.0**9
        (model() * scale).backward()
        guessed(optimizer, 4)
        optimizer.unscale_(1 / scale)
        optimizer.step()
        optimizer.zero_grad()
        found.append(counts(optimizer))
    assert found == [(0, 4), (4, 4), (8, 4), (12, 4), (12, 8), (16, 8), (20, 8), (24, 8)]
    optimizer.close()
    assert np.isfinite(model.items[0].detach().numpy()).all()


# ---- a guess is made part by part


def half_made() -> tuple[Speculation, Arena, GradientStore, Coefficients]:
    """One bucket of 20 elements, of which the first 7 have been stepped ahead."""
    torch.manual_seed(0)
    arena = Arena([torch.zeros(15, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bfloat16)], [0, 0], 1 << 20)
    for i, a in enumerate(arena.state):
        a[:] = np.linspace(0.1, 1.0 + i, 20, dtype=np.float32)
    store = GradientStore(arena, "wire", threads=1)
    store.receive(0, np.arange(0x3F00, 0x3F14, dtype=np.uint16), [0, 1], [False, False])
    rows = rows_of(1.0)
    speculation = Speculation(1 << 20, threads=1)
    speculation.reserve(arena)
    speculation.offer(store, 0, Basis(rows, [np.zeros(2, np.int64)]), StepRecord(1))
    assert speculation.turn()
    return speculation, arena, store, rows


def rows_of(factor: float) -> Coefficients:
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True}
    return Coefficients([{**group, "maximize": False}], factor)


def bucket_work(arena: Arena, rows: Coefficients) -> BucketWork:
    table = rows.table(np.zeros(2, np.int64), arena.turns, np.arange(2))
    work = ArenaWork(arena, None, arena.params, [0, 0], [1, 1], table, np.arange(2), arena.turns)  # type: ignore[arg-type]
    return BucketWork(work, 0, "all")


def test_step_finishes_a_guess_that_is_half_made() -> None:
    speculation, arena, store, rows = half_made()
    before = [a.copy() for a in arena.state_of(0)]
    expected, weights = [a.copy() for a in before], np.zeros(20, np.uint16)
    work = bucket_work(arena, rows)
    cpu.adam_step(
        *expected, store.of_bucket(0), weights, arena.bucket_bounds[0], work.coefficients(), wire="bfloat16", threads=1
    )
    guess = speculation.accept(work)
    assert guess is not None and speculation.hits == 1
    assert guess.weights.tobytes() == weights.tobytes()
    assert [a.tobytes() for a in arena.state_of(0)] == [a.tobytes() for a in expected]
    assert arena.state_of(0) is guess.state and speculation.accept(work) is None
    assert [a.tobytes() for a in arena.home_of(0)] == [a.tobytes() for a in before]


def test_a_guess_that_is_half_made_and_wrong_is_dropped() -> None:
    speculation, arena, _, _ = half_made()
    before = [a.copy() for a in arena.state_of(0)]
    assert speculation.accept(bucket_work(arena, rows_of(0.5))) is None
    assert speculation.misses == 1 and speculation.hits == 0
    assert not speculation.turn()
    assert [a.tobytes() for a in arena.state_of(0)] == [a.tobytes() for a in before]


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_a_guess_that_is_half_made_is_forgotten(how: str) -> None:
    speculation, arena, _, rows = half_made()
    if how == "forget":
        speculation.forget(arena, 0)
    else:
        speculation.clear()
    assert not speculation.turn()
    assert speculation.accept(bucket_work(arena, rows)) is None
