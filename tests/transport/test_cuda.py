"""What only the CUDA transport has to mind: streams, events, pinned memory, devices. Over a fake CuPy."""

from __future__ import annotations

import gc
import linecache
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from hf_offload.errors import HostMemoryError, TransportError
from hf_offload.transport import cuda_pack, cuda_slab
from hf_offload.transport.cuda import CudaTransport, DeviceMemoryError
from support.engine_interrupts import Interrupter
from support.fake_cupy import FAILED, NO_MEMORY, CUDARuntimeError, FakeCupy, OutOfMemoryError
from support.transport import LONG, fill, packed, segment

DEVICE = 1
SLOT = 4096


def make(fake: FakeCupy, slots: int = 2, slot_bytes: int = SLOT, timeout_s: float = LONG) -> CudaTransport:
    stream = fake.current_stream(DEVICE)
    return CudaTransport(slots, slot_bytes, DEVICE, current_stream=stream, timeout_s=timeout_s, cupy=fake)


def memory(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def content(of: Tensor) -> bytes:
    return of.numpy().tobytes()


class Gate:
    """Work of a stream that goes on until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self) -> None:
        assert self._open.wait(LONG)

    def open(self) -> None:
        self._open.set()


def new_stream(fake: FakeCupy) -> Any:
    fake.local.device = DEVICE
    try:
        return fake.cuda.Stream(non_blocking=True)
    finally:
        fake.local.device = 0


# ---- marks and joins


def test_a_copy_after_a_mark_waits_for_what_the_current_stream_was_asked_before() -> None:
    fake = FakeCupy()
    transport, gate, source = make(fake), Gate(), memory(b"old")
    fake.run_on(DEVICE, 0, gate)
    fake.run_on(DEVICE, 0, lambda: source.copy_(memory(b"new")))
    event = transport.to_host([segment(source, 0)], 0, transport.mark())
    time.sleep(0.02)
    assert not event.done()
    gate.open()
    event.wait(LONG)
    assert transport.down[0][:3].tobytes() == b"new"
    transport.close()


def test_a_copy_without_a_mark_waits_for_nothing() -> None:
    fake = FakeCupy()
    transport, gate = make(fake), Gate()
    fake.run_on(DEVICE, 0, gate)
    transport.to_host([segment(memory(b"old"), 0)], 0, None).wait(LONG)
    gate.open()
    transport.close()


def test_a_mark_does_not_wait_for_what_came_after_it() -> None:
    fake = FakeCupy()
    transport, gate = make(fake), Gate()
    mark = transport.mark()
    fake.run_on(DEVICE, 0, gate)
    transport.to_device([segment(memory(b"old"), 0)], 0, mark).wait(LONG)
    gate.open()
    transport.close()


def test_marks_and_joins_are_on_the_calling_threads_own_stream() -> None:
    """autograd's thread has a stream of its own."""
    fake = FakeCupy()
    transport, gate, mine = make(fake), Gate(), new_stream(fake)
    found: dict[str, Any] = {}

    def backward() -> None:
        fake.use_stream(DEVICE, mine.ptr)
        found.update(here=transport.here(), mark=transport.mark())

    fake.run_on(DEVICE, mine.ptr, gate)
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(LONG)
    assert found["here"] == mine.ptr and transport.here() == 0
    free = transport.to_host([segment(memory(b"x"), 0)], 0, transport.mark())
    free.wait(LONG)
    held = transport.to_host([segment(memory(b"x"), 0)], 0, found["mark"])
    time.sleep(0.02)
    assert not held.done()
    gate.open()
    held.wait(LONG)
    transport.close()


def test_join_holds_the_current_stream_up_and_not_the_caller() -> None:
    fake = FakeCupy()
    transport, gate, weight = make(fake), Gate(), memory(b"old weight")
    other, seen = new_stream(fake), []
    fill(transport.up[0], b"new weight")
    fake.run_on(DEVICE, 0, gate)
    event = transport.to_device([segment(weight, 0)], 0, transport.mark())
    transport.join(event, LONG)  # returns, though the copy waits
    assert not event.done()
    fake.run_on(DEVICE, other.ptr, lambda: seen.append(content(weight)))
    fake.synchronize(DEVICE, other.ptr)
    fake.use_stream(DEVICE, other.ptr)
    transport.join(event, LONG)
    fake.use_stream(DEVICE, 0)
    for stream in (0, other.ptr):
        fake.run_on(DEVICE, stream, lambda: seen.append(content(weight)))
    time.sleep(0.02)
    assert seen == [b"old weight"], "the kernels behind the join wait"
    gate.open()
    for stream in (0, other.ptr):
        fake.synchronize(DEVICE, stream)
    assert seen == [b"old weight", b"new weight", b"new weight"]
    transport.close()


def test_join_of_a_copy_that_ended_asks_the_device_for_nothing() -> None:
    """Its CUDA event may be another copy's by now."""
    fake = FakeCupy()
    transport = make(fake)
    event = transport.to_device([segment(memory(b"x"), 0)], 0, None)
    event.wait(LONG)
    before = fake.calls["streamWaitEvent"]
    transport.join(event, LONG)
    assert fake.calls["streamWaitEvent"] == before
    transport.close()


# ---- what is created, and freed


def test_a_thousand_copies_create_no_more_events_than_are_in_use_at_once() -> None:
    fake = FakeCupy()
    transport, source = make(fake), memory(bytes(64))

    def step() -> None:
        mark = transport.mark()
        down = [transport.to_host([segment(source, 0)], i % 2, mark) for i in range(4)]
        up = [transport.to_device([segment(source, 0)], i % 2, transport.mark()) for i in range(4)]
        for event in (*down, *up):
            event.wait(LONG)

    for _ in range(125):
        step()
    at_once = 2 * 8 + 2 + 2  # two around each copy, one a lane to read the clock by, two marks
    assert fake.calls["eventCreateWithFlags"] <= at_once
    assert fake.calls["Stream"] == 2 and fake.calls["hostAlloc"] == 1
    transport.close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 1), (2, 65), (4, 100_000)])
def test_what_is_pinned_is_one_piece_of_exactly_that_size(slots: int, slot_bytes: int) -> None:
    fake = FakeCupy()
    transport = make(fake, slots, slot_bytes)
    stride = (slot_bytes + 63) // 64 * 64
    assert [size for size, _ in fake.pinned.values()] == [transport.pinned_bytes] == [2 * slots * stride]
    addresses = [slot.ctypes.data for slot in (*transport.down, *transport.up)]
    assert np.diff(addresses).tolist() == [stride] * (2 * slots - 1)
    transport.close()


@pytest.mark.parametrize("end", ["close", "forget"])
def test_nothing_is_left_on_the_device(end: str) -> None:
    fake = FakeCupy()
    transport, source = make(fake), memory(bytes(64))
    marks = [transport.mark() for _ in range(3)]
    events = [transport.to_host([segment(source, 0)], 0, marks[0]) for _ in range(5)]
    if end == "close":
        transport.close()
    del transport
    assert not fake.handles and not fake.pinned
    del marks
    assert all(e.done() for e in events)


def test_a_view_of_a_slot_outlives_the_transport() -> None:
    fake = FakeCupy()
    transport = make(fake)
    transport.to_host([segment(memory(b"still here"), 0)], 0, None).wait(LONG)
    view = transport.down[0][:10]
    transport.close()
    assert len(fake.pinned) == 1 and view.tobytes() == b"still here"
    del view
    assert not fake.pinned


def test_what_never_ends_is_kept_and_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCupy()
    transport, gate, target = make(fake, timeout_s=0.05), Gate(), memory(b"old")
    fill(transport.up[0], b"new")
    fake.run_on(DEVICE, 0, gate)
    transport.to_device([segment(target, 0)], 0, transport.mark())
    transport.close()
    assert "did not end in 0.05 s" in caplog.text and len(fake.pinned) == 1
    gate.open()
    fake.synchronize(DEVICE, 0)


def test_the_collector_may_find_it_inside_one_of_its_own_calls() -> None:
    """There the thread holds a lock of the transport, and closing would wait for itself."""
    fake = FakeCupy()
    transport, target = make(fake), memory(b"x")
    parts, lane = transport._parts, transport._down
    lane._inside(parts.close)
    deadline = time.monotonic() + LONG
    while fake.calls["eventDestroy"] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(TransportError, match="closed"):
        transport.to_host([segment(target, 0)], 0, None)
    transport.close()


# ---- what the system refuses


@pytest.mark.parametrize(("pinnable", "slots", "given"), [(8 * SLOT, 4, 4), (8 * SLOT - 1, 4, 2), (4 * SLOT, 9, 2)])
def test_less_pinned_memory_means_a_shorter_ring(
    pinnable: int, slots: int, given: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCupy(pinnable=pinnable)
    transport = make(fake, slots)
    assert len(transport.down) == len(transport.up) == given
    assert transport.pinned_bytes == 2 * given * SLOT
    assert all(view.ctypes.data % 64 == 0 and view.size == SLOT for view in (*transport.down, *transport.up))
    if given == slots:
        assert not caplog.text
    else:
        assert f"ring_slots={slots}" in caplog.text and "out of memory" in caplog.text
        assert f"would not pin 0.00 GB ({2 * slots * SLOT} bytes)" in caplog.text
        assert f"Going on with {given} instead" in caplog.text and f"Set ring_slots={given}" in caplog.text
    source, target = [memory(bytes([i] * 9)) for i in range(20)], memory(bytes(180))
    transport.to_host(packed(source), 0, transport.mark()).wait(LONG)
    transport.up[0][:180] = transport.down[0][:180]
    transport.to_device([segment(target, 0)], 0, None).wait(LONG)
    assert content(target) == b"".join(content(s) for s in source)
    transport.close()


LARGE = 1 << 20


@pytest.mark.parametrize(
    ("pinnable", "slots"), [(4 * LARGE - 1, 4), (3 * LARGE, 2), (2 * LARGE - 1, 1), (300_000, 9), (0, 3)]
)
@pytest.mark.parametrize("locked", [8 << 20, None])
def test_a_ring_that_cannot_be_pinned_is_refused_with_the_settings_that_could(
    pinnable: int, slots: int, locked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_slab, "lockable_bytes", lambda: locked)
    fake = FakeCupy(pinnable=pinnable)
    with pytest.raises(HostMemoryError) as caught:
        make(fake, slots, LARGE)
    text = str(caught.value)
    assert not should_reduce_batch_size(caught.value), "fewer rows would not help"
    assert text.startswith(f"ring_slots={slots}: the system would not pin ") and f"({2 * slots * LARGE} bytes)" in text
    assert "out of memory" in text and "are left" in text and "WSL" in text
    assert ("(8388608 bytes) (ulimit -l unlimited" in text) is (locked is not None)
    assert not fake.pinned and not fake.handles, "the probe gave everything back"
    advice = re.search(r"Set ring_slots=(\d+) and bucket_bytes=(\d+)", text)
    if pinnable < 2 * min(slots, 2) << 16:
        assert advice is None, "no bucket of a useful size can be pinned"
        return
    assert advice is not None
    fewer, bucket = map(int, advice.groups())
    assert pinnable - 2 * fewer * LARGE / 32 <= 2 * fewer * bucket <= pinnable
    make(fake, fewer, bucket).close()


@pytest.mark.parametrize("status", [NO_MEMORY, 304, 801])
def test_all_ways_in_which_the_system_refuses_to_pin(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    monkeypatch.setattr(fake.cuda.runtime, "hostAlloc", _raiser(CUDARuntimeError(status)), raising=False)
    with pytest.raises(HostMemoryError, match="would not pin"):
        make(fake)


def test_a_device_that_fails_is_not_taken_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    monkeypatch.setattr(fake.cuda.runtime, "hostAlloc", _raiser(CUDARuntimeError(FAILED)), raising=False)
    with pytest.raises(TransportError, match="unspecified launch failure") as caught:
        make(fake)
    assert "pin" not in str(caught.value)


def test_a_full_device_at_construction_lowers_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()

    def full(**kwargs: Any) -> Any:
        raise OutOfMemoryError("Out of memory allocating 512 bytes")

    monkeypatch.setattr(fake.cuda, "Stream", full)
    with pytest.raises(DeviceMemoryError, match="Out of memory allocating 512") as caught:
        make(fake)
    assert isinstance(caught.value, RuntimeError) and should_reduce_batch_size(caught.value)
    gc.collect()
    assert not fake.pinned, "what was reserved before is given back"


@pytest.mark.parametrize("error", [CUDARuntimeError(NO_MEMORY), OutOfMemoryError("Out of memory allocating 9 bytes")])
def test_a_full_device_in_a_copy_lowers_the_batch_size(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    transport = make(fake)
    monkeypatch.setattr(fake.cuda.runtime, "memcpyAsync", _raiser(error), raising=False)
    event = transport.to_host([segment(memory(b"x"), 0)], 0, None)
    with pytest.raises(TransportError) as caught:
        event.wait(LONG)
    assert should_reduce_batch_size(caught.value) and isinstance(caught.value.__cause__, DeviceMemoryError)
    transport.close()


def test_a_device_that_cannot_be_used_is_named() -> None:
    with pytest.raises(TransportError, match=r"device='cuda:5'.*cudaError 101"):
        CudaTransport(2, 64, 5, current_stream=lambda: 0, cupy=FakeCupy())


# ---- failures


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_a_device_that_fails_ends_every_copy_under_way(direction: str) -> None:
    fake = FakeCupy()
    transport, gate = make(fake), Gate()
    fake.run_on(DEVICE, 0, gate)
    copy = getattr(transport, direction)
    events = [copy([segment(memory(b"x"), 0)], 0, transport.mark()) for _ in range(3)]
    fake.failed = True
    gate.open()
    for event in (*events, copy([segment(memory(b"x"), 0)], 0, None)):
        with pytest.raises(TransportError, match="failed: cudaErrorLaunchFailure") as caught:
            event.wait(LONG)
        assert isinstance(caught.value.__cause__, CUDARuntimeError)
        with pytest.raises(TransportError, match="cudaErrorLaunchFailure"):
            transport.join(event, LONG)
    transport.close()


def test_a_copy_that_fails_half_way_keeps_its_memory_until_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that was asked for may still be under way."""
    fake = FakeCupy()
    transport, gate, source, owner = make(fake), Gate(), memory(bytes(8)), Owner()
    alive = weakref.ref(owner)
    real, calls = fake.cuda.runtime.memcpyAsync, []

    def second_fails(*args: int) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise CUDARuntimeError(1)
        real(*args)

    monkeypatch.setattr(fake.cuda.runtime, "memcpyAsync", second_fails, raising=False)
    fake.run_on(DEVICE, 0, gate)
    parts = [segment(source, 0, nbytes=4, owner=owner), segment(source, 4, 4, owner=owner)]
    event = transport.to_host(parts, 0, transport.mark())
    del parts, owner
    with pytest.raises(TransportError, match="cudaError 1"):
        event.wait(LONG)
    gc.collect()
    assert alive() is not None
    closing = threading.Thread(target=transport.close)
    closing.start()
    time.sleep(0.02)
    assert closing.is_alive() and alive() is not None, "it waits for the part that is under way"
    gate.open()
    closing.join(LONG)
    assert alive() is None and not fake.pinned


class AtEveryMoment(Interrupter):
    """Leaves two moments out: inside `__del__`, where Python swallows what is raised, and between the body of `with
    lock` and the lock's release. There is a line event there, but no signal is looked at: CPython does so after calls
    and where it jumps back, and `Lock.__exit__` is the call."""

    def __init__(self, at: int) -> None:
        super().__init__(at, ("/hf_offload/",))  # not in the fake's own threads
        self.entered: list[FrameType] = []

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name == "__del__":
            return None
        if event == "line" and "with self._lock" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            if frame in self.entered:
                return self._inside
            self.entered.append(frame)
        return super()._inside(frame, event, arg)


class Owner:
    """Stands for the object that keeps device memory alive."""


def test_an_interrupt_at_any_line_of_a_copy_spoils_nothing() -> None:
    """Nor at any line of a mark, a join or a wait: what follows works, and all is given back."""
    fake, at = FakeCupy(), 0
    transport, source, target = make(fake), memory(b"12345678"), memory(bytes(8))

    def work() -> None:
        down = transport.to_host([segment(source, 0)], 0, transport.mark())
        down.wait(LONG)
        up = transport.to_device(packed([target[:2], target[2:4], target[4:6], target[6:]]), 1, None)
        transport.join(up, LONG)
        up.wait(LONG)

    interrupted = True
    while interrupted:
        at += 1
        owner = Owner()
        alive = weakref.ref(owner)
        interrupted = AtEveryMoment(at).run(work)
        fill(transport.up[1], b"abcdefgh")
        transport.down[0][:] = 0
        transport.to_host([segment(source, 0, owner=owner)], 0, transport.mark()).wait(LONG)
        del owner
        transport.to_device([segment(target, 0)], 1, transport.mark()).wait(LONG)
        assert transport.down[0][:8].tobytes() == b"12345678" and content(target) == b"abcdefgh" and alive() is None
    assert at > 50
    transport.close()
    gc.collect()  # traced frames are in cycles
    assert not fake.handles and not fake.pinned


def test_interrupts_reach_a_waiting_thread() -> None:
    fake = FakeCupy()
    transport, gate = make(fake), Gate()
    fake.run_on(DEVICE, 0, gate)
    event = transport.to_host([segment(memory(b"x"), 0)], 0, transport.mark())
    me = threading.main_thread().ident
    assert me is not None and threading.current_thread() is threading.main_thread()
    threading.Timer(0.05, lambda: signal.pthread_kill(me, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        event.wait(LONG)
    gate.open()
    event.wait(LONG)
    transport.close()


# ---- devices


def test_the_callers_device_is_current_again_after_each_call() -> None:
    fake = FakeCupy(devices=3)
    for before in range(3):
        fake.local.device = before
        transport = make(fake)
        event = transport.to_host([segment(memory(b"x"), 0)], 0, transport.mark())
        transport.join(event, LONG)
        event.wait(LONG)
        assert fake.device == before
        transport.close()
        assert fake.device == before


def test_threads_of_ours_stay_on_the_device() -> None:
    """Going back to a device on which nothing was ever done would make a context there, of some 500 MB."""
    fake = FakeCupy()
    transport, found = make(fake), []

    def step() -> None:
        transport.to_host([segment(memory(b"x"), 0)], 0, None).wait(LONG)
        found.append(fake.device)

    thread = threading.Thread(target=step, name="hf_offload-step")
    thread.start()
    thread.join(LONG)
    assert found == [DEVICE]
    transport.close()


def test_the_fake_minds_the_device() -> None:
    """So that the contract suite, whose transport is not on device 0, sees a call that forgot it."""
    fake = FakeCupy()
    transport = make(fake)
    with pytest.raises(CUDARuntimeError):
        fake.cuda.runtime.eventRecord(fake.cuda.runtime.eventCreateWithFlags(0), transport._down._stream.ptr)
    with pytest.raises(CUDARuntimeError):
        fake.cuda.runtime.eventQuery(transport._down._anchor)
    transport.close()


# ---- many small parameters


@contextmanager
def counted(fake: FakeCupy) -> Iterator[Callable[[str], int]]:
    before = fake.calls.copy()
    yield lambda name: fake.calls[name] - before[name]


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_small_segments_travel_packed(direction: str) -> None:
    fake = FakeCupy()
    sizes = [cuda_pack.SMALL + 2, 6, *[3 + i % 11 for i in range(600)], cuda_pack.SMALL, 1 << 17, 0, 5]
    memories = [memory(bytes([i % 251]) * size) for i, size in enumerate(sizes)]
    total = sum(sizes)
    transport = make(fake, slot_bytes=total)
    transport.up[0][:total] = np.arange(total) % 249
    with counted(fake) as calls:
        event = getattr(transport, direction)(packed(memories), 0, transport.mark())
        event.wait(LONG)
        assert event.nbytes == total
        assert calls("memcpyAsync") == 2, "the two large ones"
        assert calls("launch") == 3, "604 small ones, 240 a launch"
    joined = b"".join(content(m) for m in memories)
    assert joined == (transport.down if direction == "to_host" else transport.up)[0][:total].tobytes()
    transport.close()


def test_packed_segments_wait_for_the_mark_and_are_under_way_until_the_event() -> None:
    fake = FakeCupy()
    transport, gate = make(fake), Gate()
    memories = [memory(b"old") for _ in range(9)]
    fake.run_on(DEVICE, 0, gate)
    fake.run_on(DEVICE, 0, lambda: [m.copy_(memory(b"new")) for m in memories])
    event = transport.to_host(packed(memories), 0, transport.mark())
    time.sleep(0.02)
    assert not event.done()
    gate.open()
    event.wait(LONG)
    assert transport.down[0][:27].tobytes() == b"new" * 9
    transport.close()


def test_a_few_small_segments_are_copied_one_by_one() -> None:
    fake = FakeCupy()
    transport = make(fake)
    with counted(fake) as calls:
        transport.to_host(packed([memory(b"abc")] * (cuda_pack.FEWEST - 1)), 0, None).wait(LONG)
        assert calls("launch") == 0 and calls("memcpyAsync") == cuda_pack.FEWEST - 1
    transport.close()


def test_without_a_compiler_small_segments_are_copied_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCupy()
    fake.compiles = RuntimeError("no libnvrtc.so")
    transport = make(fake)
    assert "no libnvrtc.so" in caplog.text
    memories = [memory(bytes([i])) for i in range(50)]
    transport.to_host(packed(memories), 0, None).wait(LONG)
    assert transport.down[0][:50].tolist() == list(range(50)) and fake.calls["memcpyAsync"] == 50
    transport.close()


# ---- as the engine uses it


def test_hooks_copy_down_while_the_step_copies_up() -> None:
    """autograd's thread marks and copies down, the step's thread waits for that and copies up, at the same time."""
    fake = FakeCupy(delays=(0.0, 0.0, 1e-4, 1e-3))
    transport = make(fake, slots=4)
    n, failed = 60, []
    gradients, weights = [memory(bytes(32)) for _ in range(n)], [memory(bytes(32)) for _ in range(n)]
    events: list[Any] = [None] * n
    free = threading.Semaphore(4)
    ready = [threading.Event() for _ in range(n)]

    def backward() -> None:
        for k in range(n):
            assert free.acquire(timeout=LONG)
            fake.run_on(DEVICE, 0, lambda k=k: gradients[k].fill_(k + 1))
            events[k] = transport.to_host([segment(gradients[k], 0)], k % 4, transport.mark())
            ready[k].set()

    def step() -> None:
        up: list[Any] = []
        for k in range(n):
            assert ready[k].wait(LONG)
            events[k].wait(LONG)
            if k >= 4:
                up[k - 4].wait(LONG)
            transport.up[k % 4][:] = transport.down[k % 4]
            free.release()
            up.append(transport.to_device([segment(weights[k], 0)], k % 4, None))
        transport.join(up[-1], LONG)

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (backward, step)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * LONG)
    assert not failed
    transport.close()
    assert [content(w) for w in weights] == [bytes([k + 1]) * 32 for k in range(n)]


def test_spans_lie_between_the_call_and_the_wait_and_have_the_right_length() -> None:
    fake = FakeCupy(delays=(0.01,))
    transport = make(fake)
    for _ in range(3):
        before = time.perf_counter()
        event = transport.to_host([segment(memory(b"x"), 0)], 0, None)
        event.wait(LONG)
        first, last = event.span()
        assert before <= first <= last <= time.perf_counter()
        assert last - first >= 0.02 - 1e-4  # the copy and the event behind it
    transport.close()


def test_importing_the_package_does_not_import_cupy() -> None:
    code = "import sys, hf_offload.transport, hf_offload.transport.cuda; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _raiser(error: Exception) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error

    return fail


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hf_offload")
