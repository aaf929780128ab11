"""Tokens per second and peak memory on a GPU: no offload, and each exact schedule, at three batch sizes.

    python -m hf_offload.bench.gpu --out FILE [--params 1.5e9] [--batch-sizes 4,16,64] [--seq-len 1024]

A Llama-like model of random weights in bf16, random tokens, gradients clipped to a norm of 1 in every variant:

- `no_offload`: fp32 masters on the GPU, stepped there by `torch.optim.AdamW(fused=True)`: 16 bytes a parameter;
- `in_order`, `overlapped`, `streamed`, `speculative`: `OffloadAdam`, the last with shadow for every parameter;
- `speculative_hit`: the same with a bound that never bites. A model of random weights may have norms above 1 in every
  step, and then `speculative` measures what wrong guesses cost.

First of all it copies (the link's speed), and trains a small model in every variant (are the bits those of in order?).
FILE, JSON, is written anew after each cell. A cell is skipped, and says so, where it could overrun `--minutes`; what
does not fit into the GPU is recorded as out of memory. Where the host cannot hold the largest variant (28 bytes a
parameter) the model is made smaller, and a note says so.

How long the default takes on an H200 with 16 cores, by the planner's arithmetic for 1.5e9 parameters, 400 TFLOPS, 55
GB/s each way and 150 GB/s of host memory: forward and backward take 0.09, 0.37 and 2.0 s at 4, 16 and 64 rows of 1024
tokens (64 rows are checkpointed, which costs a third forward); the link 2 x 0.055 s and the host step 0.28 s, exposed
in full in order. Of each cell 3 steps warm up, and 10 s, 8 steps at most and 2 at least, are timed: 5, 8 and 16 s a
cell, 3 minutes for 18 cells. Building the model six times, allocating 18 to 42 GB of state five times, compiling and
the small model: 1.5 minutes. These are estimates for the budget alone; no figure of the report is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_offload.bench import gpu_cells, gpu_model
from hf_offload.bench.gpu_cells import Budget, OutOfTime
from hf_offload.bench.gpu_device import Device, device_of
from hf_offload.bench.gpu_variants import VARIANTS, Stepper
from hf_offload.environment import hardware, versions
from hf_offload.errors import ConfigError, OffloadError, explain, nearest
from hf_offload.hostmem import HostMemory, available_host_bytes
from hf_offload.models import quiet

HOST_SHARE = 0.8
"""Part of the host's free memory that the largest variant may take."""
MARGIN_S = 25.0
"""Kept for what is outside of the cells: Python's start, imports, the last report."""
SMALL = 5_000_000
"""Parameters of the model whose bits are compared."""
OK, NO_MEMORY, NO_TIME = "ok", "out of memory", "skipped: time"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured. Every field is in the report.

    Attributes:
        params: of the model, about. batch_sizes: rows of `seq_len` tokens, rising.
        steps: timed in a cell, at most; `cell_seconds`: seconds after which no further one begins.
        minutes: wall clock for all, from the start of Python.
        checkpointing: auto (by the planner), on, off.
        vocab: tokens. variants: names, in order.
    """

    params: int = 1_500_000_000
    batch_sizes: tuple[int, ...] = (4, 16, 64)
    seq_len: int = 1024
    steps: int = 8
    cell_seconds: float = 10.0
    minutes: float = 6.0
    max_norm: float = 1.0
    checkpointing: str = "auto"
    vocab: int = gpu_model.VOCAB
    variants: tuple[str, ...] = tuple(VARIANTS)
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("params", "seq_len", "steps", "cell_seconds", "minutes", "max_norm", "vocab"):
            if not getattr(self, name) > 0:
                raise ConfigError(explain(name, getattr(self, name), "not above 0", "Give a number above 0"))
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(explain("batch_sizes", self.batch_sizes, "no batch, or one without rows", "4,16,64, say"))
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        for name in self.variants:
            if name not in VARIANTS:
                raise ConfigError(explain("variants", name, "not a variant", nearest(name, VARIANTS)))
        if self.checkpointing not in ("auto", "on", "off"):
            raise ConfigError(explain("checkpointing", self.checkpointing, "not a mode", "auto, on or off"))

    @property
    def host_bytes_a_parameter(self) -> float:
        """Of the variant that takes most, the ring left out."""
        return max(VARIANTS[v].host_bytes(1_000_000_000) - VARIANTS[v].host_bytes(0) for v in self.variants) / 1e9


@dataclass
class Report:
    """What is known so far, and the file that says it."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """The file is the last report or this one, never half of one."""
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(json.dumps(_plain(self.data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite becomes text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


class Run:
    """One run of the benchmark.

    Args:
        budget: None: the minutes of the setting, less a margin, from now.
    """

    def __init__(self, setting: Setting, device: Device, report: Report, budget: Budget | None = None) -> None:
        self.setting = setting
        self.device = device
        self.report = report
        self.budget = budget or Budget(60 * setting.minutes - MARGIN_S)
        self.shape, notes = fitting(setting, available_host_bytes())
        self.cells: list[dict[str, Any]] = []
        self._setup_seconds = 0.0
        report.data.update(
            config={**asdict(setting), "warmup_steps": gpu_cells.WARMUP_STEPS},
            model={**asdict(self.shape), "params": self.shape.params, "dtype": "bfloat16", "kind": "llama, random"},
            notes=notes,
            machine={**hardware(), "gpu": device.facts(), "versions": versions()},
            cells=self.cells,
        )

    def all(self) -> None:
        """Copies, the small model, then every cell. The report is saved after each."""
        self.report.save()
        self.report.data["machine"]["copy_gb_s"] = self._tried(self.device.copy_gb_s)
        small = gpu_model.shape_for(min(SMALL, self.shape.params), min(1000, self.setting.vocab))
        self.report.data["correctness"] = self._tried(lambda: gpu_cells.correctness(small, self.device))
        self._release()
        self._say(f"bits of a small model: {self.report.data['correctness']}")
        self.report.save()
        for name in self.setting.variants:
            self._variant(name)
        self.report.save()

    def _tried(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What it gives, or what went wrong: the cells are to be measured all the same."""
        try:
            return measure()
        except Exception as error:
            return {"failed": self._status(error)}

    def _variant(self, name: str) -> None:
        """All batch sizes of one variant, with one model and one optimizer."""
        batches = list(self.setting.batch_sizes)
        if self.budget.left < self._setup_seconds + self._expected(name, batches[0]):
            self._give_up(name, batches, NO_TIME)
            return
        start = time.monotonic()
        model = stepper = None
        try:
            model = gpu_model.build(self.shape, self.setting.seq_len, self.device.name)
            stepper = VARIANTS[name].stepper(model, self.setting.max_norm, self.shape.params)
            self._setup_seconds = max(self._setup_seconds, time.monotonic() - start)
            self._batches(name, batches, model, stepper)
        except Exception as error:
            self._give_up(name, batches, self._status(error))
        finally:
            if stepper is not None:
                self._close(name, stepper)
            del model, stepper
            self._release()

    def _batches(self, name: str, batches: list[int], model: Any, stepper: Stepper) -> None:
        """Takes each batch size from `batches` once its cell is recorded."""
        while batches:
            batch = batches[0]
            if self.budget.left < self._expected(name, batch):
                self._give_up(name, batches, NO_TIME)
                return
            start = time.monotonic()
            cell = self._cell(batch, model, stepper, VARIANTS[name].bound or self.setting.max_norm)
            del batches[0]
            self._add(name, batch, OK, wall_seconds=time.monotonic() - start, **cell)

    def _cell(self, batch: int, model: Any, stepper: Stepper, max_norm: float) -> dict[str, Any]:
        setting = self.setting
        checkpointed = self._checkpointed(batch)
        gpu_model.set_checkpointing(model, checkpointed)
        found = gpu_cells.measure(
            model, stepper, self.device, batch=batch, seq_len=setting.seq_len, steps=setting.steps,
            cell_seconds=setting.cell_seconds, budget=self.budget, max_norm=max_norm,
        )  # fmt: skip
        return {"checkpointing": checkpointed, **found}

    def _checkpointed(self, batch: int) -> bool:
        if self.setting.checkpointing != "auto":
            return self.setting.checkpointing == "on"
        return gpu_model.needs_checkpointing(self.shape, batch, self.setting.seq_len, self.device.nbytes)

    def _give_up(self, name: str, batches: Sequence[int], status: str) -> None:
        """The first of `batches` ended so; the larger ones are not tried."""
        first, *larger = batches
        self._add(name, first, status)
        for batch in larger:
            why = status if status == NO_TIME else f"not tried: {status.partition(':')[0]} at batch {first}"
            self._add(name, batch, why)

    def _status(self, error: Exception) -> str:
        if isinstance(error, OutOfTime):
            return NO_TIME
        if gpu_cells.out_of_memory(error):
            return NO_MEMORY
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"

    def _expected(self, name: str, batch: int) -> float:
        """Seconds that a cell will take: the most another variant took at that size, or from this one's last size."""
        done = [c for c in self.cells if c["status"] == OK]
        others = [c["wall_seconds"] for c in done if c["batch_size"] == batch]
        mine = [c["wall_seconds"] * batch / c["batch_size"] for c in done if c["variant"] == name]
        return max(others) if others else mine[-1] if mine else 0.0

    def _add(self, name: str, batch: int, status: str, **figures: Any) -> None:
        self.cells.append({"variant": name, "batch_size": batch, "status": status, **figures})
        self.report.data["seconds"] = self.budget.spent
        self.report.save()
        rate = f", {figures['tokens_per_second']:.0f} tokens/s" if status == OK else ""
        self._say(f"{name}, batch {batch}: {status}{rate}")

    def _close(self, name: str, stepper: Stepper) -> None:
        try:
            stepper.close()
        except Exception as error:  # a step that ran out of memory may have left it failed
            self.report.data["notes"].append(f"closing {name}: {type(error).__name__}: {error}")

    def _release(self) -> None:
        gc.collect()
        self.device.start_peak()

    def _say(self, text: str) -> None:
        print(f"[{self.budget.spent:5.0f} s] {text}", file=sys.stderr, flush=True)


def fitting(setting: Setting, memory: HostMemory) -> tuple[gpu_model.Llama, list[str]]:
    """The model asked for, or the largest that the host can hold the state of, with a note."""
    shape = gpu_model.shape_for(setting.params, setting.vocab)
    each = setting.host_bytes_a_parameter
    room = HOST_SHARE * memory.available
    if not memory.known or shape.params * each <= room or not each:
        return shape, []
    smaller = gpu_model.shape_for(max(1, int(room / each)), setting.vocab)
    note = (
        f"{setting.params:.3g} parameters were asked for; the host has {memory.available / 1e9:.0f} GB free "
        f"({memory.source}), of which {each:g} bytes a parameter may take {HOST_SHARE:.0%}: {smaller.params:.3g}"
    )
    return smaller, [note]


def table(data: dict[str, Any]) -> Table:
    """One row a cell; fits 80 columns."""
    found = Table(title=f"{data['model']['params']:.3g} parameters", title_justify="left")
    found.add_column("variant", no_wrap=True)
    for heading in ("batch", "tokens/s", "s/step", "GiB", "hidden", "hit/miss"):
        found.add_column(heading, justify="right", no_wrap=True)
    for cell in data["cells"]:
        head = (cell["variant"], str(cell["batch_size"]))
        if cell["status"] != OK:
            found.add_row(*head, "no memory" if cell["status"] == NO_MEMORY else cell["status"].partition(":")[0])
            continue
        peak, engine = cell["peak_allocated_gib"], cell["engine"]
        hidden = engine and engine["hidden_fraction"]
        guesses = f"{engine['speculation_hits']}/{engine['speculation_misses']}" if engine else "-"
        found.add_row(
            *head, f"{cell['tokens_per_second']:.0f}", f"{cell['seconds_per_step']:.3f}",
            "-" if peak is None else f"{peak:.1f}", "-" if hidden is None else f"{hidden:.1%}", guesses,
        )  # fmt: skip
    return found


def parse(arguments: Sequence[str]) -> tuple[Setting, Path]:
    """Raises ConfigError; argparse ends the process where the words make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_offload.bench.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    default = Setting()
    parser.add_argument("--out", type=Path, required=True, help="the JSON report")
    parser.add_argument("--params", type=lambda text: int(float(text)), default=default.params)
    parser.add_argument("--batch-sizes", type=_integers, default=default.batch_sizes)
    parser.add_argument("--variants", type=lambda text: tuple(text.split(",")), default=default.variants)
    parser.add_argument("--checkpointing", default=default.checkpointing, help="auto, on, off")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device, help="cpu: only to try the code")
    for name in ("seq_len", "steps", "vocab"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    for name in ("cell_seconds", "minutes", "max_norm"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(default, name))
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    if not out.parent.is_dir():
        raise ConfigError(explain("--out", str(out), "its folder does not exist", "Make the folder first"))
    setting = Setting(**given)
    if setting.device == "cuda" and not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        cause = f"torch sees no GPU (it was built with {built})"
        raise ConfigError(explain("--device", "cuda", cause, "Run it on a GPU; --device cpu only tries the code"))
    return setting, out


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, also where cells were skipped; 1 where bits differ or a cell failed; 2 for settings that cannot be."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        setting, out = parse(words)
        quiet()
        command = shlex.join([w.replace(str(out), out.name) for w in words])  # where it lies is nobody's business
        report = Report(out, {"command": f"python -m hf_offload.bench.gpu {command}"})
        run = Run(setting, device_of(setting.device), report)
    except OffloadError as error:
        print(error, file=sys.stderr)
        return 2
    run.all()
    console = Console()
    console.print(table(report.data))
    for note in report.data["notes"]:
        console.print(note, highlight=False)
    same = report.data["correctness"].get("same_bits_as_in_order", {"correctness": "failed"})
    if any(value is not True for value in same.values()):
        print(f"bits differ from in order: {same}", file=sys.stderr)
        return 1
    return 1 if any(c["status"].startswith("failed") for c in run.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
