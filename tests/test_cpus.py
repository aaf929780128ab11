"""What a process may use of the processor, read from made-up /proc and /sys trees; how many ranks share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_offload import cpus
from hf_offload.cpus import Cpus, find_cpus
from hf_offload.procfs import numbers
from support.hosttree import tree
from support.hosttree_cpus import process, quota_v1, quota_v2, smt

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"RANK": "1", "WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_LOCALID": "1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Affinity masks by pid, to be filled; this process (0) is a child of process 10."""
    masks: dict[int, set[int]] = {}

    def affinity(pid: int) -> set[int]:
        if pid not in masks:
            raise ProcessLookupError(pid)
        return masks[pid]

    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 10)
    return masks


def test_smt_siblings_are_one_core(machine: dict[int, set[int]], tmp_path: Path) -> None:
    root = tree(tmp_path, smt(128))
    for mask, cores in (({*range(128)}, 64), ({*range(64)}, 64), ({0, 64, 1, 65}, 2), ({3}, 1), ({*range(60, 70)}, 10)):
        machine[0] = mask
        found = find_cpus(root, {})
        assert (found.usable, found.cores, found.share, found.most) == (len(mask), cores, cores, len(mask))


def test_without_a_topology_each_cpu_is_a_core(machine: dict[int, set[int]], tmp_path: Path) -> None:
    machine[0] = {*range(12)}
    assert find_cpus(tmp_path, {}) == Cpus(usable=12, cores=12, pool=12)


def test_without_affinity_masks_the_machines_count_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert find_cpus(tmp_path, {}).share == 10


@pytest.mark.parametrize(
    ("files", "quota", "of"),
    [
        pytest.param(quota_v2("", 400_000), 4.0, "cgroup cpu.max of /", id="a container's own mount"),
        pytest.param(quota_v2("job", 350_000), 3.5, "cgroup cpu.max of /job", id="half a CPU"),
        pytest.param(quota_v2("job", "max") | quota_v2("", 200_000), 2.0, "cgroup cpu.max of /", id="a group around"),
        pytest.param(quota_v2("job", 900_000) | quota_v2("", 200_000), 2.0, "cgroup cpu.max of /", id="the tightest"),
        pytest.param(quota_v2("job", "max"), None, "", id="v2 without a limit"),
        pytest.param(quota_v2("job", 50_000, 10_000), 5.0, "cgroup cpu.max of /job", id="another period"),
        pytest.param(quota_v2("job", 100_000, 0), None, "", id="no period"),
        pytest.param(quota_v1("job", 300_000), 3.0, "cgroup cpu.cfs_quota_us of /job", id="v1"),
        pytest.param(quota_v1("", 300_000, mount="cpu"), 3.0, "cgroup cpu.cfs_quota_us of /", id="v1 in a container"),
        pytest.param(quota_v1("job", -1), None, "", id="v1 without a limit"),
    ],
)
def test_cgroups_grant_cpu_time(
    machine: dict[int, set[int]], tmp_path: Path, files: dict[str, str], quota: float | None, of: str
) -> None:
    machine[0] = {*range(16)}
    found = find_cpus(tree(tmp_path, files | {"proc/self/cgroup": "2:cpu,cpuacct:/job\n0::/job\n"}), {})
    assert (found.quota, found.quota_of) == (quota, of)


@pytest.mark.parametrize(
    ("quota", "ranks", "share", "most"),
    [(4.0, 1, 4, 4), (3.5, 1, 3, 4), (0.5, 1, 1, 1), (64.0, 1, 16, 16), (8.0, 2, 4, 8), (3.0, 8, 1, 3)],
)
def test_a_quota_is_shared_and_not_exceeded(quota: float, ranks: int, share: int, most: int) -> None:
    found = Cpus(usable=16, cores=16, quota=quota, quota_of="g", pool=64, ranks=ranks)
    assert (found.share, found.most) == (share, most)
    assert f"g grants {quota:g} CPUs" in found.reason()


@pytest.mark.parametrize(
    ("mine", "launcher", "environ", "share"),
    [
        pytest.param(128, 128, {}, 128, id="alone"),
        pytest.param(32, 128, {}, 32, id="alone and bound"),
        pytest.param(128, 128, TORCHRUN, 16, id="torchrun"),
        pytest.param(16, 16, TORCHRUN, 2, id="torchrun in a container of 16 CPUs"),
        pytest.param(16, 128, TORCHRUN, 16, id="bound one by one"),
        pytest.param(64, 128, TORCHRUN, 16, id="bound to a socket, with three others"),
        pytest.param(12, 128, TORCHRUN, 12, id="bound to fewer"),
        pytest.param(3, 3, TORCHRUN, 1, id="more ranks than CPUs"),
        pytest.param(64, None, TORCHRUN, 8, id="the launcher has ended"),
        pytest.param(16, 16, SRUN | {"SLURM_CPUS_ON_NODE": "128"}, 16, id="srun that binds"),
        pytest.param(64, 128, SRUN | {"SLURM_CPUS_ON_NODE": "64"}, 8, id="srun that binds none, in half a node"),
        pytest.param(16, 128, SRUN, 16, id="srun that does not tell"),
        pytest.param(16, 16, TORCHRUN | {"SLURM_CPUS_ON_NODE": "128"}, 2, id="torchrun in a task of srun"),
    ],
)
def test_ranks_share_the_cores(
    machine: dict[int, set[int]], tmp_path: Path, mine: int, launcher: int | None, environ: dict[str, str], share: int
) -> None:
    machine[0] = {*range(mine)}
    if launcher is not None:
        machine[10] = {*range(launcher)}
    assert find_cpus(tmp_path, environ).share == share


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN])
def test_what_wraps_a_rank_is_not_its_launcher(
    machine: dict[int, set[int]], tmp_path: Path, environ: dict[str, str]
) -> None:
    """launcher 7 -> a shell 9 that bound itself -> a tool 10 -> this process."""
    started = [f"{name}={value}" for name, value in environ.items()]
    root = tree(tmp_path, process(10, 9, started) | process(9, 7, started) | process(7, 1, ["HOME=/"]))
    for pid, cpu_count in ((0, 16), (10, 16), (9, 16), (7, 128), (1, 256)):
        machine[pid] = {*range(cpu_count)}
    assert find_cpus(root, environ).share == 16
    machine[7] = {*range(16)}  # a container of 16 for all ranks: what lies outside is not theirs
    assert find_cpus(root, environ).share == 2


def test_ranks_share_physical_cores(machine: dict[int, set[int]], tmp_path: Path) -> None:
    root = tree(tmp_path, smt(128))
    machine[0] = machine[10] = {*range(128)}
    assert find_cpus(root, TORCHRUN).share == 8
    assert find_cpus(root, SRUN | {"SLURM_CPUS_ON_NODE": "128"}).share == 8
    machine[0] = {*range(4), *range(64, 68)}
    assert find_cpus(root, TORCHRUN).share == 4
    assert find_cpus(root, TORCHRUN).reason() == "affinity: 8 CPUs on 4 cores; 8 ranks share 64 cores"


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("", set()), ("\n", set()), ("a-b,1-,-2,7", {7})],
)
def test_the_kernels_lists(text: str, found: set[int]) -> None:
    assert numbers(text) == found


def test_this_machine_is_read_without_an_error() -> None:
    found = cpus.find_cpus()
    assert 1 <= found.share <= found.most <= found.usable
