"""200 kills: `killed.py` has the story."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("seed", [0, 1])
def test_no_kill_loses_a_checkpoint(seed: int) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "tests" / "checkpoint" / "killed.py"), "100", str(seed)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    table = json.loads(done.stdout.splitlines()[-1])
    assert table["lost"] == 0, done.stderr[-4000:]
    assert table["kills"] == 100 and table["in the middle of a save"] > 50 and table["saving over a checkpoint"] > 5
    print(table)
