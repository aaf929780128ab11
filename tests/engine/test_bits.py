"""Overlapped gives the bits of in order, whatever is slow, however small the buckets, however the loop behaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from support.engine import (
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
def reference(model: str, accumulation: int, missing: bool) -> Outcome:
    return train(config("in_order", threads=1, bucket_bytes=ALL), plan(accumulation, missing), make=MODELS[model])


def plan(accumulation: int, missing: bool, steps: int = 3) -> Plan:
    return Plan(steps=steps, accumulation=accumulation, missing={0: 3, 1: 0} if missing else {})


SIZES = [(1, 60, 1), (1, 333, 3), (1, ALL, 2), (4, 60, 2), (4, 1500, 4)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accumulation", "bucket_bytes", "ring_slots"), SIZES)
def test_every_setting_gives_the_same_bits(model: str, accumulation: int, bucket_bytes: int, ring_slots: int) -> None:
    expected = reference(model, accumulation, True)
    small = {"bucket_bytes": bucket_bytes, "ring_slots": ring_slots}
    dawdle = random.Random(0)
    with kernels(lambda: time.sleep(dawdle.choice((0.0, 0.0, 0.0, 5e-4)))):
        delay = dice(bucket_bytes + ring_slots, 5e-4)
        overlapped = train(config("overlapped", **small), plan(accumulation, True), delay, MODELS[model])
    assert overlapped == expected
    assert train(config("in_order", **small), plan(accumulation, True), make=MODELS[model]) == expected


@pytest.mark.parametrize("model", ["fp32", "mixed"])
def test_one_element_a_bucket(model: str) -> None:
    """Thousands of buckets; some of their copies are late."""
    expected = reference(model, 1, False)
    roll = random.Random(1)
    for schedule in ("overlapped", "in_order"):
        found = train(
            config(schedule, bucket_bytes=ONE, ring_slots=3),
            plan(1, False),
            lambda d, n: 1e-3 if roll.random() < 0.005 else 0.0,
            MODELS[model],
        )
        assert found == expected


# ---- many threads: kernels run in parallel from 32,768 elements on


THREADS = """
    import torch
    from hf_offload import OffloadAdam, OffloadConfig
    from hf_offload.kernels import cpu

    def run(dtype, schedule, threads, bucket_bytes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 301)).to(dtype)
        config = OffloadConfig(schedule=schedule, threads=threads, bucket_bytes=bucket_bytes)
        optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.synchronize()
        saved = optimizer.state_dict()["state"]
        optimizer.close()
        return [norm, *(p.detach() for p in model.parameters()), *(t for e in saved.values() for t in e.values())]

    assert cpu.max_threads() == 8
    for dtype in (torch.float32, torch.bfloat16):
        expected = run(dtype, "in_order", 1, 1 << 20)
        for schedule, threads, bucket_bytes in [
            ("in_order", 2, 1 << 20), ("in_order", 8, 1 << 20), ("overlapped", 8, 1 << 20), ("overlapped", 3, 200_001),
            ("overlapped", None, 100_000),
        ]:
            found = run(dtype, schedule, threads, bucket_bytes)
            assert all(torch.equal(a, b) for a, b in zip(expected, found)), (dtype, schedule, threads, bucket_bytes)
    print("the same bits")
"""


def test_1_2_and_many_threads_give_the_same_bits() -> None:
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "NUMBA_NUM_THREADS": "8", "PYTHONPATH": str(root)}
    code = textwrap.dedent(THREADS)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout


# ---- any loop


ACTION_NAMES = ["generate", "eval", "train", "state_dict", "synchronize", "save", "swap", "stats", "pause"]
STEP = st.fixed_dictionaries(
    {
        "micro_batches": st.integers(1, 3),
        "clip": st.sampled_from([None, 0.1, 10.0]),
        "missing": st.none() | st.integers(0, 18),
        "zero": st.sampled_from(["none", "none", "zero", "keep"]),
        "lr": st.sampled_from([1e-2, 3e-3]),
        "after": st.lists(
            st.sampled_from(
                ["generate", "eval", "train", "state_dict", "synchronize", "save", "swap", "stats", "pause"]
            ),
            max_size=2,
        ),
    }
)
LOOPS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "bucket_bytes": st.sampled_from([17, 60, 333, 1500, ALL]),
        "ring_slots": st.integers(1, 4),
        "seed": st.integers(0, 10_000),
        "steps": st.lists(STEP, min_size=2, max_size=4),
    }
)


def follow(loop: dict[str, Any], schedule: str) -> tuple[list[float], Any, Any]:
    """Train as `loop` says; in order without any delay."""
    overlapped = schedule == "overlapped"
    data, seen, roll = batches(loop["seed"]), [], random.Random(loop["seed"])
    with ExitStack() as stack:
        stack.enter_context(copies(dice(loop["seed"], 1e-3) if overlapped else None))
        if overlapped:
            stack.enter_context(kernels(lambda: time.sleep(roll.choice((0.0, 0.0, 0.0, 5e-4)))))
        model = MODELS[loop["model"]]()
        sizes = {name: loop[name] for name in ("bucket_bytes", "ring_slots")}
        optimizer = optimizer_of(model, config(schedule, **sizes))
        params = list(model.parameters())
        for step in loop["steps"]:
            optimizer.param_groups[0]["lr"] = step["lr"]
            for _ in range(step["micro_batches"]):
                loss = model(next(data))
                loss.backward()
                seen.append(loss.item())
            if step["missing"] is not None:
                params[step["missing"] % len(params)].grad = None
            if step["clip"] is not None:
                seen.append(float(optimizer.clip_grad_norm_(step["clip"])))
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e9  # a scheduler writes right after step(); it must not matter
            if step["zero"] != "keep":
                optimizer.zero_grad(set_to_none=step["zero"] == "none")
            for action in step["after"]:
                ACTIONS[action](model, optimizer, seen, data)
        optimizer.synchronize()
        result = (seen, weights(model), state(optimizer))
        optimizer.close()
    return result


def generate(model: Any, optimizer: Any, seen: list[float], data: Any) -> None:
    with torch.no_grad():
        seen.append(model(next(data)).item())


def evaluate(model: Any, optimizer: Any, seen: list[float], data: Any) -> None:
    optimizer.eval()
    seen.append(sum(float(p.detach().double().sum()) for p in model.parameters()))


def save(model: Any, optimizer: Any, seen: list[float], data: Any) -> None:
    seen.append(sum(float(t.double().sum()) for t in model.state_dict().values()))


def save_state(model: Any, optimizer: Any, seen: list[float], data: Any) -> None:
    seen.append(sum(float(e["exp_avg"].double().sum()) for e in optimizer.state_dict()["state"].values()))


def swap(model: Any, optimizer: Any, seen: list[float], data: Any) -> None:
    """What loads a checkpoint: other weights, then back."""
    mine = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({k: v * 1.5 for k, v in mine.items()})
    seen.append(model(next(data)).item())
    model.load_state_dict(mine)


ACTIONS: dict[str, Callable[[Any, Any, list[float], Any], None]] = {
    "generate": generate,
    "eval": evaluate,
    "train": lambda model, optimizer, seen, data: optimizer.train(),
    "state_dict": save_state,
    "synchronize": lambda model, optimizer, seen, data: optimizer.synchronize(),
    "save": save,
    "swap": swap,
    "stats": lambda model, optimizer, seen, data: optimizer.stats(),
    "pause": lambda model, optimizer, seen, data: time.sleep(2e-3),
}


def both_schedules_agree(loop: dict[str, Any]) -> None:
    expected, found = follow(loop, "in_order"), follow(loop, "overlapped")
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
    assert same(found[2], expected[2])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loop=LOOPS)
def test_any_loop_gives_the_same_bits_in_both_schedules(loop: dict[str, Any]) -> None:
    both_schedules_agree(loop)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loop=LOOPS)
def test_any_of_many_loops_gives_the_same_bits_in_both_schedules(loop: dict[str, Any]) -> None:
    both_schedules_agree(loop)
