"""Two processes under DDP (gloo, CPU): in order, the result of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = str(Path(__file__).parent / "scripts" / "train_tiny.py")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT)

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


def test_two_processes_train_as_one(python: Any, tmp_path: Path) -> None:
    python(SCRIPT, "one", "4", "2", "threads=1")
    python(*LAUNCH, "two", "4", "1", "threads=1", env={"OMP_NUM_THREADS": "1"})
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("one-0", "two-0", "two-1"))
    assert first["wrapped"] == "DistributedDataParallel" and first["schedule"] == "in_order"
    assert all(torch.equal(first["weights"][n], second["weights"][n]) for n in first["weights"])
    assert first["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_overlapped_is_refused(python: Any) -> None:
    done = python(*LAUNCH, "two", "4", "1", "schedule=overlapped,threads=1", env={"OMP_NUM_THREADS": "1"}, fails=True)
    assert "schedule='overlapped'" in done.stderr and "in_order" in done.stderr
