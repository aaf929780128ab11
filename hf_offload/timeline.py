"""The timeline: when each phase of each step ran, written as a Chrome trace that https://ui.perfetto.dev opens.

The format is that of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): one complete event ("X") a span,
and one track for each of `TRACKS`. Stdlib only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hf_offload.errors import ConfigError, explain

logger = logging.getLogger(__name__)

PHASES = ("compute", "d2h", "host_step", "h2d", "wait")
TRACKS = ("compute", "gradients down", "host step", "weights up")
TRACK_OF = {
    "compute": "compute",
    "wait": "compute",  # the training thread either computes or waits
    "d2h": "gradients down",
    "host_step": "host step",
    "h2d": "weights up",
}
MAX_SPANS = 250_000
"""Spans a timeline keeps, about 40 MB of memory and as much of file; some 2,000 steps of a model of 24 blocks."""

_PRODUCER = "hf_offload timeline"
MOST_SECONDS = 1e10
MOST_BYTES = 1 << 29
"""Of a file that is read; `MAX_SPANS` take a tenth of it."""


@dataclass(frozen=True)
class Span:
    """One stretch of one phase, in seconds from the file's first span.

    Attributes:
        phase: one of `PHASES`.
        name: what was worked on, as `bucket 3`.
        step: the step whose gradients and weights it belongs to, from 1.
    """

    phase: str
    name: str
    start: float
    end: float
    step: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Records spans, and writes them as a Chrome trace.

    Args:
        path: the file to write; its folder must be there.
        max_spans: recording stops after so many, and the file says so.

    Raises:
        ConfigError: `path` cannot be written.
    """

    def __init__(self, path: str, max_spans: int = MAX_SPANS) -> None:
        self.path: str | None = path
        self._max = max_spans
        self._full = False
        self._spans: list[tuple[str, str, float, float, int]] = []
        self._target = os.path.abspath(path)  # the process may go to another folder before it writes
        self._part = _probe(path)

    def add(self, phase: str, name: str, start: float, end: float, step: int) -> None:
        """Record one span; from any thread. One append, no lock: a thread more or less may pass the cap.

        Args:
            phase: one of `PHASES`.
            name: what was worked on, as `bucket 3`.
            start, end: seconds on `time.perf_counter`'s clock.
            step: the step whose gradients and weights it belongs to, from 1.
        """
        if len(self._spans) < self._max:
            self._spans.append((phase, name, start, end, step))
        else:
            self._full = True

    def write(self) -> None:
        """Write all spans so far. The file is whole at any time: it is written beside and moved into place.

        A disk that fills up is warned of and not raised: a picture is not worth a training run.
        """
        spans = list(self._spans)  # other threads may go on recording
        try:
            _forget(self._part)
            with open(self._part, "w", encoding="utf-8") as file:
                file.writelines(_lines(spans, self._note(len(spans))))
            os.replace(self._part, self._target)
        except OSError as error:
            logger.warning("hf_offload: the timeline %r was not written: %s.", self.path, error.strerror or error)
            _forget(self._part)

    def _note(self, kept: int) -> str | None:
        return f"recording stopped after {kept:,} spans, which is its bound" if self._full else None


class NoTimeline:
    """Records nothing."""

    path: str | None = None

    def add(self, phase: str, name: str, start: float, end: float, step: int) -> None:
        """As `Timeline.add`."""

    def write(self) -> None:
        """As `Timeline.write`."""


AnyTimeline: TypeAlias = Timeline | NoTimeline


def open_timeline(path: str | None) -> AnyTimeline:
    """A timeline that writes to `path`, or one that records nothing for None.

    In a distributed run (`RANK` in the environment) every rank but the first writes a file of its own: `trace.json`
    becomes `trace.rank1.json`. Raises ConfigError as `Timeline` does.
    """
    if path is None:
        return NoTimeline()
    rank = os.environ.get("RANK", "0")
    if rank not in ("", "0"):
        stem, suffix = os.path.splitext(path)
        path = f"{stem}.rank{rank}{suffix}"
    return Timeline(path)


def load_spans(path: str | os.PathLike[str]) -> list[Span]:
    """The spans of a file that `Timeline.write` wrote, by start.

    Raises:
        ConfigError: no such file, not one of ours, cut off, or without a span.
    """
    events = _events(Path(path))
    try:
        spans = [_span(event) for event in events if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(_not_ours(path, "an event in it is not one that hf_offload writes")) from None
    if not spans:
        cause = "no span was recorded: no step was taken while it was on"
        raise ConfigError(explain("FILE", str(path), cause, "Take three steps or more"))
    return sorted(spans, key=lambda span: span.start)


# ---- writing


def _probe(path: str) -> str:
    """The file written beside `path`, after a trial. Raises ConfigError."""
    target = Path(path)
    folder, name = os.path.split(os.path.abspath(path))
    part = os.path.join(folder, f".{name}.{os.getpid()}.part")
    remedy = "Give a file in a folder that is there and that you may write to"
    if not target.parent.is_dir():
        raise ConfigError(explain("timeline", path, f"there is no folder {str(target.parent)!r}", remedy))
    if target.is_dir():
        raise ConfigError(explain("timeline", path, "it is a folder, not a file", remedy))
    if not _replaceable(target):
        cause = "there is a file of this name that hf_offload did not write"
        raise ConfigError(explain("timeline", path, cause, "Give another name, or take that file away"))
    _forget(part)  # a link there would be followed
    try:
        with open(part, "w", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        cause = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(explain("timeline", path, cause, remedy)) from None
    _forget(part)
    return part


def _replaceable(path: Path) -> bool:
    """Whether nothing is lost with what is there: a recipe of somebody else's may name any file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False  # a pipe, a device
        with open(path, "rb") as file:
            head = file.read(200)
    except (OSError, ValueError):  # not there; what else is wrong shows at the trial
        return True
    return not head or _PRODUCER.encode() in head


def _forget(path: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # it was never there, or the disk is gone
        os.unlink(path)


def _lines(spans: list[tuple[str, str, float, float, int]], note: str | None) -> Iterator[str]:
    """The file, one event a line. The pid is the process's, the tids number the tracks from 1."""
    pid = os.getpid()
    head = {"producer": _PRODUCER, "version": 1, **({"note": note} if note else {})}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(head)}, "traceEvents": [\n'
    yield ",\n".join(json.dumps(event) for event in _metadata(pid))
    origin = min((start for _, _, start, _, _ in spans), default=0.0)
    for phase, name, start, end, step in spans:
        ts = round((start - origin) * 1e6, 3)
        event = {
            "name": name,
            "cat": phase,
            "ph": "X",
            "ts": ts,
            # from the rounded end, so that spans that touch do not overlap: viewers refuse to draw that
            "dur": round(max(0.0, round((end - origin) * 1e6, 3) - ts), 3),
            "pid": pid,
            "tid": TRACKS.index(TRACK_OF[phase]) + 1,
            "args": {"step": step},
        }
        yield ",\n" + json.dumps(event)
    yield "\n]}\n"


def _metadata(pid: int) -> Iterator[dict[str, Any]]:
    """Names of the process and its tracks, and the order of the tracks."""
    common = {"ph": "M", "ts": 0, "dur": 0, "pid": pid}
    yield {"name": "process_name", **common, "tid": 0, "args": {"name": "hf_offload"}}
    for tid, track in enumerate(TRACKS, start=1):
        yield {"name": "thread_name", **common, "tid": tid, "args": {"name": track}}
        yield {"name": "thread_sort_index", **common, "tid": tid, "args": {"sort_index": tid}}


# ---- reading


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        found = os.stat(path)
        odd = not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES
        text = "" if odd else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        cause = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        remedy = "Give the file that offload.timeline=FILE wrote"
        raise ConfigError(explain("FILE", str(path), cause, remedy)) from None
    if odd:  # a pipe may never end
        raise ConfigError(_not_ours(path, f"cannot be read: not a plain file of at most {MOST_BYTES:,} bytes"))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(_not_ours(path, f"not JSON, or cut off ({error})")) from None
    try:
        ours = content["otherData"]["producer"] == _PRODUCER
        events = content["traceEvents"]
    except (KeyError, TypeError, IndexError):
        ours, events = False, None
    if not ours or not isinstance(events, list):
        raise ConfigError(_not_ours(path, "hf_offload did not write it"))
    return events


def _span(event: dict[str, Any]) -> Span:
    if event["cat"] not in PHASES:
        raise ValueError
    start, step = float(event["ts"]) / 1e6, int(event["args"]["step"])
    end = start + float(event["dur"]) / 1e6
    if not (0 <= start <= end < MOST_SECONDS and 0 <= step < 2**53):
        raise ValueError
    return Span(event["cat"], str(event["name"]), start, end, step)


def _not_ours(path: str | os.PathLike[str], cause: str) -> str:
    return explain("FILE", str(path), cause, "Give the file that offload.timeline=FILE wrote")
