"""`device_state_bytes="auto"`: state moves to the device after the first micro-batches, and back when memory is short.

Bits never change. What a GPU would say of its memory is made up here.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine.device_memory import CudaMemory, NoDeviceMemory, memory_of
from hf_offload.engine.inlets import Tap
from hf_offload.errors import HostMemoryError
from hf_offload.planner import DEVICE_MARGIN_BYTES
from hf_offload.transport.cuda_device import DeviceMemoryError
from support.engine import (
    Outcome,
    Plan,
    TinyLM,
    batches,
    dice,
    handmade,
    optimizer_of,
    same,
    settings,
    state,
    train,
    weights,
)
from support.engine_interrupts import Interrupter
from support.transport import needs_gpu

ALL = 1 << 30
EMBEDDING, BLOCK = 78, 174
"""Elements of TinyLM's units: the embedding, each of three blocks; the tail has 90."""


STRIDE = 241
"""Moments between two at which a move is interrupted: some ten of thousands."""


def mixed() -> nn.Module:
    return TinyLM(torch.bfloat16, adapters=True)


class Memory:
    """A device with `free` bytes; it ran short when it is asked for the n-th time, for each n in `short`."""

    def __init__(self, free: int, short: Collection[int] = ()) -> None:
        self.free, self.short, self.asked = free, short, 0

    def free_bytes(self) -> int:
        return self.free

    def margin_bytes(self) -> int:
        return 0

    def ran_short(self) -> bool:
        self.asked += 1
        return self.asked in self.short


@contextmanager
def device(memory: Memory) -> Iterator[None]:
    with patch("hf_offload.engine.placement.memory_of", lambda device: memory):
        yield


def resident(optimizer: OffloadAdam) -> int:
    """Elements."""
    return sum(a.plan.numel for a in optimizer.engine.arenas if a.resident)


EXPECTED: dict[str, Outcome] = {}
PLAN = Plan(steps=5, accumulation=2, missing={0: 3})


@pytest.mark.parametrize(
    "mode",
    [
        "overlapped",
        "streamed",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("in_order", "speculative", "delayed")),
    ],
)
@pytest.mark.parametrize("short", [(), (4, 7), range(2, 100)], ids=["stays", "half goes twice", "goes at once"])
def test_moving_to_the_device_and_back_changes_no_bit(mode: str, short: Collection[int]) -> None:
    base = "delayed" if mode == "delayed" else "in_order"
    if base not in EXPECTED:
        EXPECTED[base] = train(settings(base), PLAN, make=mixed)
    memory = Memory(12 * 300 if short else ALL, short)
    with device(memory):
        found = train(settings(mode, device_state_bytes="auto"), PLAN, dice(1, 3e-4), mixed)
    assert found == EXPECTED[base]
    assert memory.asked > 2, "something was on the device"


class Run:
    def __init__(
        self, memory: Memory, mode: str = "overlapped", make: Callable[[], nn.Module] = TinyLM, **more: Any
    ) -> None:
        self.model = make()
        with device(memory):
            self.optimizer = optimizer_of(self.model, settings(mode, device_state_bytes="auto", **more))
        self.data = batches()

    def backward(self) -> None:
        self.model(next(self.data)).backward()

    def evaluate(self) -> None:
        self.model(next(self.data))

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.optimizer.close()


@pytest.mark.parametrize(
    ("free", "taken"),
    [
        (12 * EMBEDDING - 1, 0),
        (12 * EMBEDDING, EMBEDDING),
        (12 * (EMBEDDING + BLOCK) + 11, EMBEDDING + BLOCK),
        (12 * (EMBEDDING + BLOCK + 90), EMBEDDING + BLOCK + 90),
    ],
)
def test_whole_units_in_the_order_of_forward_as_long_as_they_fit(free: int, taken: int) -> None:
    """The last case: the second block is passed over for the tail, which fits."""
    with Run(Memory(free)) as run:
        run.backward()
        assert run.optimizer.engine.bound and not resident(run.optimizer), "not before a micro-batch was seen"
        run.optimizer.step()
        assert resident(run.optimizer) == taken


def test_streamed_gradients_that_come_to_stay_are_counted_as_well() -> None:
    with Run(Memory(16 * EMBEDDING - 1), "streamed") as run:
        run.step()
        assert resident(run.optimizer) == 0
    with Run(Memory(16 * EMBEDDING), "streamed") as run:
        run.backward()
        norm = run.optimizer.clip_grad_norm_(1.0).item()
        assert resident(run.optimizer) == EMBEDDING
        assert run.model.embed.weight.grad.norm() > 0, "it is back from the host"
        assert run.optimizer.clip_grad_norm_(1.0).item() == norm
        run.optimizer.step()


def test_half_of_it_goes_back_each_time_the_last_that_forward_needs_first(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(ALL)
    with Run(memory) as run, caplog.at_level(logging.INFO, "hf_offload"):
        run.step()
        assert resident(run.optimizer) == EMBEDDING + 3 * BLOCK + 90
        assert re.search(r"1.07 GB of the device are free.* 690 of 690 parameters", caplog.text)
        for left in (EMBEDDING + BLOCK, EMBEDDING, 0, 0):
            memory.short = [memory.asked + 1]
            run.step()
            assert resident(run.optimizer) == left
        assert "ran short: the state of 438 parameters moves to the host" in caplog.text


def test_it_goes_back_before_the_next_forward_where_one_has_failed() -> None:
    """As with auto_find_batch_size: the allocation that failed is tried again with fewer rows."""
    memory = Memory(12 * EMBEDDING)
    with Run(memory) as run:
        run.step()
        memory.short = [memory.asked + 1]
        with patch.object(run.model, "hidden", side_effect=RuntimeError("out of memory")), pytest.raises(RuntimeError):
            run.backward()
        assert resident(run.optimizer) == 0
        run.step()


@pytest.mark.parametrize("mode", ["in_order", "overlapped", "streamed", "speculative"])
def test_what_goes_back_is_free_before_the_forward_that_needs_the_room(mode: str) -> None:
    memory = Memory(ALL)
    with Run(memory, mode) as run:
        for _ in range(2):
            run.step()
        held = {a.number: weakref.ref(a.state[0].base) for a in run.optimizer.engine.arenas if a.resident}
        memory.short = range(1000)
        run.optimizer.engine.before_root()
        gone = [held[a.number] for a in run.optimizer.engine.arenas if not a.resident]
        assert gone and not any(block() is not None for block in gone)
        run.step()


def test_streamed_it_goes_back_before_a_forward_and_not_under_its_gradients() -> None:
    memory = Memory(ALL)
    with Run(memory, "streamed") as run:
        run.step()
        held, memory.short = resident(run.optimizer), range(1000)
        run.model(next(run.data)).backward()
        assert resident(run.optimizer) < held, "no gradient stood there"
        held = resident(run.optimizer)
        run.backward()
        run.optimizer.step()
        assert resident(run.optimizer) == held


def test_it_goes_back_before_an_evaluation_under_inference_mode() -> None:
    memory = Memory(ALL)
    with Run(memory) as run:
        run.step()
        memory.short = range(1000)
        with torch.inference_mode():
            run.evaluate()
        assert resident(run.optimizer) < EMBEDDING + 3 * BLOCK + 90
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        run.step()


def test_nothing_moves_between_clipping_and_the_step() -> None:
    """Gradients by hand, which no forward came before: state is bound when they are clipped, and not moved then."""
    with Run(Memory(ALL), "streamed") as run:
        handmade(run.model)
        run.optimizer.clip_grad_norm_(1e-3)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert resident(run.optimizer) == 0
        run.step()
        assert resident(run.optimizer) > 0


def test_the_state_that_is_shown_is_where_it_is() -> None:
    memory = Memory(ALL)
    with Run(memory) as run:
        run.step()
        p = run.model.embed.weight
        for _ in range(2):
            entry = run.optimizer.state[p]
            before = {name: t.clone() for name, t in entry.items()}
            memory.short = range(1000)
            run.optimizer.engine.before_root()
            assert run.optimizer.state[p] is entry and same(dict(entry), before)
            arena, index = run.optimizer.engine._place_of[id(p)]
            views = run.optimizer.engine.arenas[arena].state_views(index)
            assert all(entry[name].data_ptr() == t.data_ptr() for name, t in views.items())
        entry["exp_avg"].zero_()
        run.step()
        assert float(entry["step"]) == 2.0


def test_an_entry_that_was_replaced_by_hand_is_refused_though_its_state_moved() -> None:
    from hf_offload.errors import StateError

    memory = Memory(ALL)
    with Run(memory) as run:
        run.step()
        run.optimizer.state[run.model.embed.weight]["exp_avg"] = torch.zeros(13, 6)
        memory.short = range(1000)
        run.backward()
        with pytest.raises(StateError, match=r"optimizer.state=.*replaced by hand"):
            run.optimizer.step()


def test_an_entry_with_something_more_in_it_goes_with_its_state() -> None:
    memory = Memory(ALL)
    with Run(memory) as run:
        run.step()
        p = run.model.head.weight
        entry = run.optimizer.state[p]
        entry["note"] = "mine"
        memory.short = range(1000)
        run.step()
        arena, index = run.optimizer.engine._place_of[id(p)]
        assert not run.optimizer.engine.arenas[arena].resident
        there = run.optimizer.engine.arenas[arena].state_views(index)
        assert entry["exp_avg"].data_ptr() == there["exp_avg"].data_ptr() and entry["note"] == "mine"


def test_what_comes_back_does_without_a_shadow_that_is_too_small_for_it() -> None:
    memory = Memory(ALL)
    with Run(memory, "speculative", shadow_bytes=16 * EMBEDDING, bucket_bytes=1 << 20) as run:
        run.step()
        held, memory.short = resident(run.optimizer), range(1000)
        run.step()
        assert resident(run.optimizer) < held
        run.step()


def test_the_shadow_of_what_has_moved_to_the_device_covers_what_has_not() -> None:
    with Run(Memory(16 * EMBEDDING), "speculative", shadow_bytes=16 * EMBEDDING) as run:
        for _ in range(3):
            run.step()
        found = run.optimizer.stats()
        assert resident(run.optimizer) == EMBEDDING
        assert found.speculation_hits and 0 < found.host_bytes["shadow"] <= 16 * EMBEDDING


def test_steps_are_guessed_when_state_is_back_that_was_away_when_a_parameter_came() -> None:
    memory = Memory(ALL)
    with Run(memory, "speculative", lambda: TinyLM(blocks=1)) as run:
        run.model.head.requires_grad_(False)
        for _ in range(2):
            run.step()
        run.model.head.requires_grad_(True)
        for _ in range(2):
            run.step()
        memory.short = range(1000)
        for _ in range(6):
            run.step()
        assert resident(run.optimizer) == 0 and run.optimizer.stats().speculation_hits


def test_a_host_without_room_leaves_it_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(ALL)
    with Run(memory) as run:
        run.step()
        held, memory.short = resident(run.optimizer), range(1000)
        budget = run.optimizer.engine.placement.budget
        with patch.object(budget, "check_binding", side_effect=HostMemoryError("full")):
            run.step()
        assert resident(run.optimizer) == held and "state stays on the device" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DeviceMemoryError])
def test_a_device_that_is_full_after_all_leaves_it_on_the_host(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with Run(Memory(ALL)) as run:
        with patch("hf_offload.engine.engine.ResidentArena", side_effect=error("CUDA out of memory")):
            run.step()
        assert resident(run.optimizer) == 0 and "no more state is kept on the device" in caplog.text
        run.step()


def test_a_loaded_state_moves_too() -> None:
    with Run(Memory(0)) as run:
        for _ in range(2):
            run.step()
        saved = {"optimizer": run.optimizer.state_dict(), "model": weights(run.model)}
        with Run(Memory(ALL)) as other:
            other.model.load_state_dict(saved["model"])
            other.optimizer.load_state_dict(saved["optimizer"])
            for r in (run, other):
                r.data = batches(7)
                r.step()
                r.optimizer.synchronize()
            assert resident(other.optimizer) and same(weights(run.model), weights(other.model))
            assert same(state(run.optimizer), state(other.optimizer))


def test_without_a_model_it_moves_a_gigabyte_at_a_time() -> None:
    params = [nn.Parameter(torch.ones(n)) for n in (0, 3, 4, 5, 0)]
    with device(Memory(12 * 8)), patch("hf_offload.engine.share.LOT_BYTES", 12 * 7):
        optimizer = OffloadAdam(params, config=OffloadConfig(device_state_bytes="auto"))
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert [len(a.params) for a in optimizer.engine.arenas] == [3, 2] and resident(optimizer) == 7
    optimizer.close()


@pytest.mark.parametrize("mode", ["overlapped", "streamed", "delayed"])
@pytest.mark.parametrize("back", [False, True], ids=["to the device", "and back"])
def test_a_move_interrupted_anywhere_loses_no_bit(back: bool, mode: str) -> None:
    def run(moment: int) -> tuple[bool, Any]:
        memory, interrupted = Memory(ALL), False
        with Run(memory, mode, lambda: TinyLM(blocks=2)) as made:
            engine, params = made.optimizer.engine, list(made.model.parameters())
            for k in range(3):
                if moment and back and k == 2:
                    memory.short = range(1000)
                    interrupted = Interrupter(moment, ("/hf_offload/",)).run(engine.before_root)
                engine.before_root()
                torch.autograd.backward(params, [torch.full_like(p, 1.0 + k) for p in params])
                if moment and not back and k == 0:
                    gather = Interrupter(moment, ("/hf_offload/",))
                    interrupted = gather.run(lambda: engine.gather(made.optimizer.param_groups))
                made.optimizer.step()
                made.optimizer.zero_grad()
            made.optimizer.synchronize()
            for p in params:
                arena, index = engine._place_of[id(p)]
                shown, there = made.optimizer.state[p], engine.arenas[arena].state_views(index)
                assert all(shown[name].data_ptr() == t.data_ptr() for name, t in there.items())
            return interrupted, (weights(made.model), state(made.optimizer))

    _, expected = run(0)
    for moment in itertools.count(1, STRIDE):
        interrupted, found = run(moment)
        assert same(found[0], expected[0]) and same(found[1], expected[1]), moment
        if not interrupted:
            break
    assert moment > 3 * STRIDE


def test_gradients_that_an_interrupted_move_left_on_the_host_go_on_accumulating() -> None:
    """Ctrl-C right after the hook of the parameter that is first in backward was taken off."""
    found, close = [], Tap.close
    for interrupted in (False, True):
        with Run(Memory(ALL), "streamed") as run:
            run.backward()
            last = run.optimizer.engine.stream._tap_of[id(run.model.head.weight)][1]

            def closed(tap: Tap, last: Tap = last) -> None:
                close(tap)
                if tap is last:
                    raise KeyboardInterrupt

            if interrupted:
                with patch.object(Tap, "close", closed), pytest.raises(KeyboardInterrupt):
                    run.optimizer.clip_grad_norm_(1e9)
            run.backward()
            run.optimizer.step()
            run.optimizer.synchronize()
            found.append(weights(run.model))
    assert same(*found)


# ---- what there is to measure


def test_a_cpu_has_no_device_memory_to_take_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(memory_of("cpu"), NoDeviceMemory)
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped", device_state_bytes="auto"))
    with caplog.at_level(logging.INFO, "hf_offload"):
        for k in range(3):
            handmade(model, k)
            optimizer.step()
    assert resident(optimizer) == 0 and caplog.text.count("All state is on the host") == 1
    optimizer.close()


def test_a_gpu_is_asked_for_what_torch_has_not_reserved_and_for_failed_allocations() -> None:
    stats = {"num_alloc_retries": 2, "num_ooms": 0}
    with (
        patch("torch.cuda.mem_get_info", lambda device: (30 << 30, 80 << 30)),
        patch("torch.cuda.memory_stats", lambda device: stats),
    ):
        memory = CudaMemory(torch.device("cuda", 0))
        assert memory.free_bytes() == 30 << 30
        assert memory.margin_bytes() == 4 << 30, "a twentieth of 80 GiB is left alone"
        with (
            patch("torch.cuda.memory_reserved", lambda device: 9 << 30),
            patch("torch.cuda.memory_allocated", lambda device: 7 << 30),
        ):
            assert memory.room_bytes() == 32 << 30
        assert not memory.ran_short(), "what happened before does not count"
        for name in ("num_alloc_retries", "num_ooms"):
            stats[name] += 1
            assert memory.ran_short() and not memory.ran_short()
        with patch("torch.cuda.mem_get_info", lambda device: (3 << 30, 8 << 30)):
            assert memory.margin_bytes() == DEVICE_MARGIN_BYTES


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_what_is_free_is_taken_and_given_back_when_an_allocation_fails(self) -> None:
        model = TinyLM().to("cuda:0")
        optimizer = optimizer_of(model, settings("overlapped", device_state_bytes="auto"))
        free = torch.cuda.mem_get_info(0)[0]
        for k in range(3):
            handmade(model, k)
            optimizer.step()
            optimizer.zero_grad()
        assert resident(optimizer) == sum(p.numel() for p in model.parameters())
        assert all(t.is_cuda for name, t in optimizer.state[model.embed.weight].items() if name != "step")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * free, dtype=torch.uint8, device="cuda:0")
        before = state(optimizer)
        model(next(batches()).to("cuda:0"))
        assert resident(optimizer) < sum(p.numel() for p in model.parameters())
        assert same(state(optimizer), before)
        optimizer.close()
