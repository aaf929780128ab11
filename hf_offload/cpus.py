"""How many threads the host step takes: the CPUs this process may use, and its share of them. Stdlib only.

The step is bound by memory, so two threads on one physical core gain nothing over one. torch's own threads and
DataLoader workers are not touched, and none of their settings is read: OMP_NUM_THREADS, which launchers set to 1, says
nothing about the step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_offload import procfs
from hf_offload.ranks import LocalRanks, find_local_ranks

ANCESTORS = 16
"""How many wrappers (shells, tools that bind) between a rank and its launcher are looked through."""


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """What a process may use of the processor.

    Attributes:
        usable: CPUs of its affinity mask.
        cores: physical cores these belong to; as `usable` where the system does not tell.
        quota: CPUs' worth of time that the tightest cgroup grants; None: no limit.
        quota_of: which group's, and by which file.
        pool: physical cores that the ranks of this node share among them, `cores` at least.
        ranks: processes of this run on this node.
    """

    usable: int
    cores: int
    quota: float | None = None
    quota_of: str = ""
    pool: int = 0
    ranks: int = 1

    @property
    def most(self) -> int:
        """Threads that can run at the same time."""
        return self.usable if self.quota is None else max(1, min(self.usable, math.ceil(self.quota)))

    @property
    def share(self) -> int:
        """This process's part of the physical cores and of the quota; at least 1."""
        share = min(self.cores, max(self.pool, self.cores) // self.ranks)
        if self.quota is not None:
            share = min(share, int(self.quota / self.ranks))
        return max(1, share)

    def reason(self) -> str:
        """Why `share` is what it is, as "affinity: 32 CPUs on 16 cores; 4 ranks share 64 cores"."""
        cpus = f"affinity: {self.usable} CPU{'s' if self.usable > 1 else ''}"
        if self.cores != self.usable:
            cpus += f" on {self.cores} core{'s' if self.cores > 1 else ''}"
        quota = [] if self.quota is None else [f"{self.quota_of} grants {self.quota:g} CPUs"]
        ranks = [f"{self.ranks} ranks share {max(self.pool, self.cores)} cores"] if self.ranks > 1 else []
        return "; ".join([cpus, *quota, *ranks])


def find_cpus(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Cpus:
    """The CPUs of this process as they are now: tools may narrow its affinity while it runs.

    Args:
        root: where /proc and /sys are found (tests use made-up trees).
        environ: environment variables; None: this process's.
    """
    found = os.environ if environ is None else environ
    mine = affinity(0)
    usable = len(mine) if mine else os.cpu_count() or 1
    cores = physical(mine, root) if mine else usable
    quota, of = _quota(root)
    ranks = find_local_ranks(found)
    pool = _pool(ranks, found, root, usable, cores) if ranks.count > 1 else cores
    return Cpus(usable=usable, cores=cores, quota=quota, quota_of=of, pool=pool, ranks=ranks.count)


def affinity(pid: int) -> frozenset[int]:
    """The CPUs that process `pid` (0: the calling thread) may run on; empty where the system does not tell."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # macOS, Windows; a process that has ended
        return frozenset()


def physical(cpus: frozenset[int], root: Path) -> int:
    """How many physical cores `cpus` belong to: SMT siblings count once. len(cpus) where one's are not known."""
    cores: set[frozenset[int]] = set()
    for cpu in cpus:
        topology = root / "sys" / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        siblings = procfs.numbers(procfs.text(topology / "thread_siblings_list"))
        if cpu not in siblings:
            return len(cpus)
        cores.add(siblings)
    return len(cores)


def _quota(root: Path) -> tuple[float | None, str]:
    """The tightest CPU bandwidth limit of the groups around this process: CPUs, and whose it is.

    cgroup v2: "cpu.max" reads "quota period" in us, or "max period"; v1: cpu.cfs_quota_us, -1 for none.
    """
    mount = root / "sys" / "fs" / "cgroup"
    found: list[tuple[float, str]] = []
    for group, folder in procfs.around(mount, procfs.own_cgroup(root, "")):
        words = procfs.text(folder / "cpu.max").split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            found.append((int(words[0]) / int(words[1]), f"cgroup cpu.max of {group}"))
    for name in ("cpu", "cpu,cpuacct"):
        for group, folder in procfs.around(mount / name, procfs.own_cgroup(root, "cpu")):
            quota, period = (procfs.number(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
            if quota and period:
                found.append((quota / period, f"cgroup cpu.cfs_quota_us of {group}"))
    return min(found, default=(None, ""))


def _pool(ranks: LocalRanks, environ: Mapping[str, str], root: Path, usable: int, cores: int) -> int:
    """Physical cores that the launcher divides among its ranks.

    A launcher that binds each rank to CPUs of its own has more itself; one that does not has as many. SLURM's lives in
    a daemon that may run anywhere, but says what the step got on this node.
    """
    of_step = environ.get("SLURM_CPUS_ON_NODE", "")
    if ranks.by_slurm and of_step.isdigit():
        return max(cores, int(of_step) * cores // usable)
    launcher = affinity(_launcher(ranks, environ, root))
    return max(cores, physical(launcher, root))


def _launcher(ranks: LocalRanks, environ: Mapping[str, str], root: Path) -> int:
    """The nearest ancestor that is not a part of this rank itself: a shell or tool between them was started with the
    variable that tells the rank its number."""
    pid = os.getppid()
    mine = f"{ranks.number_in}={environ.get(ranks.number_in, '')}"
    for _ in range(ANCESTORS if ranks.number_in in environ else 0):
        above = procfs.fields(root / "proc" / str(pid) / "status").get("PPid:", 0)
        if not above or mine not in procfs.text(root / "proc" / str(pid) / "environ").split("\0"):
            break
        pid = above
    return pid
