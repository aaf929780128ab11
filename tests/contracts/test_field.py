"""What goes wrong for users of other systems: those of the twenty that sections 6 to 8 of the design do not have.

README.md has the table of all twenty.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.engine import placement
from hf_offload.errors import HostMemoryError, StateError, WaitTimeout
from hf_offload.preflight import check_host_budget
from support.contracts import (
    Case,
    Duel,
    Steered,
    every_case,
    every_schedule,
    every_schedule_accumulating,
    gradients,
    prove,
    two_groups,
)
from support.engine import LONG, Hold, late, ours

GUESSING = ("speculative", "small shadow")

# ---- 2. Pinned memory


@pytest.mark.parametrize("bucket_bytes", [1000, 4096, 5000, 70_000])
def test_the_pinned_ring_takes_what_was_asked_for_and_not_the_next_power_of_two(bucket_bytes: int) -> None:
    with Duel(Case("overlapped"), bucket_bytes=bucket_bytes, ring_slots=3) as duel:
        duel.train([0])
        lines = -(-bucket_bytes // 64) * 64
        assert duel.optimizer.stats().host_bytes["pinned"] == 2 * 3 * lines
        transport = duel.optimizer.engine.placement.transport
        assert {slot.nbytes for slot in (*transport.down, *transport.up)} == {lines}


# ---- 3. Saving


class Many(nn.Module):
    def __init__(self, wire: str) -> None:
        super().__init__()
        self.items = nn.ParameterList(nn.Parameter(torch.ones(40)) for _ in range(60))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.get_parameter(name) * g).sum() for name, g in given.items())


def test_a_saved_state_is_12_bytes_a_parameter_and_not_the_whole_memory_under_each_view() -> None:
    with Duel(Case("overlapped", "float32"), make=Many, groups=lambda m: [{"params": list(m.parameters())}]) as duel:
        duel.train([0])
        file = io.BytesIO()
        torch.save(duel.optimizer.state_dict(), file)
        tensors, zip_entries = 4 * 60, 300  # bytes that a zip archive takes for each
        assert file.tell() < 12 * 60 * 40 + tensors * (zip_entries + 200)


# ---- 4. No budget check


def test_a_containers_limit_counts_and_not_only_the_machines(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 50000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "4000000000\n",
        "sys/fs/cgroup/job/memory.current": "1000000000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    check_host_budget({"master": 2_900_000_000}, None, tmp_path)
    with pytest.raises(HostMemoryError, match=r"cgroup memory\.max of /job"):
        check_host_budget({"master": 3_100_000_000}, None, tmp_path)


# ---- 9. and 10. Clipping


def clips_hard(duel: Duel) -> None:
    for step in range(3):
        duel.micro_batches(step)
        duel.clip((1e-3, 1e9, 1e-2)[step])
        duel.step()


@every_case
def test_the_clip_factor_reaches_the_gradients_that_are_stepped(case: Case) -> None:
    prove(clips_hard, case)


@every_schedule
def test_clipping_needs_no_process_group(case: Case) -> None:
    assert torch.distributed.is_available() and not torch.distributed.is_initialized()
    with Duel(case) as duel:
        duel.train([0], clip=0.1)
        duel.agree()


# ---- 11. Undoing Adam


def waits_for_guesses(duel: Duel) -> None:
    """Until what can be stepped ahead has been."""
    engine = duel.optimizer.engine
    assert engine.stream is not None and engine.speculation is not None
    engine.stream.settle()
    deadline = time.monotonic() + LONG
    while engine.speculation._waiting or engine.speculation._making:
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("schedule", GUESSING)
def test_what_was_stepped_ahead_is_never_undone_because_it_was_never_in_the_state(schedule: str, wire: str) -> None:
    """Neither by a gradient of inf, whose step is skipped, nor by one that is dropped."""
    with Duel(Case(schedule, wire)) as duel:
        duel.train([0, 1], clip=None)
        before = duel.state_bits()
        arena = duel.optimizer.engine.arenas[0]
        held = [a.tobytes() for a in arena.state]
        for scale in (1.0, float("inf")):
            duel.backward(2, scale=scale)
            waits_for_guesses(duel)
            assert duel.optimizer.engine.speculation._guesses, "nothing was guessed"
            assert [a.tobytes() for a in arena.state] == held
            if scale != 1.0:
                duel.optimizer.clip_grad_norm_(0.5)
                duel.optimizer.step()
            for each in duel.both:
                each.zero_grad()
            assert duel.state_bits() == before


def guesses_wrong(duel: Duel) -> None:
    """Right, clipped, another lr, a second backward, right."""
    for step, what in enumerate(["right", "clipped", "lr", "backward", "right", "right"]):
        duel.backward(10 * step)
        if duel.case.schedule in GUESSING:
            waits_for_guesses(duel)
        if what == "backward":
            duel.backward(10 * step + 1)
        if what == "lr":
            for each in duel.both:
                each.param_groups[0]["lr"] = 0.05
        duel.clip(1e-2 if what == "clipped" else 1e9)
        duel.step()


@pytest.mark.parametrize("schedule", GUESSING)
def test_a_wrong_guess_costs_no_bit(schedule: str) -> None:
    prove(guesses_wrong, Case(schedule, "mixed"))
    with Duel(Case(schedule, "mixed")) as duel:
        guesses_wrong(duel)
        stats = duel.optimizer.stats()
        assert stats.speculation_hits and stats.speculation_misses


# ---- 12. Mixed dtypes


@every_schedule_accumulating
def test_the_link_carries_two_bytes_a_parameter_each_way_and_nothing_is_widened(case: Case) -> None:
    """Down once a step, streamed once a micro-batch; up once. The device holds 4 bytes a parameter."""
    sent = {"d2h": 0, "h2d": 0}

    def count(direction: str, nbytes: int) -> float:
        sent[direction] += nbytes
        return 0.0

    with Duel(case, count) as duel:
        duel.train([0])
        duel.optimizer.synchronize()
        sent.update(d2h=0, h2d=0)
        duel.micro_batches(1)
        duel.step()
        duel.optimizer.synchronize()
        one_way = 2 * sum(p.numel() for p in duel.model.parameters())
        streamed = duel.optimizer.config.stream_gradients
        assert sent == {"d2h": one_way * (case.accumulation if streamed else 1), "h2d": one_way}
        stats = duel.optimizer.stats()
        assert stats.device_bytes["optimizer"] == 0 and stats.device_bytes["weights"] == one_way
        assert 0 < stats.device_bytes["gradients"] <= one_way
        if case.schedule != "delayed":  # whose last figures are of the update that synchronize() applied
            assert (stats.d2h_bytes, stats.h2d_bytes) == (sent["d2h"], sent["h2d"])


# ---- 13. Threads


def test_a_launchers_omp_num_threads_of_1_does_not_make_the_host_step_single_threaded() -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core")
    code = "from hf_offload.kernels import cpu; print(cpu.max_threads())"
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_NUM_THREADS"} | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(placement.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) == cores


# ---- 17. Lazy pinning, fresh streams


@every_schedule
def test_memory_is_pinned_at_construction_and_nothing_is_made_anew_in_a_step(case: Case) -> None:
    made: list[Any] = []
    real = placement.make_transport

    def watched(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    model = Steered(case.wire)
    with patch("hf_offload.engine.placement.make_transport", watched):
        optimizer = OffloadAdam(two_groups(model), config=case.config(), model=model)
        assert len(made) == 1 and made[0].pinned_bytes > 0
        threads = set()
        for step in range(4):
            model(gradients(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            threads = threads or ours()
        assert len(made) == 1 and ours() == threads
    optimizer.close()


# ---- 19. Hangs


@every_schedule
def test_a_stuck_copy_is_told_with_what_was_waited_for_and_does_not_hang(case: Case) -> None:
    hold = Hold("h2d")
    duel = Duel(case, hold, timeout_s=0.2)
    duel.train([0])
    duel.optimizer.synchronize()
    hold.close()
    with pytest.raises((WaitTimeout, StateError), match=r"timeout_s=0\.2.*(bucket|copy)"):
        duel.train([1])
        duel.optimizer.synchronize()
    hold.release()
    with contextlib.suppress(StateError):
        duel.optimizer.close()


@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "streamed", "delayed"])
def test_a_slow_step_that_goes_on_is_not_cut_off(schedule: str) -> None:
    """In all it takes longer than `timeout_s`; no copy does."""
    with Duel(Case(schedule), late("h2d", 0.12), timeout_s=1.0, bucket_bytes=84) as duel:
        duel.train([0], clip=None)
        duel.agree()
        assert len(duel.optimizer.engine.arenas[0].plan.buckets) * 0.12 > 1.0
