from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_python():
    """Runs a script in a new process that imports this checkout's (or `root`'s) hf_offload; returns the process."""

    def run(script: str, root: Path = ROOT, expect: int = 0, **env: str | None) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, "PYTHONPATH": str(root), **env}
        process = subprocess.run(
            [sys.executable, "-c", script],
            env={name: value for name, value in merged.items() if value is not None},
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == expect, f"exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process

    return run
