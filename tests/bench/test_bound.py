"""The ideal simulation against cases worked out by hand."""

from __future__ import annotations

import random

import pytest

from hf_offload.bench.bound import SCHEDULES, BucketTimes, UnitTimes, bound


def units(*buckets: list[tuple[float, float, float]], forward: float = 10, backward: float = 20) -> list[UnitTimes]:
    """One unit for each list of (d2h, host_step, h2d)."""
    return [UnitTimes(forward, backward, tuple(BucketTimes(*b) for b in unit)) for unit in buckets]


QUICK = units([(1, 3, 2)], [(1, 3, 2)])
SLOW_HOST = units([(1, 30, 2)], [(1, 30, 2)])
SLOW_DOWN = units([(25, 3, 2)], [(25, 3, 2)])
SLOW_UP = units([(1, 3, 12)], [(1, 3, 12)])
TWO_BUCKETS = units([(1, 3, 2), (1, 3, 2)], [(1, 3, 2)])


@pytest.mark.parametrize(
    ("schedule", "case", "stalls"),
    [
        # 2 x (1 + 3 + 2), all before the first unit
        ("in_order", QUICK, (12, 0)),
        ("in_order", TWO_BUCKETS, (18, 0)),
        # 1 + 3 + 2; the second unit's weights are up at 9, its turn comes at 16
        ("overlapped", QUICK, (6, 0)),
        # up at 33; forward till 43; the second is stepped at 61, up at 63
        ("overlapped", SLOW_HOST, (33, 20)),
        # up at 30; forward till 40; the second is down at 50, stepped at 53, up at 55
        ("overlapped", SLOW_DOWN, (30, 15)),
        # up at 16; forward till 26; the second is up at 28
        ("overlapped", SLOW_UP, (16, 2)),
        # stepped at 4 and 7, up at 6 and 9: the unit waits for both its buckets
        ("overlapped", TWO_BUCKETS, (9, 0)),
        # the first unit's gradients are ready last, at 40 = the end; the second's have gone down by 21
        ("streamed", QUICK, (6, 0)),
        ("streamed", SLOW_HOST, (33, 20)),
        # the second's down from 20 to 45, the first's till 70: the norm is known 30 after the end; up 5 later
        ("streamed", SLOW_DOWN, (35, 0)),
        # both of the first unit's must be down, at 2, before one is stepped; stepped at 5 and 8, up at 7 and 10
        ("streamed", TWO_BUCKETS, (10, 0)),
        # the second unit is stepped in backward; the first is down at 1, stepped at 4, up at 6
        ("speculative_hit", QUICK, (6, 0)),
        # the second: down 21, stepped 51 (11 after the end); the first: stepped 81 (41 after), up 43; the second before
        ("speculative_hit", SLOW_HOST, (43, 0)),
        # the first bucket is stepped from 1 on, without waiting for the second: stepped at 4 and 7, up at 6 and 9
        ("speculative_hit", TWO_BUCKETS, (9, 0)),
        # only the way up of weights that were ready
        ("delayed", QUICK, (2, 0)),
        # 60 of host behind 60 of compute: up at 2, forward till 12, the second's up at 4
        ("delayed", SLOW_HOST, (2, 0)),
        ("delayed", SLOW_UP, (12, 2)),
    ],
)
def test_hand_worked_cases(schedule: str, case: list[UnitTimes], stalls: tuple[float, ...]) -> None:
    found = bound(schedule, case)
    assert found.stalls == pytest.approx(stalls)
    assert found.exposed == pytest.approx(sum(stalls))


def test_a_miss_costs_nothing_in_the_ideal() -> None:
    for case in (QUICK, SLOW_HOST, SLOW_DOWN, TWO_BUCKETS):
        assert bound("speculative_miss", case) == bound("streamed", case)


def test_delayed_cannot_be_faster_than_the_host() -> None:
    """100 of host a step, 60 of compute: in the steady state 40 are exposed, whatever was hidden in the first steps."""
    assert bound("delayed", units([(1, 50, 2)], [(1, 50, 2)])).exposed == pytest.approx(40)


def test_a_unit_without_buckets_waits_for_nothing() -> None:
    assert bound("overlapped", units([(1, 3, 2)], [])).stalls == pytest.approx((6, 0))


def test_stages_that_take_no_time_expose_nothing() -> None:
    for schedule in SCHEDULES:
        assert bound(schedule, units([(0, 0, 0)], [(0, 0, 0)])).exposed == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_exposes_more_than_in_order(seed: int) -> None:
    rng = random.Random(seed)
    case = [
        UnitTimes(rng.random() * 10, rng.random() * 20, tuple(BucketTimes(*(rng.random() for _ in range(3)))
                                                              for _ in range(rng.randint(1, 3))))
        for _ in range(rng.randint(2, 6))
    ]  # fmt: skip
    most = bound("in_order", case).exposed
    assert most == pytest.approx(sum(b.d2h + b.host_step + b.h2d for u in case for b in u.buckets))
    for schedule in SCHEDULES:
        assert bound(schedule, case).exposed <= most + 1e-9
