"""Predicted step time against batch size, drawn: where link and host step vanish behind the compute."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload.errors import ConfigError, explain
from hf_offload.prediction import VANISHED
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
_LARGEST_ADDED = 60
"""Percent that the lower axes show."""


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
    """A matplotlib figure over the tokens of a micro-batch, one line a schedule: above, the time of a step, and below,
    what is added to the compute, with a dot where that falls below 5 % for good.

    Raises ConfigError without matplotlib.
    """
    made = _figure()
    above, below = made.add_axes((0.11, 0.45, 0.86, 0.46)), made.add_axes((0.11, 0.10, 0.86, 0.29))
    curves = [curve for curve in told.curves if curve.schedule in _COLORS]
    compute = curves[0]
    above.fill_between(compute.tokens, compute.compute, color="#dddddd", linewidth=0, label="compute alone", zorder=0)
    for curve in curves:
        style = {"color": _COLORS[curve.schedule], "linewidth": 1.6}
        above.plot(curve.tokens, curve.steps, label=curve.schedule, **style)
        added = [100 * (step / alone - 1) for step, alone in zip(curve.steps, curve.compute)]
        hidden = curve.vanishes_at
        label = curve.schedule if hidden is None else f"{curve.schedule}: from {hidden:,} tokens"
        below.plot(curve.tokens, added, label=label, **style)
        if hidden is not None:
            below.plot([hidden], [added[curve.tokens.index(hidden)]], "o", color=style["color"], markersize=6, zorder=4)
    below.axhline(100 * VANISHED, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
    below.set_ylim(0, _LARGEST_ADDED)
    _time_axis(above, min(compute.compute))
    for axes in (above, below):
        _token_axis(axes, told)
    above.set_xticklabels([])
    above.annotate("this plan", (told.work.tokens, 0.03), (3, 0), xycoords=("data", "axes fraction"),
                   textcoords="offset points", fontsize=8, color="#333333")  # fmt: skip
    above.set_ylabel("time of a step", fontsize=9)
    below.set_ylabel("added to the compute, %", fontsize=9)
    below.set_xlabel("tokens in a micro-batch", fontsize=9)
    above.legend(frameon=False, fontsize=8, loc="upper left")
    below.legend(frameon=False, fontsize=8, loc="upper right", title="below 5 %", title_fontsize=8)
    steps = f", {told.work.accumulation} micro-batches a step" if told.work.accumulation > 1 else ""
    name = told.calibration.model.get("name")
    made.text(0.02, 0.955, f"Predicted step of {name}{steps}", fontsize=11.5, fontweight="bold", va="center")
    return made


def _time_axis(axes: Any, least: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(bottom=0.8 * least)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))


def _token_axis(axes: Any, told: Told) -> None:
    tokens = told.curves[0].tokens
    axes.set_xscale("log", base=2)
    axes.set_xlim(tokens[0], tokens[-1])
    axes.set_xticks(tokens[::2], [f"{n:,}" for n in tokens[::2]])
    axes.tick_params(labelsize=8)
    axes.axvline(told.work.tokens, color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _figure() -> Any:
    """An empty figure of the Agg backend: no display, and no global state of pyplot's."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        cause = "drawing needs matplotlib, which is not installed"
        remedy = "Install it: pip install 'hf-offload[plot]' (or matplotlib)"
        raise ConfigError(explain("--plot", "FILE", cause, remedy)) from None
    made = Figure(figsize=(8, 6), dpi=150, facecolor="white")
    FigureCanvasAgg(made)
    return made
