"""How many threads the host step should take where the training thread computes on the same cores.

    python -m hf_offload.bench.threads --json

A multi-layer perceptron of bf16 weights trains on the CPU over the host transport, once with each number of threads of
the host step, interleaved round by round in one process: seconds a step, and its ratio to that with all of them. In
order the training thread waits while the step runs; overlapped, torch's threads compute the next forward meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, environment
from hf_offload.engine.step_threads import step_threads

WARM_UP = 2


@dataclass(frozen=True)
class Setting:
    """The model's layers and their width, rows of a batch, steps of each round, rounds."""

    layers: int = 8
    width: int = 1024
    rows: int = 64
    steps: int = 8
    rounds: int = 5

    def model(self) -> nn.Sequential:
        """Blocks of a class of their own, which the engine takes for units."""
        blocks = nn.ModuleList(_Block(self.width) for _ in range(self.layers))
        return nn.Sequential(*blocks).to(torch.bfloat16)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(x)))
        return result


def run(setting: Setting) -> dict[str, Any]:
    """Seconds a step by schedule and threads: the median over rounds of each round's median."""
    most = step_threads().most
    counts = sorted({1, max(1, most // 2), max(1, most - 1), most})
    found: dict[str, dict[int, list[float]]] = {s: {n: [] for n in counts} for s in ("in_order", "overlapped")}
    for _ in range(setting.rounds):
        for schedule, by_threads in found.items():
            for threads, seconds in by_threads.items():
                seconds.append(_round(setting, OffloadConfig(schedule=schedule, threads=threads)))
    medians = {s: {n: statistics.median(seconds) for n, seconds in by.items()} for s, by in found.items()}
    return {
        "seconds_per_step": medians,
        "ratio_to_all_threads": {s: {n: value / by[most] for n, value in by.items()} for s, by in medians.items()},
        "torch_threads": torch.get_num_threads(),
        "params": sum(p.numel() for p in setting.model().parameters()),
        "machine": environment.hardware(),
        "versions": environment.versions(),
    }


def _round(setting: Setting, config: OffloadConfig) -> float:
    """The median seconds of a step, from one step's end to the next one's."""
    torch.manual_seed(0)
    model = setting.model()
    x = torch.randn(setting.rows, setting.width).to(torch.bfloat16)
    ends = []
    with OffloadAdam(model.parameters(), lr=1e-4, config=config, model=model) as optimizer:
        for _ in range(WARM_UP + setting.steps + 1):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.threads", description=(__doc__ or "")[:90])
    for name in ("layers", "width", "rows", "steps", "rounds"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    found = run(Setting(given.layers, given.width, given.rows, given.steps, given.rounds))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for schedule, by_threads in found["seconds_per_step"].items():
        for threads, seconds in by_threads.items():
            ratio = found["ratio_to_all_threads"][schedule][threads]
            print(f"{schedule:<11} {threads:>3} threads  {seconds * 1e3:9.2f} ms a step  x {ratio:.3f}")


if __name__ == "__main__":
    main()
