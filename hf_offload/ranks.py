"""How many processes of one training run share this node, as their launcher says. Stdlib only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# where a launcher says how many there are -> where it says which of them this one is
_LOCAL_SIZES = {
    "LOCAL_WORLD_SIZE": "LOCAL_RANK",  # torchrun, accelerate launch
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",  # Open MPI
    "MPI_LOCALNRANKS": "MPI_LOCALRANKID",  # Intel MPI, MPICH
    "SLURM_STEP_TASKS_PER_NODE": "SLURM_LOCALID",  # srun; last, since torchrun or mpirun may run inside of it
    "SLURM_NTASKS_PER_NODE": "SLURM_LOCALID",
}
_THIS_NODE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LocalRanks:
    """Processes of one run on this node.

    Attributes:
        count: how many, this one included; 1 where nothing says that there are more.
        number_in: the variable in which their launcher tells each its number; empty where it tells none.
    """

    count: int
    number_in: str = ""

    @property
    def by_slurm(self) -> bool:
        """Whether srun started them."""
        return self.number_in.startswith("SLURM")


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """`find_local_ranks(environ).count`."""
    return find_local_ranks(environ).count


def find_local_ranks(environ: Mapping[str, str] | None = None) -> LocalRanks:
    """Processes of this run on this node, by what launchers set.

    The launchers' own variables count only where torch's are set too (RANK, WORLD_SIZE): a job's shell has SLURM's, and
    may run a single process. Where only those are set (`notebook_launcher`, `mp.spawn`) and the ranks meet on
    localhost, all are here.

    Args:
        environ: environment variables; None: this process's.
    """
    found = os.environ if environ is None else environ
    world = _count(found, "WORLD_SIZE")
    if world is None or "RANK" not in found:
        return LocalRanks(1)
    for name, number_in in _LOCAL_SIZES.items():
        local = _count(found, name)
        if local is not None:
            return LocalRanks(min(local, world), number_in)
    return LocalRanks(world if found.get("MASTER_ADDR") in _THIS_NODE else 1)


def _count(environ: Mapping[str, str], name: str) -> int | None:
    """A positive number; of SLURM's "4(x2),3", 4 tasks on each of two nodes and 3 on another, the most."""
    found = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environ.get(name, "").strip())
    return max(map(int, found), default=0) or None
