"""Tables and sentences of `hf-offload checkpoint`. Fits 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_offload.checkpoint.convert import Converted
from hf_offload.checkpoint.inspect import Contents, OptimizerFacts
from hf_offload.checkpoint.verify import Verdict
from hf_offload.report import size

_SHOWN_FILES = 20


def print_contents(console: Console, found: Contents) -> None:
    """What `inspect` found."""
    step = found.trainer.get("global_step")
    at = "" if step is None else f", step {step}"
    _say(console, f"[bold]{escape(found.folder)}[/]: {found.kind}{at}")
    if found.weights:
        held = ", ".join(f"{count:,} {dtype}" for dtype, count in found.weights.items())
        _say(console, f"Weights: {found.weight_tensors} tensors, {held}.")
    if found.optimizer is not None:
        console.print(_groups_table(found.optimizer))
        _say(console, _state_sentence(found.optimizer))
    if found.trainer:
        _say(console, f"Trainer: {', '.join(f'{k} {v}' for k, v in found.trainer.items() if v is not None)}.")
    if found.scaler is not None:
        _say(console, f"Loss scale: {found.scaler.get('scale')}.")
    console.print(_files_table(found.files))
    if found.written_by is None:
        _say(console, "No manifest: changed bytes would not be noticed.")
    else:
        _say(
            console,
            f"Manifest of {escape(found.written_by)}: hf-offload checkpoint verify compares every byte with it.",
        )
    for note in found.notes:
        _note(console, note)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """What `verify` found: each damaged file and why on a line of its own."""
    for note in verdict.notes:
        _note(console, note)
    if verdict.whole:
        for checked in verdict.checked:
            _say(console, f"Checked: {escape(checked)}.")
        _say(console, f"[green]Whole:[/] {escape(verdict.folder)}")
        return
    for damage in verdict.damages:
        console.print(f"{damage.file}: {damage.what}", style="red", markup=False, highlight=False, soft_wrap=True)
    if verdict.siblings:
        remedy = f"Resume from {verdict.siblings[0]}, beside it, whose files are all there"
        others = f" (or {', '.join(verdict.siblings[1:4])})" if verdict.siblings[1:] else ""
        remedy += others
    else:
        remedy = "Copy it again from where it was, or resume from another checkpoint"
    _say(console, f"[red]Damaged:[/] {escape(verdict.folder)}. {escape(remedy)}.")


def print_converted(console: Console, done: Converted) -> None:
    """What `convert` did."""
    for sentence in done.said:
        _say(console, escape(sentence))
    _say(console, f"[green]Wrote[/] {escape(done.output)}: {done.kind} to {done.to}")


def _groups_table(optimizer: OptimizerFacts) -> Table:
    table = Table(title="Param groups", title_justify="left", expand=False)
    for heading in ("tensors", "parameters", "lr", "betas", "weight decay"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in optimizer.groups:
        settings = group.settings
        betas = ", ".join(f"{b:g}" for b in settings.get("betas", ()))
        numbers = [f"{settings[k]:.3g}" if k in settings else "-" for k in ("lr", "weight_decay")]
        table.add_row(f"{group.tensors:,}", f"{group.elements:,}", numbers[0], betas, numbers[1])
    return table


def _state_sentence(optimizer: OptimizerFacts) -> str:
    parts = [f"{name} {' and '.join(dtypes)}" for name, dtypes in optimizer.dtypes.items()]
    said = f"State: {', '.join(parts) or 'none'}"
    if optimizer.steps is not None:
        first, last = optimizer.steps
        said += f"; {last} steps taken" if first == last else f"; {first} to {last} steps taken"
    if optimizer.without_state:
        said += f"; {optimizer.without_state} parameters without state"
    return f"{said}."


def _files_table(files: dict[str, int]) -> Table:
    table = Table(title="Files", title_justify="left", expand=False)
    table.add_column("", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    largest = sorted(files, key=lambda name: -files[name])[:_SHOWN_FILES]
    for name in largest:
        table.add_row(escape(name), size(files[name]))
    table.add_section()
    more = f" ({len(files)}, the largest shown)" if len(files) > len(largest) else ""
    table.add_row(f"in all{more}", size(sum(files.values())), style="bold")
    return table


def _note(console: Console, text: str) -> None:
    _say(console, f"[yellow]Note:[/] {escape(text)}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)
