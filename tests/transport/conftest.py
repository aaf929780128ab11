from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.transport import KINDS, Kind, ours


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every test of the contract runs once for each transport."""
    return request.param


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = ours()
    yield
    assert ours() <= before
