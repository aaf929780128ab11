"""How much host memory this process may still take, and the refusal of a plan that needs more. Stdlib only."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_offload.errors import HostMemoryError, explain

UNKNOWN = "unknown"
GB = 1e9


@dataclass(frozen=True)
class HostMemory:
    """What is left for this process.

    Attributes:
        available: bytes that can be taken without swapping or being killed; 0 where unknown.
        total: bytes of the machine or of its tightest cgroup; 0 where unknown.
        source: what sets `available`: "/proc/meminfo MemAvailable", "cgroup memory.max of /a/b" ...; or "unknown".
    """

    available: int
    total: int
    source: str

    @property
    def known(self) -> bool:
        return self.source != UNKNOWN


def available_host_bytes(root: Path = Path("/")) -> HostMemory:
    """The least of the machine's available memory and of what every cgroup around this process leaves.

    A cgroup leaves its limit minus its usage, where page cache that the kernel gives back on demand (`inactive_file`)
    does not count as used.

    Args:
        root: where /proc and /sys are found (tests use made-up trees).
    """
    found = [*_machine(root), *_cgroups_v2(root), *_cgroups_v1(root)]
    if not found:
        return HostMemory(0, 0, UNKNOWN)
    tightest = min(found, key=lambda memory: memory.available)
    return HostMemory(tightest.available, min(memory.total for memory in found), tightest.source)


def check_host_budget(need: Mapping[str, int], max_host_bytes: int | None, root: Path = Path("/")) -> None:
    """Refuses a plan that does not fit, before anything is allocated.

    Args:
        need: bytes of each line of the plan, in the order in which an error lists them.
        max_host_bytes: the user's cap on the sum, or None.
        root: as in `available_host_bytes`.

    Raises:
        HostMemoryError: the sum is above the cap, or above what is available. Where that is unknown, it passes.
    """
    needed = sum(need.values())
    if max_host_bytes is not None and needed > max_host_bytes:
        cause = f"the plan takes {_bytes(needed)} of host memory"
        remedy = f"Raise max_host_bytes to at least {needed}, or {_SMALLER}"
        raise HostMemoryError(explain("max_host_bytes", max_host_bytes, cause, remedy) + _table(need))
    memory = available_host_bytes(root)
    if memory.known and needed > memory.available:
        cause = (
            f"the plan takes {_bytes(needed)}, but of {_bytes(memory.total)} only {_bytes(memory.available)} are left"
        )
        limit = "raise the memory limit of the container or job" if "cgroup" in memory.source else "end other programs"
        remedy = f"Use a machine with more memory, {limit}, or {_SMALLER}"
        raise HostMemoryError(explain("host memory", memory.source, cause, remedy) + _table(need))


_SMALLER = "train fewer parameters (freeze some, or use LoRA)"


def _bytes(count: int) -> str:
    return f"{count / GB:.2f} GB ({count} bytes)"


def _table(need: Mapping[str, int]) -> str:
    lines = [*need.items(), ("sum", sum(need.values()))]
    width = max(len(name) for name, _ in lines)
    return "".join(f"\n  {name:<{width}}  {_bytes(count)}" for name, count in lines)


def _machine(root: Path) -> Iterator[HostMemory]:
    fields = _fields(root / "proc" / "meminfo")
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
    for group, folder in _around(root / "sys" / "fs" / "cgroup", _own_cgroup(root, "")):
        yield from _left(folder, group, "memory.max", "memory.current", "inactive_file")


def _cgroups_v1(root: Path) -> Iterator[HostMemory]:
    for group, folder in _around(root / "sys" / "fs" / "cgroup" / "memory", _own_cgroup(root, "memory")):
        yield from _left(folder, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _own_cgroup(root: Path, controller: str) -> str:
    """This process's group in the hierarchy of `controller` ("" is v2's); "/" where the kernel does not say.

    Lines of /proc/self/cgroup read `id:controllers:path` (man 7 cgroups).
    """
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if controller in controllers.split(","):
            return path
    return "/"


def _around(mount: Path, group: str) -> Iterator[tuple[str, Path]]:
    """The group and each one around it, innermost first, that exist below `mount`.

    In a container the mount is often the container's own group while the kernel names it from the host's root (or with
    "..", from another namespace): such folders do not exist, and the mount itself is what counts.
    """
    inside = PurePosixPath("/", *(part for part in PurePosixPath(group).parts if part not in ("/", "..")))
    for path in (inside, *inside.parents):
        folder = mount / path.relative_to("/")
        if folder.is_dir():
            yield str(path), folder


# cgroup v1 has no word for "no limit": it is the largest multiple of the page size below 2**63.
_NO_LIMIT = 1 << 60


def _left(folder: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[HostMemory]:
    limit, usage = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or limit >= _NO_LIMIT or usage is None:
        return
    reclaimable = _fields(folder / "memory.stat").get(cache_field, 0)
    yield HostMemory(max(0, limit - max(0, usage - reclaimable)), limit, f"cgroup {limit_file} of {group}")


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # cgroup v2 says "max" for no limit


def _fields(path: Path) -> dict[str, int]:
    """First word to second word (an integer) of each line."""
    words = [line.split() for line in _text(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
