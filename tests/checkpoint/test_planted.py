"""The lists of planted bugs go with the code: each can be planted, and is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.planting import Copy, Planted, check, listed

PLANTED = [bug for script in ("planted.py", "planted_tools.py") for bug in listed(Path(__file__).with_name(script))]
every_bug = pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)


@every_bug
def test_it_can_be_planted_and_its_test_exists(bug: Planted) -> None:
    check(bug)


@pytest.mark.slow
@every_bug
def test_it_is_caught(bug: Planted, copied: Copy) -> None:
    verdict = copied.verdict_of(bug)
    assert verdict.caught, f"{verdict.how}: {verdict.error}"


def test_no_two_have_one_name() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)
