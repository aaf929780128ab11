"""The bucket plan for any sizes: plain arithmetic, with models of 2^40 elements that nobody has to hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_offload.engine.plan import LEAD_BUCKETS, LEAD_BYTES, WIRE_ITEMSIZE, BucketPlan, ParamSpec, plan_buckets
from support.fuzz import both_sizes, examples_of

EDGES = (2**31, 2**32, 2**33)
small = st.sampled_from((0, 0, 1, 1, 2, 3, 7, 129)) | st.integers(0, 50)
huge = st.sampled_from([edge + off for edge in EDGES for off in (-1, 0, 1)]) | st.integers(2**30, 2**40)
wires, units = st.sampled_from(sorted(WIRE_ITEMSIZE)), st.integers(0, 3)


def check_plan(params: list[ParamSpec], bucket_bytes: int, plan: BucketPlan) -> None:
    """Every element of every parameter lies in exactly one bucket, once, where the arena has it."""
    at = [0] * len(params)
    arena, unit = 0, -1
    for bucket in plan.buckets:
        assert bucket.start == arena and bucket.numel > 0 and bucket.unit >= unit, "in arena order, without gaps"
        assert bucket.nbytes <= max(bucket_bytes, bucket.itemsize)
        offset = 0
        for piece in bucket.pieces:
            spec = params[piece.param]
            assert (spec.unit, spec.wire) == (bucket.unit, bucket.wire)
            assert piece.offset == offset and piece.length > 0
            assert piece.start == at[piece.param], "a parameter's pieces follow each other"
            assert plan.param_start[piece.param] + piece.start == bucket.start + piece.offset
            at[piece.param] += piece.length
            offset += piece.length
        assert offset == bucket.numel
        arena, unit = arena + bucket.numel, bucket.unit
    assert at == [p.numel for p in params] and arena == plan.numel == sum(at)


@both_sizes
def test_any_small_parameters(examples: int) -> None:
    @examples_of(4 * examples)
    @given(st.lists(st.builds(ParamSpec, small, wires, units), max_size=12), st.integers(1, 200))
    def check(params: list[ParamSpec], bucket_bytes: int) -> None:
        check_plan(params, bucket_bytes, plan_buckets(params, bucket_bytes))

    check()


@both_sizes
def test_any_huge_parameters(examples: int) -> None:
    """Buckets of a size that leaves some hundreds of them."""

    @examples_of(examples)
    @given(
        st.lists(st.builds(ParamSpec, huge | small, wires, units), min_size=1, max_size=6),
        st.integers(2**34, 2**43) | st.sampled_from(EDGES).map(lambda edge: 4 * edge + 1),
    )
    def check(params: list[ParamSpec], bucket_bytes: int) -> None:
        check_plan(params, bucket_bytes, plan_buckets(params, bucket_bytes))

    check()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_parameter_around_a_power_of_two(edge: int, off: int) -> None:
    params = [ParamSpec(3, "bfloat16", 0), ParamSpec(edge + off, "bfloat16", 1), ParamSpec(5, "bfloat16", 1)]
    plan = plan_buckets(params, 1 << 30)
    check_plan(params, 1 << 30, plan)
    assert plan.param_start == (0, 3, 3 + edge + off)
    assert all(b.numel <= 1 << 29 for b in plan.buckets)


def test_many_tiny_parameters() -> None:
    params = [ParamSpec(i % 3, "float32", i // 5000) for i in range(20_000)]
    plan = plan_buckets(params, 4000)
    check_plan(params, 4000, plan)
    assert len(plan.buckets) < 30 + LEAD_BUCKETS


@both_sizes
def test_the_first_unit_is_cut_finer_and_not_too_fine(examples: int) -> None:
    @examples_of(examples)
    @given(st.integers(1, 2**34), wires)
    def check(numel: int, wire: str) -> None:
        plan = plan_buckets([ParamSpec(numel, wire, 0)], 2**40)
        assert len(plan.buckets) <= LEAD_BUCKETS
        assert all(b.nbytes >= LEAD_BYTES for b in plan.buckets[:-1])

    check()
