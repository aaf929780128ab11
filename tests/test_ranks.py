"""How many ranks share this node, by what launchers set."""

from __future__ import annotations

import pytest

from hf_offload.ranks import local_ranks

TORCH = {"RANK": "3", "WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        pytest.param({}, 1, id="a plain python"),
        pytest.param({**TORCH, "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}, 8, id="torchrun"),
        pytest.param({**TORCH, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, id="Open MPI"),
        pytest.param({**TORCH, "MPI_LOCALNRANKS": "2"}, 2, id="Intel MPI"),
        pytest.param({**TORCH, "SLURM_NTASKS_PER_NODE": "8"}, 8, id="srun"),
        pytest.param({**TORCH, "SLURM_NTASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8, id="torchrun under srun"),
        pytest.param({**TORCH, "SLURM_NTASKS_PER_NODE": "1", "MPI_LOCALNRANKS": "8"}, 8, id="mpirun under srun"),
        pytest.param({"SLURM_NTASKS_PER_NODE": "8"}, 1, id="one process in a job's shell"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1, id="a world of one"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, 4, id="spawned from a notebook"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, 1, id="nobody says"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "8"}, 1, id="rubbish"),
        pytest.param({**TORCH, "LOCAL_WORLD_SIZE": "0", "MPI_LOCALNRANKS": "2"}, 2, id="none is no answer"),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: int) -> None:
    assert local_ranks(environ) == ranks


def test_this_process_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCH, "LOCAL_WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == 5
    monkeypatch.delenv("RANK")
    assert local_ranks() == 1
