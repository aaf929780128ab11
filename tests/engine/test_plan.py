"""The bucket plan: pure arithmetic, so sizes may be absurd."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_offload.engine.plan import WIRE_ITEMSIZE, BucketPlan, ParamSpec, plan_buckets

WIRES = sorted(WIRE_ITEMSIZE)
SPECS = st.lists(
    st.builds(ParamSpec, numel=st.integers(0, 40), wire=st.sampled_from(WIRES), unit=st.integers(-1, 3)), max_size=12
)
BUCKET_BYTES = st.one_of(st.integers(1, 40), st.integers(1, 5000))


def check(params: list[ParamSpec], bucket_bytes: int, plan: BucketPlan) -> None:
    """Everything section 4 of the design says of a plan."""
    assert plan.numel == sum(p.numel for p in params)
    covered: dict[int, int] = dict.fromkeys(range(len(params)), 0)
    at = 0
    for bucket in plan.buckets:
        assert bucket.start == at, "buckets follow each other in the arena"
        at += bucket.numel
        assert bucket.numel > 0 and bucket.nbytes == bucket.numel * WIRE_ITEMSIZE[bucket.wire]
        assert bucket.nbytes <= bucket_bytes or bucket.numel == 1
        inside = 0
        for piece in bucket.pieces:
            param = params[piece.param]
            assert (param.unit, param.wire) == (bucket.unit, bucket.wire)
            assert piece.offset == inside and piece.length > 0
            inside += piece.length
            assert piece.start == covered[piece.param], "pieces of a parameter come in order, each element once"
            covered[piece.param] += piece.length
            # in the arena a parameter lies whole: a piece is where param_start says
            assert bucket.start + piece.offset == plan.param_start[piece.param] + piece.start
        assert inside == bucket.numel
    assert at == plan.numel
    assert all(covered[i] == p.numel for i, p in enumerate(params))


@given(params=SPECS, bucket_bytes=BUCKET_BYTES)
def test_every_element_is_in_exactly_one_bucket(params: list[ParamSpec], bucket_bytes: int) -> None:
    check(params, bucket_bytes, plan_buckets(params, bucket_bytes))


@given(params=SPECS, bucket_bytes=BUCKET_BYTES)
def test_units_come_in_order_and_buckets_are_full(params: list[ParamSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(params, bucket_bytes)
    runs = [(run, list(buckets)) for run, buckets in groupby(plan.buckets, key=lambda b: (b.unit, b.wire))]
    assert [run for run, _ in runs] == sorted({run for run, _ in runs}, key=lambda r: (r[0], _first(params, *r)))
    for (_, wire), buckets in runs:
        most = max(1, bucket_bytes // WIRE_ITEMSIZE[wire])
        assert all(b.numel == most for b in buckets[:-1]), "only a run's last bucket may be short"
        order = [p.param for b in buckets for p in b.pieces]
        assert order == sorted(order)


def _first(params: list[ParamSpec], unit: int, wire: str) -> int:
    return next(i for i, p in enumerate(params) if (p.unit, p.wire) == (unit, wire) and p.numel)


@given(params=SPECS)
def test_one_element_a_bucket(params: list[ParamSpec]) -> None:
    plan = plan_buckets(params, 1)
    assert all(b.numel == 1 for b in plan.buckets)
    assert len(plan.buckets) == plan.numel


@given(params=SPECS)
def test_everything_of_a_unit_and_dtype_in_one_bucket(params: list[ParamSpec]) -> None:
    plan = plan_buckets(params, 1 << 40)
    assert len(plan.buckets) == len({(p.unit, p.wire) for p in params if p.numel})


@pytest.mark.parametrize("wire", WIRES)
def test_sizes_are_64_bit(wire: str) -> None:
    """2^33 elements in one parameter, 2^35 in all, by arithmetic: nothing is allocated."""
    params = [ParamSpec(1 << 33, wire, u) for u in range(3)] + [
        ParamSpec((1 << 33) + 5, wire, 2),
        ParamSpec(3, wire, 3),
    ]
    for bucket_bytes in (1 << 32, (1 << 33) + 6, 1 << 36):
        plan = plan_buckets(params, bucket_bytes)
        check(params, bucket_bytes, plan)
    assert plan.numel == (1 << 35) + 8
    assert plan.param_start[3] == 3 << 33


def test_nothing_at_all() -> None:
    assert plan_buckets([], 7) == BucketPlan(0, (), ())
    assert plan_buckets([ParamSpec(0, "bfloat16", 0)], 7) == BucketPlan(0, (0,), ())


def test_by_hand() -> None:
    """Two units, two dtypes, a parameter sliced over three buckets, one shared."""
    bf16, fp32 = "bfloat16", "float32"
    params = [ParamSpec(2, bf16, 1), ParamSpec(5, bf16, 0), ParamSpec(3, fp32, 0), ParamSpec(2, bf16, 0)]
    plan = plan_buckets(params, 4)
    assert plan.param_start == (10, 0, 7, 5)
    found = [
        (b.unit, b.wire, b.start, [(p.param, p.start, p.length, p.offset) for p in b.pieces]) for b in plan.buckets
    ]
    assert found == [
        (0, bf16, 0, [(1, 0, 2, 0)]),
        (0, bf16, 2, [(1, 2, 2, 0)]),
        (0, bf16, 4, [(1, 4, 1, 0), (3, 0, 1, 1)]),
        (0, bf16, 6, [(3, 1, 1, 0)]),
        (0, fp32, 7, [(2, 0, 1, 0)]),
        (0, fp32, 8, [(2, 1, 1, 0)]),
        (0, fp32, 9, [(2, 2, 1, 0)]),
        (1, bf16, 10, [(0, 0, 2, 0)]),
    ]


def test_the_first_unit_is_cut_finer_so_that_its_way_there_and_back_overlaps_itself() -> None:
    million = 1 << 20
    specs = [ParamSpec(8 * million, "bfloat16", 0), ParamSpec(8 * million, "bfloat16", 1)]
    buckets = plan_buckets(specs, 32 * million).buckets
    assert [b.numel for b in buckets if b.unit == 0] == [million] * 8
    assert [b.numel for b in buckets if b.unit == 1] == [8 * million]
    small = plan_buckets([ParamSpec(million, "bfloat16", 0)], 32 * million).buckets
    assert [b.nbytes for b in small] == [million] * 2  # no bucket of less than a MiB for this
    assert max(b.nbytes for b in plan_buckets(specs, 1000).buckets) == 1000
