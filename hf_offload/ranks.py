"""How many processes of one training run share this node, as their launcher says. Stdlib only."""

from __future__ import annotations

import os
from collections.abc import Mapping

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate launch
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
    "SLURM_NTASKS_PER_NODE",  # srun; last, since torchrun or mpirun may run inside of it
)
_THIS_NODE = ("localhost", "127.0.0.1", "::1")


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """Processes of this run on this node, this one included; 1 where nothing says that there are more.

    The launchers' own variables count only where torch's are set too (RANK, WORLD_SIZE): a job's shell has SLURM's, and
    may run a single process. Where only those are set (`notebook_launcher`, `mp.spawn`) and the ranks meet on
    localhost, all are here.

    Args:
        environ: environment variables; None: this process's.
    """
    found = os.environ if environ is None else environ
    world = _count(found, "WORLD_SIZE")
    if world is None or "RANK" not in found:
        return 1
    for name in _LOCAL_SIZES:
        local = _count(found, name)
        if local is not None:
            return min(local, world)
    return world if found.get("MASTER_ADDR") in _THIS_NODE else 1


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdigit() and int(text) else None
