"""Made-up /proc and /sys trees for what reads the processor's limits."""

from __future__ import annotations

from collections.abc import Iterable


def smt(cpus: int, threads: int = 2) -> dict[str, str]:
    """Topology of `cpus` CPUs, numbered as Linux does: the second threads of all cores after the first ones."""
    cores = cpus // threads
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(
            str(cpu % cores + cores * t) for t in range(threads)
        )
        + "\n"
        for cpu in range(cpus)
    }


def quota_v2(group: str, quota: str | int, period: int = 100_000) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    return {f"{folder}/cpu.max": f"{quota} {period}\n"}


def quota_v1(group: str, quota: int, period: int = 100_000, mount: str = "cpu,cpuacct") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{mount}/{group}".rstrip("/")
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


def process(pid: int, above: int, environ: Iterable[str] = ()) -> dict[str, str]:
    """A process `pid`, a child of `above`, started with `environ` ("NAME=value" each)."""
    folder = f"proc/{pid}"
    return {
        f"{folder}/status": f"Name:\tx\nPid:\t{pid}\nPPid:\t{above}\n",
        f"{folder}/environ": "".join(f"{e}\0" for e in environ),
    }
