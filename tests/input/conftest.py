from __future__ import annotations

from collections.abc import Generator

import pytest

from support.fuzz import each_failure_told


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with each_failure_told():
        return (yield)
