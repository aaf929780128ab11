"""The list of planted bugs goes with the code and with the contracts: each is caught, and each contract catches one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.planting import Copy, Planted, check, listed

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
PLANTED = listed(HERE / "planted.py")
every_bug = pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)


@every_bug
def test_it_can_be_planted_and_its_test_exists_and_so_does_its_line_in_the_table(bug: Planted) -> None:
    check(bug)
    assert bug.name in README


@pytest.mark.slow
@every_bug
def test_it_is_caught(bug: Planted, copied: Copy) -> None:
    verdict = copied.verdict_of(bug)
    assert verdict.caught, f"{verdict.how}: {verdict.error}"


def test_no_two_have_one_name() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)


def contracts() -> list[str]:
    """Every contract, as `contracts/FILE::TEST`."""
    return [
        f"contracts/{file.name}::{node.name}"
        for file in sorted(HERE.glob("test_*.py"))
        if file.name != Path(__file__).name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("contract", contracts())
def test_every_contract_was_seen_to_fail(contract: str) -> None:
    assert contract in {bug.test.partition("[")[0] for bug in PLANTED}


@pytest.mark.parametrize("contract", contracts())
def test_every_contract_is_in_the_table(contract: str) -> None:
    assert contract.partition("::")[2] in README
