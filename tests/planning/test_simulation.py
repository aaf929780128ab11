"""The simulated pipeline against cases worked out by hand, and against the bound."""

from __future__ import annotations

import dataclasses
import random

import pytest

from hf_offload.bench import bound
from hf_offload.simulation import (
    COPY,
    DEVICE,
    HOST,
    PART,
    SCHEDULES,
    BucketSize,
    Costs,
    HostCost,
    LinkCost,
    Outcome,
    UnitWork,
    Way,
    simulate,
)


def units(*buckets: int, forward: float = 10, backward: float = 20) -> list[UnitWork]:
    """One unit for each number of buckets, each of one parameter and one byte."""
    return [UnitWork(forward, backward, (BucketSize(1, 1),) * n) for n in buckets]


def costs(d2h: float, step: float, h2d: float, **more: float) -> Costs:
    host = HostCost(**{"step": step, "guess": step, **{k: v for k, v in more.items() if hasattr(HostCost, k)}})
    rest = {k: v for k, v in more.items() if not hasattr(HostCost, k)}
    return Costs(host=host, down=LinkCost(per_byte=d2h), up=LinkCost(per_byte=h2d), **rest)


QUICK, SLOW_HOST, SLOW_DOWN, SLOW_UP = (1, 3, 2), (1, 30, 2), (25, 3, 2), (1, 3, 12)


def exposed(schedule: str, work: list[UnitWork], cost: Costs, **more: object) -> float:
    return simulate(SCHEDULES[schedule], work, cost, **more).exposed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "stages", "seconds"),
    [
        # 2 x (1 + 3 + 2), one after the other
        ("in_order", QUICK, 12),
        # 1 + 3 + 2; the second unit's weights are up at 9, its turn comes at 16
        ("overlapped", QUICK, 6),
        # up at 33; forward till 43; the second is stepped at 61, up at 63
        ("overlapped", SLOW_HOST, 53),
        # up at 30; forward till 40; the second is down at 50, stepped at 53, up at 55
        ("overlapped", SLOW_DOWN, 45),
        # up at 16; forward till 26; the second is up at 28
        ("overlapped", SLOW_UP, 18),
        ("streamed", QUICK, 6),
        ("streamed", SLOW_HOST, 53),
        # the second's down from 20 to 45, the first's till 70: the norm is known 30 after the end; up 5 later
        ("streamed", SLOW_DOWN, 35),
        ("speculative_hit", QUICK, 6),
        # the second: down 21, stepped 51, 11 after the end; the first: stepped 81, 41 after, up 43
        ("speculative_hit", SLOW_HOST, 43),
        # the first unit's guess is under way, for nothing, when `step()` comes at 41; then it is stepped: 3 + 3 + 2
        ("speculative_miss", QUICK, 1 + 3 + 3 + 2),
        ("delayed", QUICK, 2),
        # 60 of host behind 60 of compute
        ("delayed", SLOW_HOST, 2),
        ("delayed", SLOW_UP, 14),
    ],
)
def test_hand_worked_cases(schedule: str, stages: tuple[float, float, float], seconds: float) -> None:
    assert exposed(schedule, units(1, 1), costs(*stages)) == pytest.approx(seconds)


@pytest.mark.parametrize("seed", range(8))
def test_without_overhead_it_is_the_bound(seed: int) -> None:
    """Two programs written apart: where the ring is large and nothing slows anything down, they say the same."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 5))]
    stages = tuple(rng.random() * 5 for _ in range(3))
    times = [(rng.random() * 10, rng.random() * 20) for _ in sizes]
    work = [UnitWork(f, b, (BucketSize(1, 1),) * n) for (f, b), n in zip(times, sizes)]
    same = [bound.UnitTimes(f, b, (bound.BucketTimes(*stages),) * n) for (f, b), n in zip(times, sizes)]
    for schedule in ("in_order", "overlapped", "streamed", "delayed"):
        found = exposed(schedule, work, costs(*stages), slots=99)
        assert found == pytest.approx(bound.bound(schedule, same).exposed), schedule


def test_compute_is_that_of_all_micro_batches_and_the_exchange_comes_once() -> None:
    found = simulate(SCHEDULES["in_order"], units(1, 1), costs(*QUICK), accumulation=3)
    assert found == Outcome(step=pytest.approx(3 * 60 + 12), compute=180)
    assert exposed("overlapped", units(1, 1), costs(*QUICK), accumulation=3) == pytest.approx(6)


def test_streamed_gradients_go_down_after_each_micro_batch_and_are_added_up() -> None:
    """The host is the slowest by far, and never idle from the first gradient on."""
    cost = costs(1, 3, 2, put=100, add=200)
    # ready at 40, down at 41; put till 141, 241; added till 441, 641; 120 of compute; then 3 + 2
    assert exposed("streamed", units(1, 1), cost, accumulation=2) == pytest.approx(641 - 120 + 5)


def test_a_ring_without_a_free_slot_stops_backward() -> None:
    """One slot: the first unit's gradients go when the second's have been put away, 30 after they were ready."""
    cost = costs(10, 0, 0, put=20)
    wide = exposed("streamed", units(1, 1, backward=5), cost, slots=2)
    # ready at 25 and 30; down at 35, 45; put away at 55, 75
    assert wide == pytest.approx(45)
    # the second copy begins at 55: down at 65, put away at 85
    assert exposed("streamed", units(1, 1, backward=5), cost, slots=1) == pytest.approx(55)


def test_a_ring_holds_back_copies_and_steps() -> None:
    """Weights up take 10 each, one slot: a bucket is stepped when the one before is up."""
    cost = costs(1, 5, 10)
    # stepped 6 and 11, up 16 and 26, 36: the forward needs all three at once
    assert exposed("overlapped", units(3), cost, slots=9) == pytest.approx(36)
    # one slot: down 1, stepped 6, up 16; the next was down at 7: stepped 21, up 31; 46
    assert exposed("overlapped", units(3), cost, slots=1) == pytest.approx(46)
    # and gradients come down into a slot when the ones before have been stepped: 3 x (10 + 5) instead of 30 + 5
    assert exposed("overlapped", units(3), costs(10, 5, 0), slots=9) == pytest.approx(35)
    assert exposed("overlapped", units(3), costs(10, 5, 0), slots=1) == pytest.approx(45)


def test_delayed_cannot_be_faster_than_the_host() -> None:
    """100 of host a step, 60 of compute: in the steady state 40 are exposed, whatever was hidden in the first steps."""
    assert exposed("delayed", units(1, 1), costs(0, 50, 0)) == pytest.approx(40)
    # `step()` waits for the step before, and only then does what it has to do itself
    assert exposed("delayed", units(1, 1), costs(0, 50, 0, step_s=5)) == pytest.approx(45)


def test_what_the_engine_itself_takes() -> None:
    with_overhead = costs(*QUICK, step_s=0.5, bucket_s=0.25)
    assert exposed("in_order", units(1, 1), with_overhead) == pytest.approx(12 + 0.5 + 2 * 0.25)
    assert exposed("overlapped", units(1, 1), with_overhead) == pytest.approx(6 + 0.5 + 0.25)


@pytest.mark.parametrize(
    ("schedule", "stages", "seconds"),
    [
        # both wait for their gradients, or the second for the first's weights
        ("in_order", (1, 3, 0), 2 * (1 + 0.75 + 3)),
        ("in_order", (0, 3, 2), 2 * (0.75 + 3 + 2)),
        # stepped 1.75 to 4.75; the second, there since 2, 5 to 8; up 10
        ("overlapped", QUICK, 10),
        # the second waits, too: down 50, stepped 50.75 to 53.75
        ("overlapped", SLOW_DOWN, 55.75),
        # and here for the only slot of the ring: stepped 0.75 to 3.75, up 15.75; stepped 16.5 to 19.5
        ("overlapped", (0, 3, 12), 31.5),
        # down 31, put away 31.75 to 36.75 and 37 to 42; `step()` comes at 43: 43.75 to 46.75, 47 to 50; up 52
        ("streamed", QUICK, 22 - 1),
        # down 40 and 50, put away 40.75 to 45.75 and 50.75 to 55.75; stepped 57.5 to 60.5, 60.75 to 63.75; up 65.75
        ("streamed", (10, 3, 2), 35.75 - 1),
    ],
)
def test_a_thread_that_has_rested_takes_longer(
    schedule: str, stages: tuple[float, float, float], seconds: float
) -> None:
    """A bucket takes 0.25 of the engine where it is there when its turn comes, 0.5 more where it is waited for."""
    cost = costs(*stages, bucket_s=0.25, idle_s=0.5, step_s=1, put=5)
    slots = 1 if stages[2] == 12 else 4
    assert exposed(schedule, units(2), cost, slots=slots) == pytest.approx(seconds + 1)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # each: down 1, 0.5 + 0.25, stepped 3, up 2
        ("in_order", 2 * 6.75),
        # stepped 1.75 to 4.75 and 5.5 to 8.5; up 10.5
        ("overlapped", 10.5),
        # down 31 and 32; put away 31.25 and 32.25; stepped 32.5 to 35.5, 35.75 to 38.75; up 40.75
        ("streamed", 10.75),
        # sent up without a kernel: 0.25 and 0.5, up 2.25 and 4.25
        ("delayed", 4.25),
    ],
)
def test_gradients_that_the_step_asks_for_take_time_of_their_own(schedule: str, seconds: float) -> None:
    cost = costs(*QUICK, bucket_s=0.25, fetch_s=0.5)
    assert exposed(schedule, units(2), cost) == pytest.approx(seconds)


def test_weights_that_nobody_needs_yet_are_not_sent() -> None:
    """What the thread does beside the kernels of a delayed step is all that counts: 2 to send up, 2 to step."""
    cost = costs(0, 50, 0, bucket_s=0.25, fetch_s=0.5)
    assert exposed("delayed", units(1, 1), cost) == pytest.approx(40 + 2 * 0.25 + 2 * 0.5)


def test_the_norm_comes_before_the_step_unless_gradients_are_streamed() -> None:
    cost = costs(*QUICK, norm=7)
    assert exposed("overlapped", units(1, 1), cost) == pytest.approx(6 + 2 * 7)
    assert exposed("overlapped", units(1, 1), cost, clip=False) == pytest.approx(6)
    assert exposed("streamed", units(1, 1), cost) == pytest.approx(6)
    assert exposed("streamed", units(1, 1), costs(*QUICK, squares=7)) == pytest.approx(6 + 7)


def test_weights_of_the_step_before_are_made_once_more() -> None:
    assert exposed("delayed", units(1, 1), costs(*QUICK, narrow=4)) == pytest.approx(4 + 2)


def test_a_guess_that_is_not_done_is_ended_first() -> None:
    """A bucket of three parts, the first of which is under way when `step()` asks."""
    part = 1 / PART
    work = [UnitWork(0, 30, (BucketSize(3 * PART, 0),)), UnitWork(10, 0)]
    host = HostCost(step=part, guess=10 * part, take=part)
    cost = Costs(host=host, down=LinkCost(per_byte=0), up=LinkCost(per_byte=0), step_s=5)
    # ready at 40 = the end; asked for at 45; the first part is under way till 50; then the other two, and 3 to take
    assert exposed("speculative_hit", work, cost, clip=False) == pytest.approx(30 + 3)
    # a wrong guess is not gone on with: the first part till 50, then the step of all three
    assert exposed("speculative_miss", work, cost, clip=False) == pytest.approx(10 + 3)
    # asked for at once: no part was begun
    assert exposed("speculative_hit", work, dataclasses.replace(cost, step_s=0), clip=False) == pytest.approx(3)


def test_buckets_without_a_shadow_are_stepped_at_the_step() -> None:
    all_of_them = exposed("speculative_hit", units(1, 1), costs(*SLOW_HOST))
    first_only = exposed("speculative_hit", units(1, 1), costs(*SLOW_HOST), shadow_bytes=13)
    none = exposed("speculative_hit", units(1, 1), costs(*SLOW_HOST), shadow_bytes=12)
    # the first: down 41, stepped 71, up 33 after the end; forward till 43; the second: stepped 61 after it, up 63
    assert (all_of_them, first_only) == pytest.approx((43, 33 + 20))
    assert none == pytest.approx(exposed("streamed", units(1, 1), costs(*SLOW_HOST)))


def test_host_and_device_slow_each_other_down() -> None:
    """Half speed each while both work: of 60 alone, what the host takes 6 for beside it costs the device 3 more."""
    cost = dataclasses.replace(costs(0, 3, 0), rates={(DEVICE, HOST): 0.5, (HOST, DEVICE): 0.5})
    # the first bucket in 3, alone; the second, 3, beside forward: 6, in which forward does 3
    assert exposed("overlapped", units(1, 1), cost) == pytest.approx(3 + 3)
    assert exposed("in_order", units(1, 1), cost) == pytest.approx(6)


def test_a_copy_takes_what_link_or_core_say_and_two_share_the_core() -> None:
    assert [w.seconds for w in LinkCost(per_byte=3, core_per_byte=1, latency=5).work(2)] == [5 + 4, 2]
    assert [w.seconds for w in LinkCost(per_byte=1, core_per_byte=3).work(2)] == [0, 6]
    slow = dataclasses.replace(
        costs(0, 0, 0), down=LinkCost(per_byte=0, core_per_byte=4), up=LinkCost(per_byte=0, core_per_byte=4)
    )
    # down 4; then the first bucket's way up and the second's down share the core: both till 12; up till 16
    assert exposed("overlapped", units(2), slow) == pytest.approx(16)
    slowed = dataclasses.replace(slow, rates={(DEVICE, COPY): 0.5})
    # no copy beside the compute: all four are before it
    assert exposed("in_order", units(2), slowed) == pytest.approx(16)


def test_streamed_in_order_returns_when_all_is_up() -> None:
    way = Way(waits=True, streamed=True)
    # norm known at 41; stepped 44, 47; up 46, 49
    assert simulate(way, units(1, 1), costs(*QUICK)).exposed == pytest.approx(9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_unit_without_buckets_waits_for_nothing_and_a_model_without_any_costs_nothing(schedule: str) -> None:
    assert exposed(schedule, units(0, 0), costs(*QUICK)) == pytest.approx(0)
    assert exposed(schedule, units(0, 1), costs(*QUICK)) <= exposed(schedule, units(1, 1), costs(*QUICK))
