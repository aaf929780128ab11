"""A step of many small tensors, where the work is nothing and the way to it everything.

    python -m hf_offload.bench.small --json

`OffloadAdam` in order over the host transport, with and without clipping; then, by turns, the same step beside others
that have a pool of OpenMP threads: torch's fused AdamW on fp32 parameters of the same sizes, and the kernel alone on
one bucket of all of them. Microseconds a step, and the CPU time that all threads of the process took for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, environment
from hf_offload.kernels import cpu

Step = Callable[[], object]
Contenders = dict[str, tuple[Sequence[nn.Parameter], Step]]
"""By name: the parameters that get a gradient before each step, and the step."""
WARM_UP, TURN, PAUSE_S = 5, 30, 0.05
"""Steps of a turn that do not count, steps that do, and what is waited before it."""


@dataclass(frozen=True)
class Setting:
    """How many parameters in how many tensors of about one size; steps of each contender, rounded up to whole turns;
    threads of the host step."""

    params: int = 100_000
    tensors: int = 300
    steps: int = 300
    threads: int | None = None

    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        each, more = divmod(self.params, self.tensors)
        return [each + (k < more) for k in range(self.tensors)]


def run(setting: Setting) -> dict[str, Any]:
    """Figures of every contender."""
    config = OffloadConfig(schedule="in_order", threads=setting.threads)
    mine = [nn.Parameter(torch.full((n,), 0.5, dtype=torch.bfloat16)) for n in setting.sizes()]
    theirs = [nn.Parameter(torch.full((n,), 0.5)) for n in setting.sizes()]
    with OffloadAdam(mine, lr=1e-5, config=config) as optimizer:
        fused = torch.optim.AdamW(theirs, lr=1e-5, fused=True)
        threads = optimizer.engine.threads

        def clipped() -> None:
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

        contenders: Contenders = {
            "step": (mine, optimizer.step),
            "clip_and_step": (mine, clipped),
        }
        found = _measured(contenders, setting.steps)
        # Only then: GNU OpenMP has a pool for each thread that asks for one, and lets them sleep sooner once they are
        # more than the cores. In training on a GPU the step's pool is alone, on a CPU it is not.
        more: Contenders = {
            "step_beside_other_pools": (mine, optimizer.step),
            "kernel": ((), _kernel(setting, threads)),
            "torch_fused_fp32": (theirs, fused.step),
        }
        for _, other in more.values():
            other()
        found |= _measured(more, setting.steps)
    return {
        "params": setting.params, "tensors": setting.tensors, "threads": threads, "contenders": found,
        "machine": environment.hardware(), "versions": environment.versions(),
    }  # fmt: skip


def _measured(contenders: Contenders, steps: int) -> dict[str, dict[str, float]]:
    """By contender: median and lower decile of the time of a step, and the median CPU time, microseconds.

    A turn is several steps, after a pause: torch's OpenMP threads spin for a while after its step, and would do so on
    the cores of who comes next.
    """
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(-(-steps // TURN)):
        for name, (params, step) in contenders.items():
            time.sleep(PAUSE_S)
            timed = [_timed(params, step) for _ in range(WARM_UP + TURN)][WARM_UP:]
            wall[name] += [seconds * 1e6 for seconds, _ in timed]
            busy[name] += [cpu_seconds * 1e6 for _, cpu_seconds in timed]
    return {
        name: {
            "us": statistics.median(wall[name]),
            "us_lower_decile": statistics.quantiles(wall[name], n=10, method="inclusive")[0],
            "cpu_us": statistics.median(busy[name]),
        }
        for name in contenders
    }


def _timed(params: Sequence[nn.Parameter], step: Step) -> tuple[float, float]:
    """Seconds of one step with new gradients, and CPU seconds of the process."""
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    began, took = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began, time.process_time() - took


def _kernel(setting: Setting, threads: int) -> Step:
    """`cpu.adam_step` on one bucket of all tensors."""
    sizes = setting.sizes()
    row = cpu.coefficients(
        lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1, grad_scale=1.0, decoupled=True,
        maximize=False,
    )  # fmt: skip
    state = [np.full(setting.params, 0.5, np.float32) for _ in range(3)]
    grad, weight = np.full(setting.params, 0x3C24, np.uint16), np.zeros(setting.params, np.uint16)  # 0.01 in bfloat16
    bounds, rows = np.cumsum([0, *sizes], dtype=np.int64), np.repeat(row[None], len(sizes), axis=0)
    return lambda: cpu.adam_step(*state, grad, weight, bounds, rows, wire="bfloat16", threads=threads)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.small", description=(__doc__ or "")[:80])
    for name, default in (("params", 100_000), ("tensors", 300), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, help="of the host step; default: this process's share of the cores")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    found = run(Setting(given.params, given.tensors, given.steps, given.threads))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{given.params:,} parameters in {given.tensors} tensors; microseconds a step")
    for name, row in found["contenders"].items():
        print(f"  {name:<24} {row['us']:>9.0f}  lower decile {row['us_lower_decile']:>9.0f}  CPU {row['cpu_us']:>9.0f}")


if __name__ == "__main__":
    main()
