"""DESIGN, section 8: settled questions. README.md has the table of items, tests and planted bugs."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.engine.pipeline import Pipeline
from hf_offload.engine.plan import ParamSpec, plan_buckets
from hf_offload.errors import ConfigError, OffloadError, StateError, UnsupportedError
from support.contracts import (
    Case,
    Duel,
    every_exact,
    every_schedule,
    every_schedule_accumulating,
    every_schedule_and_wire,
    gradients,
    prove,
    with_grads_in_place,
)
from support.engine import Hold, late, ours

# ---- Clipping


def clips_several_times(duel: Duel) -> None:
    for step, bounds in enumerate([(9.0, 0.5, 3.0), (math.inf, 0.25), (0.5, math.inf), (0.0,), (1e9, math.inf)]):
        duel.micro_batches(step)
        for bound in bounds:
            duel.clip(bound)
        duel.step()


@every_schedule_accumulating
def test_of_several_clips_before_one_step_the_tightest_holds_and_inf_only_reads(case: Case) -> None:
    prove(clips_several_times, case)


def drops_a_clip(duel: Duel) -> None:
    duel.train([0])
    duel.micro_batches(1)
    duel.clip(1e-3)
    for each in duel.both:
        each.zero_grad()
    duel.train([2], clip=None)


@every_schedule
def test_zero_grad_drops_a_pending_clip(case: Case) -> None:
    prove(drops_a_clip, case)


@every_schedule
def test_a_backward_between_clip_and_step_raises_and_is_not_stepped_half_clipped(case: Case) -> None:
    with Duel(case) as duel:
        duel.train([0])
        duel.backward(1)
        duel.clip(0.1)
        duel.backward(2)
        before = duel.state_bits()
        with pytest.raises(StateError, match="changed after clip_grad_norm_"):
            duel.optimizer.step()
        assert duel.state_bits() == before


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_negative_or_nan_bound_is_refused(bound: float) -> None:
    with Duel(Case("in_order")) as duel:
        duel.backward(0)
        with pytest.raises(ConfigError, match=r"max_norm=.*inf only reads"):
            duel.optimizer.clip_grad_norm_(bound)


def clips_huge(duel: Duel) -> None:
    for step, scale in enumerate([1.0, 1e22, 1e-25]):
        duel.micro_batches(step, scale=scale)
        duel.clip(0.5)
        duel.step()


@every_exact
def test_the_norm_is_right_where_fp32_squares_overflow(case: Case) -> None:
    """And where they vanish."""
    prove(clips_huge, case)


# ---- Loss scaling


def scales(duel: Duel) -> None:
    for step, scale in enumerate([8.0, 2.0, 4.0]):
        duel.micro_batches(step, scale=scale)
        for each in duel.both:
            assert not each.unscale_(1.0 / scale)
        duel.clip((0.5, 1e9, 2.0)[step])
        duel.step()


@every_schedule_and_wire
def test_the_loss_scale_is_taken_out_of_gradients_and_of_the_norm_that_is_clipped(case: Case) -> None:
    prove(scales, case)


# ---- Weights changed from outside


def edits_one_element(duel: Duel) -> None:
    duel.train([0, 1])
    duel.optimizer.synchronize()
    changed = duel.param("head.weight")[0].detach().clone()
    changed.view(-1)[5] = 2.0
    duel.write({"head.weight": changed})
    duel.train([2])


@every_schedule_and_wire
def test_an_edit_of_one_element_does_not_round_the_masters_of_its_neighbours(case: Case) -> None:
    prove(edits_one_element, case)


def swaps_ema(duel: Duel) -> None:
    """`oracle.reseed` is not called: nothing has changed when the step comes."""
    for step in range(3):
        duel.train([step])
        duel.optimizer.synchronize()
        kept = {name: p.detach().clone() for name, p in duel.model.named_parameters()}
        with torch.no_grad():
            for p in duel.model.parameters():
                p.mul_(0.5)
            for name, p in duel.model.named_parameters():
                p.copy_(kept[name])


@every_schedule_and_wire
def test_an_ema_swapped_in_and_out_changes_nothing(case: Case) -> None:
    prove(swaps_ema, case)


@every_schedule
def test_a_checkpoint_whose_masters_disagree_with_the_weights_follows_the_weights_and_says_so(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with Duel(case) as duel, Duel(case) as resumed:
        duel.train([0, 1])
        saved = duel.saved()
        saved["model"]["head.weight"][2] = 1.5
        resumed.load(saved)
        resumed.oracle.masters = {}
        resumed.model(gradients(resumed.model, 3)).backward()
        resumed.optimizer.param_groups[0]["lr"] = 0.0
        resumed.optimizer.step()
        resumed.optimizer.synchronize()
        assert torch.equal(resumed.model.head.weight[2], saved["model"]["head.weight"][2])
    assert "6 weights were changed from outside" in caplog.text


# ---- state_dict


@every_schedule
def test_state_dict_shows_live_memory_takes_no_step_and_waits(case: Case) -> None:
    with Duel(case, lambda direction, nbytes: 2e-3) as duel:
        duel.train([0, 1])
        first = duel.optimizer.state_dict()["state"]
        seen = {n: {k: t.clone() for k, t in entry.items()} for n, entry in first.items()}
        duel.agree()
        assert all(torch.equal(t, first[n][k]) for n, entry in seen.items() for k, t in entry.items()), "too early"
        again = duel.optimizer.state_dict()["state"]
        where = [[t.data_ptr() for t in entry.values()] for entry in first.values()]
        assert where == [[t.data_ptr() for t in entry.values()] for entry in again.values()], "a copy was made"
        assert {float(entry["step"]) for entry in first.values()} == {2.0}
        held = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}[case.state_dtype]
        dtypes = [{k: t.dtype for k, t in entry.items()} for entry in first.values()]
        full = {"step": torch.float32, "master": torch.float32}
        assert all(found == {**dict.fromkeys(found, held), **full} for found in dtypes)


@every_schedule
def test_load_state_dict_copies(case: Case) -> None:
    with Duel(case) as duel:
        duel.train([0])
        saved = duel.saved()
        duel.optimizer.load_state_dict(saved["optimizer"])
        before = duel.state_bits()
        for entry in saved["optimizer"]["state"].values():
            for t in entry.values():
                t.fill_(9.0)
        assert duel.state_bits() == before


def damaged(saved: dict[str, Any], how: str) -> dict[str, Any]:
    last = saved["state"][max(saved["state"])]
    if how == "a moment of another shape":
        last["exp_avg"] = last["exp_avg"][:1]
    elif how == "a moment is missing":
        del last["exp_avg_sq"]
    elif how == "groups of other sizes":
        saved["param_groups"][0]["params"].append(99)
    elif how == "amsgrad":
        last["max_exp_avg_sq"] = last["exp_avg_sq"]
    elif how == "the other weight decay":
        saved["param_groups"][1]["decoupled_weight_decay"] = False
    elif how == "a step that is none":
        last["step"] = 1.5
    return saved


DAMAGES = ["a moment of another shape", "a moment is missing", "groups of other sizes", "amsgrad",
           "the other weight decay", "a step that is none"]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("schedule", ["in_order", "speculative"])
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(schedule: str, how: str) -> None:
    with Duel(Case(schedule)) as duel:
        duel.train([0, 1])
        saved = damaged(duel.saved()["optimizer"], how)
        for entry in saved["state"].values():
            entry["exp_avg"].fill_(5.0)
        saved["param_groups"][0]["lr"] = 5.0
        before = duel.state_bits(), [g["lr"] for g in duel.optimizer.param_groups]
        with pytest.raises(StateError):
            duel.optimizer.load_state_dict(saved)
        assert before == (duel.state_bits(), [g["lr"] for g in duel.optimizer.param_groups])


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_steps_load_as_numbers_and_as_tensors(kind: Any) -> None:
    with Duel(Case("in_order")) as duel:
        duel.train([0, 1])
        saved = duel.saved()
        before = duel.state_bits()
        for entry in saved["optimizer"]["state"].values():
            entry["step"] = kind(2)
        duel.load(saved)
        assert duel.state_bits() == before


# ---- Gradients after step()


def keeps_gradients(duel: Duel) -> None:
    for step in range(3):
        duel.micro_batches(step)
        duel.clip(0.5)
        duel.step(zero=False)


def zeroes_in_place(duel: Duel) -> None:
    for step in range(3):
        duel.micro_batches(step, without=duel.names[step::3] if step else ())
        duel.clip(0.5)
        duel.step(zero=False)
        for each in duel.both:
            each.zero_grad(set_to_none=False)


@every_schedule_and_wire
def test_gradients_that_are_kept_go_on_accumulating(case: Case) -> None:
    prove(keeps_gradients, case, delay=late("d2h", 5e-4))


def test_gradients_that_are_kept_are_not_added_to_before_their_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No gradient goes down until somebody waits for the step: who does not wait writes into what is copied.

    Delayed: elsewhere a forward waits for weights, which are there after the gradients.
    """
    hold, wait = Hold("d2h"), Pipeline.wait_all

    def waits(pipeline: Pipeline) -> None:
        hold.release()
        wait(pipeline)

    monkeypatch.setattr(Pipeline, "wait_all", waits)
    with Duel(Case("delayed"), hold, delay_warmup_steps=0) as duel:
        for step in range(3):
            duel.micro_batches(step)
            duel.optimizer.engine.wait_gradients()
            hold.close()
            duel.step(zero=False)
        hold.release()
        duel.agree()


@every_schedule_and_wire
def test_gradients_zeroed_in_place_are_zeros_and_not_gone(case: Case) -> None:
    prove(zeroes_in_place, case, delay=late("d2h", 5e-4))


@with_grads_in_place
def test_a_write_to_a_gradient_that_is_being_copied_is_right_or_raises(case: Case) -> None:
    hold = Hold("d2h")
    duel = Duel(case, hold)
    duel.train([0])
    duel.optimizer.synchronize()
    duel.backward(1)
    if case.schedule != "in_order":  # whose step() returns when the copies have ended
        hold.close()
    duel.optimizer.step()
    for p in duel.model.parameters():
        p.grad.zero_()
    hold.release()
    if case.schedule == "in_order":
        duel.oracle.step()
        duel.agree()
        duel.optimizer.close()
        return
    with pytest.raises(StateError, match="gradient was written to"):
        duel.optimizer.synchronize()
    with pytest.raises(StateError):
        duel.optimizer.close()


# ---- Duplicates


def test_a_tensor_listed_twice_in_one_group_is_stepped_once_with_torchs_warning() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = OffloadAdam([p, p], lr=0.1, weight_decay=0.0)
    other = torch.optim.AdamW([q], lr=0.1, weight_decay=0.0)
    for param, each in ((p, optimizer), (q, other)):
        param.grad = torch.ones(3)
        each.step()
    torch.testing.assert_close(p, q)
    assert float(optimizer.state[p]["step"]) == 1.0
    optimizer.close()


def test_a_tensor_in_two_groups_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        OffloadAdam([{"params": [p]}, {"params": [p]}])


# ---- Lifetime


@every_schedule
def test_an_optimizer_that_is_forgotten_leaves_no_thread_and_no_pinned_byte(case: Case) -> None:
    before = ours()
    duel = Duel(case)
    duel.train([0])
    model, gone = duel.model, weakref.ref(duel.optimizer.engine.placement.transport)
    pinned = weakref.ref(duel.optimizer.engine.placement.transport.down[0])
    del duel
    gc.collect()
    assert gone() is None and pinned() is None
    assert ours() <= before
    model(gradients(model, 1)).backward()  # it lives on, with or without our hooks


def test_copies_of_the_optimizer_are_refused_and_of_the_model_work() -> None:
    with Duel(Case("overlapped"), late("h2d", 2e-3)) as duel:
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="state_dict"):
                attempt(duel.optimizer)
        duel.train([0])
        twin, again = copy.deepcopy(duel.model), pickle.loads(pickle.dumps(duel.model))
        duel.agree()
        for other in (twin, again):
            assert all(map(torch.equal, other.parameters(), duel.model.parameters())), "of the step before"
        twin(gradients(twin, 1)).backward()


@every_schedule
def test_two_optimizers_in_two_threads_do_not_disturb_each_other(case: Case) -> None:
    failures: list[BaseException] = []
    with Duel(case) as one, Duel(case) as two:

        def train(duel: Duel) -> None:
            try:
                duel.train(range(3))
                duel.agree()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=train, args=(duel,)) for duel in (one, two)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failures
        assert one.bits() == two.bits()


@every_schedule
def test_a_closed_optimizer_says_so_and_does_not_hang(case: Case) -> None:
    duel = Duel(case)
    duel.train([0])
    duel.optimizer.close()
    for p in duel.model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(OffloadError, match="closed"):
        duel.optimizer.step()


def with_denormals(schedule: str, flush: bool) -> dict[str, object]:
    """State after steps with gradients of 1e-38, where the caller of `step()` has the flag set."""
    torch.set_flush_denormal(flush)
    try:
        with Duel(Case(schedule, "float32")) as duel:
            for step in range(3):
                torch.set_flush_denormal(False)  # else torch makes other gradients
                duel.micro_batches(step, scale=1e-38)
                torch.set_flush_denormal(flush)
                duel.optimizer.step()
                duel.optimizer.zero_grad()
            return duel.state_bits()
    finally:
        torch.set_flush_denormal(False)


@every_exact
def test_flush_to_zero_of_the_caller_changes_no_bit(case: Case) -> None:
    assert with_denormals(case.schedule, flush=True) == with_denormals("in_order", flush=False)


# ---- Empty and huge


def test_an_empty_parameter_does_not_stop_its_neighbours() -> None:
    with Duel(Case("overlapped", "float32")) as duel:
        assert duel.model.embed.empty.numel() == 0
        before = [p.detach().clone() for p in duel.model.parameters()]
        duel.train([0])
        duel.agree()
        moved = [not torch.equal(a, b) for a, b in zip(before, duel.model.parameters()) if a.numel()]
        assert all(moved)


def test_sizes_beyond_two_to_the_31_are_counted_in_64_bits() -> None:
    """By arithmetic: 4 G elements in one parameter, cut into pieces that cover each once."""
    huge = (1 << 32) + 3
    plan = plan_buckets([ParamSpec(5, "bfloat16", 0), ParamSpec(huge, "bfloat16", 1)], 1 << 31)
    pieces = [p for b in plan.buckets for p in b.pieces if p.param == 1]
    assert plan.numel == huge + 5 and sum(p.length for p in pieces) == huge
    assert all(a.start + a.length == b.start for a, b in pairwise(pieces))
    assert all(b.nbytes <= 1 << 31 for b in plan.buckets)
