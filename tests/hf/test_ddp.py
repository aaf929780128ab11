"""Two processes under DDP (gloo, CPU): in order, the result of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_offload.checkpoint import manifest

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
def test_a_checkpoint_of_two_processes_is_whole_and_resumes(python: Any, tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    python(*LAUNCH, "whole", "2", "1", "threads=1", env=env)
    folder = tmp_path / "whole-trainer"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    found = manifest.verify(folder / "checkpoint-2")
    assert found is not None and {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= set(found.files)
    python(*LAUNCH, "resumed", "2", "1", "threads=1", str(folder / "checkpoint-2"), env=env)
    whole, resumed = (torch.load(tmp_path / f"{name}-1.pt")["weights"] for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    (folder / "checkpoint-2" / "rng_state_1.pth").unlink()
    done = python(*LAUNCH, "x", "2", "1", "threads=1", str(folder / "checkpoint-2"), env=env, fails=True)
    assert "rng_state_1.pth is missing" in done.stderr


@pytest.mark.slow
def test_overlapped_is_refused(python: Any) -> None:
    done = python(*LAUNCH, "two", "4", "1", "schedule=overlapped,threads=1", env={"OMP_NUM_THREADS": "1"}, fails=True)
    assert "schedule='overlapped'" in done.stderr and "in_order" in done.stderr
