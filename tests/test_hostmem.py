"""Host memory: what is read from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import sys
import types

import pytest

from hf_offload import hostmem, procfs
from support.hosttree import GB, KIB, MEMINFO, own_limits, tree, v1, v2


def test_machine_alone(tmp_path):
    memory = hostmem.available_host_bytes(tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert memory == hostmem.HostMemory(50_000_000 * KIB, 64_000_000 * KIB, "/proc/meminfo MemAvailable")


def test_kernel_without_memavailable(tmp_path):
    old = "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 300 kB\n"
    memory = hostmem.available_host_bytes(tree(tmp_path, {"proc/meminfo": old}))
    assert memory.available == 420 * KIB
    assert memory.source == "/proc/meminfo MemFree + Buffers + Cached"


def test_v2_limit_less_usage_less_reclaimable_cache(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job\n", **v2("job", 8 * GB, 5 * GB, cache=2 * GB)}
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert memory == hostmem.HostMemory(5 * GB, 8 * GB, "cgroup memory.max of /job")


def test_v2_walks_up_to_the_tightest(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/slice/job/step\n",
        **v2("slice/job/step", "max", 1 * GB),
        **v2("slice/job", 20 * GB, 2 * GB),
        **v2("slice", 12 * GB, 9 * GB),
    }
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert (memory.available, memory.source) == (3 * GB, "cgroup memory.max of /slice")


@pytest.mark.parametrize("group", ["/", "/../../other", "/docker/0123abc"])
def test_v2_in_a_container_the_mount_is_the_limit(tmp_path, group):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"0::{group}\n", **v2("", 4 * GB, 1 * GB)}
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert (memory.available, memory.source) == (3 * GB, "cgroup memory.max of /")


def test_v1_and_its_way_to_say_no_limit(tmp_path):
    lines = "11:cpu,cpuacct:/x\n4:hugetlb,memory:/pod/box\n0::/\n"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": lines,
        **v1("pod/box", 9223372036854771712, 1 * GB),
        **v1("pod", 6 * GB, 5 * GB, cache=1 * GB),
    }
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert (memory.available, memory.source) == (2 * GB, "cgroup memory.limit_in_bytes of /pod")


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **v2("a", 1 * GB, 2 * GB)}
    assert hostmem.available_host_bytes(tree(tmp_path, files)).available == 0


def test_cache_larger_than_usage_does_not_raise_the_limit(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **v2("a", 1 * GB, 2, cache=50)}
    assert hostmem.available_host_bytes(tree(tmp_path, files)).available == 1 * GB


def test_a_limit_above_the_machine_does_not_count(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **v2("a", 900 * GB, 0)}
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert (memory.total, memory.source) == (64_000_000 * KIB, "/proc/meminfo MemAvailable")


@pytest.mark.parametrize("broken", ["", "rubbish", "0::", "MemTotal: many kB\n"])
def test_unreadable_files_are_no_information(tmp_path, broken):
    root = tree(tmp_path, {"proc/meminfo": broken, "proc/self/cgroup": broken, **v2("", "rubbish", 0)})
    memory = hostmem.available_host_bytes(root)
    assert not memory.known and memory.source == "unknown"


def test_without_proc_sysconf_then_psutil(monkeypatch):
    answers = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10, "SC_PHYS_PAGES": 20}
    monkeypatch.setattr(procfs, "text", lambda path: "")
    monkeypatch.setattr(os, "sysconf", answers.__getitem__)
    assert hostmem.available_host_bytes() == hostmem.HostMemory(40960, 81920, "sysconf")

    def unknown_name(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown_name)
    fake = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=7, total=9))
    monkeypatch.setitem(sys.modules, "psutil", fake)
    assert hostmem.available_host_bytes() == hostmem.HostMemory(7, 9, "psutil.virtual_memory")
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert not hostmem.available_host_bytes().known


def test_this_machine():
    memory = hostmem.available_host_bytes()
    assert memory.known and 0 < memory.available <= memory.total


@pytest.mark.parametrize(
    ("mode", "available", "source"),
    [(2, 6_000_000, "/proc/meminfo CommitLimit, with vm.overcommit_memory=2"), (0, 50_000_000, "/proc/meminfo MemAv"),
     (1, 50_000_000, "/proc/meminfo MemAv")],
)  # fmt: skip
def test_where_the_kernel_promises_no_more_than_it_has_its_promises_are_what_bounds(tmp_path, mode, available, source):
    promises = "CommitLimit:    10000000 kB\nCommitted_AS:    4000000 kB\n"
    root = tree(tmp_path, {"proc/meminfo": MEMINFO + promises, "proc/sys/vm/overcommit_memory": f"{mode}\n"})
    memory = hostmem.available_host_bytes(root)
    assert memory.available == available * KIB and memory.source.startswith(source)
    assert memory.total == (10_000_000 if mode == 2 else 64_000_000) * KIB


@pytest.mark.parametrize(("limit", "flag"), [("memory", "-v"), ("data", "-d")])
def test_this_process_own_ulimits_less_what_it_has_mapped(tmp_path, limit, flag):
    files = {"proc/meminfo": MEMINFO, **own_limits(**{limit: 9 * 2**30}, mapped=2 * 2**30)}
    memory = hostmem.available_host_bytes(tree(tmp_path, files))
    assert (memory.available, memory.total, memory.source) == (7 * 2**30, 9 * 2**30, f"ulimit {flag}")
    assert not memory.shared, "the other ranks have their own"


def test_without_ulimits_none_bounds(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, **own_limits(mapped=10**15)})
    assert [m.source for m in hostmem.host_limits(root)] == ["/proc/meminfo MemAvailable"]


@pytest.mark.parametrize(("locked", "found"), [(8_388_608, 8_388_608), ("unlimited", None)])
def test_memory_that_may_be_locked(tmp_path, locked, found):
    assert hostmem.lockable_bytes(tree(tmp_path, own_limits(locked=locked))) == found


def test_all_limits_come_tightest_first(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        **v2("a/b", 9 * GB, 1 * GB),
        **v2("a", 8 * GB, 2 * GB),
    }
    files |= own_limits(memory=7 * GB)
    sources = [m.source for m in hostmem.host_limits(tree(tmp_path, files))]
    assert sources == [
        "cgroup memory.max of /a", "ulimit -v", "cgroup memory.max of /a/b", "/proc/meminfo MemAvailable"
    ]  # fmt: skip


def test_what_the_kernel_says_of_this_process_is_read():
    resource = pytest.importorskip("resource")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if not os.path.exists("/proc/self/limits"):
        pytest.skip("needs /proc")
    assert hostmem.lockable_bytes() == (None if soft == resource.RLIM_INFINITY else soft)
    assert 0 < hostmem.own_bytes() < hostmem.available_host_bytes().total
