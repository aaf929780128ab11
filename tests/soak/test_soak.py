"""Thousands of steps of whatever may come, with copies and kernels late at random, beside a plain run in order.

After every stretch the bits are the same; memory, threads and open files are those of the first stretches.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from support.engine import EXACT, KERNELS, TinyLM, batches, copies, dice, kernels, optimizer_of, same, state, weights
from support.engine import settings as config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2000
MOST_SECONDS = 60.0
"""After so long no new stretch begins; a slow machine takes fewer steps."""
LEAST_STEPS = 300
WARM_UP = 9
"""Stretches after which memory and threads must be level: by then every mode and every path has run."""
ALLOWED_KIB, ALLOWED_OBJECTS = 12 << 10, 3000
"""What the end may have above that, of memory and of objects that Python tracks. A list of the events of 600 steps has
ten times as many."""


@pytest.fixture(autouse=True)
def quick_and_quiet() -> Iterator[None]:
    """Models this small only lose by torch's threads, and skipped steps are many."""
    threads, logger = torch.get_num_threads(), logging.getLogger("hf_offload")
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    yield
    torch.set_num_threads(threads)
    logger.setLevel(logging.NOTSET)


@dataclass(frozen=True)
class Step:
    """One step as both runs take it."""

    micro_batches: int
    missing: int | None
    clip: float | None
    lr: float | None
    spoilt: bool
    zero: str
    look: bool


def steps_of(roll: random.Random, count: int) -> Iterator[Step]:
    for _ in range(count):
        clip = roll.choice((None, 0.5, 0.05, 1e9))
        yield Step(
            micro_batches=roll.choice((1, 1, 2, 3)),
            missing=roll.choice((None, None, None, roll.randrange(20))),
            clip=clip,
            lr=roll.choice((None, None, 1e-2 * roll.random())),
            spoilt=clip is not None and roll.random() < 0.08,  # skipped: a norm is computed
            zero=roll.choice(("none", "none", "zero")),
            look=roll.random() < 0.1,
        )


def take(step: Step, model: nn.Module, optimizer: OffloadAdam, data: Iterator[Tensor]) -> float:
    """Returns the norm, or 0.0."""
    params = list(model.parameters())
    for micro in range(step.micro_batches):
        loss = model(next(data)) / step.micro_batches
        (loss * math.inf if step.spoilt and not micro else loss).backward()
    if step.missing is not None:
        params[step.missing % len(params)].grad = None
    if step.lr is not None:
        optimizer.param_groups[0]["lr"] = step.lr
    norm = 0.0 if step.clip is None else optimizer.clip_grad_norm_(step.clip).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=step.zero == "none")
    if step.look:
        optimizer.synchronize()
    return norm


def replaced(optimizer: OffloadAdam, model: nn.Module, roll: random.Random, mode: str) -> OffloadAdam:
    """Another optimizer, of other settings, that goes on where this one was: by a file, or by a dict."""
    saved: Any = optimizer.state_dict()
    if roll.random() < 0.5:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    else:
        saved = copy.deepcopy(saved)
    optimizer.close()
    sizes = {
        "bucket_bytes": roll.choice((300, 900, 1 << 20)),
        "ring_slots": roll.choice((1, 2, 4)),
        "threads": roll.choice((1, 2)),
    }
    with copies(dice(roll.randrange(1 << 30), 4e-4)):
        made = optimizer_of(model, config(mode, **sizes))
    made.load_state_dict(saved)
    return made


@contextmanager
def dawdling(roll: random.Random) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(kernels(lambda: time.sleep(roll.choice((0.0,) * 15 + (2e-4,))), KERNELS))
        yield


# ---- what must stay level


@dataclass(frozen=True)
class Level:
    """What the process holds: anonymous memory in KiB, threads of Python and of the system, open files, objects."""

    memory: int
    threads: int
    tasks: int
    files: int
    objects: int

    @classmethod
    def now(cls) -> Level:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(
            memory=int(status["RssAnon"].split()[0]),
            threads=threading.active_count(),
            tasks=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            objects=len(gc.get_objects()),
        )


def assert_level(first: Level, last: Level) -> None:
    assert last.threads <= first.threads, (first, last)
    assert last.tasks <= first.tasks, (first, last)
    assert last.files <= first.files, (first, last)
    assert last.objects <= first.objects + ALLOWED_OBJECTS, (first, last)
    assert last.memory <= first.memory + ALLOWED_KIB, (first, last)


class Stretches:
    """Counts stretches and steps, and looks at the level when the warm-up has ended."""

    def __init__(self) -> None:
        self.begun, self.steps, self.stretch = time.monotonic(), 0, 0
        self.level: Level | None = None

    def __iter__(self) -> Iterator[int]:
        while self.steps < STEPS and (time.monotonic() - self.begun < MOST_SECONDS or self.steps < LEAST_STEPS):
            yield self.stretch
            self.stretch += 1

    def warmed_up(self) -> None:
        self.level = Level.now()

    def check(self) -> None:
        assert self.level is not None and self.steps >= LEAST_STEPS
        until = time.monotonic() + 5.0
        while Level.now().tasks > self.level.tasks and time.monotonic() < until:
            time.sleep(0.05)  # the system may still list a thread that was joined
        assert_level(self.level, Level.now())


Run = tuple[nn.Module, OffloadAdam, Iterator[Tensor]]


def both(roll: random.Random, dawdle: random.Random, plain: Run, soaked: Run) -> int:
    """A stretch of steps, of one run and then of the other: in turns, whatever is late would have time to catch up.
    Returns how many."""
    script = list(steps_of(roll, roll.randrange(5, 40)))
    norms = [take(step, *plain) for step in script]
    with dawdling(dawdle):
        assert repr([take(step, *soaked) for step in script]) == repr(norms), "nan is nan"
    return len(script)


def soak(seed: int, make: Callable[[], nn.Module], modes: tuple[str, ...], reference: str) -> None:
    """Takes the same steps with one optimizer of `reference` that nothing disturbs, and with one of `modes` after the
    other."""
    roll, dawdle = random.Random(seed), random.Random(seed + 1)
    plain, soaked = make(), make()
    expected = optimizer_of(plain, config(reference, bucket_bytes=1 << 20, threads=1))
    found = optimizer_of(soaked, config(modes[0], bucket_bytes=300))
    plain_data, soaked_data = batches(seed), batches(seed)
    stretches = Stretches()
    for stretch in stretches:
        mode = modes[stretch % len(modes)] if stretch < 2 * len(modes) else roll.choice(modes)
        if stretch == WARM_UP:
            found = replaced(found, soaked, roll, "in_order")  # as many threads as at the end
            stretches.warmed_up()
        with dawdling(dawdle):
            found = replaced(found, soaked, roll, mode)
        stretches.steps += both(roll, dawdle, (plain, expected, plain_data), (soaked, found, soaked_data))
        for optimizer in (expected, found):
            optimizer.synchronize()
        assert same(weights(plain), weights(soaked)) and same(state(expected), state(found)), (stretch, mode)
    found = replaced(found, soaked, roll, "in_order")
    stretches.check()
    expected.close()
    found.close()


@pytest.mark.parametrize(("seed", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_exact_schedules(seed: int, dtype: torch.dtype) -> None:
    soak(seed, lambda: TinyLM(dtype, blocks=2, adapters=dtype != torch.float32), ("in_order", *EXACT), "in_order")


def test_delayed() -> None:
    """Not exact, but determined: the steps of a delayed run that nothing disturbs. Every save drains it, there too."""
    roll, dawdle = random.Random(3), random.Random(4)
    plain, soaked = TinyLM(blocks=2), TinyLM(blocks=2)
    expected = optimizer_of(plain, config("delayed", bucket_bytes=1 << 20, threads=1))
    with copies(dice(5, 4e-4)):
        found = optimizer_of(soaked, config("delayed", bucket_bytes=300))
    plain_data, soaked_data = batches(6), batches(6)
    stretches = Stretches()
    for stretch in stretches:
        if stretch == WARM_UP:
            stretches.warmed_up()
        stretches.steps += both(roll, dawdle, (plain, expected, plain_data), (soaked, found, soaked_data))
        for optimizer in (expected, found):
            optimizer.synchronize()
        assert same(weights(plain), weights(soaked)) and same(state(expected), state(found)), stretch
    stretches.check()
    expected.close()
    found.close()
