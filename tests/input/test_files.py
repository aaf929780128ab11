"""Files that are read: timelines and chats. Whatever is in them, they are read or refused by an error of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_offload import data, models, timeline, timeline_plot
from hf_offload.errors import ConfigError, RecipeError
from hf_offload.recipe import JsonlChat
from support.fuzz import both_sizes, examples_of, little_memory, numbers, only_our_errors, texts, values

DEEP = "[" * 100_000 + "]" * 100_000


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except ValueError:  # an int too long to be written
        return "9" * 5000


# ---- timelines


def event(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "bucket 1",
        "cat": "compute",
        "ph": "X",
        "ts": 1.0,
        "dur": 5.0,
        "pid": 1,
        "tid": 1,
        "args": {"step": 3},
    }
    return {**base, **changes}


fields = st.sampled_from(("name", "cat", "ph", "ts", "dur", "args"))
events = st.builds(lambda changes: event(**changes), st.dictionaries(fields, values, max_size=2)) | st.builds(
    lambda ts, dur, step, phase: event(ts=ts, dur=dur, args={"step": step}, cat=phase),
    numbers,
    numbers,
    numbers,
    st.sampled_from(timeline.PHASES),
)
chosen = st.none() | st.sampled_from(("1", "3:4", "0:" + "9" * 5000, ":", "3:2", "-1", "a", "٣", "2:9")) | texts


@both_sizes
def test_any_timeline(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    @examples_of(examples)
    @given(st.lists(events | values, max_size=4), chosen)
    def check(found: list[Any], steps: str | None) -> None:
        head = {"otherData": {"producer": "hf_offload timeline"}, "traceEvents": found}
        path.write_text(as_json(head))
        with only_our_errors():
            window = timeline_plot.choose(timeline.load_spans(path), steps)
            assert window.seconds >= 0 and all(0 <= s.start <= s.end <= window.seconds for s in window.spans)

    check()


@pytest.mark.parametrize(
    "spoilt",
    [{"ts": float("nan")}, {"ts": float("inf")}, {"ts": -1.0}, {"ts": 10**400}, {"ts": 1e300}, {"dur": float("nan")},
     {"dur": -2.0}, {"dur": float("inf")}, {"args": {"step": float("inf")}}, {"args": {"step": float("nan")}},
     {"args": {"step": -1}}, {"args": {"step": 10**400}}, {"args": []}, {"cat": []}],
    ids=lambda spoilt: str(spoilt)[:40],
)  # fmt: skip
def test_spans_that_cannot_be(spoilt: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    head = {"otherData": {"producer": "hf_offload timeline"}, "traceEvents": [event(), event(**spoilt)]}
    path.write_text(json.dumps(head))
    with pytest.raises(ConfigError, match="an event in it is not one that hf_offload writes"):
        timeline.load_spans(path)


@both_sizes
def test_any_content_instead_of_a_timeline(examples: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    @examples_of(examples)
    @given(st.binary(max_size=30) | values.map(lambda v: as_json(v).encode()))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="FILE="):
            timeline.load_spans(path)

    check()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # no disk is taken


def nested(path: Path) -> None:
    path.write_text(DEEP)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, huge, nested, Path.mkdir])
def test_files_that_are_no_timelines(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    make(path)
    with little_memory(), pytest.raises(ConfigError, match="FILE="):
        timeline.load_spans(path)


def test_devices_are_no_timelines() -> None:
    with pytest.raises(ConfigError, match="not a plain file"):
        timeline.load_spans("/dev/zero")


@pytest.mark.parametrize(
    "make", [pipe, lambda path: path.write_text("years of work"), lambda path: path.symlink_to("x")]
)
def test_a_timeline_replaces_only_a_timeline(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "x").write_text("years of work")
    path = tmp_path / "trace.json"
    make(path)
    with pytest.raises(
        ConfigError, match=r"timeline='.*trace.json': there is a file .* did not write. Give another name"
    ):
        timeline.open_timeline(str(path))
    assert (tmp_path / "x").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trace.json", "x"]


def test_a_timeline_of_ours_or_an_empty_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.touch()
    for name in ("first", "second"):
        record = timeline.open_timeline(str(path))
        record.add("compute", name, 0.0, 1.0, 1)
        record.write()
        assert [span.name for span in timeline.load_spans(path)] == [name]


def test_steps_with_gaps_between_them(tmp_path: Path) -> None:
    spans = [timeline.Span("compute", "x", step, step + 1.0, step) for step in (1, 5, 9)]
    window = timeline_plot.choose(spans, "2:8")
    assert (window.first, window.last) == (5, 5)


# ---- chats


GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
messages = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(("user", "assistant")) | texts, "content": texts | values}
)
rows = st.fixed_dictionaries({"messages": st.lists(messages | values, max_size=3) | values}) | values


@both_sizes
def test_any_chats(examples: int, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "chats.jsonl", models.byte_level_tokenizer()
    spec = JsonlChat(kind="jsonl", path=str(path), block_size=64)

    @examples_of(examples)
    @given(
        st.lists(rows.map(as_json) | st.just(as_json(GOOD)) | texts, max_size=3), st.sampled_from(("\n", "\r\n", "\r"))
    )
    def check(lines: list[str], end: str) -> None:
        path.write_text(end.join(lines), encoding="utf-8", errors="surrogatepass", newline="")
        with only_our_errors():
            found = data.build(spec, tokenizer, seed=0)
            assert found.train and all(len(row["input_ids"]) == len(row["labels"]) <= 64 for row in found.train)

    check()


WRONG_LINES = {
    DEEP: "not JSON",
    '{"messages": ' + DEEP + "}": "not JSON",
    "9" * 5000: "not JSON",
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}': "half of a surrogate pair",
    '{"messages": [{"role": "user", "content": ' + "[" * 500 + "]" * 500 + "}]}": "no text `role` and `content`",
    '{"messages": [' + "{}," * 9999 + "{}]}": "no text `role` and `content`",
}


@pytest.mark.parametrize("number", range(len(WRONG_LINES)))
def test_lines_that_bite(number: int, tmp_path: Path) -> None:
    line, said = list(WRONG_LINES.items())[number]
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{as_json(GOOD)}\n\n{line}\n")
    with pytest.raises(RecipeError, match=f"chats.jsonl:3: .*{said}") as caught:
        data.read_chats(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("letter", ["\u2028", "\u2029", "\x85", "\\u001e"])
def test_letters_that_end_a_line_for_python_and_not_for_json(letter: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(as_json(GOOD).replace("Hi", letter) + "\r\n" + as_json(GOOD), encoding="utf-8", newline="")
    assert len(data.read_chats(path)) == 2


def test_a_pipe_or_a_folder_is_no_file_of_chats(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(RecipeError, match="no such file"):
            data.read_chats(path)
