"""What the command line says of predicted step times: in `hf-offload plan`, and in `bench predict`. Imports late."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_offload.command import Debug, JsonOut, check_output, guarded
from hf_offload.errors import ConfigError, explain

if TYPE_CHECKING:
    from hf_offload.planning import Answer, Asked


@dataclass(frozen=True)
class Told:
    """What a calibration says about a plan: a `calibrating.Told`, or None, and what hinders it."""

    found: Any = None
    note: str | None = None
    plot: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """For `plan --json`: nothing where there is no calibration."""
        if self.found is None:
            return {}
        from hf_offload import calibrating

        return {"prediction": calibrating.as_json(self.found)}

    def print(self, console: Console) -> None:
        if self.note is not None:
            console.print(f"[yellow]Note:[/] {escape(self.note)}", highlight=False)
        if self.found is None:
            return
        from hf_offload import calibrating, report

        data, found = calibrating.as_json(self.found), self.found.calibration
        rows = " and ".join(map(str, found.rows))
        about = f"Measured {calibrating.made(found)} with {rows} rows of {found.seq_len:,} tokens: {self.found.path}"
        console.print()
        report.print_predictions(console, data["schedules"], data["hidden_from_tokens"], about)
        for note in data["notes"]:
            console.print(f"[yellow]Note:[/] {escape(note)}", highlight=False)
        if self.plot is not None:
            console.print(f"Wrote {self.plot}", highlight=False, markup=False)


def told(asked: Asked, answer: Answer, calibrate: bool, file: Path | None, plot: Path | None) -> Told:
    """Calibrate if that is asked for, predict if there is a calibration, draw if that is asked for.

    Raises:
        ConfigError: as `calibrating.for_plan`; nothing is calibrated, and there is to be a plot; as `prediction_plot`.
    """
    if asked.params is not None and not (calibrate or file or plot):
        return Told()
    from hf_offload import calibrating

    if plot is not None:
        from hf_offload import prediction_plot

        prediction_plot.check(plot)  # before a minute of measuring
    if calibrate and file is not None and file.parent.is_dir():  # a folder that is not there is made
        check_output("--calibration", file)
    console = Console(stderr=True)
    with console.status("") as status:
        found, note = calibrating.for_plan(asked, answer.plan, calibrate, file, status.update)
    if plot is not None:
        if found is None:
            cause = note or "this model was not calibrated on this machine"
            raise ConfigError(explain("--plot", str(plot), cause, "Add --calibrate"))
        prediction_plot.draw(found, plot)
    return Told(found, note, plot)


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

    One calibration, as plan --calibrate makes it, then real steps behind an emulated device. Some four minutes.
    """
    check_output("--out", out)
    console = Console(stderr=True)
    with console.status("Loading torch ...") as status:
        from hf_offload.bench import predict

        setting = predict.Setting(
            links=tuple(_numbers("--links", links)),
            rows=tuple(int(n) for n in _numbers("--rows", rows, whole=True)),
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


def _numbers(setting: str, text: str, whole: bool = False) -> list[float]:
    """`2,6,16` as numbers above 0, or whole ones. Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < n < 1e6 and not (whole and n % 1) for n in found):
        cause = f"not {'whole ' if whole else ''}numbers above 0"
        raise ConfigError(explain(setting, text, cause, "Write them as 2,6,16"))
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
