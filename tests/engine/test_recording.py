"""What is recorded of a step: spans in the timeline, and ranges for a profiler."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hf_offload.errors import ConfigError
from hf_offload.timeline import PHASES, load_spans
from support.engine import TinyLM, batches, copies, late, optimizer_of, settings

MODES: dict[str, dict[str, Any]] = {
    "in_order": {},
    "overlapped": {"schedule": "overlapped"},
    "streamed": {"schedule": "overlapped", "stream_gradients": True},
    "speculative": {"schedule": "overlapped", "stream_gradients": True, "shadow_bytes": 1 << 20},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 1},
}
modes = pytest.mark.parametrize("mode", MODES)


def run(mode: str, steps: int = 4, **more: Any) -> Any:
    model = TinyLM()
    optimizer = optimizer_of(model, settings(**{"schedule": "in_order", **MODES[mode], **more}))
    data = batches()
    for _ in range(steps):
        model(next(data)).backward()
        optimizer.clip_grad_norm_(100.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@modes
def test_every_phase_of_every_step_is_in_the_timeline(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    optimizer = run(mode, timeline=str(path))
    stats = optimizer.stats()
    optimizer.close()
    spans = load_spans(str(path))
    assert {s.phase for s in spans} == set(PHASES)
    for step in (3, 4):  # delayed: step 2 has no weights to send yet
        assert {s.phase for s in spans if s.step == step} == set(PHASES)
    assert all(s.seconds >= 0 for s in spans)
    buckets = len(optimizer.engine.arenas[0].plan.buckets)
    down = Counter(s.step for s in spans if s.phase == "d2h")
    assert all(down[step] == buckets for step in (1, 2, 3, 4))
    mine = [s for s in spans if s.step == stats.step]
    for phase in ("d2h", "h2d"):
        assert sum(s.seconds for s in mine if s.phase == phase) == pytest.approx(stats.seconds[phase], abs=1e-4)


@modes
def test_spans_of_one_track_do_not_overlap(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(mode, timeline=str(path)).close()
    spans = load_spans(str(path))
    for track in (("compute", "wait"), ("d2h",), ("host_step",), ("h2d",)):
        mine = sorted((s for s in spans if s.phase in track), key=lambda s: s.start)
        assert all(a.end <= b.start + 2e-6 for a, b in pairwise(mine)), track  # the file has microseconds


def test_a_window_of_steps_ends_with_the_step_under_way(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with copies(late("h2d", 0.02)):
        optimizer = run("overlapped", steps=2)
    optimizer.start_timeline(str(path))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.detach().clone()
    optimizer.step()
    optimizer.stop_timeline()
    recorded = load_spans(str(path))
    down, up = (sum(s.phase == phase and s.step == 3 for s in recorded) for phase in ("d2h", "h2d"))
    assert down == up > 0
    optimizer.step()
    optimizer.close()
    assert len(load_spans(str(path))) == len(recorded)


def test_a_path_that_cannot_be_written_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="timeline="):
        optimizer_of(TinyLM(), settings("in_order", timeline=str(tmp_path / "no" / "t.json")))


class Recorder:
    """Stands for NVTX."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.seen: Counter[str] = Counter()

    def start(self, phase: str, name: str) -> int:
        self.seen[phase] += 1
        handle = sum(self.seen.values())
        self.open[handle] = f"{phase}: {name}"
        return handle

    def end(self, handle: int) -> None:
        if handle:
            del self.open[handle]


@modes
def test_every_range_that_begins_ends(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("hf_offload.engine.engine.ranges_for", lambda kind: recorder)
    run(mode).close()
    assert recorder.open == {}
    assert set(recorder.seen) == set(PHASES)
    assert recorder.seen["d2h"] >= 4 and recorder.seen["d2h"] == recorder.seen["h2d"]
