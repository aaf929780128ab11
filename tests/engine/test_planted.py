"""The list of planted bugs goes with the code: each can still be planted, and its test is still there.

That the tests catch them is seen by running `planted.py`, which takes a quarter of an hour.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def load() -> Any:
    spec = importlib.util.spec_from_file_location("planted", HERE / "planted.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


PLANTED = load().PLANTED


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_it_can_be_planted_and_its_test_exists(bug: Any) -> None:
    source = (HERE.parents[1] / "hf_offload" / bug.file).read_text(encoding="utf-8")
    changed = bug.plant(source)
    assert changed != source
    compile(changed, bug.file, "exec")
    file, _, name = bug.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (HERE.parent / file).read_text(encoding="utf-8")


def test_no_two_have_one_name() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)
