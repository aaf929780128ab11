"""DESIGN, section 6: the contracts of the engine. README.md has the table of items, tests and planted bugs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine.pipeline import Pipeline
from hf_offload.errors import HostMemoryError, OffloadError
from hf_offload.hostmem import HostMemory
from support.contracts import (
    SCHEDULES,
    WIRES,
    Case,
    Duel,
    Steered,
    Story,
    every_case,
    every_exact,
    every_schedule,
    every_schedule_accumulating,
    every_schedule_and_wire,
    gradients,
    prove,
    reference,
    two_groups,
)
from support.engine import Hold, dice, late, ours, watched_gradients

# ---- 1. No gradient is lost


def accumulates(duel: Duel) -> None:
    duel.train(range(3))


@every_case
def test_no_gradient_of_an_earlier_micro_batch_is_lost(case: Case) -> None:
    prove(accumulates, case)


def several_backwards(duel: Duel) -> None:
    for step in range(3):
        duel.backward(10 * step, without=duel.names[::2])
        duel.backward(10 * step + 1, without=duel.names[1::2])
        duel.backward(10 * step + 2)
        duel.clip(0.5)
        duel.step()


@every_schedule_and_wire
def test_no_gradient_of_several_backwards_before_one_step_is_lost(case: Case) -> None:
    """Each reaches other parameters: some get two gradients and some three."""
    prove(several_backwards, case)


def some_without_gradient(duel: Duel) -> None:
    for step in range(4):
        duel.micro_batches(step, without=duel.names[step::4] if step else ())
        duel.clip(0.5)
        duel.step()


def one_never_with_gradient(duel: Duel) -> None:
    for step in range(2):
        duel.micro_batches(step, without=["layers.1.weight"])
        duel.clip(0.5)
        duel.step()


@pytest.mark.parametrize("story", [some_without_gradient, one_never_with_gradient])
@every_schedule_and_wire
def test_a_parameter_without_gradient_is_not_stepped_with_its_last_one(case: Case, story: Story) -> None:
    """Its weight, state and step count stay; bias corrections of the others go on."""
    prove(story, case)


def freezes(duel: Duel) -> None:
    duel.freeze(["layers.0.weight", "head.weight"])
    duel.train([0])
    duel.freeze(["layers.0.weight", "head.weight"], frozen=False)
    duel.freeze(["embed.weight"])
    duel.train([1, 2])
    duel.freeze(["embed.weight"], frozen=False)
    duel.train([3])


@every_schedule_accumulating
def test_a_parameter_that_is_frozen_and_unfrozen_is_stepped_exactly_when_it_has_a_gradient(case: Case) -> None:
    prove(freezes, case)


def tied(wire: str) -> nn.Module:
    model = Steered(wire)
    model.head.weight = model.embed.weight
    return model


def lists_both(model: nn.Module) -> list[dict[str, Any]]:
    inside = [p for part in (*model.layers, model.embed, model.head) for p in part.parameters()]
    return [{"params": inside}]


def accumulates_tied(duel: Duel) -> None:
    assert "head.weight" not in duel.names
    duel.train(range(3))


@every_schedule_accumulating
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_tied_weights_are_stepped_once(case: Case) -> None:
    prove(accumulates_tied, case, make=tied, groups=lists_both)


def with_an_empty_group(model: nn.Module) -> list[dict[str, Any]]:
    return [two_groups(model)[0], {"params": [], "lr": 7.0}, two_groups(model)[1]]


def schedules_lr(duel: Duel) -> None:
    factors = [lambda t: 0.5**t, lambda t: 1.0, lambda t: 1.0 / (1 + t)]
    both = [torch.optim.lr_scheduler.LambdaLR(o, factors) for o in (duel.optimizer, duel.oracle.adam)]
    for step in range(3):
        duel.train([step])
        for scheduler in both:
            scheduler.step()
    assert [len(g["params"]) for g in duel.optimizer.state_dict()["param_groups"]][1] == 0


@every_schedule
def test_an_empty_group_breaks_neither_the_step_nor_the_scheduler(case: Case) -> None:
    """LoRA's empty group. The scheduler rewrites lr right after `step()`, while the step may be under way."""
    prove(schedules_lr, case, groups=with_an_empty_group)


# ---- 2. No race


@every_schedule_accumulating
@pytest.mark.parametrize("seed", [0, 1])
def test_copies_that_are_late_at_random_change_no_bit(case: Case, seed: int) -> None:
    prove(accumulates, case, delay=dice(seed, 2e-3))


@pytest.mark.parametrize("schedule", ["overlapped", "streamed", "speculative", "small shadow"])
def test_a_forward_does_not_read_the_weights_of_the_step_before(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight goes up until a forward waits for one: who does not wait reads an old one, however fast the link."""
    hold, wait = Hold("h2d"), Pipeline.wait_bucket

    def waits(pipeline: Pipeline, k: int) -> None:
        hold.release()
        wait(pipeline, k)

    monkeypatch.setattr(Pipeline, "wait_bucket", waits)
    case = Case(schedule)
    with Duel(case, hold) as duel:
        for step in range(3):
            duel.micro_batches(step)
            duel.clip(0.5)
            duel.optimizer.engine.wait_gradients()
            hold.close()
            duel.step()
        hold.release()
        found = duel.bits()
    expected = reference(accumulates, replace(case, schedule="in_order"), Steered, two_groups)
    assert [what for what in found if found[what] != expected[what]] == []


@every_schedule
def test_the_host_step_does_not_read_a_gradient_that_is_still_being_copied(case: Case) -> None:
    prove(accumulates, case, delay=late("d2h", 5e-3), bucket_bytes=1 << 20)


def test_the_allocator_does_not_get_a_gradient_back_before_its_copy_has_ended() -> None:
    hold = Hold("d2h")
    with Duel(Case("overlapped", "float32"), hold) as duel:
        duel.train([0], clip=None)
        duel.optimizer.synchronize()
        hold.close()
        memory = watched_gradients(duel.model)
        duel.optimizer.step()
        duel.optimizer.zero_grad()
        held = [m() is not None for m in memory]
        hold.release()
        duel.optimizer.synchronize()
        assert all(held)
        assert not any(m() is not None for m in memory), "and is never given back"


# ---- 3. The same bits


SETTINGS = [
    {"bucket_bytes": 2, "ring_slots": 3},
    {"bucket_bytes": 61, "ring_slots": 1},
    {"bucket_bytes": 1000, "ring_slots": 4, "threads": 2},
    {"bucket_bytes": 1 << 20, "ring_slots": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"bucket {s['bucket_bytes']}")
@every_schedule
def test_bucket_size_and_ring_change_no_bit(case: Case, settings: dict[str, int]) -> None:
    prove(accumulates, replace(case, wire="mixed"), **settings)


class Wide(nn.Module):
    """One parameter that kernels share out among threads, and one that several buckets share."""

    def __init__(self, wire: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if wire == "bfloat16" else torch.float32
        self.items = nn.ParameterList(
            nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (40_001, 36_003)
        )

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.get_parameter(name).float() * g.float()).sum() for name, g in given.items())


@every_exact
def test_the_number_of_threads_changes_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload.engine.speculation.PART", 35_000)
    found = []
    for threads in (1, 2):
        # fp32: sums of squares of 16-bit numbers are exact in fp64, however they are grouped
        with Duel(replace(case, wire="float32"), None, Wide, bucket_bytes=160_000, threads=threads) as duel:
            duel.train(range(2))
            duel.agree()
            found.append([*duel.norms, *(p.detach() for p in duel.model.parameters())])
    assert found[0][:2] == found[1][:2] and all(map(torch.equal, found[0][2:], found[1][2:]))


@pytest.mark.parametrize("wire", WIRES)
def test_delayed_is_one_step_stale_after_its_warm_up_and_no_more(wire: str) -> None:
    """A forward reads the weights of the step before the last; what is computed is what in order computes."""
    warmup, losses, after = 2, [], []
    with Duel(Case("in_order", wire)) as exact:
        for step in range(6):
            after.append({name: p.detach().clone() for name, p in exact.model.named_parameters()})
            exact.train([step])
    for step in range(6):
        read = Steered(wire)
        read.load_state_dict(after[step if step <= warmup else step - 1])
        losses.append(read(gradients(read, 100 * step)).item())
    with Duel(Case("delayed", wire), late("h2d", 1e-3), delay_warmup_steps=warmup, bucket_bytes=1000) as duel:
        duel.train(range(6))
        assert duel.losses == losses
        duel.agree()


# ---- 4. A skipped step


def overflows(duel: Duel) -> None:
    duel.train([0, 1])
    before = duel.state_bits()
    duel.micro_batches(2, scale=math.inf)
    duel.optimizer.clip_grad_norm_(0.5)
    duel.optimizer.step()
    for each in duel.both:
        each.zero_grad()
    assert duel.state_bits() == before
    assert duel.optimizer.stats().skipped_steps == 1
    duel.train([3])


@every_case
def test_a_skipped_step_changes_no_byte_and_counts_no_step(case: Case) -> None:
    prove(overflows, case)


def passes_nan_on(duel: Duel) -> None:
    duel.train([0], clip=None)
    duel.micro_batches(1, scale=math.nan, without=duel.names[::2])
    duel.step()
    duel.train([2], clip=None)


@every_schedule_and_wire
def test_nan_goes_through_as_in_adamw_where_nobody_computes_a_norm(case: Case) -> None:
    prove(passes_nan_on, case)


@every_schedule
def test_skip_nonfinite_always_skips_without_clipping_and_never_steps_with_it(case: Case) -> None:
    with Duel(case, skip_nonfinite="always") as duel:
        duel.train([0], clip=None)
        before = duel.state_bits()
        duel.backward(1, scale=math.inf)
        duel.optimizer.step()
        assert duel.state_bits() == before and duel.optimizer.stats().skipped_steps == 1
    with Duel(case, skip_nonfinite="never") as duel:
        duel.train([0], clip=None)
        duel.backward(1, scale=math.inf)
        duel.clip(0.5)
        duel.step()
        duel.agree()
        assert duel.optimizer.stats().skipped_steps == 0


# ---- 5. Resume, and weights changed from outside


def continues(duel: Duel) -> dict[str, object]:
    """Steps 3 to 5, and all their bits."""
    del duel.losses[:], duel.norms[:]
    for step in range(3, 6):
        duel.micro_batches(step)
        duel.optimizer.clip_grad_norm_(0.5)
        duel.losses.append(duel.optimizer.last_grad_norm or 0.0)
        duel.optimizer.step()
        duel.optimizer.zero_grad()
    return duel.bits() | {"lr": [g["lr"] for g in duel.optimizer.param_groups]}


def other_weights(wire: str) -> nn.Module:
    model = Steered(wire)
    for p in model.parameters():
        p.data.fill_(3.0)
    return model


@every_schedule_and_wire
def test_a_resumed_run_does_not_jump(case: Case) -> None:
    """Weights, masters, moments, step counts, learning rates: the bits of the run that never stopped."""
    with Duel(case) as whole, Duel(case, make=other_weights) as resumed:
        whole.train(range(3))
        whole.optimizer.param_groups[0]["lr"] = 3e-4
        saved = whole.saved()
        expected = continues(whole)
        resumed.load(saved)
        assert continues(resumed) == expected


MOVES = [
    ("in_order", "overlapped"),
    ("overlapped", "speculative"),
    ("speculative", "streamed in order"),
    ("streamed", "in_order"),
    ("small shadow", "overlapped"),
]


@pytest.mark.parametrize("move", MOVES, ids=" to ".join)
def test_a_run_resumed_under_another_schedule_bucket_size_and_thread_count_has_the_same_bits(
    move: tuple[str, str],
) -> None:
    first, then = (Case(schedule, "mixed", 3) for schedule in move)
    with Duel(first) as whole, Duel(then, make=other_weights, bucket_bytes=77, ring_slots=3, threads=2) as resumed:
        whole.train(range(3))
        saved = whole.saved()
        expected = continues(whole)
        resumed.load(saved)
        assert continues(resumed) == expected


def loads_weights(duel: Duel) -> None:
    duel.train([0, 1])
    generator = torch.Generator().manual_seed(3)
    new = {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in duel.model.named_parameters()}
    duel.model.load_state_dict(new)
    duel.twin.load_state_dict(new)
    for p in duel.twin.parameters():
        duel.oracle.reseed(p)
    duel.train([2, 3])


@every_schedule_and_wire
def test_weights_loaded_into_the_model_are_not_overwritten_by_stale_masters(case: Case) -> None:
    prove(loads_weights, case)


def loads_weights_first(duel: Duel) -> None:
    new = {name: torch.full_like(p, 0.75) for name, p in duel.model.named_parameters()}
    duel.model.load_state_dict(new)
    duel.twin.load_state_dict(new)
    for p in duel.twin.parameters():
        duel.oracle.masters[p].fill_(0.75)
    duel.train([0, 1])


@every_schedule
def test_weights_loaded_after_the_optimizer_was_made_are_trained_from(case: Case) -> None:
    prove(loads_weights_first, case)


def edits_data(duel: Duel) -> None:
    """Rows of some weights, by `p.data`, which moves no version counter. The last edit is told by `reseed` alone."""
    optimizer = duel.optimizer
    waits = [optimizer.synchronize, duel.model.state_dict, optimizer.eval, optimizer.engine.wait_all]
    for step, told in enumerate(waits):
        duel.train([step])
        told()
        changed = {"embed.weight": duel.param("embed.weight")[0].detach().clone()}
        changed["embed.weight"][step] = 0.25 * step
        duel.write(changed)
        if step == 3:
            assert optimizer.reseed() > 0
    duel.train([4])


@every_schedule
def test_an_edit_of_data_is_not_overwritten_by_stale_masters(case: Case) -> None:
    prove(edits_data, case)


# ---- 6. What is unsupported is refused

P = nn.Parameter
REFUSALS: dict[str, tuple[list[str], Callable[[], object]]] = {
    "amsgrad": (["amsgrad=True", "Leave amsgrad out"], lambda: OffloadAdam([P(torch.ones(2))], amsgrad=True)),
    "float64": (["dtype of parameter 0", "float64", "Convert"], lambda: OffloadAdam([P(torch.ones(2).double())])),
    "complex": (["dtype of parameter 0", "complex64"], lambda: OffloadAdam([P(torch.ones(2) + 0j)])),
    "gaps in memory": (["stride of parameter 0", "contiguous"], lambda: OffloadAdam([P(torch.ones(4, 4)[:, :2])])),
    "betas": (["betas[1]=1.0", "[0, 1)"], lambda: OffloadAdam([P(torch.ones(2))], betas=(0.9, 1.0))),
    "lr": (["lr=-1.0", "at least 0"], lambda: OffloadAdam([P(torch.ones(2))], lr=-1.0)),
    "all frozen": (["params=", "Unfreeze"], lambda: OffloadAdam([P(torch.ones(2), requires_grad=False)])),
    "an unknown setting": (["bucket_byte=4", "bucket_bytes"], lambda: OffloadConfig(bucket_byte=4)),
    "an unknown schedule": (["schedule='overlaped'", "overlapped"], lambda: OffloadConfig(schedule="overlaped")),
    "shadow alone": (["shadow_bytes=9", "stream_gradients"], lambda: OffloadConfig(shadow_bytes=9)),
    "delayed and streamed": (
        ["stream_gradients=True", "schedule='overlapped'"],
        lambda: OffloadConfig(schedule="delayed", stream_gradients=True),
    ),
    "no model": (["schedule='overlapped'", "model=model"], lambda: overlapped_without_model()),
    "sparse": (["sparse=True", "sparse=False"], lambda: sparse_embedding()),
    "shared memory": (["params=", "share memory", "Tie them"], lambda: overlapping_parameters()),
}


def overlapped_without_model() -> None:
    p = P(torch.ones(2))
    p.grad = torch.ones(2)
    with OffloadAdam([p], config=OffloadConfig(schedule="overlapped")) as optimizer:
        optimizer.step()


def sparse_embedding() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    OffloadAdam(model.parameters(), model=model)


def overlapping_parameters() -> None:
    memory = torch.ones(6)
    OffloadAdam([P(memory[:4]), P(memory[2:])])


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_unsupported_is_refused_with_setting_value_cause_and_remedy(what: str) -> None:
    words, make = REFUSALS[what]
    before = ours()
    with pytest.raises(OffloadError) as refused:
        make()
    assert ours() <= before, "though the error, and with it its frames, is still held"
    assert all(word in str(refused.value) for word in words), refused.value


# ---- 7. Bytes are counted before they are taken


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_above_the_cap_is_refused_before_anything_is_allocated(schedule: str) -> None:
    before = ours()
    model = Steered()
    with pytest.raises(HostMemoryError, match="max_host_bytes=2000"):
        OffloadAdam(two_groups(model), config=Case(schedule).config(max_host_bytes=2000), model=model)
    assert ours() <= before and not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_that_is_gone_by_the_first_step_is_noticed_before_the_state_is_allocated(schedule: str) -> None:
    """A job's cgroup may fill up between construction and the first forward: refused, and not killed."""
    with Duel(Case(schedule)) as duel:
        before = [p.detach().clone() for p in duel.model.parameters()]
        little = HostMemory(100, 1 << 30, "cgroup memory.max of /job")
        with patch("hf_offload.hostmem.available_host_bytes", lambda *_: little):
            with pytest.raises(HostMemoryError, match=r"cgroup memory\.max of /job"):
                duel.model(gradients(duel.model, 0))
            assert not duel.optimizer.engine.arenas
        assert all(map(torch.equal, before, duel.model.parameters()))
        duel.train([0])  # there is room again
        duel.agree()


# ---- 8. An import is cheap

HEAVY = ("torch", "transformers", "accelerate", "numba", "numpy", "datasets", "cupy")


def test_importing_hf_offload_pulls_in_nothing_heavy() -> None:
    code = f"import sys, hf_offload; hf_offload.__version__; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
