"""What every transport must do. Nothing here knows which one it is."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_offload.errors import TransportError, WaitTimeout
from hf_offload.transport import Event, Transport
from support.transport import KINDS, LONG, Kind, exit_code, fill, leftovers, packed, segment

DIRECTIONS = ("d2h", "h2d")


def start(transport: Transport, direction: str, segments: list, slot: int = 0) -> Event:
    copy = transport.to_host if direction == "d2h" else transport.to_device
    return copy(segments, slot, transport.mark())


# ---- the bytes


SIZES = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9), st.integers(0, 5)), max_size=12)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 999), slot=st.integers(0, 2))
def test_bytes_arrive_where_they_belong_and_nowhere_else(kind: Kind, sizes: list, seed: int, slot: int) -> None:
    """`sizes`: (length, gap in the slot, first byte in the device memory) of each segment; odd ones too."""
    content = bytes((seed + i * 7) % 251 for i in range(12 * 720))
    lengths = [length + first + 3 for length, _, first in sizes]
    memories = [kind.memory(content[i * 710 : i * 710 + length]) for i, length in enumerate(lengths)]
    transport = kind.make(slots=3, slot_bytes=12 * 710)
    try:
        segments, at = [], 0
        for memory, (length, gap, first) in zip(memories, sizes):
            segments.append(segment(memory, at + gap, first, length))
            at += gap + length
        for ring in (transport.down, transport.up):
            for each in ring:
                each[:] = 0xEE
        event = start(transport, "d2h", segments, slot)
        event.wait(LONG)
        expected = bytearray(b"\xee" * transport.down[slot].size)
        for memory, s, (length, _, first) in zip(memories, segments, sizes):
            expected[s.offset : s.offset + length] = kind.content(memory)[first : first + length]
        assert transport.down[slot].tobytes() == bytes(expected)
        assert all((ring[i] == 0xEE).all() for ring in (transport.down, transport.up) for i in range(3)
                   if ring is transport.up or i != slot)  # fmt: skip

        before = [kind.content(m) for m in memories]
        back = bytes((seed + 31 * i) % 253 for i in range(transport.up[slot].size))
        fill(transport.up[slot], back)
        start(transport, "h2d", segments, slot).wait(LONG)
        for memory, old, s, (length, _, first) in zip(memories, before, segments, sizes):
            assert kind.content(memory) == old[:first] + back[s.offset : s.offset + length] + old[first + length :]
    finally:
        transport.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_segments(kind: Kind, direction: str) -> None:
    transport = kind.make()
    event = start(transport, direction, [])
    event.wait(LONG)
    assert event.done() and event.nbytes == 0
    transport.close()


def test_a_thousand_segments(kind: Kind) -> None:
    memories = [kind.memory(bytes([i % 256, i // 256, 7])) for i in range(1000)]
    transport = kind.make(slot_bytes=3000)
    start(transport, "d2h", packed(memories)).wait(LONG)
    assert transport.down[0][:3000].tobytes() == b"".join(kind.content(m) for m in memories)
    transport.close()


# ---- order


def test_copies_of_one_direction_keep_their_order(kind: Kind) -> None:
    memory = kind.memory(bytes(64))
    transport = kind.make(slots=8, slot_bytes=64)
    for i in range(8):
        fill(transport.up[i], bytes([i + 1]) * 64)
    events = [start(transport, "h2d", [segment(memory, 0)], i % 8) for i in range(40)]
    while not events[-1].done():
        seen = [e.done() for e in reversed(events)]  # the newest is asked first
        assert seen == sorted(seen), "a copy had ended while an older one had not"
    assert kind.content(memory) == bytes([8]) * 64
    spans = [e.span() for e in events]
    assert all(a <= b for a, b in spans) and all(e[1] <= f[0] for e, f in pairwise(spans))
    transport.close()


def test_directions_do_not_wait_for_each_other(kind: Kind) -> None:
    memory = kind.memory(b"down")
    for held in DIRECTIONS:
        transport, hold = kind.held(held)
        first = start(transport, held, [segment(memory, 0)])
        start(transport, "h2d" if held == "d2h" else "d2h", [segment(kind.memory(b"free"), 0)]).wait(LONG)
        assert not first.done()
        hold.release()
        first.wait(LONG)
        transport.close()


def test_copies_may_be_asked_for_from_many_threads(kind: Kind) -> None:
    transport = kind.make(slots=8, slot_bytes=64)
    memories = [kind.memory(bytes([i]) * 64) for i in range(8)]

    def work(i: int) -> None:
        for _ in range(10):
            start(transport, "d2h", [segment(memories[i], 0)], i).wait(LONG)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LONG)
    assert [slot[:64].tobytes() for slot in transport.down] == [bytes([i]) * 64 for i in range(8)]
    transport.close()


# ---- events


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_event_tells_when_its_copy_ends(kind: Kind, direction: str) -> None:
    memories = [kind.memory(bytes(5)), kind.memory(bytes(9))]
    transport, hold = kind.held()
    before = time.perf_counter()
    event = start(transport, direction, packed(memories))
    assert event.nbytes == 14
    assert not event.done()
    with pytest.raises(WaitTimeout, match=r"timeout_s=0\.02.*copy of (gradients|weights)") as caught:
        event.wait(0.02)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, TransportError)
    waiting = [threading.Thread(target=event.wait, args=(LONG,)) for _ in range(3)]
    for t in waiting:
        t.start()
    hold.release()
    event.wait(LONG)  # after a timeout it can be waited for again
    event.wait(0.0)
    assert event.done()
    first, last = event.span()
    assert before <= first <= last <= time.perf_counter()
    for t in waiting:
        t.join(LONG)
        assert not t.is_alive()
    transport.close()


def test_join_makes_the_caller_see_the_copy(kind: Kind) -> None:
    memory = kind.memory(bytes(16))
    transport = kind.make()
    fill(transport.up[0], b"sixteen bytes ok")
    transport.join(start(transport, "h2d", [segment(memory, 0)]), LONG)
    assert kind.content(memory) == b"sixteen bytes ok"
    transport.close()


# ---- owners


class Owner:
    """Stands for the object that keeps device memory alive."""


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_owners_live_until_the_copy_is_done_and_no_longer(kind: Kind, direction: str) -> None:
    memory = kind.memory(bytes(8))
    transport, hold = kind.held()
    owner = Owner()
    alive = weakref.ref(owner)
    event = start(transport, direction, [segment(memory, 0, owner=owner)])
    del owner
    hold.reached.wait(LONG)
    assert alive() is not None
    hold.release()
    event.wait(LONG)
    start(transport, direction, []).wait(LONG)  # the lane has moved on from the first copy
    assert alive() is None
    transport.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_owners_are_let_go_of_when_the_copy_fails(kind: Kind, direction: str) -> None:
    memory = kind.memory(bytes(8))
    transport = kind.failing(direction, 0)
    owners = [Owner(), Owner()]
    alive = [weakref.ref(o) for o in owners]
    events = [start(transport, direction, [segment(memory, 0, owner=o)]) for o in owners]
    owners.clear()
    for event in events:
        with pytest.raises(TransportError):
            event.wait(LONG)
    transport.close()
    assert [a() for a in alive] == [None, None]


# ---- failures


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_after_a_failed_copy_all_later_ones_of_its_direction_fail_with_its_cause(kind: Kind, direction: str) -> None:
    memory = kind.memory(b"old")
    transport = kind.failing(direction, 1)
    fill(transport.up[0], b"new")
    other = "h2d" if direction == "d2h" else "d2h"
    start(transport, direction, [segment(memory, 0)]).wait(LONG)
    for _ in range(3):
        event = start(transport, direction, [segment(memory, 0)])
        with pytest.raises(TransportError, match="the link is down") as caught:
            event.wait(LONG)
        assert isinstance(caught.value.__cause__, OSError)
        assert event.done()
    start(transport, other, [segment(memory, 0)]).wait(LONG)
    transport.close()


# ---- the end


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_close_ends_what_is_queued_and_hangs_nobody(kind: Kind, direction: str) -> None:
    """Where a copy can be called back it fails, elsewhere it is carried out before close() returns."""
    memory = kind.memory(bytes(8))
    transport, hold = kind.held()
    fill(transport.up[0], b"carried!")
    events = [start(transport, direction, [segment(memory, 0)]) for _ in range(5)]
    hold.reached.wait(LONG)
    closing = threading.Thread(target=transport.close)
    waiting = threading.Thread(target=_wait, args=(events[-1], kind.cancels))
    closing.start()
    waiting.start()
    time.sleep(0.02)
    hold.release()
    for t in (closing, waiting):
        t.join(LONG)
        assert not t.is_alive()
    events[0].wait(0.0)  # it was under way
    for event in events[1:]:
        if not kind.cancels:
            event.wait(0.0)
            continue
        with pytest.raises(TransportError, match="closed"):
            event.wait(0.0)
    if direction == "h2d":
        assert kind.content(memory) == b"carried!"


def _wait(event: Event, in_vain: bool) -> None:
    if not in_vain:
        event.wait(LONG)
        return
    with pytest.raises(TransportError):
        event.wait(LONG)


def test_close_twice_and_nothing_after(kind: Kind) -> None:
    memory = kind.memory(bytes(8))
    before = leftovers()
    transport = kind.make()
    assert leftovers() > before
    transport.close()
    transport.close()
    assert transport.pinned_bytes == 0 and leftovers() == before
    for direction in DIRECTIONS:
        with pytest.raises(TransportError, match="closed"):
            start(transport, direction, [segment(memory, 0)])


def test_a_forgotten_transport_gives_everything_back_at_once(kind: Kind) -> None:
    before = leftovers()
    transport = kind.make()
    alive = weakref.ref(transport)
    gc.disable()
    try:
        del transport
        assert alive() is None
        assert leftovers() == before
    finally:
        gc.enable()


def test_a_forgotten_transport_first_ends_the_copy_under_way(kind: Kind) -> None:
    memory = kind.memory(bytes(8))
    transport, hold = kind.held("h2d")
    fill(transport.up[0], b"in time!")
    event = start(transport, "h2d", [segment(memory, 0)])
    hold.reached.wait(LONG)
    threading.Timer(0.05, hold.release).start()
    del transport
    assert event.done() and kind.content(memory) == b"in time!"


# ---- the slab


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 1), (1, 64), (2, 65), (3, 4097), (4, 32768)])
def test_the_slab_is_exactly_as_large_as_asked_for(kind: Kind, slots: int, slot_bytes: int) -> None:
    transport = kind.make(slots=slots, slot_bytes=slot_bytes)
    stride = (slot_bytes + 63) // 64 * 64
    assert transport.pinned_bytes == 2 * slots * stride
    views = [*transport.down, *transport.up]
    assert len(transport.down) == len(transport.up) == slots
    addresses = sorted(v.ctypes.data for v in views)
    assert all(a % 64 == 0 for a in addresses)
    assert all(b - a >= stride for a, b in pairwise(addresses))
    assert all(v.dtype == "uint8" and v.ndim == 1 and slot_bytes <= v.size <= stride for v in views)
    transport.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_neither_hangs_nor_copies(kind: Kind) -> None:
    memory = kind.memory(bytes(8))
    transport, hold = kind.held()
    event = start(transport, "d2h", [segment(memory, 0)])
    hold.reached.wait(LONG)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(TransportError, match="fork"):
                start(transport, "d2h", [segment(memory, 0)])
            with pytest.raises(TransportError):
                event.wait(0.01)
            transport.close()
            del transport
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    hold.release()
    event.wait(LONG)
    transport.close()
