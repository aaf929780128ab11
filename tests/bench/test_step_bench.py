"""`hf-offload bench step`: that everybody does the whole work, bookkeeping, output. No timing is asserted."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from hf_offload import cli, hostmem
from hf_offload.bench import step, step_check, step_memory, step_peers, step_report, step_resident, step_runs
from hf_offload.bench import step_threads as threads_of
from hf_offload.bench.step import Lane, Setting
from hf_offload.bench.step_adam import MissingPeer, Outcome
from hf_offload.bench.step_check import WrongResult
from hf_offload.bench.step_contenders import CONTENDERS
from hf_offload.bench.step_memory import Memory
from hf_offload.bench.step_ours import OurFloat32
from hf_offload.cpus import Cpus
from hf_offload.errors import ConfigError, HostMemoryError, StateError, UnsupportedError
from hf_offload.hostmem import HostMemory
from hf_offload.kernels.cpu import max_threads, reference

OURS = "ours/float32/bf16"
TINY = {"params": 5000, "rounds": 2}
QUICK = ("--params=5000", "--rounds=2", f"--only={OURS},torch_fused/bf16")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "step", *arguments], env={"COLUMNS": "80"})


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_WAKE_S", 0.0)
    monkeypatch.setattr(step, "_SAMPLE_S", 0.0)


# ------------------------------------------------------------------------------------------------ the whole work


@pytest.mark.parametrize("name", list(CONTENDERS))
def test_every_contender_does_the_whole_step(name: str) -> None:
    try:
        step_check.check(name, CONTENDERS[name], threads=2)
    except MissingPeer as error:
        pytest.skip(str(error))


def _weight_left(memory: Memory) -> None:
    memory.weight[-1] = 0


def _weight_truncated(memory: Memory) -> None:
    memory.weight[:] = memory.master.view(np.uint32) >> 16


def _moment_off(memory: Memory) -> None:
    memory.exp_avg_sq[17] *= np.float32(1 + 1e-3)


def _master_rounded(memory: Memory) -> None:
    memory.master[:] = reference.widened(memory.weight, "bfloat16")


def _moment_not_stepped(memory: Memory) -> None:
    memory.exp_avg[3] = step_memory.make(step_check.PARAMS, 0, 1).exp_avg[3]


def _nan(memory: Memory) -> None:
    memory.exp_avg[0] = np.nan


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_weight_left, "weights are not the rounded master"),
        (_weight_truncated, "weights are not the rounded master"),
        (_moment_off, "exp_avg_sq is off"),
        (_master_rounded, "master is off"),
        (_moment_not_stepped, "exp_avg is off"),
        (_nan, "exp_avg is off by nan"),
    ],
)
@pytest.mark.parametrize("peer", [OURS, "torch_fused/bf16"])
def test_less_than_the_whole_step_is_refused(peer: str, wrong: Callable[[Memory], None], words: str) -> None:
    class Wrong:
        def __init__(self, memory: Memory, threads: int) -> None:
            self._memory, self._real = memory, CONTENDERS[peer].make(memory, threads)
            self.begin, self.step = self._real.begin, self._real.step

        def outcome(self) -> Outcome:
            wrong(self._memory)
            return self._real.outcome()

    with pytest.raises(WrongResult, match=words):
        step_check.check(peer, dataclasses.replace(CONTENDERS[peer], make=Wrong), threads=1)


def test_ours_goes_bucket_by_bucket_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload.bench.step_ours.BUCKET_BYTES", 2 * 1000)
    step_check.check(OURS, CONTENDERS[OURS], threads=1)
    memory = step_memory.make(2500, 0, 1)
    assert [b.stop - b.start for b in OurFloat32(memory, 1, "bfloat16")._buckets] == [1000, 1000, 500]


def test_the_gradient_is_an_ordinary_number_to_both_formats() -> None:
    memory = step_memory.make(100_000, 0, 1)
    for wire, low, high in (("bfloat16", 2.0**-20, 1.0), ("float16", 0.25, 2.0)):
        size = memory.grad_as(wire).float().abs()
        assert bool(((size >= low) & (size < high)).all())
        assert float((memory.grad_as(wire) < 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert memory.finite() and bool((memory.exp_avg_sq > 0).all())


def test_all_contenders_share_one_memory() -> None:
    memory = step_memory.make(5000, 4, 1)
    shared = [*memory.state, memory.weight]
    for name, contender in CONTENDERS.items():
        try:
            stepper = contender.make(memory, 1)
        except MissingPeer:
            continue
        stepper.begin()
        before = [a.copy() for a in shared]
        stepper.step()
        changed = [not np.array_equal(a, b) for a, b in zip(shared, before)]
        own_moments = contender.twin is not None  # in the scratch
        moments = contender.fp32_master and not own_moments
        assert changed == [contender.fp32_master, moments, moments, True], name
    assert all(a.ctypes.data % 64 == 0 for a in (*shared, memory.grad, memory.scratch))


def test_no_contender_decides_where_the_scratch_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(step_memory.cpu, "touch", lambda a, threads: touched.append((a.size, threads)))
    memory = step_memory.make(5000, 4, 1)
    for name in ("ours/int8/bf16", "torch_fused/bf16"):
        CONTENDERS[name].make(memory, 1).begin()
    assert touched == [(20_000, max_threads())]


def test_what_is_needed_is_what_is_allocated() -> None:
    memory = step_memory.make(5000, 4, 1)
    arrays = [*memory.state, memory.grad, memory.weight, memory.scratch]
    assert sum(step_memory.need(5000, 4).values()) == sum(a.nbytes for a in arrays) == 20 * 5000
    assert sum(step_memory.need(5000, 0).values()) == 16 * 5000


# ---------------------------------------------------------------------------------------- peers that are not there


@pytest.mark.parametrize(("name", "module"), [("deepspeed/bf16", "deepspeed"), ("torchao/bf16", "torchao")])
def test_a_missing_peer_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    done = invoke("--params=5000", "--rounds=1", f"--only={OURS},{name}")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert f"{name} did not run." in said and "not installed" in said and "pip install 'hf-offload[bench]'" in said
    alone = invoke("--params=5000", f"--only={name}")
    assert alone.exit_code == 2 and "No contender can run" in alone.stderr and "hf-offload[bench]" in alone.stderr


def test_a_peer_that_does_not_build_says_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        print("ninja prints this")
        raise RuntimeError("failed to build") from OSError(
            "c++ -O3 x.cpp\nx.cpp:1: fatal error: no omp.h\nninja stopped"
        )

    fake = types.ModuleType("deepspeed.ops.adam")
    fake.DeepSpeedCPUAdam = build  # type: ignore[attr-defined]
    for module in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", fake)
    found = step.run(Setting(**TINY, only=(OURS, "deepspeed/bf16")))
    assert "fatal error: no omp.h" in found.missing["deepspeed/bf16"]
    assert "C++ compiler" in found.missing["deepspeed/bf16"]


def test_what_peers_print_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with step_peers.stdout_to_stderr():
        os.write(1, b"from a compiler\n")
    os.write(1, b"figures\n")
    assert capfd.readouterr() == ("figures\n", "from a compiler\n")


@pytest.mark.skipif(sys.platform != "linux", reason="names of glibc")
def test_what_their_c_code_has_in_its_buffer_does_not_either(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    stdout, buffer = ctypes.c_void_p.in_dll(libc, "stdout"), ctypes.create_string_buffer(4096)
    libc.setvbuf(stdout, buffer, 0, len(buffer))  # _IOFBF, as where stdout is a file
    try:
        with step_peers.stdout_to_stderr():
            libc.printf(b"from C++\n")
        libc.fflush(None)
        assert capfd.readouterr() == ("", "from C++\n")
    finally:
        libc.setvbuf(stdout, None, 2, 0)  # _IONBF: no longer in `buffer`


def test_the_extra_bench_has_the_peers_and_the_tests_do_without() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {"deepspeed", "torchao"} <= {line.split(">=")[0] for line in extras["bench"]}
    assert not any("deepspeed" in line or "torchao" in line for line in extras["test"])


# ------------------------------------------------------------------------------------------------------- bookkeeping


def test_figures_of_a_lane() -> None:
    slow, quick = Lane(10**9, 28, (2.0, 4.0, 3.0), 1.5), Lane(10**9, 14, (1.0, 1.0, 2.0), 1.0)
    assert slow.gparams_per_s == pytest.approx(1 / 3) and slow.gb_per_s == pytest.approx(28 / 3)
    assert slow.spread == pytest.approx(2 / 3)
    assert quick.times(slow) == 2.0, "the median of 2, 4 and 1.5, round by round"


def test_everybody_has_one_turn_a_round_and_follows_others() -> None:
    order: list[str] = []
    turns = {n: step._Turn(lambda n=n: order.append(n), lambda: None, 1.0) for n in "ABC"}  # type: ignore[misc]
    step._take_turns(turns, 4, lambda text: None)
    assert "".join(order) == "ABCBCACABABC"
    assert [len(t.seconds) for t in turns.values()] == [4] * 3


def test_a_turn_is_long_enough_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step, "_SAMPLE_S", 0.02)
    monkeypatch.setattr(step, "_WAKE_S", 0.008)
    calls = []

    def work() -> None:
        calls.append("step")
        now[0] += 0.003

    turn = step._Turn(lambda: calls.append("begin"), work, 28)
    turn.take()
    assert calls == ["begin", *["step"] * (3 + 7)], "untimed for 8 ms at least, then timed for 20"
    assert turn.seconds == pytest.approx([0.003]) and turn.lane(3_000_000).gparams_per_s == pytest.approx(1)


def test_a_turn_of_a_long_step_is_one_untimed_and_one_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])

    def work() -> None:
        calls.append("step")
        now[0] += 1.5 if len(calls) == 1 else 1.0

    turn = step._Turn(lambda: None, work, 28)
    turn.take()
    assert len(calls) == 2 and turn.seconds == [1.0]


def test_threads_are_set_everywhere_and_put_back() -> None:
    before = torch.get_num_threads()
    libraries = threads_of._loaded()
    with threads_of.everywhere(1):
        assert torch.get_num_threads() == 1
        assert [threads_of.ctypes.CDLL(p).omp_get_max_threads() for p in libraries] == [1] * len(libraries)
    assert torch.get_num_threads() == before
    if sys.platform == "linux":
        assert libraries, "torch brings one"


def test_a_quota_counts_as_the_affinity_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    half = Cpus(usable=64, cores=32, quota=0.5, quota_of="cgroup cpu.max of /box")
    monkeypatch.setattr("hf_offload.engine.step_threads.find_cpus", lambda: half)
    assert threads_of.chosen(None) == 1
    with pytest.raises(ConfigError, match=r"threads=2: .*may use 1 .*/box grants 0\.5 CPUs"):
        threads_of.chosen(2)


def test_a_state_that_is_no_longer_finite_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = step.prepare(Setting(**TINY, only=(OURS,)))
    lab.memory.exp_avg_sq[-1] = np.inf
    with pytest.raises(StateError, match="no longer finite"):
        lab.measure(1)


def test_a_peer_whose_casts_do_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    room = HostMemory(17 * 5000, 1 << 40, "test", True)
    monkeypatch.setattr(hostmem, "available_host_bytes", lambda *a: room)
    found = step.run(Setting(**TINY, only=(OURS, "torch_fused/bf16")))
    assert list(found.contenders) == [OURS]
    assert "100000 bytes" in found.missing["torch_fused/bf16"] and "85000 bytes" in found.missing["torch_fused/bf16"]


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (12, [1, 2, 4, 8, 12])])
def test_thread_counts_of_a_grid(most: int, counts: list[int]) -> None:
    assert step_runs.grid_of(most) == counts


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_resident_bytes_are_those_of_the_state() -> None:
    found = step_resident.measure(lambda text: None, 1, params=3_000_000)["float32"]
    total = found.construction_bytes + found.step_bytes
    assert found.ring_bytes == 4 << 20 and found.bytes_per_param == total / found.params
    slack = 2 << 20
    assert 12 * found.params - slack < total < 12 * found.params + found.ring_bytes + slack
    assert found.construction_bytes < found.ring_bytes + slack, "the state comes with the first step"


# -------------------------------------------------------------------------------------------------- the command line


def test_json_has_the_schema_and_is_all_there_is_on_stdout() -> None:
    done = invoke(*QUICK, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"contenders", "roofline", "params", "machine"} <= set(found) and found["params"] == 5000
    assert set(found["contenders"]) == {OURS, "torch_fused/bf16"}
    for name, figures in found["contenders"].items():
        assert figures["gparams_per_s"] > 0 and figures["spread"] >= 0
        assert figures["gb_per_s"] == pytest.approx(figures["gparams_per_s"] * CONTENDERS[name].bytes_per_param)
        assert len(figures["seconds"]) == 2
    assert set(found["contenders"][OURS]["times"]) == {"torch_fused/bf16"}
    roof = found["roofline"]
    assert roof["rmw_gb_per_s"] > 0
    rates = [roof["lanes"][name]["gparams_per_s"] for name in step.PATTERNS]
    assert roof["step_pattern_gparams_per_s"] == max(rates)
    assert found["machine"]["versions"]["torch"] and found["threads"] == max_threads()


def test_the_tables_fit_80_columns_and_say_what_is_counted() -> None:
    found = step.run(Setting(**TINY, only=(OURS,)))
    lane = found.contenders[OURS]
    missing = {"deepspeed/bf16": "not installed. " * 9, "deepspeed/fp16": "not installed. " * 9}
    everybody = dataclasses.replace(found, contenders=dict.fromkeys(CONTENDERS, lane), missing=missing)
    text = io.StringIO()
    step_report.print_result(Console(file=text, width=80), everybody)
    assert max(map(len, text.getvalue().splitlines())) <= 80
    said = " ".join(text.getvalue().split())
    for word in (*CONTENDERS, "Times as fast as", "copy_()", "no float32 master", "Less work"):
        assert word in said, word
    assert said.count("deepspeed/bf16, deepspeed/fp16 did not run. not installed.") == 1


def test_several_sizes_and_a_file(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    done = invoke("--params=4000,1e13,5000", "--rounds=1", f"--only={OURS}", f"--out={out}")
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [run["params"] for run in found["runs"]] == [4000, 5000]
    assert "GB" in found["left_out"]["10000000000000"]
    assert "10,000,000,000,000 parameters were left out" in " ".join(done.stdout.split())


def test_a_grid_of_threads_and_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_runs, "SIZES", (3000, 40_000))
    out = tmp_path / "grid.json"
    shown = invoke("--scaling", "--rounds=1", f"--only={OURS}", f"--out={out}")
    assert shown.exit_code == 0, shown.output
    runs = json.loads(out.read_text())["runs"]
    counts = step_runs.grid_of(max_threads())
    assert [(r["params"], r["threads"]) for r in runs] == [(n, t) for n in (3000, 40_000) for t in counts]
    assert "step pattern, Gparam/s" in shown.stdout and "4e+04" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params=0"], ["--params='0'", "not from 1"]),
        (["--params=many"], ["--params='many'", "7e9"]),
        (["--threads=0"], ["threads=0", "at least 1"]),
        (["--threads=99999"], ["threads=99999", "may use", "or fewer"]),
        (["--out=nowhere/x.json"], ["--out='nowhere/x.json'", "there is no folder 'nowhere'"]),
        (["--out=/"], ["--out='/'", "a folder"]),
        (["--rounds=0"], ["rounds=0", "at least 1"]),
        (["--only=ours/float32/bf61"], ["only='ours/float32/bf61'", "Did you mean 'ours/float32/bf16'"]),
        (["--params=1e13"], ["master, m, v", "GB"]),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], words: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == "" and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_the_same_from_python() -> None:
    with pytest.raises(ConfigError, match="params=0"):
        Setting(params=0)
    with pytest.raises(ConfigError, match="threads=99999"):
        Setting(threads=99999)
    with pytest.raises(HostMemoryError):
        step.run(Setting(params=10**13))


def test_a_busy_machine_is_said_to_be_busy() -> None:
    found = step.run(Setting(**TINY, only=(OURS,)))
    busy = dataclasses.replace(found, others=1.0)
    assert any("Other programs kept 1.0 cores busy" in s for s in step_report._remarks(busy))
    assert not any("Other programs" in s for s in step_report._remarks(dataclasses.replace(found, others=0.0)))


def test_no_contender_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_able", lambda *a: {})
    with pytest.raises(UnsupportedError, match="No contender"):
        step.run(Setting(**TINY))


def test_help_fits_80_columns() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "step", "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0 and "--scaling" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
