"""Predicted step time against batch size, drawn: where link and host step vanish behind the compute."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.errors import ConfigError, explain
from hf_offload.report import duration

if TYPE_CHECKING:
    from hf_offload.calibrating import Told

_COLORS = {
    "in_order": "#6b6b6b",
    "overlapped": "#4c78a8",
    "streamed": "#d9762b",
    "speculative_hit": "#3f8f5b",
    "delayed": "#7a5ba6",
}
"""The schedules that are drawn; a guess that misses costs about what `streamed` does."""


def check(output: Path) -> None:
    """Raises ConfigError where `draw` could not write `output`: no matplotlib, no such folder, no such format."""
    known = sorted(_figure().canvas.get_supported_filetypes())
    form = output.suffix.lstrip(".").lower()
    if form not in known:
        cause = f"{output.suffix!r} is no picture format of matplotlib's" if form else "its name has no suffix"
        raise ConfigError(explain("--plot", str(output), cause, f"End it with one of: {', '.join(known)}"))
    if not output.parent.is_dir():
        cause = f"there is no folder {str(output.parent)!r}"
        raise ConfigError(explain("--plot", str(output), cause, "Give a file in a folder that is there"))


def draw(told: Told, output: Path) -> None:
    """Write the picture. Raises ConfigError as `check`, or where the file cannot be written."""
    check(output)
    picture = io.BytesIO()
    figure(told).savefig(picture, format=output.suffix.lstrip(".").lower())
    try:
        output.write_bytes(picture.getvalue())
    except OSError as error:
        cause = f"cannot be written: {error.strerror or error}"
        raise ConfigError(explain("--plot", str(output), cause, "Give a file you may write to")) from None


def figure(told: Told) -> Any:
    """A matplotlib figure: seconds of a step over tokens of a micro-batch, one line a schedule, both axes logarithmic.

    A dot marks where what a schedule exposes falls below 5 % of the compute. Raises ConfigError without matplotlib.
    """
    made = _figure()
    axes = made.add_axes((0.09, 0.13, 0.88, 0.76))
    compute = next(c for c in told.curves if c.schedule == "in_order")
    axes.fill_between(compute.tokens, compute.compute, color="#dddddd", linewidth=0, label="compute alone", zorder=0)
    vanished: list[tuple[int, str, str]] = []
    for curve in told.curves:
        if curve.schedule not in _COLORS:
            continue
        color = _COLORS[curve.schedule]
        axes.plot(curve.tokens, curve.steps, color=color, linewidth=1.8, label=curve.schedule)
        if curve.vanishes_at is not None:
            at = curve.tokens.index(curve.vanishes_at)
            axes.plot([curve.tokens[at]], [curve.steps[at]], "o", color=color, markersize=7, zorder=4)
            vanished.append((curve.vanishes_at, curve.schedule, color))
    axes.axvline(told.work.tokens, color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    axes.annotate("this plan", (told.work.tokens, 1.0), (3, -11), xycoords=("data", "axes fraction"),
                  textcoords="offset points", fontsize=9, color="#333333")  # fmt: skip
    for line, (tokens, schedule, color) in enumerate(sorted(vanished, reverse=True)):
        axes.text(0.98, 0.04 + 0.05 * line, f"{schedule}: hidden from {tokens:,} tokens", color=color, fontsize=9,
                  ha="right", transform=axes.transAxes)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda seconds, _: duration(seconds))
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_ylim(bottom=min(compute.compute) * 0.8)
    axes.set_xlim(compute.tokens[0], compute.tokens[-1])
    axes.set_xticks(compute.tokens[::2], [f"{n:,}" for n in compute.tokens[::2]], fontsize=9)
    axes.set_xlabel("tokens in a micro-batch", fontsize=10)
    axes.set_ylabel("time of a step", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    steps = f", {told.work.accumulation} micro-batches a step" if told.work.accumulation > 1 else ""
    name = told.calibration.model.get("name")
    made.text(0.02, 0.945, f"Predicted step of {name}{steps}; a dot: less than 5 % exposed",
              fontsize=11.5, fontweight="bold", va="center")  # fmt: skip
    return made


def _figure() -> Any:
    """An empty figure of the Agg backend: no display, and no global state of pyplot's."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        cause = "drawing needs matplotlib, which is not installed"
        remedy = "Install it: pip install 'hf-offload[plot]' (or matplotlib)"
        raise ConfigError(explain("--plot", "FILE", cause, remedy)) from None
    made = Figure(figsize=(8, 4.8), dpi=150, facecolor="white")
    FigureCanvasAgg(made)
    return made
