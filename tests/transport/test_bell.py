from __future__ import annotations

import itertools
import threading
import time

import pytest

from hf_offload.transport import Bell
from support.engine_interrupts import Interrupter
from support.transport import LONG, Kind, segment


def test_what_is_true_needs_no_bell() -> None:
    assert Bell().wait(lambda: True, 0.0)


def test_it_wakes_everyone_who_waits() -> None:
    bell, rung = Bell(), []
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(bell.wait(lambda: bool(rung), LONG))) for _ in range(4)]
    for t in threads:
        t.start()
    bell.ring()  # for nothing: they go on waiting
    time.sleep(0.01)
    assert not heard
    rung.append(1)
    bell.ring()
    for t in threads:
        t.join(LONG)
    assert heard == [True] * 4
    assert not bell._boxes


def test_a_bell_rung_for_nothing_wakes_nobody() -> None:
    bell, rung = Bell(), []
    looks: list[str] = []

    def reached() -> bool:
        looks.append(threading.current_thread().name)
        return bool(rung)

    waiting = threading.Thread(target=lambda: bell.wait(reached, LONG), name="waiting")
    waiting.start()
    while not bell._boxes:
        time.sleep(1e-3)
    time.sleep(0.01)
    before = looks.count("waiting")
    for _ in range(10):
        bell.ring()
    time.sleep(0.01)
    assert looks.count("waiting") == before
    rung.append(1)
    bell.ring()
    waiting.join(LONG)
    assert looks.count("waiting") == before + 1


def test_it_gives_up_only_where_nothing_moves() -> None:
    bell = Bell()
    assert not bell.wait(lambda: False, 0.01)
    ticks = itertools.count()
    looks = iter([False] * 6 + [True] * 9)
    assert bell.wait(lambda: next(looks), 0.001, lambda: next(ticks))


def test_what_becomes_true_just_before_it_listens_is_heard() -> None:
    """Nobody rings for it any more: it looks once more before it listens."""
    asked: list[float] = []

    def moved() -> int:
        asked.append(time.monotonic())
        return 0

    looks = iter([False, True, True])
    assert Bell().wait(lambda: next(looks), 0.05, moved)
    assert len(asked) == 1, "asked again only after it has listened in vain"


def test_a_timeout_beyond_what_the_system_can_wait_is_no_error() -> None:
    bell = Bell()
    threading.Timer(0.01, bell.ring).start()
    looks = iter([False, False, True, True])  # the last two: who rings, who waits
    assert bell.wait(lambda: next(looks), 1e300)


def test_an_interrupt_at_any_moment_of_a_wait_hangs_nobody() -> None:
    """`threading.Condition` fails this: interrupted in its __enter__ it keeps its lock."""
    kind, memory = Kind("host"), None
    for at in itertools.count(1):
        transport, hold = kind.held("d2h", slot_bytes=64)
        memory = kind.memory(b"12345678")
        event = transport.to_host([segment(memory, 0)], 0, None)
        threading.Timer(0.003, hold.release).start()
        interrupted = Interrupter(at).run(lambda event=event: event.wait(LONG))
        event.wait(LONG)
        transport.to_host([segment(memory, 0)], 0, None).wait(LONG)
        closing = threading.Thread(target=transport.close)
        closing.start()
        closing.join(LONG)
        assert not closing.is_alive()
        if not interrupted:
            break
    assert at > 10


def test_interrupts_reach_a_waiting_thread() -> None:
    import signal

    kind = Kind("host")
    transport, hold = kind.held()
    event = transport.to_host([segment(kind.memory(b"x"), 0)], 0, None)
    me = threading.main_thread().ident
    assert me is not None and threading.current_thread() is threading.main_thread()
    threading.Timer(0.05, lambda: signal.pthread_kill(me, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        event.wait(LONG)
    hold.release()
    event.wait(LONG)
    transport.close()
