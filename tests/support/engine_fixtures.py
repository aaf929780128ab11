"""For every test of engines; a conftest.py imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine import ours


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test makes ends with it: closed, or forgotten."""
    before = ours()
    yield
    assert ours() <= before


@pytest.fixture(autouse=True)
def guesses_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets here are small; a guess is made part by part all the same."""
    monkeypatch.setattr("hf_offload.engine.speculation.PART", 7)
