"""The list of planted bugs goes with the code: each can still be planted, and its test is there and fails with it.

To plant them all takes a quarter of an hour of two cores: here every third is, and `planted.py` plants all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.planting import Copy, Planted, check, listed

PLANTED = listed(Path(__file__).with_name("planted.py"))
every_bug = pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)


@every_bug
def test_it_can_be_planted_and_its_test_exists(bug: Planted) -> None:
    check(bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED[::3], ids=lambda bug: bug.name)
def test_it_is_caught(bug: Planted, copied: Copy) -> None:
    verdict = copied.verdict_of(bug)
    assert verdict.caught, f"{verdict.how}: {verdict.error}"


def test_no_two_have_one_name() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)
