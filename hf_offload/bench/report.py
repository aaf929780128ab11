"""What `hf-offload bench pipeline` prints: one JSON object for programs, a table and sentences for people."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_offload.bench import streaming_copies
from hf_offload.bench.pipeline import NONE, Result, Row
from hf_offload.environment import hardware, versions
from hf_offload.report import duration

CLIP = (
    "none: on a GPU the norm is the device's work at 3 TB/s; the emulated device computes it in no time. never bites, "
    "always bites: clip_grad_norm_ is called, on the host"
)

BUSY = 0.1
"""Cores that other programs may take before the table says that they spoil the figures."""

SLOW_LINK = 0.9
"""Part of the link's speed below which the table says that the copies do not reach it."""


def as_json(result: Result) -> dict[str, Any]:
    """Seconds are of one step: medians over the rounds of means over each round's window.

    Of each schedule: `exposed_seconds` is `step_seconds` less that of `none`; `main_thread_seconds` the CPU time of the
    training thread in clip_grad_norm_(), step() and zero_grad(), and what forward and backward take it more than with
    `none`, which the hooks do; `hidden_fraction` 1 - exposed / (d2h + host_step + h2d), the stages alone;
    `speculation_hits` and `_misses` are of buckets, in all measured steps (`rounds` x `steps` x `buckets` in all);
    `cpu_seconds` the CPU time of the engine's threads and of the process. A GPU's copy engines would do without the
    d2h and h2d of that.
    """
    setting, stages = result.setting, result.stages
    return {
        "schedules": {name: _row_json(name, row, stages.seconds) for name, row in result.rows.items()},
        "config": {
            **dataclasses.asdict(setting),
            "threads": stages.threads,
            "threads_by": "the setting" if setting.threads else "the cores less those for copies and training thread",
            "cores": {name: sorted(found) for name, found in dataclasses.asdict(result.cores).items()},
            "params": result.params,
            "tensors": result.tensors,
            "buckets": sum(map(len, stages.units)),
            "wire_dtype": "bfloat16",
            "clip": CLIP,
            "copies": streaming_copies.described(),
        },
        "machine": {
            **hardware(),
            "versions": versions(),
            "other_programs_cores": result.others,
            "d2h_seconds": stages.total("d2h"),
            "host_step_seconds": stages.total("host_step"),
            "h2d_seconds": stages.total("h2d"),
        },
    }


def _row_json(name: str, row: Row, stage_seconds: float) -> dict[str, Any]:
    threads = sorted({thread for r in row.rounds for thread in r.threads})
    return {
        "step_seconds": row.step,
        "exposed_seconds": row.exposed,
        "bound_seconds": row.bound.exposed,
        "hidden_fraction": row.hidden,
        "main_thread_seconds": row.main,
        "bound_hidden_fraction": row.bound_hidden,
        "engine_exposed_seconds": row.median(lambda r: r.engine_exposed),
        "round_seconds": [r.step for r in row.rounds],
        "cpu_seconds": {
            "process": row.median(lambda r: r.process),
            "main": row.median(lambda r: r.main),
            **{t: row.median(lambda r, t=t: r.threads.get(t, 0.0)) for t in threads},  # type: ignore[misc]
        },
        "clip": row.clip,
        "speculation_hits": sum(r.hits for r in row.rounds),
        "speculation_misses": sum(r.misses for r in row.rounds),
        "same_bits": row.same_bits,
        "bounded_by": bounded_by(name, row, stage_seconds),
    }


def bounded_by(name: str, row: Row, stage_seconds: float) -> str:
    """One sentence: what keeps the ideal engine from hiding more."""
    if name == NONE:
        return "No optimizer: forward and backward alone."
    if name == "in_order":
        return f"Everything is exposed: d2h, host_step and h2d one after the other, {duration(stage_seconds)}."
    first, rest = row.bound.stalls[0], sum(row.bound.stalls[1:])
    why = {
        "overlapped": "until its gradients are down, stepped, and its weights up",
        "streamed": "until its gradients, the last to be ready, are down, stepped, and its weights up",
        "speculative_hit": "until its gradients, the last to be ready, are down, stepped, and its weights up",
        "speculative_miss": "as streamed: in the ideal a wrong guess costs nothing",
        "delayed": "until its weights, ready before the step, are up",
    }[name]
    slower = f"; later units wait {duration(rest)} more for host or link" if rest >= 1e-4 else ""
    return f"The first unit waits {duration(first)}, {why}{slower}."


def print_result(console: Console, result: Result) -> None:
    """Table and sentences; fits 80 columns."""
    setting, stages = result.setting, result.stages
    _say(console, f"[bold]{result.params:,} parameters in {result.tensors} tensors, {setting.blocks} blocks[/], "
         f"forward {setting.forward_ms:g} ms and backward {setting.backward_ms:g} ms a block, link "
         f"{setting.link_gb_s:g} GB/s, host step on {stages.threads} threads")  # fmt: skip
    alone = ", ".join(f"{name} {duration(stages.total(name))}" for name in ("d2h", "host_step", "h2d"))
    _say(console, f"Each stage alone, for the whole model: {alone}; together {duration(stages.seconds)}.")
    console.print(_table(result))
    for name, row in result.rows.items():
        if name != NONE:
            _say(console, f"[bold]{name}[/]: {bounded_by(name, row, stages.seconds)}")
    for sentence in _remarks(result):
        _say(console, sentence)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _table(result: Result) -> Table:
    table = Table(title="One step, steady state", title_justify="left", expand=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("step", "exposed", "bound", "hidden", "main", "bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    bits = {True: "same", False: "[red]differ[/]", None: "-"}
    for name, row in result.rows.items():
        if name == NONE:
            table.add_row(name, _signed(row.step), *["-"] * 5)
            continue
        cells = (_signed(row.step), _signed(row.exposed), _signed(row.bound.exposed), f"{row.hidden:.1%}")
        table.add_row(name, *cells, _signed(row.main), bits[row.same_bits])
    return table


def _signed(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"-{duration(-seconds)}"


def _remarks(result: Result) -> list[str]:
    rows = [row for name, row in result.rows.items() if name != NONE]
    found = ["Exposed: the step less that of none. Main: CPU time of the training thread in step() and hooks."]
    guesses = [
        f"{name} {sum(r.hits for r in row.rounds)} hits and {sum(r.misses for r in row.rounds)} misses"
        for name, row in result.rows.items()
        if name.startswith("speculative")
    ]
    if guesses:
        buckets = sum(map(len, result.stages.units)) * result.setting.steps * result.setting.rounds
        found.append(f"Guesses in all measured steps, of {buckets} buckets: {', '.join(guesses)}.")
    copies = _range([row.median(lambda r: r.threads.get("d2h", 0.0) + r.threads.get("h2d", 0.0)) for row in rows])
    found.append(
        f"What remains of the emulation: the copies take {copies} of CPU time a step, which a GPU's copy engines would "
        "not."
    )
    stages, link = result.stages, result.setting.link_gb_s
    reached = 2 * result.params / max(stages.total("d2h"), stages.total("h2d")) / 1e9
    if reached < SLOW_LINK * link:
        found.append(
            f"The link of {link:g} GB/s is not reached: alone, the copies run at {reached:.3g} GB/s, what one core "
            "moves or small copies cost. The bound is for these times."
        )
    if result.others is not None and result.others > BUSY:
        found.append(
            f"[yellow]Other programs kept {result.others:.1f} cores busy meanwhile: these figures are not the engine's "
            "alone. Run it again on a quiet machine.[/]"
        )
    return found


def _range(seconds: list[float]) -> str:
    low, high = min(seconds, default=0.0), max(seconds, default=0.0)
    return duration(low) if duration(low) == duration(high) else f"{duration(low)} to {duration(high)}"
