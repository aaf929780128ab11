from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.transport import KINDS, Kind, leftovers


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every test of the contract runs once for each transport."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = leftovers()
    yield
    assert leftovers() <= before
