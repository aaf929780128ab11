"""`hf-offload bench step`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from hf_offload.command import EXIT_CODES, Debug, JsonOut, check_output, guarded


def add_to(app: typer.Typer) -> None:
    """Make the command known to `hf-offload bench`."""
    app.command("step", epilog=EXIT_CODES)(bench_step)


@guarded
def bench_step(
    params: Annotated[
        str, typer.Option(help="Parameters, as 6.4e7 or 1B; several as 6.4e7,1e9: one run each.", metavar="N")
    ] = "6.4e7",
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Threads of every contender. Default: all this process may use.", metavar="N"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; the contenders take turns in each.", metavar="N")] = 11,
    only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Some only, as ours/float32/bf16,deepspeed/bf16. Default: all.", metavar="NAMES"),
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Every number of threads at 1e5 to 1e9 parameters instead of one run.")
    ] = False,
    resident: Annotated[
        bool, typer.Option("--resident", help="Measure the resident bytes of our state, too, in every state dtype.")
    ] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the JSON of all runs to this file.", metavar="FILE"),
    ] = None,
    as_json: JsonOut = False,
    debug: Debug = False,
) -> None:
    """Time the whole host step of hf-offload and its peers, and what the memory allows.

    A 16-bit gradient goes in; updated master, m, v and the 16-bit weight come out. Every contender steps the same
    arrays, is checked before, and takes its turn in each round. The peers (DeepSpeed, torchao) come with
    pip install 'hf-offload\\[bench]'. For example:

    hf-offload bench step --params 6.4e7,1e9 --out step.json
    """
    from hf_offload import planning

    sizes = [planning.parse_count("--params", text) for text in params.split(",")]
    check_output("--out", out)
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    console = Console(stderr=True)
    with console.status("Loading torch ..."):
        from hf_offload.bench import step_runs

    asked = step_runs.Asked(sizes=tuple(sizes), threads=threads, rounds=rounds, only=names, scaling=scaling,
                            resident=resident)  # fmt: skip
    with console.status("") as status:
        found = step_runs.run(asked, status.update)
    _hand_over(found.as_json(), out, as_json)
    if not as_json:
        found.print(Console())


def _hand_over(figures: dict[str, Any], out: Path | None, as_json: bool) -> None:
    text = json.dumps(figures, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
