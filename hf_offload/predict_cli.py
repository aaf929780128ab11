"""`hf-offload bench predict`: whether the planner is right, as a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from hf_offload.command import Debug, JsonOut, guarded
from hf_offload.errors import ConfigError, explain


@guarded
def bench_predict(
    links: Annotated[str, typer.Option(help="Emulated links, 1e9 bytes/s each way.", metavar="X,X,...")] = "2,6,16",
    rows: Annotated[str, typer.Option(help="Batch sizes; the calibration has others.", metavar="N,N,...")] = "4,16",
    steps: Annotated[int, typer.Option(help="Measured steps of a schedule in a round.", min=1, metavar="N")] = 6,
    rounds: Annotated[int, typer.Option(help="Rounds; the schedules take turns in each.", min=1, metavar="N")] = 3,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Threads of the host step. Default: all cores but one or two.", min=1, metavar="N"),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the JSON to this file, too.", metavar="FILE"),
    ] = None,
    as_json: JsonOut = False,
    debug: Debug = False,
) -> None:
    """Predict and measure the step of each schedule at several link speeds and batch sizes, and show the errors.

    One calibration, as plan --calibrate makes it, then real steps behind an emulated device. Some three minutes.
    """
    console = Console(stderr=True)
    with console.status("Loading torch ...") as status:
        from hf_offload.bench import predict

        setting = predict.Setting(
            links=tuple(_numbers("--links", links)),
            rows=tuple(round(n) for n in _numbers("--rows", rows)),
            steps=steps,
            rounds=rounds,
            threads=threads,
        )
        result = predict.run(setting, say=status.update)
    text = json.dumps(predict.as_json(result), indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        print_result(Console(), result)


def _numbers(setting: str, text: str) -> list[float]:
    """`2,6,16` as numbers above 0. Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < n < 1e6 for n in found):
        raise ConfigError(explain(setting, text, "not numbers above 0", "Write them as 2,6,16"))
    return found


def print_result(console: Console, result: Any) -> None:
    """The table of all cells, and what it says. Fits 80 columns."""
    from hf_offload.bench.report import BUSY
    from hf_offload.report import duration

    table = Table(title="Seconds per step, predicted and measured", title_justify="left", expand=False)
    for heading in ("link", "rows", "schedule", "predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for cell in result.cells:
        color = "red" if abs(cell.error) > 0.1 else "green"
        table.add_row(
            f"{cell.link_gb_s:g} GB/s", str(cell.rows), cell.schedule, duration(cell.predicted),
            duration(cell.measured), f"[{color}]{cell.error:+.1%}[/]",
        )  # fmt: skip
    console.print(table)
    close = sum(abs(cell.error) <= 0.1 for cell in result.cells)
    console.print(
        f"{close} of {len(result.cells)} predictions are within 10 %; the worst is off by {result.worst:.1%}.",
        highlight=False,
    )
    if result.others is not None and result.others > BUSY:
        console.print(
            f"[yellow]Other programs kept {result.others:.1f} cores busy meanwhile: run it again when it is quiet.[/]",
            highlight=False,
        )
