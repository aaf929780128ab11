from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.engine import ours
from support.faults import leftovers

torch.set_num_threads(1)  # models this small only lose by more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What hangs fails, long before a wait of ours would give up by itself."""
    for item in items:
        if "/tests/faults/" in item.path.as_posix() and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test makes ends with it: closed, or forgotten."""
    before = ours()
    yield
    if not ours() <= before:
        assert leftovers() == sorted(t.name for t in before)
