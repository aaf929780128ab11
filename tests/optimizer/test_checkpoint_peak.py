"""Saving and loading take no memory beside the state, which is why the plan has nothing for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, hostmem
from support.optimizer import config, give, gradients

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")

N = 6_000_000
STATE = 12 * N
SLACK = 3 * STATE // 100


class Peak:
    """The most memory of its own that this process has touched meanwhile, above that at the start."""

    def __init__(self) -> None:
        self._start = self._most = hostmem.own_bytes()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._most = max(self._most, hostmem.own_bytes())

    def end(self) -> int:
        self._ended.set()
        self._watcher.join()
        return max(self._most, hostmem.own_bytes()) - self._start


@contextmanager
def flat(allowed: int = SLACK) -> Iterator[None]:
    peak = Peak()
    try:
        yield
    finally:
        taken = peak.end()
    assert taken < allowed, f"{taken / 1e6:.1f} MB beside a state of {STATE / 1e6:.1f} MB"


def trained() -> tuple[OffloadAdam, list[Any]]:
    params = [nn.Parameter(torch.ones(N // 4, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = OffloadAdam(params, config=config(bucket_bytes=1 << 20))
    give(params, gradients(0, params))
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, params


def test_saving_and_loading(tmp_path: Path) -> None:
    """By torch's own functions, as the Trainer does; loaded by `mmap`, the file is page cache, not memory of ours."""
    optimizer, params = trained()
    file = tmp_path / "optimizer.pt"
    torch.save({"warm": torch.zeros(10)}, file)
    for _ in range(2):  # nothing is left by the first one, either
        with flat():
            torch.save(optimizer.state_dict(), file)
    assert file.stat().st_size > STATE
    before = {name: t.clone() for name, t in optimizer.state[params[0]].items()}
    give(params, gradients(1, params))
    optimizer.step()
    optimizer.zero_grad()
    with flat():
        optimizer.load_state_dict(torch.load(file, mmap=True, weights_only=True))
    assert all(torch.equal(optimizer.state[params[0]][name], t) for name, t in before.items())
    optimizer.close()


def test_the_measure_sees_a_copy(tmp_path: Path) -> None:
    optimizer, _ = trained()
    with pytest.raises(AssertionError, match=r"beside a state of 72\.0 MB"), flat():
        copies = [t.clone() for entry in optimizer.state_dict()["state"].values() for t in entry.values()]
    del copies
    optimizer.close()


def test_loading_into_a_new_optimizer_takes_the_state_and_no_more(tmp_path: Path) -> None:
    optimizer, params = trained()
    file = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), file)
    optimizer.close()
    del optimizer
    fresh = OffloadAdam(params, config=config(bucket_bytes=1 << 20))
    with flat(STATE + SLACK):
        fresh.load_state_dict(torch.load(file, mmap=True, weights_only=True))
    fresh.close()
