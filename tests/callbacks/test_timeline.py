"""`TimelineCallback`: when it starts and stops recording, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_offload import OffloadAdam
from hf_offload.callbacks.timeline import TimelineCallback
from hf_offload.errors import ConfigError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of the optimizer, each with the number of steps taken by then."""
    made: list[tuple[Any, ...]] = []

    def start(self: OffloadAdam, path: str) -> None:
        made.append(("start", path, self.stats().steps))

    def stop(self: OffloadAdam) -> None:
        made.append(("stop", self.stats().steps))

    monkeypatch.setattr(OffloadAdam, "start_timeline", start, raising=False)
    monkeypatch.setattr(OffloadAdam, "stop_timeline", stop, raising=False)
    return made


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_records_the_window_until_the_step_after_is_taken(
    make_trainer: Callable[..., Any], calls: Any, tmp_path: Path, accumulation: int
) -> None:
    path, said = str(tmp_path / "trace.json"), []
    callback = TimelineCallback(path, first_step=2, steps=2, say=said.append)
    make_trainer([callback], gradient_accumulation_steps=accumulation).train()
    assert calls == [("start", path, 1), ("stop", 3)]  # step 2 begins after one step; step 4 is about to be taken
    assert len(said) == 1 and path in said[0] and "perfetto" in said[0]


def test_training_that_ends_inside_the_window_writes_what_there_is(
    make_trainer: Callable[..., Any], calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "trace.json")
    real = OffloadAdam.synchronize
    monkeypatch.setattr(OffloadAdam, "synchronize", lambda self: calls.append(("synchronize",)) or real(self))
    make_trainer([TimelineCallback(path, first_step=4, steps=10, say=lambda line: None)]).train()
    kinds = [call[0] for call in calls]
    assert calls[kinds.index("start")] == ("start", path, 3)
    stop = kinds.index("stop")
    assert calls[stop] == ("stop", 5) and calls[stop - 1] == ("synchronize",)
    assert kinds.count("start") == kinds.count("stop") == 1


def test_training_that_ends_before_the_window_says_so(
    make_trainer: Callable[..., Any], calls: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    make_trainer([TimelineCallback(str(tmp_path / "t.json"), first_step=6, say=said.append)]).train()
    assert calls == [] and len(said) == 1 and "after 5 steps, before step 6" in said[0]


def test_a_second_training_is_recorded_anew(make_trainer: Callable[..., Any], calls: Any, tmp_path: Path) -> None:
    trainer = make_trainer([TimelineCallback(str(tmp_path / "t.json"), 2, 1, say=lambda line: None)], max_steps=3)
    trainer.train()
    trainer.train()
    assert [call[0] for call in calls] == ["start", "stop"] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"first_step": 0}, r"first_step=0: not a count"),
        ({"steps": 0}, r"steps=0: not a count"),
        ({"steps": 1.5}, r"steps=1\.5"),
        ({"steps": True}, r"steps=True"),
    ],
)
def test_counts_that_make_no_sense_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TimelineCallback(str(tmp_path / "t.json"), **given)


def test_a_path_that_does_not_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeline='.*no folder"):
        TimelineCallback(str(tmp_path / "nowhere" / "t.json"))


def test_another_optimizer_is_refused(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer([TimelineCallback(str(tmp_path / "t.json"))], optim="adamw_torch", optim_args=None)
    with pytest.raises(ConfigError, match=r"TimelineCallback.*without offload_adam"):
        trainer.train()


@pytest.mark.skipif(not hasattr(OffloadAdam, "start_timeline"), reason="OffloadAdam does not record timelines yet")
@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_the_file_holds_whole_steps(make_trainer: Callable[..., Any], tmp_path: Path, schedule: str) -> None:
    from hf_offload.timeline import PHASES, load_spans

    path = tmp_path / "trace.json"
    callback = TimelineCallback(str(path), first_step=2, steps=2, say=lambda line: None)
    make_trainer([callback], optim_args=f"threads=1,bucket_bytes=4096,schedule={schedule}").train()
    spans = load_spans(path)
    for step in (2, 3):
        found = {span.phase for span in spans if span.step == step}
        assert found >= set(PHASES) - {"wait"}, (step, found)
