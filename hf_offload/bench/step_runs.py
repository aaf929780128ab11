"""The runs that one call of `hf-offload bench step` makes: one, one of each size, or a grid of threads and sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hf_offload.bench import step, step_report, step_resident, step_threads
from hf_offload.bench.step import Result, Setting
from hf_offload.errors import HostMemoryError

SIZES = (100_000, 1_000_000, 10_000_000, 64_000_000, 1_000_000_000)
"""Parameters of the runs of a grid."""

_EACH_UP_TO = 8
"""Threads up to which a grid has every number; beyond, powers of two and all."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command."""

    sizes: tuple[int, ...]
    threads: int | None
    rounds: int
    only: tuple[str, ...]
    scaling: bool
    resident: bool

    def settings(self) -> list[Setting]:
        """One for each size. Raises ConfigError as Setting does."""
        sizes = SIZES if self.scaling else self.sizes
        return [Setting(params=n, threads=self.threads, rounds=self.rounds, only=self.only) for n in sizes]

    def thread_counts(self) -> list[int]:
        most = step_threads.chosen(self.threads)
        return grid_of(most) if self.scaling else [most]


def grid_of(most: int) -> list[int]:
    """Numbers of threads from 1 to `most`."""
    if most <= _EACH_UP_TO:
        return list(range(1, most + 1))
    return [*(2**k for k in range(most.bit_length()) if 2**k < most), most]


@dataclass(frozen=True)
class Found:
    """What a call measured.

    Attributes:
        runs: at least one, where no size was left out.
        left_out: sizes that did not fit, with the reason.
        resident: by state dtype, where asked for.
    """

    runs: tuple[Result, ...]
    left_out: dict[int, str]
    resident: dict[str, step_resident.Resident] | None
    grid: bool

    def as_json(self) -> dict[str, Any]:
        """One run as `step_report.as_json` has it; several, or sizes left out, as `{"runs": [...], "left_out": ...}`;
        and `resident`."""
        runs = [step_report.as_json(run) for run in self.runs]
        single = len(runs) == 1 and not self.grid and not self.left_out
        found = runs[0] if single else {"runs": runs, "left_out": {str(n): why for n, why in self.left_out.items()}}
        if self.resident is None:
            return found
        return {**found, "resident": {name: r.as_json() for name, r in self.resident.items()}}

    def print(self, console: Console) -> None:
        if self.grid:
            step_report.print_grid(console, self.runs)
        else:
            for run in self.runs:
                step_report.print_result(console, run)
        step_report.print_left_out(console, self.left_out)
        if self.resident is not None:
            step_report.print_resident(console, self.resident)


def run(asked: Asked, say: Say) -> Found:
    """Do what was asked.

    Raises:
        ConfigError: a number out of range, an unknown contender.
        HostMemoryError: no size fits.
        others: as `step.prepare` and `Lab.measure`.
    """
    settings, counts = asked.settings(), asked.thread_counts()
    resident = step_resident.measure(say, step_threads.chosen(asked.threads)) if asked.resident else None
    runs: list[Result] = []
    left_out: dict[int, str] = {}
    for setting in settings:
        try:
            runs += _of_one_size(setting, counts, say)
        except HostMemoryError as error:
            if len(settings) == 1:
                raise
            left_out[setting.params] = str(error)
        gc.collect()  # one size's memory before the next one's
    if not runs:
        raise HostMemoryError("No size fits. " + "\n".join(left_out.values()))
    return Found(tuple(runs), left_out, resident, asked.scaling)


def _of_one_size(setting: Setting, counts: list[int], say: Say) -> Iterator[Result]:
    def told(text: str) -> None:
        say(f"{setting.params:,} parameters: {text}")

    lab = step.prepare(setting, told)
    for threads in counts:
        yield lab.measure(threads, told)
