"""What `hf-offload bench step` prints: JSON for programs, tables and sentences for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_offload.bench import step_peers
from hf_offload.bench.step import PATTERN_BYTES, RMW, RMW_BYTES, Lane, Result
from hf_offload.bench.step_contenders import CONTENDERS
from hf_offload.bench.step_resident import Resident
from hf_offload.environment import hardware, versions

BUSY = 0.1
"""Cores that other programs may take before the table says that they spoil the figures."""


def as_json(result: Result) -> dict[str, Any]:
    """One run. Rates are of medians over the rounds; 1e9 parameters and 1e9 bytes a second.

    Of each contender: `gb_per_s` counts `bytes_per_param`, the least that its own passes must move (`counted` says
    which); `spread` is (slowest - fastest) / median round; `seconds` are those of one step, round by round; `cores` the
    processor time of this process a second; `of_step_pattern` its rate over the roofline's, and `times` that over each
    peer's on the same wire, medians over the rounds. `roofline.step_pattern_by` says which of the two patterns was the
    faster, whose rate this is; `missing` are contenders that did not run, and why.
    """
    pattern = result.patterns[result.pattern]
    return {
        "contenders": {name: _contender(result, name, lane) for name, lane in result.contenders.items()},
        "roofline": {
            "rmw_gb_per_s": result.rmw.gb_per_s,
            "step_pattern_gparams_per_s": pattern.gparams_per_s,
            "step_pattern_by": result.pattern,
            "rmw_bytes_per_param": RMW_BYTES,
            "step_pattern_bytes_per_param": PATTERN_BYTES,
            "lanes": {name: _lane(lane) for name, lane in {RMW: result.rmw, **result.patterns}.items()},
        },
        "params": result.setting.params,
        "threads": result.threads,
        "rounds": result.setting.rounds,
        "missing": dict(result.missing),
        "machine": {
            **hardware(),
            "versions": {**versions(), **step_peers.versions()},
            "huge_pages": _huge_pages(),
            "other_programs_cores": result.others,
        },
    }


def _huge_pages() -> str:
    """The system's policy for transparent huge pages, as it says it: `always [madvise] never`."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as text:
            return text.read().strip()
    except OSError:
        return "unknown"


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "gparams_per_s": lane.gparams_per_s,
        "gb_per_s": lane.gb_per_s,
        "spread": lane.spread,
        "cores": lane.cores,
        "seconds": list(lane.seconds),
    }


def _contender(result: Result, name: str, lane: Lane) -> dict[str, Any]:
    contender = CONTENDERS[name]
    return {
        **_lane(lane),
        "bytes_per_param": contender.bytes_per_param,
        "counted": contender.counted,
        "of_step_pattern": lane.times(result.patterns[result.pattern]),
        **({"times": {peer: lane.times(result.contenders[peer]) for peer in peers(result, name)}}
           if contender.ours else {}),
    }  # fmt: skip


def peers(result: Result, name: str) -> list[str]:
    """The contenders of others that ran with the wire of `name`."""
    wire = CONTENDERS[name].wire
    return [other for other in result.contenders if not CONTENDERS[other].ours and CONTENDERS[other].wire == wire]


def print_result(console: Console, result: Result) -> None:
    """Tables and sentences; fits 80 columns."""
    _say(console, f"[bold]The host step of {result.setting.params:,} parameters[/], threads: {result.threads}, "
         f"rounds: {result.setting.rounds}; medians")  # fmt: skip
    console.print(_rates(result))
    if (ratios := _ratios(result)) is not None:
        console.print(ratios)
    for sentence in _remarks(result):
        _say(console, sentence)
    _say_missing(console, result.missing)


def _say_missing(console: Console, missing: Mapping[str, str]) -> None:
    """Once for each reason."""
    for why in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, its in missing.items() if its == why)
        _say_why(console, f"{names} did not run.", why)


def _say_why(console: Console, what: str, why: str) -> None:
    console.print(Text.assemble((what, "yellow"), " ", why))


def print_left_out(console: Console, left_out: Mapping[int, str]) -> None:
    """Sizes that did not fit."""
    for params, why in left_out.items():
        _say_why(console, f"{params:,} parameters were left out.", why)


def print_grid(console: Console, runs: Sequence[Result]) -> None:
    """Gparam/s by threads and size, a table for each contender and for the step pattern."""
    for name in dict.fromkeys(name for run in runs for name in run.contenders):
        console.print(_grid(f"{name}, Gparam/s", runs, partial(_named, name)))
    console.print(_grid("step pattern, Gparam/s", runs, lambda run: run.patterns[run.pattern]))
    _say_missing(console, {name: why for run in runs for name, why in run.missing.items()})


def _named(name: str, run: Result) -> Lane | None:
    return run.contenders.get(name)


def _grid(title: str, runs: Sequence[Result], lane: Callable[[Result], Lane | None]) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    sizes = list(dict.fromkeys(run.setting.params for run in runs))
    table.add_column("threads", justify="right")
    for size in sizes:
        table.add_column(f"{size:.3g}", justify="right", no_wrap=True)
    for threads in sorted({run.threads for run in runs}):
        found = {run.setting.params: lane(run) for run in runs if run.threads == threads}
        cells = (None if (at := found.get(size)) is None else f"{at.gparams_per_s:.3f}" for size in sizes)
        table.add_row(str(threads), *(cell or "-" for cell in cells))
    return table


def print_resident(console: Console, found: Mapping[str, Resident]) -> None:
    """Bytes a parameter of our state, by dtype."""
    for dtype, resident in found.items():
        ring = f"a ring of {resident.ring_bytes / 2**20:.0f} MiB is in it"
        _say(console, f"[bold]Resident, {dtype} state[/]: {resident.bytes_per_param:.3f} B/param after three steps of "
             f"{resident.params:,} parameters (RssAnon; {ring}).")  # fmt: skip


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _rates(result: Result) -> Table:
    table = Table(title="16-bit gradient in, master, m, v and 16-bit weight out", title_justify="left", expand=False)
    table.add_column("", no_wrap=True)
    for heading in ("Gparam/s", "B/p", "GB/s", "roof", "spread", "cores"):
        table.add_column(heading, justify="right", no_wrap=True)
    roof = result.patterns[result.pattern]
    for name, lane in {RMW: result.rmw, **result.patterns}.items():
        table.add_row(_short(name), *_cells(lane), "=" if name == result.pattern else "-", *_ends(lane), style="dim")
    for name, lane in sorted(result.contenders.items(), key=lambda item: not CONTENDERS[item[0]].ours):
        table.add_row(name, *_cells(lane), f"{lane.times(roof):.0%}", *_ends(lane))
    return table


def _short(name: str) -> str:
    return name.replace("step pattern, streamed weights", "pattern, streamed").replace("step pattern", "pattern, plain")


def _cells(lane: Lane) -> tuple[str, str, str]:
    return f"{lane.gparams_per_s:.3f}", f"{lane.bytes_per_param:g}", f"{lane.gb_per_s:.1f}"


def _ends(lane: Lane) -> tuple[str, str]:
    return f"{lane.spread:.0%}", f"{lane.cores:.1f}"


def _ratios(result: Result) -> Table | None:
    """How many times as fast as each peer on the same wire ours are; None where none of them ran."""
    ours = [name for name in result.contenders if CONTENDERS[name].ours]
    others = [name for name in result.contenders if not CONTENDERS[name].ours]
    if not ours or not others:
        return None
    table = Table(title="Times as fast as", title_justify="left", expand=False)
    table.add_column("", no_wrap=True)
    for name in ours:
        table.add_column(name.removeprefix("ours/"), justify="right", no_wrap=True)
    for other in others:
        cells = (
            f"{result.contenders[name].times(result.contenders[other]):.2f}" if other in peers(result, name) else "-"
            for name in ours
        )
        table.add_row(other, *cells)
    return table


def _remarks(result: Result) -> list[str]:
    found = [
        "B/p: the least that the contender's own passes move; GB/s counts these. Roof: part of the step's loads "
        "and stores without arithmetic. Spread: slowest less fastest round. Cores: processor time a second.",
        *(f"[bold]{who}[/]: {counted}" for who, counted in _counted(list(result.contenders)).items()),
    ]
    if result.others is not None and result.others > BUSY:
        found.append(
            f"[yellow]Other programs kept {result.others:.1f} cores busy meanwhile: these figures are not the step's "
            "alone. Run it again on a quiet machine.[/]"
        )
    return found


def _counted(names: Sequence[str]) -> dict[str, str]:
    """What is counted, by contender without its wire."""
    return {name.rpartition("/")[0]: CONTENDERS[name].counted for name in names}
