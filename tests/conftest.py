from __future__ import annotations

import os
import signal
from typing import Any

import pytest

# A shell gives programs it starts in the background an ignored SIGINT, and Python leaves that as it is. Tests press
# Ctrl-C, here and in programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_WORKERS = 4
"""Each imports torch, and most tests wait more than they compute."""


@pytest.hookimpl
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`, which pyproject.toml sets: tests on a GPU have it to themselves."""
    if config.option.markexpr == "gpu":
        return 0
    return min(os.cpu_count() or 1, MOST_WORKERS)


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A copy of the repository, for the tests that plant bugs."""
    from support.planting import Copy

    return Copy(tmp_path_factory.mktemp("planted"))
