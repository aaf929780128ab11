"""`hf-offload checkpoint`: what is in a checkpoint, whether it is whole, conversion. Imports late, as cli.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from hf_offload.command import FAILED, Debug, JsonOut, guarded

checkpoint_app = typer.Typer(
    help="Checkpoints: what is inside, whether they are whole, and conversion from and to other optimizers.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXIT_CODES = "Exit codes: 0 done and whole, 1 damaged or failed, 2 refused (no such folder, a wrong argument)."

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, as outputs/checkpoint-100.")]


@checkpoint_app.command("inspect", epilog=_EXIT_CODES)
@guarded
def inspect_checkpoint(folder: Folder, as_json: JsonOut = False, debug: Debug = False) -> None:
    """Say what is in a checkpoint: whose state, its groups and dtypes, steps, files. DeepSpeed ZeRO-1 and 2 as well.

    For example: [bold]hf-offload checkpoint inspect outputs/checkpoint-100[/]
    """
    with _busy("Reading ..."):
        from hf_offload.checkpoint import inspect

        found = inspect.contents(folder)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    from hf_offload import checkpoint_report

    checkpoint_report.print_contents(Console(), found)


@checkpoint_app.command("verify", epilog=_EXIT_CODES)
@guarded
def verify_checkpoint(folder: Folder, as_json: JsonOut = False, debug: Debug = False) -> None:
    """Is it whole? Every byte against its manifest, weights against masters, and whether the state is finite.

    Each damaged file is named on a line of its own, and a whole checkpoint beside it as the remedy. For example:

    hf-offload checkpoint verify outputs/checkpoint-100
    """
    with _busy("Loading torch ..."):
        from hf_offload.checkpoint import inspect, verify
        from hf_offload.checkpoint_model import TransformersModel

        inspect.check_folder(folder)
    with _bar("Verifying", verify.bytes_to_read(folder)) as told:
        verdict = verify.verify(folder, told, TransformersModel(folder))
    if as_json:
        typer.echo(json.dumps(verdict.as_json(), indent=2))
    else:
        from hf_offload import checkpoint_report

        checkpoint_report.print_verdict(Console(), verdict)
    if not verdict.whole:
        raise typer.Exit(FAILED)


@checkpoint_app.command("convert", epilog=_EXIT_CODES)
@guarded
def convert_checkpoint(
    folder: Folder,
    to: Annotated[
        str, typer.Option(help="adamw (torch's, and the Trainer's adamw_*) or offload_adam.", metavar="KIND")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder. DIR is only read.", metavar="OUT")],
    fp32_weights: Annotated[
        Optional[bool],  # noqa: UP045 (typer on Python 3.10)
        typer.Option(
            help="To adamw: whether the fp32 masters become the weights. Default: yes where the weights have 16 bits, "
            "since a plain AdamW has no other place for the masters' lower bits."
        ),
    ] = None,
    as_json: JsonOut = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint of OffloadAdam, AdamW or DeepSpeed ZeRO-1/2 anew, for another optimizer to resume from.

    The state is carried over bit for bit; nothing in DIR's files is executed. For example:

    hf-offload checkpoint convert outputs/checkpoint-100 --to adamw -o plain/checkpoint-100

    hf-offload checkpoint convert deepspeed/checkpoint-100 --to offload_adam -o outputs/checkpoint-100
    """
    with _busy("Loading torch ..."):
        from hf_offload.checkpoint import convert, inspect, verify
        from hf_offload.checkpoint_model import TransformersModel

        inspect.check_folder(folder)
    with _bar("Converting", verify.bytes_to_read(folder)) as told:
        done = convert.convert(folder, to, output, fp32_weights, TransformersModel(folder), told)
    if as_json:
        typer.echo(json.dumps({"from": done.kind, "to": done.to, "output": done.output, "said": done.said}, indent=2))
        return
    from hf_offload import checkpoint_report

    checkpoint_report.print_converted(Console(), done)


@contextmanager
def _busy(text: str) -> Iterator[None]:
    with Console(stderr=True).status(text):
        yield


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one; yields what is told of each part's bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
