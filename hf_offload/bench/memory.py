"""What training takes of the host's memory, beside what was planned.

    python -m hf_offload.bench.memory --params 1e9 --json

A Llama of random bf16 weights trains in exact mode over the host transport: real forward, backward and step. RssAnon,
this process's memory that no file backs, is read after each phase, and every 2 ms during saves and the load. What the
process had before the optimizer was made (interpreter, weights, gradients, what a backward leaves behind) is taken off;
the rest is the optimizer's, and should be the plan's.

Over the host transport nothing is pinned: the ring's pages come as they are used. They are touched here after
construction, as pinning does, so that the ring can be seen alone. And the "device" is the same memory: glibc is told to
give back what is freed (mallopt), since it would keep holes of the size of a few gradients, which differ from run to
run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, environment, planning
from hf_offload.bench.checkpoint import rss_anon, watched
from hf_offload.bench.gpu_model import Llama, build, shape_for
from hf_offload.checkpoint import manifest, torch_file
from hf_offload.engine.masters import cast_trainable
from hf_offload.errors import ConfigError, explain

TOLERANCE = 0.02
"""Part of the plan by which a measurement may differ from it."""
TOKENS = 8
"""A micro-batch: few, so that activations are nothing beside the weights."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's malloc.h."""
SMALL = 1 << 22
"""Parameters up to which the vocabulary is small, too, so that the model keeps its proportions."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how long.

    Attributes:
        params: about how many parameters.
        steps, saves: how many are taken; 5 steps at least.
        config: settings of the engine.
        from_fp32: whether the model is made in fp32 and then cast, as the Trainer does with one that was loaded so.
    """

    params: int
    steps: int = 100
    saves: int = 5
    config: OffloadConfig = OffloadConfig(schedule="in_order")  # noqa: RUF009  (frozen)
    from_fp32: bool = False

    def __post_init__(self) -> None:
        if self.steps < 5:
            raise ConfigError(explain("steps", self.steps, "too few to see memory grow", "Give 5 or more"))

    def shape(self) -> Llama:
        return shape_for(self.params, vocab=32_000 if self.params > 10 * SMALL else 4_000)


class Account:
    """Memory of this process since the account was opened, by phase: measured, and planned.

    Attributes:
        phases: by name, bytes: "measured", "plan", and their ratio.
    """

    def __init__(self) -> None:
        gc.collect()
        self._before = rss_anon()
        self.phases: dict[str, dict[str, float]] = {}

    def now(self) -> int:
        """Bytes taken since."""
        return rss_anon() - self._before

    def note(self, phase: str, plan: int, measured: int | None = None) -> None:
        """`measured`: bytes taken; None: now."""
        found = self.now() if measured is None else measured - self._before
        self.phases[phase] = {"measured": found, "plan": plan, "ratio": found / plan if plan else 1.0}

    def agrees(self) -> bool:
        """Whether every phase took what was planned."""
        return all(abs(p["measured"] - p["plan"]) <= TOLERANCE * p["plan"] for p in self.phases.values() if p["plan"])


def run(setting: Setting, folder: Path) -> dict[str, Any]:
    """Figures of one training run; `folder` gets its checkpoint, 12 bytes a parameter, again at each save."""
    _give_back_freed_memory()
    _warm(setting, folder)
    base = Account()
    model = _model(setting.shape(), setting.from_fp32)
    params = list(model.parameters())
    count = sum(p.numel() for p in params)
    base.note("weights", (6 if setting.from_fp32 else 2) * count)
    _backward(model)
    base.note("weights and gradients", (8 if setting.from_fp32 else 4) * count)
    with _training(setting, model) as (account, optimizer):
        budget = optimizer.engine.placement.budget
        state = sum(budget.need(params).values())
        _touch_ring(optimizer)
        account.note("construction: the ring", budget.ring_bytes)
        optimizer.step()
        waited = 4 * count if setting.from_fp32 else 0  # values that were there before, and became masters
        plan = budget.ring_bytes + state - waited
        account.note("first step", plan)
        each = _steps(optimizer, model, 2, account)
        more, traced = _traced_steps(optimizer, model, setting.steps - 3, account)
        account.note(f"{setting.steps} steps", plan)
        seconds = _saves_and_load(optimizer, folder, setting.saves, plan, account)
        figures = optimizer.stats()
    return {
        "params": count,
        "setting": {"steps": setting.steps, "saves": setting.saves, "from_fp32": setting.from_fp32,
                    "bucket_bytes": setting.config.bucket_bytes, "ring_slots": setting.config.ring_slots},
        "model": base.phases,
        "optimizer": account.phases,
        "agrees_within": TOLERANCE,
        "agrees": account.agrees(),
        "bytes_per_param": {"state, measured": (account.phases["first step"]["measured"] + waited
                                                - budget.ring_bytes) / count, "state, plan": state / count},
        "growth_bytes_from_step_3": {"resident": max([*each[1:], *more]) - each[1],
                                     "python": traced},
        "host_step_seconds": figures.seconds["host_step"],
        "seconds": seconds,
        "machine": environment.hardware(),
        "versions": environment.versions(),
    }  # fmt: skip


@contextmanager
def _training(setting: Setting, model: nn.Module) -> Iterator[tuple[Account, OffloadAdam]]:
    account = Account()
    with OffloadAdam(model.parameters(), lr=1e-5, config=setting.config, model=model) as optimizer:
        yield account, optimizer


def _model(shape: Llama, from_fp32: bool) -> nn.Module:
    """Of bf16 weights, made in bf16; or made in fp32 and cast, the fp32 values waiting to become masters."""
    model: nn.Module = build(shape, TOKENS, "cpu", dtype=torch.float32 if from_fp32 else torch.bfloat16)
    if from_fp32:
        cast_trainable(model, torch.bfloat16)
    return model


def _backward(model: nn.Module) -> None:
    tokens = torch.arange(TOKENS)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


def _touch_ring(optimizer: OffloadAdam) -> None:
    transport = optimizer.engine.placement.transport
    for slot in (*transport.down, *transport.up):
        slot[:] = 0


def _steps(optimizer: OffloadAdam, model: nn.Module, count: int, account: Account) -> list[int]:
    """Bytes taken after each step."""
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()
        found.append(account.now())
    return found


def _traced_steps(optimizer: OffloadAdam, model: nn.Module, count: int, account: Account) -> tuple[list[int], int]:
    """`_steps`, and by how many bytes Python's and NumPy's memory grows from the second of them to the last."""
    tracemalloc.start()
    try:
        found = _steps(optimizer, model, 2, account)  # what a step leaves for the next one to replace is traced now
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        found += _steps(optimizer, model, count - 2, account)
        gc.collect()
        return found, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def _give_back_freed_memory() -> None:
    """Of 64 KiB and more, at once; on glibc alone."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        mallopt(setting, 1 << 16)


def _saves_and_load(
    optimizer: OffloadAdam, folder: Path, saves: int, plan: int, account: Account
) -> dict[str, Sequence[float]]:
    """Returns the seconds of each save, and of the load."""
    path, seconds = folder / "optimizer.pt", []

    def save() -> None:
        digest = torch_file.write(optimizer.state_dict(), path)
        manifest.write(folder, {"optimizer.pt": digest}, None)

    for number in range(saves):
        took, peak = watched(save)
        seconds.append(took)
        account.note(f"save {number + 1}, peak", plan, peak)
    took, peak = watched(lambda: optimizer.load_state_dict(torch_file.read(path)))
    account.note("load, peak", plan, peak)
    account.note("after the load", plan)
    return {"save": seconds, "load": [took]}


def _warm(setting: Setting, folder: Path) -> None:
    """Everything once with a tiny model: what libraries and compiled kernels take is not the plan's."""
    tiny = Setting(SMALL, config=setting.config, from_fp32=setting.from_fp32)
    model = _model(tiny.shape(), tiny.from_fp32)
    small = OffloadConfig(schedule=setting.config.schedule, threads=setting.config.threads, bucket_bytes=1 << 20)
    with OffloadAdam(model.parameters(), lr=1e-5, config=small, model=model) as optimizer:
        account = Account()
        _backward(model)
        _steps(optimizer, model, 3, account)
        _saves_and_load(optimizer, folder, 1, 1, account)


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{found['params']:,} parameters; MB of 1e6 bytes"]
    for whose in ("model", "optimizer"):
        for phase, row in found[whose].items():
            measured, plan = row["measured"] / 1e6, row["plan"] / 1e6
            lines.append(f"  {whose:<10} {phase:<24} {measured:>12.1f}  plan {plan:>12.1f}  x {row['ratio']:.3f}")
    told = "agrees" if found["agrees"] else "DOES NOT AGREE"
    return "\n".join([*lines, f"{told} within {found['agrees_within']:.0%}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.memory", description=(__doc__ or "")[:70])
    parser.add_argument("--params", default="1e9", help="about how many parameters, as 1e9 or 135M")
    parser.add_argument("--steps", type=int, default=100, help="5 at least")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--bucket-bytes", type=int, default=OffloadConfig().bucket_bytes)
    parser.add_argument("--from-fp32", action="store_true", help="make the model in fp32 first")
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes, 12 bytes a parameter; default: /tmp")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    for option, value, least in (("--steps", given.steps, 5), ("--saves", given.saves, 1)):
        if value < least:
            parser.error(f"{option}={value}: below {least}. Give at least {least}.")
    config = OffloadConfig(schedule="in_order", bucket_bytes=given.bucket_bytes)
    setting = Setting(
        planning.parse_count("--params", given.params), given.steps, given.saves, config, given.from_fp32
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = run(setting, Path(folder))
    print(json.dumps(found, indent=2) if given.json else table(found))
    if not found["agrees"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
