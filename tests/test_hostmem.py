"""Host memory: what is read from made-up /proc and /sys trees, and the refusal of plans that do not fit."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from hf_offload import hostmem
from hf_offload.errors import HostMemoryError

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
        f"{folder}/memory.stat": f"anon 1\nfile 99999999\ninactive_file {cache}\nactive_file 7\n",
    }


def v1(group: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 5\ninactive_file 3\ntotal_inactive_file {cache}\n",
    }


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
    hostmem.check_host_budget({"master": 10**18}, None, root)  # nothing known, nothing refused


def test_without_proc_sysconf_then_psutil(monkeypatch):
    answers = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 10, "SC_PHYS_PAGES": 20}
    monkeypatch.setattr(hostmem, "_text", lambda path: "")
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


def test_budget_that_fits_passes(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO})
    left = 50_000_000 * KIB
    hostmem.check_host_budget({"master": left - 1, "pinned ring": 1}, left, root)
    hostmem.check_host_budget({}, 1, root)
    with pytest.raises(HostMemoryError):
        hostmem.check_host_budget({"master": left, "pinned ring": 1}, None, root)


def test_refusal_tells_every_line_sum_left_source_remedy(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job\n", **v2("job", 8 * GB, 5 * GB)}
    need = {"master": 28 * GB, "exp_avg": 28 * GB, "exp_avg_sq": 28 * GB, "pinned ring": 268_435_456}
    with pytest.raises(HostMemoryError) as caught:
        hostmem.check_host_budget(need, None, tree(tmp_path, files))
    text = str(caught.value)
    for name, count in need.items():
        assert any(name in line and f"{count / 1e9:.2f} GB ({count} bytes)" in line for line in text.splitlines())
    assert "84.27 GB (84268435456 bytes)" in text
    assert "3.00 GB (3000000000 bytes) are left" in text
    assert "cgroup memory.max of /job" in text
    assert "memory limit of the container" in text and "LoRA" in text


def test_refusal_by_the_users_cap_names_the_setting():
    with pytest.raises(HostMemoryError, match=r"max_host_bytes=1000: .*Raise max_host_bytes to at least 1001"):
        hostmem.check_host_budget({"master": 1000, "exp_avg": 1}, 1000)
