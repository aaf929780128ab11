"""`hf-offload bench pipeline`: the emulated device, the bookkeeping, and what is printed. No timing is asserted."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hf_offload import cli
from hf_offload.bench import cores, emulated, pipeline, report, stages
from hf_offload.bench.emulated import Device, EmulatedModel, Memory, module_sizes
from hf_offload.bench.pipeline import CONTENDERS, Setting
from hf_offload.engine.units import find_units
from hf_offload.errors import ConfigError, HostMemoryError
from hf_offload.transport import HostTransport, Segment

TINY = {"blocks": 2, "params_per_block": 6000, "forward_ms": 0.2, "backward_ms": 1.0, "steps": 2, "rounds": 2}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
STEPS = 2 * 2  # rounds x steps: what is measured


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", "pipeline", *arguments], env={"COLUMNS": "80"})


# ------------------------------------------------------------------------------------------- the emulated device


@pytest.fixture
def memory() -> Memory:
    return Memory(module_sizes(3, 6000, 12), seed=0)


def gradients(memory: Memory) -> list[torch.Tensor]:
    return [g for module in memory.split(memory.gradients) for g in module]


def test_embedding_and_head_hold_7_percent_each() -> None:
    sizes = module_sizes(24, 2_800_000, 12)
    counts = [sum(unit) for unit in sizes]
    assert counts[1:-1] == [2_800_000] * 24
    for edge in (counts[0], counts[-1]):
        assert edge / sum(counts) == pytest.approx(0.07, rel=1e-4)
    assert sum(map(len, sizes)) == 290


def test_a_block_that_does_not_divide_keeps_every_parameter() -> None:
    assert [sum(unit) for unit in module_sizes(2, 100, 7)][1:-1] == [100, 100]


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_are_the_buffers_themselves(memory: Memory, hooked: bool) -> None:
    model = EmulatedModel(memory, (0.0, 0.0))
    for p in model.parameters():
        if hooked:
            p.register_post_accumulate_grad_hook(lambda p: None)
    model(torch.zeros(1)).backward()
    for p, buffer in zip(model.parameters(), gradients(memory), strict=True):
        assert p.grad is not None and p.grad.data_ptr() == buffer.data_ptr()
        assert buffer.count_nonzero() > 0.9 * buffer.numel()


def test_models_share_gradients_but_not_weights(memory: Memory) -> None:
    first, second = EmulatedModel(memory, (0.0, 0.0)), EmulatedModel(memory, (0.0, 0.0))
    with torch.no_grad():
        next(first.parameters()).zero_()
    for theirs in (next(second.parameters()), memory.split(memory.weights)[0][0]):
        assert theirs.count_nonzero() > 0.9 * theirs.numel()
    flat = [w for module in memory.split(memory.weights) for w in module]
    assert all(map(torch.equal, second.parameters(), flat))


def test_gradients_come_module_by_module_from_head_to_embedding(memory: Memory) -> None:
    model, seen = EmulatedModel(memory, (0.0, 0.0)), []
    module_of = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(module_of[id(p)]))
    model(torch.zeros(1)).backward()
    assert len(seen) == 3 * 12 + 2
    assert list(dict.fromkeys(seen)) == ["head", "blocks.2", "blocks.1", "blocks.0", "embedding"]
    assert seen == sorted(seen, key=list(dict.fromkeys(seen)).index)  # none between those of another module


def test_the_engine_sees_one_unit_a_module_in_forward_order(memory: Memory) -> None:
    found = find_units(EmulatedModel(memory, (0.0, 0.0)))
    assert [u.name for u in found.units] == ["embeddings", "blocks.0", "blocks.1", "blocks.2", "tail"]
    plan = stages.bucket_plan(memory, 1 << 20)
    assert [b.unit for b in plan.buckets] == [0, 1, 2, 3, 4]
    assert plan.numel == sum(p.numel() for u in found.units for p in u.params)


@dataclass
class FakeTime:
    """A clock that only sleeping, or a test, moves on; every sleep lasts `late` too long."""

    now: float = 0.0
    late: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTime]:
    fake = FakeTime()
    monkeypatch.setattr(emulated, "time", fake)
    monkeypatch.setattr("hf_offload.transport.host.time", fake)
    monkeypatch.setattr(emulated, "AHEAD_S", 2.0)
    yield fake


def test_python_runs_ahead_of_the_device_and_no_further(clock: FakeTime) -> None:
    device = Device()
    device.work(1.0)
    assert clock.now == 0.0 and device.end() == 1.0
    device.work(4.0)
    assert clock.now == 3.0 and device.end() == 5.0
    device.synchronize()
    assert clock.now == 5.0


def test_python_between_modules_hides_as_long_as_the_device_has_work(clock: FakeTime) -> None:
    device = Device()
    device.work(4.0)  # Python goes on at 2
    clock.now += 1.5
    device.work(4.0)
    assert device.end() == 8.0
    clock.now += 3.5  # 6 + 3.5: the device has stood idle from 8 to 9.5
    device.work(4.0)
    assert device.end() == 13.5


def test_a_late_wake_up_costs_nothing_while_there_is_work(clock: FakeTime) -> None:
    device, clock.late = Device(), 0.5
    for _ in range(3):
        device.work(4.0)
    assert device.end() == 12.0


def test_all_that_comes_after_the_end_of_the_queue_is_charged(clock: FakeTime) -> None:
    """`step()`: the training loop has waited for the device."""
    device = Device()
    device.work(4.0)
    device.synchronize()
    clock.now += 1.0
    device.work(4.0)
    assert device.end() == 9.0


def test_a_model_is_one_queue_and_a_hook_that_waits_holds_it_up(clock: FakeTime, memory: Memory) -> None:
    model = EmulatedModel(memory, (4.0, 8.0))
    model(torch.zeros(1)).backward()
    assert model.device.end() == 3 * 12.0

    def hold_up(module: object, args: object) -> None:
        clock.now = 50.0

    model.blocks[1].register_forward_pre_hook(hold_up)
    model.device.synchronize()
    model(torch.zeros(1)).backward()
    assert model.device.end() == 50.0 + 2 * 4.0 + 3 * 8.0  # block 0, done at 40, hid nothing of the wait


def test_a_gradient_is_not_copied_before_the_device_has_made_it() -> None:
    transport = HostTransport(1, 64)
    try:
        made = time.perf_counter() + 0.05
        transport.clock = lambda: made
        here = torch.ones(16, dtype=torch.float32)
        event = transport.to_host([Segment(here.data_ptr(), 64, 0, here)], 0, transport.mark())
        event.wait(10.0)
        begin, end = event.span()
        assert made <= begin <= end
    finally:
        transport.close()


# ------------------------------------------------------------------------------------------------------ the cores


def test_the_host_step_has_cores_of_its_own() -> None:
    assert [cores.spare(n) for n in (1, 2, 4, 6, 64)] == [0, 1, 1, 2, 2]
    found = cores.divide(frozenset({3, 5, 9}), 2)
    assert found.step == {3, 5} and found.rest == {9}
    assert cores.divide(frozenset({3, 5}), 2) == cores.Cores(frozenset({3, 5}), frozenset({3, 5}))


@pytest.mark.skipif(len(cores.usable_cores()) < 2, reason="there is one core")
def test_threads_are_pinned_while_it_runs_and_the_training_thread_is_free_again() -> None:
    usable = cores.usable_cores()
    divided = cores.divide(usable, 1)
    transport = HostTransport(1, 64)
    try:
        with divided.unpinned():
            divided.pin()
            assert os.sched_getaffinity(0) == divided.rest
            lanes = [t for t in threading.enumerate() if t.name in ("hf_offload-d2h", "hf_offload-h2d")]
            assert len(lanes) >= 2
            assert all(os.sched_getaffinity(t.native_id or 0) == divided.rest for t in lanes)
        assert cores.usable_cores() == usable
    finally:
        transport.close()


# --------------------------------------------------------------------------------------------------- the stages


def test_every_bucket_gets_its_times_and_the_largest_parameter_is_sliced(memory: Memory) -> None:
    found = stages.measure(memory, bucket_bytes=5000, slots=2, link_gb_s=1.0, threads=1)
    edge = memory.sizes[0][0]
    assert [len(unit) for unit in found.units] == [-(-edge // 2500), 3, 3, 3, -(-edge // 2500)]
    assert all(min(b.d2h, b.host_step, b.h2d) > 0 for unit in found.units for b in unit)
    assert found.total("d2h") >= 2 * sum(map(sum, memory.sizes)) / 1e9  # the link's speed holds
    assert found.seconds == pytest.approx(sum(found.total(s) for s in ("d2h", "host_step", "h2d")))
    assert found.threads == 1


# ----------------------------------------------------------------------------------------------------- the runs


@pytest.fixture(scope="module")
def result() -> pipeline.Result:
    return pipeline.run(Setting(**TINY))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def figures(result: pipeline.Result) -> dict[str, Any]:
    return json.loads(json.dumps(report.as_json(result)))  # type: ignore[no-any-return]


KEYS = {"step_seconds", "exposed_seconds", "bound_seconds", "hidden_fraction", "main_thread_seconds"}


def test_all_schedules_are_there_with_their_figures(figures: dict[str, Any]) -> None:
    assert set(figures) == {"schedules", "config", "machine"}
    names = ["none", "in_order", "overlapped", "streamed", "speculative_hit", "speculative_miss", "delayed"]
    assert list(figures["schedules"]) == names
    none = figures["schedules"]["none"]
    for name, row in figures["schedules"].items():
        assert set(row) >= KEYS
        assert all(isinstance(row[key], float) for key in KEYS)
        assert len(row["round_seconds"]) == 2
        assert row["exposed_seconds"] == pytest.approx(row["step_seconds"] - none["step_seconds"])
        alone = sum(figures["machine"][f"{stage}_seconds"] for stage in ("d2h", "host_step", "h2d"))
        assert row["hidden_fraction"] == pytest.approx(1 - row["exposed_seconds"] / alone)
        assert name == "none" or row["bound_seconds"] > 0
    assert none["exposed_seconds"] == none["bound_seconds"] == none["main_thread_seconds"] == 0.0


@pytest.mark.parametrize("name", [n for n, c in CONTENDERS.items() if c.exact])
def test_exact_schedules_leave_the_bits_of_in_order(figures: dict[str, Any], name: str) -> None:
    assert figures["schedules"][name]["same_bits"] is True


def test_the_steps_were_taken(result: pipeline.Result) -> None:
    """The bits are compared with, and so are not, those of the start; a clip that bites changes them."""
    start = pipeline.digest(EmulatedModel(Memory(module_sizes(2, 6000, 12), 0), (0.0, 0.0)))
    ends = {name: {r.digest for r in row.rounds} for name, row in result.rows.items() if name != "none"}
    assert all(len(digests) == 1 and start not in digests for digests in ends.values())
    assert ends["speculative_miss"] != ends["speculative_hit"] == ends["in_order"]


@pytest.mark.parametrize(
    ("name", "kind"), [("in_order", ""), ("overlapped", ""), ("streamed", ""), ("delayed", ""),
                       ("speculative_hit", "hits"), ("speculative_miss", "misses")]
)  # fmt: skip
def test_guesses_turn_out_as_named(figures: dict[str, Any], name: str, kind: str) -> None:
    """In every measured step, and never the other way."""
    for counted in ("hits", "misses"):
        found = figures["schedules"][name][f"speculation_{counted}"]
        assert found >= STEPS if counted == kind else found == 0


def test_steps_that_miss_go_on_being_guessed() -> None:
    """Left alone, the engine stops after four wrong guesses, of 4 buckets each; here 24 measured steps all miss."""
    setting = Setting(**{**TINY, "steps": 24, "rounds": 1, "schedules": ("speculative_miss",)})  # type: ignore[arg-type]
    (found,) = pipeline.run(setting).rows["speculative_miss"].rounds
    assert found.misses >= 24 and found.hits == 0


def test_every_schedule_had_an_engine_and_none_had_not(result: pipeline.Result) -> None:
    for name, row in result.rows.items():
        threads = {thread for r in row.rounds for thread in r.threads}
        assert ({"step", "d2h", "h2d"} <= threads) is (name != "none")


def test_what_ran_can_be_read_from_the_config(figures: dict[str, Any]) -> None:
    config = figures["config"]
    sizes = module_sizes(2, 6000, 12)
    assert config["buckets"] == 4
    assert config["params"] == sum(map(sum, sizes)) and config["tensors"] == 26
    assert {k: config[k] for k in TINY} == TINY
    assert isinstance(config["threads"], int) and "cores" in config["threads_by"]
    assert "device computes it" in config["clip"]
    machine = figures["machine"]
    assert machine["other_programs_cores"] is None or machine["other_programs_cores"] >= 0


def test_the_bound_is_for_the_device_as_it_was(memory: Memory) -> None:
    measured = stages.measure(memory, bucket_bytes=1 << 20, slots=2, link_gb_s=1.0, threads=1)
    units = Setting(blocks=3, forward_ms=4, backward_ms=8, edge_ms=1).units(measured, step_seconds=0.084)
    ms = pytest.approx([2, 8, 8, 8, 2]), pytest.approx([4, 16, 16, 16, 4])  # twice what was asked: 42 ms a step
    assert ([u.forward * 1e3 for u in units], [u.backward * 1e3 for u in units]) == ms
    assert [u.buckets for u in units] == list(measured.units)


def test_the_shadow_has_room_for_every_bucket() -> None:
    sizes = [[100], [30, 30], [100]]
    assert Setting().shadow_bytes(sizes) == 14 * sum(map(sum, sizes))


# ---------------------------------------------------------------------------------------------- the command line


def test_json_is_all_there_is_on_stdout() -> None:
    done = invoke(*OPTIONS, "--rounds=1", "--schedules=in_order,overlapped", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["schedules"]) == ["none", "in_order", "overlapped"]


def test_the_table_names_what_bounds_each_schedule(result: pipeline.Result) -> None:
    done = invoke(*OPTIONS, "--rounds=1", "--schedules=in_order,overlapped")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("in_order: Everything is exposed", "overlapped: The first unit waits", "same", "hidden", "CPU time"):
        assert word in done.stdout
    for name, row in result.rows.items():
        assert report.bounded_by(name, row, 1.0).endswith(".")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks=1"], ["blocks=1", "at least 2"]),
        (["--params-per-block=many"], ["--params-per-block='many'", "7e9"]),
        (["--params-per-block=5", "--tensors-per-block=6"], ["tensors_per_block=6", "only 5"]),
        (["--link-gb-s=0"], ["link_gb_s=0.0", "above 0"]),
        (["--link-gb-s=nan"], ["link_gb_s=nan", "above 0"]),
        (["--forward-ms=-1"], ["forward_ms=-1.0", "at least 0"]),
        (["--steps=0"], ["steps=0", "at least 1"]),
        (["--threads=0"], ["threads=0", "at least 1"]),
        (["--threads=99999"], ["threads=99999", "may use"]),
        (["--schedules=overlaped"], ["schedules='overlaped'", "Did you mean 'overlapped'"]),
        (["--params-per-block=1e13"], ["GB"]),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], words: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == "" and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_the_same_from_python() -> None:
    with pytest.raises(ConfigError, match="warmup_steps=1: below 2"):
        Setting(warmup_steps=1)
    with pytest.raises(HostMemoryError):
        pipeline.run(Setting(params_per_block=10**13))


@pytest.mark.parametrize("command", [["bench"], ["bench", "pipeline"]])
def test_help_fits_80_columns(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0 and "pipeline" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
