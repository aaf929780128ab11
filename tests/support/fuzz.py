"""What the tests of hostile input share: how many examples, values that bite, and what may come out."""

from __future__ import annotations

import datetime
import os
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hf_offload.errors import OffloadError

both_sizes = pytest.mark.parametrize("examples", [50, pytest.param(1500, marks=pytest.mark.slow)], ids=["few", "many"])
"""A test that takes `examples`."""

FUZZ = "FUZZ"
"""Set in the environment, it makes every run draw other examples (`FUZZ=1 pytest -m slow tests/input`), or those of
`--hypothesis-seed`. Else they are always the same: what CI says can be seen again, by anybody."""


def examples_of(examples: int, **more: Any) -> settings:
    return settings(
        max_examples=examples,
        derandomize=FUZZ not in os.environ,
        print_blob=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


HUGE = (10**30, -(10**30), 10**308, 10**400, -(10**400), 2**31, 2**32, 2**63, 2**64)
FLOATS = (0.0, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 0.5)
TEXTS = (
    "", " ", "\0", "a\0b", "é", "\ud800", "\u2028", "\N{PILE OF POO}", "~", "~nosuchuser/x", "..", "../..",
    "/", "/dev/zero",
    "/proc/self/mem", ".", "a/b/c", "x" * 5000, "nan", "1e400", "0x10", "null", "true", "auto", "no", "-1",
    "1" * 5000,
    "=", ",", "a=b,c=d", "{}", "[", "%s%n", "${HOME}", "$(id)", "!!python/name:os.system", "owner/name",
)  # fmt: skip
numbers = st.one_of(st.sampled_from(HUGE), st.sampled_from(FLOATS), st.integers(-3, 5), st.floats())
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))
scalars = st.one_of(
    st.none(), st.booleans(), numbers, texts, st.binary(max_size=4), st.just(datetime.date(2000, 1, 1)),
    st.just(datetime.datetime(2000, 1, 1)),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.one_of(texts, st.integers()), inner, max_size=3),
    max_leaves=6,
)
"""What a parser of YAML may give, and worse."""


@contextmanager
def each_failure_told() -> Iterator[None]:
    """Hypothesis groups failures, and pytest's summary only counts them: here each has its error and place in it."""
    try:
        yield
    except Exception as group:
        errors = getattr(group, "exceptions", ())
        if not errors:
            raise
        raise AssertionError("; ".join(map(_told, errors))) from group


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" at {os.path.basename(frame.filename)}:{frame.lineno}" for frame in where)
    return f"{type(error).__name__}{place}: {str(error)[:200]}"


@contextmanager
def only_our_errors() -> Iterator[None]:
    """It works, or it is refused by an error of ours that can be shown."""
    try:
        yield
    except OffloadError as error:
        text = str(error)
        assert 10 < len(text) < 10_000, "a message that says something, and can be read"


@contextmanager
def little_memory(most: int = 50 << 20) -> Iterator[None]:
    """What Python allocates in here stays under `most` bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
