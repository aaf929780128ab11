"""Every exact schedule gives the bits of in order, whatever is slow, however small the buckets.

`test_loops.py` goes on with loops that behave in odd ways.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_offload
from support.engine import (
    EXACT,
    KERNELS,
    Outcome,
    Plan,
    TinyLM,
    batches,
    copies,
    dice,
    kernels,
    optimizer_of,
    same,
    state,
    train,
    weights,
)
from support.engine import settings as config

MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": TinyLM,
    "bf16": lambda: TinyLM(torch.bfloat16),
    "fp16": lambda: TinyLM(torch.float16),
    "mixed": lambda: TinyLM(torch.bfloat16, adapters=True),
}
ONE, ALL = 1, 1 << 20


@cache
def reference(model: str, accumulation: int, missing: bool, steps: int = 3) -> Outcome:
    settings = config("in_order", threads=1, bucket_bytes=ALL)
    return train(settings, plan(accumulation, missing, steps), make=MODELS[model])


def plan(accumulation: int, missing: bool, steps: int = 3) -> Plan:
    return Plan(steps=steps, accumulation=accumulation, missing={0: 3, 1: 0} if missing else {})


SIZES = [(1, 60, 1), (1, 333, 3), (1, ALL, 2), (4, 60, 2), (4, 1500, 4)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accumulation", "bucket_bytes", "ring_slots"), SIZES)
def test_every_setting_gives_the_same_bits(model: str, accumulation: int, bucket_bytes: int, ring_slots: int) -> None:
    expected = reference(model, accumulation, True)
    small = {"bucket_bytes": bucket_bytes, "ring_slots": ring_slots}
    dawdle = random.Random(0)
    with kernels(lambda: time.sleep(dawdle.choice((0.0, 0.0, 0.0, 5e-4))), KERNELS):
        for mode in EXACT:
            delay = dice(bucket_bytes + ring_slots, 5e-4)
            found = train(config(mode, **small), plan(accumulation, True), delay, MODELS[model])
            assert found == expected, mode
    assert train(config("in_order", **small), plan(accumulation, True), make=MODELS[model]) == expected


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("fp32", "in_order"),
        ("mixed", "overlapped"),
        ("mixed", "streamed"),
        ("fp32", "speculative"),
        ("mixed", "small shadow"),
    ],
)
def test_one_element_a_bucket(model: str, mode: str) -> None:
    """Thousands of buckets; some of their copies are late."""
    roll = random.Random(1)
    found = train(
        config(mode, bucket_bytes=ONE, ring_slots=3),
        plan(1, False, steps=2),
        lambda d, n: 1e-3 if roll.random() < 0.005 else 0.0,
        MODELS[model],
    )
    assert found == reference(model, 1, False, 2)


CLIPS = {"never": 1e9, "sometimes": None, "always": 1e-3}


@pytest.mark.parametrize(("model", "accumulation"), [("fp32", 1), ("bf16", 4)])
@pytest.mark.parametrize("bites", CLIPS)
def test_clipping_never_sometimes_always(bites: str, accumulation: int, model: str) -> None:
    """ "sometimes": the bound lies between the norms of the steps."""

    def run(mode: str) -> tuple[Any, ...]:
        data, seen = batches(), []
        with copies(dice(3, 5e-4) if mode != "in_order" else None):
            net = MODELS[model]()
            optimizer = optimizer_of(net, config(mode))
        for step in range(6):
            for _ in range(accumulation):
                (net(next(data)) / accumulation).backward()
            norm = optimizer.clip_grad_norm_(math.inf).item()
            bound = CLIPS[bites] or norm * (2.0 if step % 3 else 0.5)
            optimizer.clip_grad_norm_(bound)
            seen.append((norm, bound < norm))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        result = seen, weights(net), state(optimizer)
        optimizer.close()
        return result

    expected = run("in_order")
    assert {bit for _, bit in expected[0]} == {"never": {False}, "always": {True}, "sometimes": {True, False}}[bites]
    for mode in EXACT:
        found = run(mode)
        assert found[0] == expected[0], mode
        assert same(found[1], expected[1]) and same(found[2], expected[2]), mode


def test_fp16_with_overflows() -> None:
    """As a GradScaler does it: overflowing steps are skipped, and the scale goes up and down."""

    def run(mode: str) -> tuple[Any, ...]:
        data, seen, scale = batches(), [], 2.0**8
        net = MODELS["fp16"]()
        optimizer = optimizer_of(net, config(mode))
        for step in range(10):
            for _ in range(2):
                (net(next(data)) * (scale * (2.0**16 if step in (3, 4, 8) else 1.0))).backward()
            overflow = bool(optimizer.unscale_(1.0 / scale))
            seen.append((overflow, repr(optimizer.clip_grad_norm_(0.5).item())))
            if not overflow or step == 4:  # the Trainer's optimizer looks for itself
                optimizer.step()
            scale = scale / 2 if overflow else scale * (2 if step % 2 else 1)
            optimizer.zero_grad()
        optimizer.synchronize()
        stats = optimizer.stats()
        result = (seen, stats.steps, stats.skipped_steps), weights(net), state(optimizer)
        optimizer.close()
        return result

    expected = run("in_order")
    assert [overflow for overflow, _ in expected[0][0]].count(True) == 3 and expected[0][1:] == (7, 1)
    for mode in EXACT:
        found = run(mode)
        assert found[0] == expected[0], mode
        assert same(found[1], expected[1]) and same(found[2], expected[2]), mode


# ---- many threads: kernels run in parallel from 32,768 elements on


THREADS = """
    import torch
    from hf_offload import OffloadAdam, OffloadConfig
    from hf_offload.kernels import cpu

    MODES = {
        "in_order": {"schedule": "in_order"},
        "overlapped": {"schedule": "overlapped"},
        "streamed": {"schedule": "overlapped", "stream_gradients": True},
        "speculative": {"schedule": "overlapped", "stream_gradients": True, "shadow_bytes": 1 << 24},
    }

    def run(dtype, schedule, threads, bucket_bytes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 301)).to(dtype)
        config = OffloadConfig(**MODES[schedule], threads=threads, bucket_bytes=bucket_bytes)
        optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in model.parameters()]
            torch.autograd.backward(list(model.parameters()), grads)
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        saved = optimizer.state_dict()["state"]
        optimizer.close()
        return [norm, *(p.detach() for p in model.parameters()), *(t for e in saved.values() for t in e.values())]

    assert cpu.max_threads() == 8
    for dtype in (torch.float32, torch.bfloat16):
        expected = run(dtype, "in_order", 1, 1 << 20)
        for schedule, threads, bucket_bytes in [
            ("in_order", 2, 1 << 20), ("in_order", 8, 1 << 20), ("overlapped", 8, 1 << 20), ("overlapped", 3, 200_001),
            ("overlapped", None, 100_000), ("streamed", 8, 1 << 20), ("streamed", 3, 200_001),
            ("speculative", 8, 100_000), ("speculative", 2, 1 << 20),
        ]:
            found = run(dtype, schedule, threads, bucket_bytes)
            assert all(torch.equal(a, b) for a, b in zip(expected, found)), (dtype, schedule, threads, bucket_bytes)
    print("the same bits")
"""


def test_1_2_and_many_threads_give_the_same_bits() -> None:
    env = {**os.environ, "NUMBA_NUM_THREADS": "8", "PYTHONPATH": str(Path(hf_offload.__file__).parents[1])}
    code = textwrap.dedent(THREADS)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout
