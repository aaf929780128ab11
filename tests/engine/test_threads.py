"""How many threads the host step takes, what is refused, and where the choice is told."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.cpus import Cpus
from hf_offload.engine import step_threads
from hf_offload.engine.step_threads import usable_threads
from hf_offload.errors import ConfigError
from hf_offload.kernels import cpu

SOCKET = Cpus(usable=32, cores=16, pool=64, ranks=4)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use 32 CPUs on 16 cores; nothing is set."""
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "max_threads", lambda: int(os.environ.get("NUMBA_NUM_THREADS", 32)))
    monkeypatch.setattr(step_threads, "find_cpus", lambda: SOCKET)
    step_threads._tell_once.cache_clear()


@pytest.mark.parametrize("omp", [None, "1"])
def test_a_ranks_share_whatever_a_launcher_says_to_openmp(omp: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert usable_threads(None) == 16


def test_what_was_asked_for_is_neither_shared_nor_kept_to_whole_cores() -> None:
    assert [usable_threads(n) for n in (1, 16, 17, 32)] == [1, 16, 17, 32]


def test_more_than_the_affinity_mask_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        usable_threads(33)
    for part in ("threads=33", "may use 32", "affinity: 32 CPUs on 16 cores", "threads=32 or fewer", "leave it out"):
        assert part in str(error.value)


def test_more_than_the_quota_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = Cpus(usable=32, cores=32, quota=3.5, quota_of="cgroup cpu.max of /box")
    monkeypatch.setattr(step_threads, "find_cpus", lambda: tight)
    assert usable_threads(None) == 3 and usable_threads(4) == 4
    with pytest.raises(ConfigError, match=r"may use 4 .*cgroup cpu\.max of /box grants 3\.5 CPUs.*quota"):
        usable_threads(5)


def test_numba_num_threads_is_somebodys_own_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_NUM_THREADS", "40")
    assert usable_threads(None) == 40
    with pytest.raises(ConfigError, match=r"may use 40 \(NUMBA_NUM_THREADS=40\).*unset or raise NUMBA_NUM_THREADS"):
        usable_threads(41)


def test_a_refused_optimizer_leaves_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="threads=1000"):
        OffloadAdam([torch.nn.Parameter(torch.ones(3))], config=OffloadConfig(threads=1000))


def test_the_choice_and_its_reason_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_offload")
    for _ in range(2):
        usable_threads(None)
    told = [r.getMessage() for r in caplog.records]
    assert told == ["hf_offload: threads of the host step: 16 (affinity: 32 CPUs on 16 cores; 4 ranks share 64 cores)"]
    usable_threads(2)
    assert "2 (threads=2; affinity" in caplog.records[-1].getMessage()


def test_torchs_own_threads_are_left_alone() -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    p = torch.nn.Parameter(torch.ones(100_000))
    with OffloadAdam([p], config=OffloadConfig(threads=1)) as optimizer:
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before
