"""Whether the planner is right: `hf-offload bench predict`, predicted and measured seconds per step side by side.

One calibration, the same that `hf-offload plan --calibrate` makes, and then real steps of every schedule at several
emulated link speeds and batch sizes, none of which the calibration has seen.

Device: the emulated one of `bench pipeline`, a model that waits instead of computing. On a machine without a GPU a
model that computes shares the host's cores with the host step, and what the two leave each other depends on the
system's scheduler more than on any model of it; a GPU leaves the cores alone, and so does the emulated one. Engine,
kernel and copies are real. Its time is a fixed part and one per row, so that calibrating it measures something.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_offload import measuring, prediction
from hf_offload.bench import pipeline
from hf_offload.bench.busy import BusyCores
from hf_offload.bench.cores import Cores
from hf_offload.bench.emulated import EmulatedModel
from hf_offload.calibration import Calibration
from hf_offload.config import OffloadConfig
from hf_offload.optimizer import OffloadAdam

SEQ_LEN = 128
SETTLED_STEPS = 24
"""Steps before those of a schedule with a shadow are measured: each covered bucket has its state in memory that was
never written until the second guess of it is right, which costs page faults once, and not all become right at once."""
CALIBRATED = (2, 12)
"""Rows of the two micro-batches of the calibration."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is emulated and what is measured.

    Attributes:
        links: speeds, 1e9 bytes/s each way.
        rows: batch sizes.
        fixed_ms, row_ms: forward of a block: fixed, and for each row. Backward takes twice as long.
    """

    blocks: int = 12
    params_per_block: int = 2_000_000
    links: tuple[float, ...] = (2.0, 6.0, 16.0)
    rows: tuple[int, ...] = (4, 16)
    fixed_ms: float = 0.3
    row_ms: float = 0.15
    steps: int = 6
    rounds: int = 3
    threads: int | None = None
    bucket_bytes: int = 1 << 22

    def forward_ms(self, rows: int) -> float:
        return self.fixed_ms + self.row_ms * rows

    def cell(self, link: float, rows: int) -> pipeline.Setting:
        """What `bench pipeline` would be asked for."""
        forward = self.forward_ms(rows)
        return pipeline.Setting(
            blocks=self.blocks, params_per_block=self.params_per_block, link_gb_s=link, forward_ms=forward,
            backward_ms=2 * forward, edge_ms=forward / 2, steps=self.steps, rounds=self.rounds, threads=self.threads,
            bucket_bytes=self.bucket_bytes,
        )  # fmt: skip

    def config(self, link: float | None = None) -> OffloadConfig:
        cell = self.cell(link or 1.0, 1)
        return OffloadConfig(
            transport="host", link_gb_s=link, bucket_bytes=self.bucket_bytes, ring_slots=cell.ring_slots,
            threads=cell.step_threads,
        )  # fmt: skip


class EmulatedSubject:
    """The emulated model as a `stopwatch.Subject`."""

    seq_len = SEQ_LEN

    def __init__(self, setting: Setting, model: EmulatedModel, cores: Cores) -> None:
        self.model: EmulatedModel = model
        self._setting, self._cores = setting, cores
        self._x = torch.zeros(1)

    def forward(self, rows: int) -> Tensor:
        forward = self._setting.forward_ms(rows) * 1e-3
        for module in (self.model.embedding, self.model.head, *self.model.blocks):
            edge = module in (self.model.embedding, self.model.head)
            module.forward_s = forward / 2 if edge else forward
            module.backward_s = 2 * module.forward_s
        return self.model(self._x)

    def mark(self) -> float:
        return max(self.model.device.end(), time.perf_counter())

    def between(self, first: float, second: float) -> float:
        return second - first

    def synchronize(self) -> None:
        self.model.device.synchronize()

    def settle(self) -> None:
        self._cores.pin()

    def join(self, optimizer: OffloadAdam) -> None:
        optimizer.engine.placement.transport.clock = self.model.device.end  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cell:
    """One schedule at one link speed and batch size: seconds per step."""

    schedule: str
    link_gb_s: float
    rows: int
    predicted: float
    measured: float
    rounds: tuple[float, ...]

    @property
    def error(self) -> float:
        """The prediction's, as a part of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Result:
    setting: Setting
    calibration: Calibration
    cells: tuple[Cell, ...]
    others: float | None

    @property
    def worst(self) -> float:
        return max(abs(cell.error) for cell in self.cells)


def calibrate(setting: Setting, widest: float | None, say: Callable[[str], None]) -> Calibration:
    """The calibration of the emulated model."""
    cell = setting.cell(1.0, 1)
    memory = cell.memory()
    lab = pipeline.Lab(cell, memory, cell.step_threads, 1.0)
    model = cell.model(memory)
    with lab.cores.unpinned():
        subject = EmulatedSubject(setting, model, lab.cores)
        facts = {"name": "emulated", "digest": "emulated"}
        return measuring.measure(subject, setting.config(), CALIBRATED, facts, widest=widest, say=say)


def run(setting: Setting, widest: float | None = None, say: Callable[[str], None] = lambda text: None) -> Result:
    """Calibrate, then measure every cell.

    Raises:
        ConfigError: the machine is too busy to calibrate.
        HostMemoryError: it does not fit.
    """
    busy = BusyCores()
    found = calibrate(setting, widest, say)
    gc.collect()
    cells = []
    for link in setting.links:
        for rows in setting.rows:
            cells += _cells(setting, found, link, rows, say)
    return Result(setting, found, tuple(cells), busy.others())


def _cells(setting: Setting, found: Calibration, link: float, rows: int, say: Callable[[str], None]) -> list[Cell]:
    cell = setting.cell(link, rows)
    memory = cell.memory()
    lab = pipeline.Lab(cell, memory, cell.step_threads, float(memory.gradients.float().norm()))
    settled = dataclasses.replace(lab, setting=dataclasses.replace(cell, warmup_steps=SETTLED_STEPS))
    rounds: dict[str, list[float]] = {name: [] for name in pipeline.CONTENDERS}
    for number in range(setting.rounds):
        for name, contender in pipeline.CONTENDERS.items():
            say(f"{link:g} GB/s, {rows} rows, round {number + 1} of {setting.rounds}: {name} ...")
            in_turn = settled if contender.shadow else lab
            rounds[name].append(in_turn.round(contender).step)
    cells = []
    for name, contender in pipeline.CONTENDERS.items():
        work = prediction.Work(tokens=rows * SEQ_LEN, clip=contender.clip is not None)
        told = prediction.predict(found, setting.config(link), work, [name])[0]
        cells.append(Cell(name, link, rows, told.step, statistics.median(rounds[name]), tuple(rounds[name])))
    return cells


def as_json(result: Result) -> dict[str, Any]:
    """Plain data; seconds are of one step."""
    from hf_offload.environment import hardware, versions

    return {
        "cells": [{**dataclasses.asdict(cell), "error": cell.error} for cell in result.cells],
        "worst_error": result.worst,
        "calibration": dataclasses.asdict(result.calibration),
        "config": dataclasses.asdict(result.setting),
        "machine": {**hardware(), "versions": versions(), "other_programs_cores": result.others},
    }
