"""What the tests of faults share: a loop that meets one, what must be left of it, and programs run beside the test."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hf_offload import OffloadAdam
from hf_offload.kernels import cpu
from support.engine import MODES, VOCAB, TinyLM, batches, groups, optimizer_of, ours, same, settings, state, weights

ROOT = Path(__file__).resolve().parents[2]
SOON = 40.0  # seconds: far less than the default of timeout_s, far more than anything here takes
EVERY = tuple(MODES)
every_mode = pytest.mark.parametrize("mode", EVERY)
QUICK = ("in_order", "overlapped", "speculative", "delayed")
most_modes = pytest.mark.parametrize(
    "mode", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in EVERY]
)
"""Every mode; those that share their code with another one are slow, where a test of one takes long."""


class Boom(RuntimeError):
    """The user's own error."""


Bits = tuple[dict[str, Tensor], dict[str, Tensor]]


def learn(model: nn.Module, optimizer: OffloadAdam, data: Iterator[Tensor], steps: int, accumulation: int = 1) -> None:
    """`steps` clipped steps, each of `accumulation` micro-batches."""
    for _ in range(steps):
        for _ in range(accumulation):
            (model(next(data)) / accumulation).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def bits_of(model: nn.Module, optimizer: OffloadAdam) -> Bits:
    """Weights and state once all is at rest."""
    optimizer.synchronize()
    return weights(model), state(optimizer)


@functools.cache
def undisturbed(mode: str, steps: int, accumulation: int = 1, seed: int = 0) -> Bits:
    """What a run in `mode` ends with that meets no fault. `seed`: of the model; its data are those of `seed` + 1."""
    model = TinyLM(seed=seed)
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, batches(seed + 1), steps, accumulation)
    found = bits_of(model, optimizer)
    optimizer.close()
    return found


def agree(a: Bits, b: Bits) -> bool:
    """Whether both are the same, bit for bit."""
    return all(same(x, y) for x, y in zip(a, b))


def twin_of(model: nn.Module, config: Any) -> OffloadAdam:
    """An optimizer of its own for a copy of a model."""
    return OffloadAdam(groups(model), lr=1e-2, config=config, model=model)


class Spots:
    """Ctrl-C at the `nth` instruction that this thread runs in files whose path contains `where`, counted from where
    the function `since` is first called.

    Attributes:
        fell: where it fell; nothing while it has not.
    """

    def __init__(self, where: str, since: str, nth: int) -> None:
        self._where = where
        self._since: str | None = since
        self._left = nth
        self.fell = ""
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._enters)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enters(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if self._where not in code.co_filename or self._since not in (None, code.co_name):
            return None
        self._since = None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._runs

    def _runs(self, frame: FrameType, event: str, arg: object) -> Any:
        self._left -= event == "opcode"
        if not self._left:
            self.fell = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            sys.settrace(self._before)
            raise KeyboardInterrupt
        return self._runs


def leftovers() -> list[str]:
    """Names of our threads that are still there once garbage was collected."""
    gc.collect()
    return sorted(t.name for t in ours())


def anonymous_kib() -> int:
    """RssAnon of this process, KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def grows(fault: Callable[[], object], times: int) -> int:
    """KiB by which this process grew over the second half of `times` faults."""
    for _ in range(times // 2):
        fault()
    gc.collect()
    before = anonymous_kib()
    for _ in range(times // 2):
        fault()
    gc.collect()
    return anonymous_kib() - before


PREAMBLE = """
import atexit, os, signal, sys, threading, time
import torch
from hf_offload import OffloadAdam, OffloadConfig
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))

def make(**given):
    given = {"schedule": "overlapped", "bucket_bytes": 4096, "link_latency_us": 5_000, "threads": 1, **given}
    return OffloadAdam(model.parameters(), config=OffloadConfig(**given), model=model)

def step(optimizer, count=1):
    for _ in range(count):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""A model, and steps that take tens of milliseconds each: whatever comes next comes in the middle of one."""


def start(code: str, folder: Path, *args: str) -> subprocess.Popen[str]:
    """A Python program of its own, in `folder`: the preamble, then `code`."""
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + code, *args], cwd=folder, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(program: subprocess.Popen[str], within_s: float = 120.0) -> tuple[int, str, str]:
    """Exit code, output and complaints of a program; one that hangs is killed, and the test fails."""
    try:
        out, err = program.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        program.kill()
        out, err = program.communicate()
        raise AssertionError(f"the program hangs\n{out[-2000:]}\n{err[-4000:]}") from None
    return program.returncode, out, err


def total(model: nn.Module, answer: Any) -> None:
    """In a spawned process, which imports this module by name."""
    answer.put(sum(p.double().sum().item() for p in model.parameters()))


class Rows(Dataset[Tensor]):
    """Rows that a worker makes; a spawned one imports this module by name.

    Args:
        kernel: with a kernel of ours, as somebody's collator might.
    """

    def __init__(self, kernel: bool = False) -> None:
        self.kernel = kernel

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        if self.kernel:
            big = np.ones(200_000, np.float32)
            cpu.sum_of_squares(big, "float32", threads=2)
        return torch.randint(0, VOCAB, (5,), generator=torch.Generator().manual_seed(i))
