"""CPUs near a GPU, from made-up /sys trees; and that what is done there stays there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_offload import OffloadAdam, OffloadConfig, numa
from hf_offload.engine import placement
from hf_offload.kernels import cpu
from support.hosttree import tree
from support.hosttree_cpus import smt

GPU = "0000:17:00.0"
NODE = "sys/devices/system/node"
TWO = {
    f"{NODE}/online": "0-1\n",
    f"{NODE}/node0/cpulist": "0-3,8-11\n",
    f"{NODE}/node1/cpulist": "4-7,12-15\n",
    f"sys/bus/pci/devices/{GPU}/numa_node": "1\n",
    "sys/bus/pci/devices/0000:ca:00.0/numa_node": "-1\n",
    **smt(16),
}
ONE = {f"{NODE}/online": "0\n", f"{NODE}/node0/cpulist": "0-15\n", f"sys/bus/pci/devices/{GPU}/numa_node": "0\n"}
NEAR = frozenset({4, 5, 6, 7, 12, 13, 14, 15})


@pytest.mark.parametrize(
    ("files", "gpu", "near"),
    [
        pytest.param(TWO, GPU, NEAR, id="two nodes"),
        pytest.param(TWO, GPU.upper(), NEAR, id="upper case"),
        pytest.param(TWO, "0000:ca:00.0", frozenset(), id="a node that is not known"),
        pytest.param(TWO, "0000:01:00.0", frozenset(), id="another device"),
        pytest.param(ONE, GPU, frozenset(), id="one node"),
        pytest.param({}, GPU, frozenset(), id="the system tells nothing"),
    ],
)
def test_cpus_near_a_gpu(tmp_path: Path, files: dict[str, str], gpu: str, near: frozenset[int]) -> None:
    assert numa.cpus_near(gpu, tree(tmp_path, files)) == near


@pytest.mark.parametrize(
    ("mine", "threads", "home"),
    [
        pytest.param(range(16), 4, NEAR, id="a share of the node"),
        pytest.param(range(16), 5, frozenset(), id="more than one node has: all nodes' memory at once"),
        pytest.param((4, 5, 12, 13), 2, {4, 5, 12, 13}, id="bound already"),
        pytest.param((4, 12), 2, frozenset(), id="siblings are one core"),
        pytest.param(range(4), 1, frozenset(), id="bound elsewhere"),
    ],
)
def test_the_step_goes_home_where_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: range, threads: int, home: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mine), raising=False)
    assert numa.home_of(GPU, threads, tree(tmp_path, TWO)) == home


bound = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU, or no affinity masks"
)


@bound
def test_threads_started_there_stay_and_the_caller_returns() -> None:
    before = os.sched_getaffinity(0)
    home = frozenset([max(before)])
    seen, leave = [], threading.Event()
    thread = threading.Thread(target=lambda: (leave.wait(), seen.append(os.sched_getaffinity(0))))
    with pytest.raises(ZeroDivisionError), numa.kept_to(home):
        thread.start()
        seen.append(os.sched_getaffinity(0))
        raise ZeroDivisionError
    leave.set()
    thread.join()
    assert seen == [home, home]
    assert os.sched_getaffinity(0) == before


@bound
@pytest.mark.parametrize("cpus", [frozenset(), frozenset([100_000])])
def test_nowhere_to_go_is_no_error(cpus: frozenset[int]) -> None:
    before = os.sched_getaffinity(0)
    with numa.kept_to(cpus):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_the_address_is_that_of_the_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of an index that ignores CUDA_VISIBLE_DEVICES."""
    asked = []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: asked.append(where) or gpu)
    monkeypatch.setattr(placement, "home_of", lambda *given: asked.append(given) or frozenset())
    with placement._near("cuda:1", 12):
        pass
    assert asked == [torch.device("cuda:1"), (GPU, 12)]
    del gpu.pci_domain_id  # an older torch
    with placement._near("cuda:1", 12):
        pass
    with placement._near("cpu", 12):
        pass
    assert len(asked) == 3


@bound
def test_all_threads_of_an_engine_stay_there_and_the_training_thread_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    home = frozenset([max(before)])
    monkeypatch.setattr(placement, "_near", lambda device, threads: numa.kept_to(home))
    others = {t.native_id for t in threading.enumerate()}
    p = torch.nn.Parameter(torch.ones(8))
    with OffloadAdam([p], config=OffloadConfig(threads=1)) as optimizer:
        p.grad = torch.ones(8)
        optimizer.step()
        ours = [t.native_id for t in threading.enumerate() if t.native_id not in others]
        assert len(ours) == 3 and all(os.sched_getaffinity(n or 0) == home for n in ours)
    assert os.sched_getaffinity(0) == before


@bound
def test_masters_are_seeded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    home = frozenset([max(before)])
    monkeypatch.setattr(placement, "_near", lambda device, threads: numa.kept_to(home))
    seen = []
    widen = cpu.widen
    monkeypatch.setattr(cpu, "widen", lambda *given: (seen.append(os.sched_getaffinity(0)), widen(*given)))
    with OffloadAdam([torch.nn.Parameter(torch.ones(8))], config=OffloadConfig(threads=1)) as optimizer:
        optimizer.engine.bind_trainable()
    assert seen == [home] and os.sched_getaffinity(0) == before
