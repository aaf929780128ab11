"""The timeline's file, and the picture drawn from it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hf_offload import timeline as module
from hf_offload.engine import stats
from hf_offload.errors import ConfigError
from hf_offload.timeline import PHASES, TRACK_OF, TRACKS, NoTimeline, Span, Timeline, load_spans, open_timeline
from hf_offload.timeline_plot import choose, draw, percent


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def spans_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in content(path)["traceEvents"] if event["ph"] == "X"]


def run_of(path: Path, steps: int = 8) -> Path:
    """A made-up run whose steps take a second: compute 0.8 and wait 0.2; down 0.1, host 0.4 and up 0.1 behind it."""
    trace = Timeline(str(path))
    for step in range(1, steps + 1):
        begin = 100.0 + step
        trace.add("compute", "forward", begin, begin + 0.2, step)
        trace.add("wait", "bucket 0", begin + 0.2, begin + 0.4, step - 1)
        trace.add("compute", "backward", begin + 0.4, begin + 1.0, step)
        trace.add("d2h", "bucket 0", begin + 1.0, begin + 1.1, step)
        trace.add("host_step", "bucket 0", begin + 1.1, begin + 1.5, step)
        trace.add("h2d", "bucket 0", begin + 1.5, begin + 1.6, step)
    trace.write()
    return path


# ---------------------------------------------------------------------------------------------------- the file


def test_the_phases_are_those_of_the_stats() -> None:
    assert PHASES == stats.PHASES and set(TRACK_OF) == set(PHASES) and set(TRACK_OF.values()) == set(TRACKS)


def test_every_event_is_what_the_trace_event_format_asks_for(tmp_path: Path) -> None:
    path = run_of(tmp_path / "trace.json")
    whole = content(path)
    assert whole["displayTimeUnit"] == "ms" and whole["otherData"]["producer"] == "hf_offload timeline"
    assert "note" not in whole["otherData"]
    for event in whole["traceEvents"]:
        assert event.keys() >= {"name", "ph", "ts", "dur", "pid", "tid"}
        assert event["ph"] in ("X", "M") and event["pid"] == os.getpid()
        assert event["ts"] >= 0 and event["dur"] >= 0
    spans = spans_of(path)
    assert len(spans) == 8 * 6
    assert all(TRACKS[event["tid"] - 1] == TRACK_OF[event["cat"]] for event in spans)
    assert {event["cat"] for event in spans} == set(PHASES)


def test_four_named_tracks_in_a_fixed_order_even_without_spans(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline(str(path)).write()
    events = content(path)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(names, key=lambda tid: order[tid])] == list(TRACKS)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["hf_offload"]


def test_microseconds_from_the_first_span_and_touching_spans_do_not_overlap(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"))
    edges = [5000.0 + i * 1.2345678e-4 for i in range(200)]
    for start, end in pairwise(edges[1:]):  # the earliest comes last, as from another thread
        trace.add("host_step", "x", start, end, 1)
    trace.add("host_step", "x", edges[0], edges[1], 1)
    trace.write()
    events = sorted(spans_of(tmp_path / "t.json"), key=lambda event: event["ts"])
    assert events[0]["ts"] == 0.0 and events[0]["dur"] == pytest.approx(123.457, abs=1e-3)
    for before, after in pairwise(events):
        assert round(before["ts"] + before["dur"], 3) <= after["ts"]
    assert events[-1]["ts"] == pytest.approx(198 * 123.45678, abs=2e-3)


def test_names_are_escaped(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"))
    trace.add("d2h", 'a "b"\\\n\u2713', 1.0, 2.0, 1)
    trace.write()
    assert load_spans(tmp_path / "t.json")[0].name == 'a "b"\\\n\u2713'


def test_what_is_read_is_what_was_added(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"))
    trace.add("h2d", "bucket 3", 7.25, 7.5, 12)
    trace.add("compute", "forward", 7.0, 7.25, 13)
    trace.write()
    expected = [Span("compute", "forward", 0.0, 0.25, 13), Span("h2d", "bucket 3", 0.25, 0.5, 12)]
    assert load_spans(tmp_path / "t.json") == expected


def test_writing_again_writes_the_whole_file_again(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"))
    for step in (1, 2):
        trace.add("compute", "x", float(step), step + 0.5, step)
        trace.write()
    assert [event["args"]["step"] for event in spans_of(tmp_path / "t.json")] == [1, 2]


def test_recording_stops_at_the_bound_and_the_file_says_so_once(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"), max_spans=3)
    for step in range(1, 4):
        trace.add("compute", "x", float(step), step + 0.5, step)
    trace.write()
    assert "note" not in content(tmp_path / "t.json")["otherData"]  # full, and nothing is missing
    for step in range(4, 10):
        trace.add("compute", "x", float(step), step + 0.5, step)
    trace.write()
    assert [event["args"]["step"] for event in spans_of(tmp_path / "t.json")] == [1, 2, 3]
    assert content(tmp_path / "t.json")["otherData"]["note"].startswith("recording stopped after 3 spans")


def test_spans_of_several_threads_are_all_there_while_the_file_is_written(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "t.json"))

    def add(phase: str) -> None:
        for i in range(2000):
            trace.add(phase, "x", float(i), i + 0.5, 1)

    threads = [threading.Thread(target=add, args=(phase,)) for phase in ("d2h", "host_step", "h2d")]
    for thread in threads:
        thread.start()
    trace.write()
    load = content(tmp_path / "t.json")  # whole, whatever it holds by now
    assert len(load["traceEvents"]) >= 9
    for thread in threads:
        thread.join()
    trace.write()
    assert len(spans_of(tmp_path / "t.json")) == 6000


def test_spans_added_while_the_file_is_written_are_left_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Timeline(str(tmp_path / "t.json"))
    trace.add("d2h", "x", 10.0, 11.0, 1)
    real, late = json.dumps, iter([3.0, 2.0, 1.0])

    def dumps(thing: Any) -> str:
        start = next(late, None)
        if start is not None:
            trace.add("d2h", "late", start, start + 1, 1)
        return real(thing)

    monkeypatch.setattr(module.json, "dumps", dumps)
    trace.write()
    assert [(event["name"], event["ts"]) for event in spans_of(tmp_path / "t.json")] == [("x", 0.0)]
    trace.write()
    assert sorted(event["ts"] for event in spans_of(tmp_path / "t.json")) == [0.0, 1e6, 2e6, 9e6]


# --------------------------------------------------------------------------------------------- where it is written


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_of(tmp_path / "t.json", steps=1)
    before = path.read_bytes()
    trace = Timeline(str(path))
    trace.add("compute", "x", 0.0, 1.0, 1)
    moved = []
    real = os.replace

    def replace(source: str, target: str) -> None:
        assert path.read_bytes() == before, "the old file stays until the new one is whole"
        moved.append((json.loads(Path(source).read_text()), Path(target)))
        real(source, target)

    monkeypatch.setattr(module.os, "replace", replace)
    trace.write()
    assert moved[0][1] == path and moved[0][0] == content(path)
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_disk_that_fails_is_warned_of_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = run_of(tmp_path / "t.json", steps=1)
    before = path.read_bytes()
    trace = Timeline(str(path))

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with caplog.at_level(logging.WARNING):
        trace.write()
    assert "was not written: No space left on device" in caplog.text
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.json"]


def test_the_process_may_go_elsewhere_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    trace = Timeline("t.json")
    monkeypatch.chdir(tmp_path / "other")
    trace.write()
    assert (tmp_path / "t.json").is_file()


def test_making_one_leaves_an_earlier_file_alone(tmp_path: Path) -> None:
    path = run_of(tmp_path / "t.json", steps=1)
    before = path.read_bytes()
    Timeline(str(path))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["t.json"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [("nowhere/t.json", "there is no folder"), (".", "it is a folder"), ("a\0b", "cannot be written")],
)
def test_a_path_that_does_not_work_is_refused_at_construction(tmp_path: Path, name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=rf"timeline='.*: .*{cause}.*\. Give a file in a folder"):
        Timeline(str(tmp_path / name))


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "open", refuse, raising=False)  # as root, no folder refuses
    with pytest.raises(ConfigError, match=r"cannot be written: Permission denied"):
        Timeline(str(tmp_path / "t.json"))


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "t.json")
    monkeypatch.delenv("RANK", raising=False)
    assert open_timeline(path).path == path
    for rank, name in (("0", "t.json"), ("3", "t.rank3.json")):
        monkeypatch.setenv("RANK", rank)
        assert open_timeline(path).path == str(tmp_path / name)


def test_without_a_path_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none = open_timeline(None)
    assert isinstance(none, NoTimeline) and none.path is None
    none.add("compute", "x", 0.0, 1.0, 1)
    none.write()
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------- reading it back


def ours(events: list[Any]) -> str:
    return json.dumps({"otherData": {"producer": "hf_offload timeline"}, "traceEvents": events})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "no such file"),
        ("", "not JSON, or cut off"),
        ("model: x\n", "not JSON, or cut off"),
        ("[1, 2]", "did not write it"),
        ("3", "did not write it"),
        ('{"traceEvents": []}', "did not write it"),
        ('{"otherData": {"producer": "hf_offload timeline"}, "traceEvents": 3}', "did not write it"),
        (ours([]), "no span was recorded"),
        (ours([3]), "an event in it"),
        (ours([{"ph": "X"}]), "an event in it"),
        (ours([{"ph": "X", "cat": "sleep", "name": "", "ts": 0, "dur": 0, "args": {"step": 1}}]), "an event in it"),
        (ours([{"ph": "X", "cat": "d2h", "name": "", "ts": "x", "dur": 0, "args": {"step": 1}}]), "an event in it"),
    ],
)
def test_what_is_not_ours_is_refused(tmp_path: Path, text: str | None, cause: str) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"FILE='.*: .*{cause}"):
        load_spans(path)


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = run_of(tmp_path / "t.json")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cut off"):
        load_spans(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_spans(path)


# ----------------------------------------------------------------------------------------------------- which steps


@pytest.mark.parametrize(("steps", "shown"), [(1, (1, 1)), (2, (1, 2)), (3, (3, 3)), (5, (3, 5)), (8, (4, 6))])
def test_three_steps_from_the_middle_after_the_second(tmp_path: Path, steps: int, shown: tuple[int, int]) -> None:
    window = choose(load_spans(run_of(tmp_path / "t.json", steps)), None)
    assert (window.first, window.last) == shown


def test_a_window_runs_from_a_steps_start_to_a_later_steps_start(tmp_path: Path) -> None:
    window = choose(load_spans(run_of(tmp_path / "t.json")), "4:5")
    assert window.seconds == pytest.approx(2.0)
    assert [(number, round(start, 6)) for number, start in window.starts] == [(4, 0.0), (5, 1.0)]
    assert all(0 <= span.start <= span.end <= window.seconds for span in window.spans)
    # step 3's host work runs behind step 4's compute, and step 5's lies beyond
    assert sorted({span.step for span in window.spans if span.phase == "host_step"}) == [3, 4]
    busy = {phase: window.busy(phase) / 2 for phase in PHASES}
    assert busy == pytest.approx({"compute": 0.8, "d2h": 0.1, "host_step": 0.4, "h2d": 0.1, "wait": 0.2})
    assert window.hidden_fraction == pytest.approx(1 - 0.2 / 0.6)


def test_the_last_step_ends_with_its_last_span(tmp_path: Path) -> None:
    window = choose(load_spans(run_of(tmp_path / "t.json")), "8")
    assert window.seconds == pytest.approx(1.6)


def test_without_host_work_there_is_no_hidden_fraction() -> None:
    assert choose([Span("compute", "x", 0.0, 1.0, 1)], None).hidden_fraction is None


@pytest.mark.parametrize("steps", ["9:10", "0", "5:4", "a", "", ":", "1:2:3", "-1:2", "1.5"])
def test_steps_that_make_no_sense_are_refused(tmp_path: Path, steps: str) -> None:
    with pytest.raises(ConfigError, match=r"--steps='.*Give "):
        choose(load_spans(run_of(tmp_path / "t.json")), steps)


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, "0 %"), (0.853, "85 %"), (0.9996, "99.9 %"), (0.9934, "99.3 %"), (1.0, "100 %")]
)
def test_a_fraction_is_not_rounded_up_to_all(fraction: float, text: str) -> None:
    assert percent(fraction) == text


# ------------------------------------------------------------------------------------------------------ the picture


def colours(image: Any, low: float, high: float) -> set[tuple[int, ...]]:
    """The saturated colours between two heights of a picture (fractions from the top), those of 20 pixels or more."""
    height = image.shape[0]
    band = image[int(low * height) : int(high * height), :, :3].reshape(-1, 3)
    counts: dict[tuple[int, ...], int] = {}
    for pixel in map(tuple, (band * 255).round().astype(int).tolist()):
        if max(pixel) - min(pixel) > 30:
            counts[pixel] = counts.get(pixel, 0) + 1
    return {colour for colour, count in counts.items() if count >= 20}


def test_the_four_rows_have_their_own_colours_and_waits_are_on_the_first(tmp_path: Path) -> None:
    from matplotlib import colors, image

    from hf_offload.timeline_plot import _SHADES, _WAIT

    def rgb(name: str) -> tuple[int, ...]:
        return tuple(round(255 * part) for part in colors.to_rgb(name))

    draw(run_of(tmp_path / "t.json"), tmp_path / "t.png", width=1000)
    picture = image.imread(tmp_path / "t.png")
    assert picture.shape[:2] == (330, 1000)
    top, bottom = 1 - 0.79, 1 - 0.19  # of the axes, from the picture's top
    row = (bottom - top) / 4
    seen = [colours(picture, top + i * row, top + (i + 1) * row) for i in range(4)]
    for found, phase in zip(seen, ("compute", "d2h", "host_step", "h2d")):
        assert {rgb(shade) for shade in _SHADES[phase]} <= found, phase  # even and odd steps
        others = {rgb(shade) for other, shades in _SHADES.items() if other != phase for shade in shades}
        assert not others & found, phase
    assert [rgb(_WAIT) in found for found in seen] == [True, False, False, False]


def test_a_part_of_the_steps_is_drawn_larger(tmp_path: Path) -> None:
    path = run_of(tmp_path / "t.json")
    draw(path, tmp_path / "t.svg", "4:6", ms="900:2000")
    text = (tmp_path / "t.svg").read_text()
    assert "step 5" in text and "step 4" not in text and "step 6" not in text  # they begin at 0, 1000 and 2000
    assert "exposed 200 ms of a step's 1,000 ms" in text  # the figures stay those of whole steps


@pytest.mark.parametrize("ms", ["", "5", "5:5", "6:5", "a:b", "-1:5", "3000:4000", "nan:5", "1:2:3"])
def test_a_part_that_makes_no_sense_is_refused(tmp_path: Path, ms: str) -> None:
    with pytest.raises(ConfigError, match=r"--ms='.*Give "):
        draw(run_of(tmp_path / "t.json"), tmp_path / "t.svg", "4:6", ms=ms)


@pytest.mark.parametrize("suffix", ["svg", "PDF", "jpg"])
def test_the_suffix_says_the_format(tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"t.{suffix}"
    draw(run_of(tmp_path / "t.json"), output)
    head = output.read_bytes()[:200]
    assert {"svg": b"<svg", "PDF": b"%PDF", "jpg": b"\xff\xd8"}[suffix] in head or b"<?xml" in head


def test_the_picture_tells_what_it_shows(tmp_path: Path) -> None:
    draw(run_of(tmp_path / "t.json"), tmp_path / "t.svg", "4:5")
    text = (tmp_path / "t.svg").read_text()
    for words in (*TRACKS, "step 4", "step 5", "67 % of gradients down", "exposed 200 ms of a step's 1,000 ms"):
        assert words in text, words  # matplotlib draws letters as shapes and names them in comments
    assert "step 6" not in text


def test_no_display_and_no_global_state_of_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "tkagg")
    before = "matplotlib.pyplot" in sys.modules
    draw(run_of(tmp_path / "t.json"), tmp_path / "t.png", width=300)
    assert ("matplotlib.pyplot" in sys.modules) == before
