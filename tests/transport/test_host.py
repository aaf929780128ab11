"""What only the host transport can, and has to mind: an emulated link, and threads of its own."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from hf_offload.errors import TransportError, WaitTimeout
from hf_offload.kernels import cpu
from hf_offload.transport import HostTransport, Segment, host
from hf_offload.transport.host import PART_BYTES
from support.transport import LONG, ours, segment


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_the_emulated_link_is_never_faster_than_asked_for(direction: str) -> None:
    nbytes, memory = 50_000, torch.zeros(50_000, dtype=torch.uint8)
    transport = HostTransport(2, nbytes, link_gb_s=0.005, link_latency_us=2000.0)  # 10 ms + 2 ms
    copy = transport.to_host if direction == "d2h" else transport.to_device
    events = [copy([segment(memory, 0)], i, None) for i in range(2)]
    for event in events:
        event.wait(LONG)
        first, last = event.span()
        assert last - first >= nbytes / 0.005e9 + 2e-3
    assert events[1].span()[0] >= events[0].span()[1], "one link: copies of a direction share its speed"
    transport.close()


def test_the_latency_is_paid_by_empty_copies_too() -> None:
    transport = HostTransport(1, 64, link_latency_us=5000.0)
    event = transport.to_host([], 0, None)
    event.wait(LONG)
    first, last = event.span()
    assert last - first >= 5e-3
    transport.close()


def test_delays_are_asked_for_each_copy_and_do_not_count_as_busy() -> None:
    asked: list[tuple[str, int]] = []

    def delay(direction: str, nbytes: int) -> float:
        asked.append((direction, nbytes))
        return 0.0

    memory = torch.zeros(10, dtype=torch.uint8)
    transport = HostTransport(1, 64, delay=delay)
    transport.to_host([segment(memory, 0)], 0, None).wait(LONG)
    transport.to_device([segment(memory, 0, nbytes=3), segment(memory, 3, nbytes=4)], 0, None).wait(LONG)
    assert asked == [("d2h", 10), ("h2d", 7)]
    transport.close()


def test_gradients_in_several_parts_arrive_whole() -> None:
    nbytes = 2 * PART_BYTES + 12_345
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    transport = HostTransport(1, nbytes)
    transport.to_host([segment(memory, 0)], 0, None).wait(LONG)
    assert bytes(transport.down[0][:nbytes]) == bytes(memory.numpy())
    transport.close()


@pytest.mark.parametrize("again", range(8))  # whoever gets a free lock is chance: they must pass each time
def test_weights_do_not_queue_behind_gradients(monkeypatch: pytest.MonkeyPatch, again: int) -> None:
    """Between two parts of a copy of gradients, weights pass."""
    moved: list[str] = []
    weights_asked, first_part = threading.Event(), threading.Event()
    real = cpu.move

    def move(to: np.ndarray, source: np.ndarray, nbytes: np.ndarray) -> None:
        moved.append("gradients" if nbytes.sum() > 100 else "weights")
        if len(moved) == 1:
            first_part.set()
            assert weights_asked.wait(LONG)
            time.sleep(0.02)  # the other lane has its copy, and waits
        real(to, source, nbytes)

    monkeypatch.setattr(cpu, "move", move)
    memory, small = torch.zeros(3 * PART_BYTES, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    transport = HostTransport(1, memory.nbytes)
    down = transport.to_host([segment(memory, 0)], 0, None)
    assert first_part.wait(LONG)
    up = transport.to_device([segment(small, 0)], 0, None)
    weights_asked.set()
    for event in (up, down):
        event.wait(LONG)
    assert moved == ["gradients", "weights", "gradients", "gradients"]
    transport.close()


def test_the_collector_may_find_it_on_one_of_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot join itself."""
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    before, held = ours(), {}

    def delay(direction: str, nbytes: int) -> float:
        held.clear()
        return 0.0

    held["transport"] = HostTransport(1, 64, delay=delay)
    event = held["transport"].to_host([], 0, None)
    event.wait(LONG)
    deadline = time.monotonic() + LONG
    while ours() - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ours() == before
    assert not complaints


def test_a_copy_that_slips_in_behind_the_end_fails() -> None:
    """Asked for just before close(), queued just after the thread has looked through its queue for the last time."""
    transport = HostTransport(1, 64)
    lane = transport._lanes[0]
    memory = torch.zeros(8, dtype=torch.uint8)

    class Late:
        """The queue, with a submit that is overtaken by close()."""

        def put(self, copy: Any) -> None:
            lane._jobs = jobs
            transport.close()
            jobs.put(copy)

    jobs, lane._jobs = lane._jobs, Late()  # type: ignore[assignment]
    event = transport.to_host([segment(memory, 0)], 0, None)
    with pytest.raises(TransportError, match="closed"):
        event.wait(LONG)


def test_a_copy_that_fails_half_way_lets_go_of_its_owners() -> None:
    """The error's traceback has the frames that hold them."""
    memory, owner = torch.zeros(8, dtype=torch.uint8), Owner()
    alive = weakref.ref(owner)
    transport = HostTransport(1, 64)
    bad: Any = object()
    event = transport.to_host([segment(memory, 0, nbytes=4, owner=owner), Segment(bad, 4, 4, owner)], 0, None)
    del owner
    with pytest.raises(TransportError, match="copy of gradients to the host failed: int\\(\\) argument"):
        event.wait(LONG)
    assert alive() is None
    transport.close()


class Owner:
    """Stands for the object that keeps device memory alive."""


@contextmanager
def each_copy(begins: Callable[[Any], object]) -> Iterator[None]:
    """`begins(copy)` is called on the thread that makes a copy, before its bytes move."""
    real = host.HostCopy._move

    def move(copy: Any) -> None:
        begins(copy)
        real(copy)

    with patch.object(host.HostCopy, "_move", move):
        yield


def test_what_a_caller_waits_for_is_made_by_the_caller() -> None:
    """Where nothing is emulated, and it is small; else by the lane."""
    makers: list[str] = []
    memory = torch.arange(8, dtype=torch.uint8)
    large = torch.zeros(host.AT_ONCE_BYTES + 1, dtype=torch.uint8)
    plain, slow = HostTransport(1, large.numel()), HostTransport(1, 64, link_latency_us=1.0)
    with each_copy(lambda copy: makers.append(threading.current_thread().name)):
        assert plain.to_host([segment(memory, 0)], 0, None, awaited=True).done()
        assert plain.down[0][:8].tolist() == memory.tolist()
        for transport, tensor, awaited in ((plain, memory, False), (plain, large, True), (slow, memory, True)):
            transport.to_host([segment(tensor, 0)], 0, None, awaited=awaited).wait(LONG)
        not_yet = time.perf_counter() + 0.01  # of an emulated device
        plain.to_host([segment(memory, 0)], 0, not_yet, awaited=True).wait(LONG)
    plain.close()
    slow.close()
    assert makers == [threading.current_thread().name] + ["hf_offload-d2h"] * 4


def test_what_a_caller_waits_for_is_made_behind_what_was_asked_for_before() -> None:
    order: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def begins(copy: Any) -> None:
        if not order:
            begun.set()
            go_on.wait(LONG)
        order.append(copy.nbytes)

    memory = torch.zeros(8, dtype=torch.uint8)
    transport = HostTransport(1, 64)
    with each_copy(begins):
        transport.to_host([segment(memory, 0, nbytes=1)], 0, None)
        begun.wait(LONG)
        transport.to_host([segment(memory, 0, nbytes=2)], 0, None)
        threading.Timer(0.05, go_on.set).start()
        transport.to_host([segment(memory, 0, nbytes=3)], 0, None, awaited=True).wait(LONG)
    transport.close()
    assert order == [1, 2, 3]


def test_what_a_caller_waits_for_is_made_behind_what_no_thread_has_begun() -> None:
    makers: list[str] = []
    memory = torch.zeros(8, dtype=torch.uint8)
    transport = HostTransport(1, 64)
    first = transport.to_host([segment(memory, 0)], 0, None)
    first.wait(LONG)
    transport._lanes[0]._unfinished.append(first)  # as between being asked for and the lane's taking it
    with each_copy(lambda copy: makers.append(threading.current_thread().name)):
        transport.to_host([segment(memory, 0)], 0, None, awaited=True).wait(LONG)
    transport.close()
    assert makers == ["hf_offload-d2h"]


def test_who_waits_behind_a_stuck_copy_is_told_in_time() -> None:
    go_on = threading.Event()
    memory = torch.zeros(8, dtype=torch.uint8)
    transport = HostTransport(1, 64)
    with each_copy(lambda copy: go_on.wait(LONG)):
        stuck = transport.to_host([segment(memory, 0)], 0, None)
        while not transport._lanes[0]._turn.locked():
            time.sleep(0.001)
        waiting = transport.to_host([segment(memory, 0)], 0, None, awaited=True)
        with pytest.raises(WaitTimeout):
            waiting.wait(0.01)
        go_on.set()
        stuck.wait(LONG)
        waiting.wait(LONG)
    transport.close()


def test_what_is_asked_for_while_a_caller_makes_a_copy_comes_after_it() -> None:
    order: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def begins(copy: Any) -> None:
        if copy.nbytes == 1:
            begun.set()
            go_on.wait(LONG)
        order.append(copy.nbytes)

    memory = torch.zeros(8, dtype=torch.uint8)
    transport = HostTransport(1, 64)
    first = [segment(memory, 0, nbytes=1)]
    with each_copy(begins):
        caller = threading.Thread(target=lambda: transport.to_host(first, 0, None, awaited=True))
        caller.start()
        begun.wait(LONG)
        second = transport.to_host([segment(memory, 0, nbytes=2)], 0, None)
        time.sleep(0.05)
        go_on.set()
        second.wait(LONG)
        caller.join()
    transport.close()
    assert order == [1, 2]
