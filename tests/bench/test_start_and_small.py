"""`bench.start` and `bench.small`: what is measured and printed. No timing is asserted."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from hf_offload.bench import small, start, threads
from hf_offload.engine.step_threads import StepThreads


def test_importing_the_package_brings_in_the_standard_library_and_two_modules_of_ours() -> None:
    modules = start._fresh(start.IMPORT)["modules"]
    assert {m for m in modules if m not in sys.stdlib_module_names} == {"hf_offload"}
    assert not {"asyncio", "multiprocessing", "subprocess", "urllib", "unittest", "email"} & set(modules)


@pytest.mark.slow
def test_construction_touches_no_state() -> None:
    found = start._fresh(start.CONSTRUCTION.format(params=20_000_001))
    assert found["rss_anon_bytes"] < 4_000_000, "of 240 MB of state, and a ring of 256"


@pytest.mark.slow
def test_kernels_compile_once(capsys: pytest.CaptureFixture[str]) -> None:
    start.main(["--params=1e6", "--repeats=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["construction"]["params"] == 1_000_000
    start.main(["--params=1e6", "--repeats=1"])
    assert "with kernels to compile" in capsys.readouterr().out


@pytest.mark.parametrize("tensors", [1, 3, 7])
def test_small_tensors_together_have_all_parameters(tensors: int) -> None:
    sizes = small.Setting(100, tensors).sizes()
    assert len(sizes) == tensors and sum(sizes) == 100 and max(sizes) - min(sizes) <= 1


def test_small_measures_every_contender_on_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params=50", "--tensors=3", "--steps=3", "--threads=1"]
    small.main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["params"], found["tensors"], found["threads"]) == (50, 3, 1)
    assert set(found["contenders"]) == {
        "step", "clip_and_step", "step_beside_other_pools", "kernel", "torch_fused_fp32",
    }  # fmt: skip
    assert all(row["us"] > 0 and row["us_lower_decile"] > 0 for row in found["contenders"].values())
    small.main(arguments)
    assert "50 parameters in 3 tensors" in capsys.readouterr().out


def test_the_kernel_alone_steps_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(small.cpu, "adam_step", lambda *arrays, **more: seen.append((arrays, more)))
    small._kernel(small.Setting(100, 3), threads=2)()
    (*state, grad, weight, bounds, rows), more = seen[0]
    assert all(a.size == 100 for a in (*state, grad, weight)) and bounds.tolist() == [0, 34, 67, 100]
    assert rows.shape[0] == 3 and rows[:, small.cpu.NUM_COEF - 1].all() and more == {"wire": "bfloat16", "threads": 2}


def test_step_threads_measures_both_schedules_with_each_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds: list[Any] = []
    real = threads._round
    monkeypatch.setattr(threads, "_round", lambda s, config: rounds.append(config) or real(s, config))
    monkeypatch.setattr(threads, "step_threads", lambda: StepThreads(1, 1, "here"))
    threads.main(["--layers=2", "--width=8", "--rows=2", "--steps=1", "--rounds=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(c.schedule, c.threads) for c in rounds] == [("in_order", 1), ("overlapped", 1)] * 2
    assert found["ratio_to_all_threads"] == {"in_order": {"1": 1.0}, "overlapped": {"1": 1.0}}
    assert found["params"] == 2 * (2 * 8 * 16 + 16 + 8)
