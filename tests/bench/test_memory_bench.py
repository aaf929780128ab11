"""`bench.memory`: the bookkeeping, and that a real model takes what was planned and no more as it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_offload.bench import memory
from hf_offload.errors import ConfigError

MB = 10**6
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> memory.Account:
    taken = iter([100 * MB, 150 * MB, 160 * MB])
    monkeypatch.setattr(memory, "rss_anon", lambda: next(taken))
    return memory.Account()


def test_an_account_counts_from_where_it_was_opened(account: memory.Account) -> None:
    account.note("first", 50 * MB)
    account.note("peak", 50 * MB, measured=151 * MB)
    assert account.phases["first"] == {"measured": 50 * MB, "plan": 50 * MB, "ratio": 1.0}
    assert account.phases["peak"] == {"measured": 51 * MB, "plan": 50 * MB, "ratio": 1.02}
    assert account.agrees()


@pytest.mark.parametrize("peak", [152 * MB, 148 * MB])
def test_one_phase_that_differs_is_enough(account: memory.Account, peak: int) -> None:
    account.note("first", 50 * MB)
    account.note("peak", 50 * MB, measured=peak)
    assert not account.agrees()
    found = {"params": 1, "model": {}, "optimizer": account.phases, "agrees": False, "agrees_within": 0.02}
    assert memory.table(found).endswith("DOES NOT AGREE within 2%")


def test_too_few_steps_to_tell_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps=4.*5 or more"):
        memory.Setting(10, steps=4)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The command's figures, in a process of its own: what other tests left in this one's heap is not measured."""
    path = os.pathsep.join(p for p in (str(Path(memory.__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "hf_offload.bench.memory", "--json", f"--folder={folder}", *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@linux
@pytest.mark.slow
def test_resident_memory_is_the_plan_and_stays_flat_over_100_steps_and_5_saves(tmp_path: Path) -> None:
    found = run(tmp_path, "--params=3e7", "--steps=100", "--saves=5", "--bucket-bytes=1048576")
    assert found["agrees"], found["optimizer"]
    assert found["params"] == pytest.approx(3e7, rel=0.03)
    assert list(found["optimizer"]) == [
        "construction: the ring", "first step", "100 steps", *(f"save {n}, peak" for n in range(1, 6)), "load, peak",
        "after the load",
    ]  # fmt: skip
    assert found["bytes_per_param"]["state, measured"] == pytest.approx(12.0, rel=0.02)
    growth = found["growth_bytes_from_step_3"]
    assert growth["resident"] < 4 * MB, "a leak of 40 kB a step"
    assert growth["python"] < 0.1 * MB, "a leak of 1 kB a step"


@linux
@pytest.mark.slow
def test_a_model_made_in_fp32_does_not_keep_its_fp32_weights(tmp_path: Path) -> None:
    """Its values become the masters: the optimizer takes 8 bytes a parameter more, and not 12."""
    found = run(tmp_path, "--params=3e7", "--steps=5", "--saves=1", "--bucket-bytes=1048576", "--from-fp32")
    assert found["agrees"], found["optimizer"]
    first = found["optimizer"]["first step"]
    assert first["plan"] - found["optimizer"]["construction: the ring"]["plan"] == 8 * found["params"]
