"""How many threads the host step takes, alone and beside other ranks of the node."""

from __future__ import annotations

import os

import pytest

from hf_offload.engine import refusals
from hf_offload.engine.refusals import usable_threads
from hf_offload.kernels import cpu


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def node(monkeypatch: pytest.MonkeyPatch, usable: int, launcher: int | None, ranks: int = 1) -> None:
    """This process may use `usable` cores and its launcher `launcher`; `ranks` share the node."""
    monkeypatch.setattr(cpu, "max_threads", lambda: usable)

    def affinity(pid: int) -> set[int]:
        assert pid == os.getppid()
        if launcher is None:
            raise ProcessLookupError
        return set(range(launcher))

    monkeypatch.setattr(refusals.os, "sched_getaffinity", affinity, raising=False)
    for name, value in (("RANK", 0), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("usable", "launcher", "ranks", "threads"),
    [
        pytest.param(128, 128, 1, 128, id="alone"),
        pytest.param(32, 128, 1, 32, id="alone and bound"),
        pytest.param(128, 128, 8, 16, id="torchrun"),
        pytest.param(16, 16, 8, 2, id="torchrun in a container of 16 cores"),
        pytest.param(16, 128, 8, 16, id="bound one by one"),
        pytest.param(64, 128, 8, 16, id="bound to a socket, with three others"),
        pytest.param(12, 128, 8, 12, id="bound to fewer"),
        pytest.param(3, 3, 8, 1, id="more ranks than cores"),
        pytest.param(64, None, 8, 8, id="the launcher has ended"),
    ],
)
@pytest.mark.parametrize("omp", [None, "1"])
def test_ranks_share_the_cores_whatever_a_launcher_says_to_openmp(
    usable: int, launcher: int, ranks: int, threads: int, omp: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(monkeypatch, usable, launcher, ranks)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert usable_threads(None) == threads


def test_what_was_asked_for_is_not_shared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    node(monkeypatch, 16, 16, 4)
    assert usable_threads(10) == 10 and not caplog.text
    assert usable_threads(20) == 16 and "threads=20" in caplog.text
    monkeypatch.setenv("NUMBA_NUM_THREADS", "16")
    assert usable_threads(None) == 16
