"""What `hf-offload timeline` does: a few steps of a timeline drawn as four rows, with what they show in figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_offload.errors import ConfigError, explain
from hf_offload.timeline import TRACK_OF, TRACKS, Span, load_spans

WARMUP_STEPS = 2
SHOWN_STEPS = 3
WIDTHS = (300, 20_000)  # pixels
_INCHES = 10.0  # the layout's width; more pixels make it finer, not fuller

# even and odd steps: two shades of one hue a row, so that it shows whose work runs under which step's compute
_SHADES = {
    "compute": ("#4c78a8", "#86abd1"),
    "d2h": ("#d9762b", "#f2ae72"),
    "host_step": ("#3f8f5b", "#86c49b"),
    "h2d": ("#7a5ba6", "#b39ad3"),
}
_WAIT = "#d62728"
_BARS = 150  # bars that fit into a row with gaps between them


@dataclass(frozen=True)
class Window:
    """Some consecutive steps of a timeline, from the first one's start to the start of the step after the last.

    Attributes:
        first, last: numbers of the steps, both inside.
        spans: what ran in it, of whichever step, cut to it; seconds from its start.
        starts: each step's number and the second it began.
        seconds: its length.
    """

    first: int
    last: int
    spans: tuple[Span, ...]
    starts: tuple[tuple[int, float], ...]
    seconds: float

    def busy(self, phase: str) -> float:
        """Seconds of one phase."""
        return sum(span.seconds for span in self.spans if span.phase == phase)

    @property
    def hidden_fraction(self) -> float | None:
        """1 - wait / (d2h + host_step + h2d), between 0 and 1; None where none of the three ran."""
        work = sum(self.busy(phase) for phase in ("d2h", "host_step", "h2d"))
        return min(1.0, max(0.0, 1.0 - self.busy("wait") / work)) if work > 0 else None


def draw(file: Path, output: Path, steps: str | None = None, width: int = 1600, ms: str | None = None) -> Window:
    """Draw the timeline in `file` into `output`, whose suffix says in what format.

    Args:
        steps: `A:B`, the first and the last step to show, or one step; None: three from the middle, after the second.
        width: pixels.
        ms: `A:B`, the part of these steps to show, in milliseconds from the start of the first; None: all.

    Raises:
        ConfigError: a file that is not a timeline, steps or milliseconds it does not hold, a format or folder that
            does not work, or matplotlib is not installed.
    """
    if not WIDTHS[0] <= width <= WIDTHS[1]:
        cause, remedy = "outside what can be drawn", f"Give {WIDTHS[0]} to {WIDTHS[1]} pixels"
        raise ConfigError(explain("--width", width, cause, remedy))
    window = choose(load_spans(file), steps)
    limits = (0.0, window.seconds * 1e3) if ms is None else _limits(ms, window.seconds * 1e3)
    figure = _figure(width)
    form = _format(figure, output)
    _draw(figure, window, limits)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    try:
        output.write_bytes(picture.getvalue())
    except OSError as error:
        cause = f"cannot be written: {error.strerror or error}"
        raise ConfigError(explain("--output", str(output), cause, "Give a file you may write to")) from None
    return window


# ---- which steps


def choose(spans: Sequence[Span], steps: str | None) -> Window:
    """The window of the steps asked for, or of some of the steady state. Raises ConfigError."""
    there = _steps(spans)
    if steps is None:
        steady = [step for step in there if step > WARMUP_STEPS] or there
        if len(steady) > SHOWN_STEPS:
            steady = steady[:-1]  # nothing runs under which the last step's work could hide
        begin = (len(steady) - SHOWN_STEPS + 1) // 2 if len(steady) > SHOWN_STEPS else 0
        chosen = steady[begin : begin + SHOWN_STEPS]
        return _window(spans, chosen[0], chosen[-1])
    first, last = _parse(steps)
    inside = [step for step in there if first <= step <= last]
    if not inside:
        cause = f"the file holds steps {there[0]} to {there[-1]}"
        raise ConfigError(explain("--steps", steps, cause, "Give steps from among these, as A:B"))
    return _window(spans, inside[0], inside[-1])


def _parse(steps: str) -> tuple[int, int]:
    parts = steps.split(":")
    remedy = "Give the first and the last step, as 10:12, or one step, as 10"
    if len(parts) > 2 or not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise ConfigError(explain("--steps", steps, "not two numbers", remedy))
    first, last = int(parts[0]), int(parts[-1])
    if first > last:
        raise ConfigError(explain("--steps", steps, "no step lies between them", remedy))
    return first, last


def _limits(ms: str, length: float) -> tuple[float, float]:
    """The milliseconds asked for, cut to the length of the window. Raises ConfigError."""
    try:
        first, last = (float(part) for part in ms.split(":"))
    except ValueError:
        cause, remedy = "not two numbers", "Give the first and the last millisecond, as 0:250"
        raise ConfigError(explain("--ms", ms, cause, remedy)) from None
    if not 0 <= first < min(last, length):
        cause = f"the steps shown take {length:,.1f} milliseconds"
        raise ConfigError(explain("--ms", ms, cause, "Give a part of them, as 0:250, the smaller number first"))
    return first, min(last, length)


def _window(spans: Sequence[Span], first: int, last: int) -> Window:
    begin = _start(spans, first)
    numbers = _steps(spans)
    after = [number for number in numbers if number > last]
    end = _start(spans, after[0]) if after else max(span.end for span in spans if span.step <= last)
    inside = [span for span in spans if span.end > begin and span.start < end]
    cut = [replace(s, start=max(s.start, begin) - begin, end=min(s.end, end) - begin) for s in inside]
    shown = [number for number in numbers if first <= number <= last]
    starts = tuple((number, max(0.0, _start(spans, number) - begin)) for number in shown)
    return Window(first, last, tuple(cut), starts, end - begin)


def _steps(spans: Sequence[Span]) -> list[int]:
    """The steps that can be shown: those whose compute is on record, and not only what was left of them to do when
    recording began. Without compute on record, all."""
    return sorted({span.step for span in spans if span.phase == "compute"} or {span.step for span in spans})


def _start(spans: Sequence[Span], step: int) -> float:
    """When a step's forward began; without compute on record, when the first of its other phases did."""
    of_step = [span for span in spans if span.step == step]
    return min(span.start for span in [s for s in of_step if s.phase == "compute"] or of_step)


# ---- the picture


def _figure(width: int) -> Any:
    """An empty figure of the Agg backend: no display, and no global state of pyplot's."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        cause = "drawing needs matplotlib, which is not installed"
        remedy = "Install it: pip install 'hf-offload[plot]' (or matplotlib). The file itself opens in ui.perfetto.dev"
        raise ConfigError(explain("timeline", "plot", cause, remedy)) from None
    figure = Figure(figsize=(_INCHES, 3.3), dpi=width / _INCHES, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _format(figure: Any, output: Path) -> str:
    """The format that the output's suffix names. Raises ConfigError."""
    known = sorted(figure.canvas.get_supported_filetypes())
    form = output.suffix.lstrip(".").lower()
    if form not in known:
        cause = f"{output.suffix!r} is no picture format of matplotlib's" if form else "its name has no suffix"
        raise ConfigError(explain("--output", str(output), cause, f"End it with one of: {', '.join(known)}"))
    if not output.parent.is_dir():
        cause = f"there is no folder {str(output.parent)!r}"
        raise ConfigError(explain("--output", str(output), cause, "Give a file in a folder that is there"))
    return form


def _draw(figure: Any, window: Window, limits: tuple[float, float]) -> None:
    axes = figure.add_axes((0.138, 0.19, 0.752, 0.60))
    for row, track in enumerate(TRACKS):
        for phase in (phase for phase, at in TRACK_OF.items() if at == track):
            _bars(axes, row, phase, window, limits)
    for number, start in window.starts:
        if not limits[0] <= start * 1e3 < limits[1]:
            continue
        axes.axvline(start * 1e3, color="#333333", linewidth=0.8, zorder=0)
        axes.annotate(
            f"step {number}", (start * 1e3, 1.0), (2, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=9, color="#333333", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(*limits)
    axes.set_ylim(len(TRACKS) - 0.45, -0.55)
    axes.set_yticks(range(len(TRACKS)), TRACKS, fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("milliseconds", fontsize=10, loc="right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _busy_column(axes, window)
    _legend(figure)
    figure.text(0.015, 0.93, _title(window), fontsize=11.5, fontweight="bold", va="center")


def _bars(axes: Any, row: int, phase: str, window: Window, limits: tuple[float, float]) -> None:
    spans = [span for span in window.spans if span.phase == phase]
    where = [(span.start * 1e3, span.seconds * 1e3) for span in spans]
    low, high = row - 0.36, 0.72
    if phase == "wait":
        style = {"facecolor": _WAIT, "edgecolor": _WAIT, "linewidth": 0.6, "zorder": 3}
        axes.broken_barh(where, (low, high), **style)
        return
    colors = [_SHADES[phase][span.step % 2] for span in spans]
    # thin gaps tell buckets apart; beside narrow bars they would wash the colour out
    line = 0.4 if spans and sum(length for _, length in where) / len(spans) > (limits[1] - limits[0]) / _BARS else 0.0
    axes.broken_barh(where, (low, high), facecolors=colors, edgecolor="white", linewidth=line, zorder=2)


def _busy_column(axes: Any, window: Window) -> None:
    """At the right of each row: its busy milliseconds a step."""
    axes.annotate("busy a step", (1.0, 1.0), (6, 3), xycoords="axes fraction", textcoords="offset points",
                  fontsize=9, color="#333333", annotation_clip=False)  # fmt: skip
    for row, phase in enumerate(("compute", "d2h", "host_step", "h2d")):
        text = _ms(window.busy(phase) / len(window.starts))
        axes.annotate(text, (1.0, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=10, va="center", annotation_clip=False)  # fmt: skip


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_WAIT, label="exposed: training waits"), *_parity_patches(Patch)]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.131, -0.005), ncols=3, frameon=False, fontsize=9,
        handlelength=1.2, columnspacing=1.5,
    )  # fmt: skip


def _parity_patches(patch: Any) -> list[Any]:
    greys = ("#6b6b6b", "#b5b5b5")
    names = ("darker: work of even steps", "lighter: of odd steps")
    return [patch(facecolor=grey, label=name) for grey, name in zip(greys, names)]


def _title(window: Window) -> str:
    count = len(window.starts)
    exposed = f"exposed {_ms(window.busy('wait') / count)} of a step's {_ms(window.seconds / count)}"
    hidden = window.hidden_fraction
    if hidden is None:
        return exposed.capitalize()
    return f"{percent(hidden)} of gradients down + host step + weights up is hidden; {exposed}"


def percent(fraction: float) -> str:
    """A fraction as people read it; never rounded up to all of it."""
    text = f"{fraction:.0%}" if fraction < 0.99 or fraction == 1 else f"{int(fraction * 1000) / 10:.1f}%"
    return text.replace("%", " %")


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 or value == 0 else f"{value:.2g} ms"
