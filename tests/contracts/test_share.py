"""State that stays on the device (`device_state_bytes`): the same contracts, whichever share it is.

README.md has the table of items, tests and planted bugs; how it is kept is tested in `tests/engine/test_resident.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from support.contracts import Case, Duel, every_resident, prove, reference, two_groups, with_a_share_and_without
from support.contracts import Steered as Model
from support.engine import late


def uneven(duel: Duel) -> None:
    """Several backwards a step, some parameters without a gradient in one, in both, frozen and unfrozen."""
    duel.freeze(["embed.scale"])
    for step in range(4):
        duel.backward(10 * step, without=duel.names[step::4])
        duel.backward(10 * step + 1, without=duel.names[step::2])
        duel.clip(0.5)
        duel.step()
        duel.freeze(["embed.scale"], frozen=step == 1)


@every_resident
def test_a_share_changes_no_bit_whatever_has_a_gradient(case: Case) -> None:
    """Norms, too: those of what stays are summed on the device, streamed ones in the store."""
    prove(uneven, case, delay=late("h2d", 2e-4))


def skips_and_kept_gradients(duel: Duel) -> None:
    duel.train([0])
    duel.micro_batches(1)
    duel.step(zero=False)
    duel.train([2])
    before = duel.state_bits()
    duel.backward(300)
    duel.backward(301, without=[name for name in duel.names if name != "embed.weight"], scale=math.inf)
    duel.optimizer.clip_grad_norm_(0.5)
    duel.optimizer.step()
    for each in duel.both:
        each.zero_grad()
    assert duel.state_bits() == before
    duel.train([4])


@every_resident
def test_a_skipped_step_leaves_every_byte_of_it_and_kept_gradients_go_on(case: Case) -> None:
    prove(skips_and_kept_gradients, case)


def written_from_outside(duel: Duel) -> None:
    duel.train([0])
    for each in ("embed.weight", "head.weight"):
        duel.optimizer.synchronize()
        duel.write({each: torch.full_like(duel.param(each)[0], 0.25)})
        duel.train([1])


@every_resident
def test_weights_that_are_written_from_outside_become_its_masters(case: Case) -> None:
    prove(written_from_outside, case)


def trains(duel: Duel) -> None:
    duel.train(range(5))


@with_a_share_and_without
def test_a_run_goes_on_with_another_share_with_the_same_bits(first: Case, then: Case) -> None:
    with Duel(first) as duel:
        duel.train(range(3))
        saved, norms = duel.saved(), list(duel.norms)
    with Duel(then) as duel:
        duel.load(saved)
        for step in (3, 4):
            duel.micro_batches(step)
            norms.append(duel.optimizer.clip_grad_norm_(0.5).item())
            duel.optimizer.step()
            duel.optimizer.zero_grad()
        found = duel.state_bits()
    expected = reference(trains, replace(first, schedule="in_order"), Model, two_groups)
    assert [what for what in found if found[what] != expected[what]] == []
