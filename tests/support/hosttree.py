"""Made-up /proc and /sys trees for what reads the host's memory."""

from __future__ import annotations

from pathlib import Path

KIB, GB = 1024, 10**9
MEMINFO = "MemTotal:       64000000 kB\nMemFree:         1000000 kB\nMemAvailable:   50000000 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str, limit: str | int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\nfile 99999999\n{_lists('', cache)}",
    }


def v1(group: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 5\ninactive_file 3\n{_lists('total_', cache)}",
    }


def _lists(prefix: str, cache: int) -> str:
    """Page cache, on both of the kernel's lists."""
    return f"{prefix}inactive_file {cache // 2}\n{prefix}active_file {cache - cache // 2}\n"


def machine(available: int, total: int = 64 * GB) -> dict[str, str]:
    """/proc/meminfo of a machine; whole KiB."""
    return {"proc/meminfo": f"MemTotal: {total // KIB} kB\nMemAvailable: {available // KIB} kB\n"}


def own_limits(memory: int | str = "unlimited", data: int | str = "unlimited", locked: int | str = "unlimited",
               mapped: int = 0, anon: int = 0) -> dict[str, str]:  # fmt: skip
    """/proc/self/limits and what this process has mapped and touched."""
    limits = "Limit                     Soft Limit           Hard Limit           Units     \n"
    for name, soft in (("Max data size", data), ("Max locked memory", locked), ("Max address space", memory)):
        limits += f"{name:<25} {soft:<20} {'unlimited':<20} bytes     \n"
    status = f"VmSize:\t {mapped // KIB} kB\nVmData:\t {mapped // KIB} kB\nRssAnon:\t {anon // KIB} kB\n"
    return {"proc/self/limits": limits, "proc/self/status": status}
