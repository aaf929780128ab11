"""How much host memory this process may still take: of the machine, of its cgroups, of its limits. Stdlib only."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hf_offload import procfs

UNKNOWN = "unknown"
MORE_MEMORY = "use a machine with more memory"


@dataclass(frozen=True)
class HostMemory:
    """What one limit leaves.

    Attributes:
        available: bytes that can be taken without swapping or being killed; 0 where unknown.
        total: bytes of the machine or of its tightest cgroup; 0 where unknown.
        source: what sets `available`: "/proc/meminfo MemAvailable", "cgroup memory.max of /a/b" ...; or "unknown".
        shared: whether all processes of a run on this node take from it; a ulimit is each process's own.
        to_free: what makes `available` more, up to `total`.
        to_raise: what makes `total` more.
    """

    available: int
    total: int
    source: str
    shared: bool = field(default=True, compare=False)
    to_free: str = field(default="end other programs", compare=False)
    to_raise: str = field(default=MORE_MEMORY, compare=False)

    @property
    def known(self) -> bool:
        return self.source != UNKNOWN


def available_host_bytes(root: Path = Path("/")) -> HostMemory:
    """What the tightest of `host_limits` leaves this process.

    Args:
        root: where /proc and /sys are found (tests use made-up trees).
    """
    found = host_limits(root)
    if not found:
        return HostMemory(0, 0, UNKNOWN)
    return replace(found[0], total=min(memory.total for memory in found))


def host_limits(root: Path = Path("/")) -> list[HostMemory]:
    """Everything that bounds this process's host memory, the tightest first.

    That is the machine's available memory, every cgroup around this process, where the kernel promises no more than it
    has (vm.overcommit_memory=2) what it may still promise, and this process's own ulimits. Swap does not count: a step
    that swaps takes minutes. A cgroup leaves its limit minus its usage, where page cache that the kernel gives back on
    demand does not count as used: files on either of its lists, as in MemAvailable (a model's files, read twice, are
    on the active one).

    Args:
        root: as in `available_host_bytes`.
    """
    found = [*_machine(root), *_cgroups_v2(root), *_cgroups_v1(root), *_commit(root), *_ulimits(root)]
    return sorted(found, key=lambda memory: memory.available)


def own_bytes(root: Path = Path("/")) -> int:
    """Memory of its own that this process has touched, bytes; 0 where unknown."""
    return procfs.fields(root / "proc" / "self" / "status").get("RssAnon:", 0) * 1024


def lockable_bytes(root: Path = Path("/")) -> int | None:
    """`ulimit -l`: bytes this process may lock in memory; None: no limit, or not known."""
    return _ulimit(root, "Max locked memory")


def _machine(root: Path) -> Iterator[HostMemory]:
    fields = procfs.fields(root / "proc" / "meminfo")
    total = fields.get("MemTotal:")
    if total is None:
        yield from _machine_elsewhere() if root == Path("/") else ()
        return
    kib, name = fields.get("MemAvailable:"), "MemAvailable"
    if kib is None:  # Linux before 3.14
        kib, name = sum(fields.get(key, 0) for key in ("MemFree:", "Buffers:", "Cached:")), "MemFree + Buffers + Cached"
    yield HostMemory(kib * 1024, total * 1024, f"/proc/meminfo {name}")


def _machine_elsewhere() -> Iterator[HostMemory]:
    """Systems without /proc/meminfo: what POSIX tells, else psutil where it is installed."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        yield HostMemory(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page, "sysconf")
        return
    except (AttributeError, ValueError, OSError):
        pass
    try:
        memory = importlib.import_module("psutil").virtual_memory()
    except ImportError:
        return
    yield HostMemory(int(memory.available), int(memory.total), "psutil.virtual_memory")


def _cgroups_v2(root: Path) -> Iterator[HostMemory]:
    for group, folder in procfs.around(root / "sys" / "fs" / "cgroup", procfs.own_cgroup(root, "")):
        yield from _left(folder, group, "memory.max", "memory.current", "")


def _cgroups_v1(root: Path) -> Iterator[HostMemory]:
    for group, folder in procfs.around(root / "sys" / "fs" / "cgroup" / "memory", procfs.own_cgroup(root, "memory")):
        yield from _left(folder, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


# cgroup v1 has no word for "no limit": it is the largest multiple of the page size below 2**63.
_NO_LIMIT = 1 << 60


def _left(folder: Path, group: str, limit_file: str, usage_file: str, prefix: str) -> Iterator[HostMemory]:
    limit, usage = procfs.number(folder / limit_file), procfs.number(folder / usage_file)
    if limit is None or limit >= _NO_LIMIT or usage is None:
        return
    stat = procfs.fields(folder / "memory.stat")
    reclaimable = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    left = max(0, limit - max(0, usage - reclaimable))
    yield HostMemory(
        left, limit, f"cgroup {limit_file} of {group}", to_free="end other programs in the container or job",
        to_raise="raise the memory limit of the container or job",
    )  # fmt: skip


def _commit(root: Path) -> Iterator[HostMemory]:
    """Memory the kernel may still promise, where it promises no more than there is. Untouched memory counts."""
    if procfs.number(root / "proc" / "sys" / "vm" / "overcommit_memory") != 2:
        return
    fields = procfs.fields(root / "proc" / "meminfo")
    limit, promised = fields.get("CommitLimit:"), fields.get("Committed_AS:")
    if limit is not None and promised is not None:
        yield HostMemory(
            max(0, limit - promised) * 1024, limit * 1024, "/proc/meminfo CommitLimit, with vm.overcommit_memory=2",
            to_raise="raise vm.overcommit_ratio, or set vm.overcommit_memory=0",
        )  # fmt: skip


def _ulimits(root: Path) -> Iterator[HostMemory]:
    """RLIMIT_AS and RLIMIT_DATA, against what this process has mapped."""
    used = procfs.fields(root / "proc" / "self" / "status")
    for limit_name, field_name, flag in (("Max address space", "VmSize:", "-v"), ("Max data size", "VmData:", "-d")):
        limit, kib = _ulimit(root, limit_name), used.get(field_name)
        if limit is not None and kib is not None:
            yield HostMemory(
                max(0, limit - kib * 1024), limit, f"ulimit {flag}", shared=False, to_free="",
                to_raise=f"raise this process's own limit (ulimit {flag} unlimited)",
            )  # fmt: skip


def _ulimit(root: Path, name: str) -> int | None:
    """The soft limit `name` of /proc/self/limits; None where there is none."""
    for line in procfs.text(root / "proc" / "self" / "limits").splitlines():
        if line.startswith(name):
            soft = line[len(name) :].split()[:1]
            return int(soft[0]) if soft and soft[0].isdigit() else None
    return None
