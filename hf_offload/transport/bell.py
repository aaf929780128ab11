"""Waiting for another thread in a way that Ctrl-C cannot spoil.

A KeyboardInterrupt that arrives in `threading.Condition.__enter__` right after it took its lock leaves that lock held
for ever, and the thread that wants to notify hangs (`threading.Event` is built on it). Nothing here holds a lock.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

LOOK_S = 0.5
"""Seconds between two looks whether the thread that is to ring still lives."""


class Bell:
    """Wakes the threads that wait for something to become true. May be rung from any thread."""

    __slots__ = ("_boxes",)

    def __init__(self) -> None:
        self._boxes: list[tuple[queue.SimpleQueue[None], Callable[[], bool]]] = []

    def ring(self) -> None:
        """Wake every thread whose wait is over; call it after what they wait for has become true.

        It is looked here, in the thread that rings: a wake-up for nothing costs the waiting thread ten times as much.
        What that look raises is for the thread that waits, which looks for itself.
        """
        for box, reached in tuple(self._boxes):
            if _true_or_raises(reached):
                box.put(None)

    def wait(
        self, reached: Callable[[], bool], timeout_s: float, moved: Callable[[], int] = lambda: 0,
        alive: Callable[[], bool] = lambda: True,
    ) -> bool:  # fmt: skip
        """Block, without the GIL, until `reached()`, which must be quick and may be called by any thread.

        Args:
            alive: whether there is still a thread that may ring.

        Returns:
            False if it was not reached and `moved()` did not change for `timeout_s` seconds, or nobody is left to ring.
        """
        if reached():
            return True
        box: queue.SimpleQueue[None] = queue.SimpleQueue()
        entry = box, reached
        self._boxes.append(entry)  # before looking again: what is rung from now on is heard
        try:
            seen, since = moved(), time.monotonic()
            while not reached():
                left = since + timeout_s - time.monotonic()
                if not alive():
                    return reached()
                if left > 0:
                    _listen(box, left, alive)
                elif moved() != seen:
                    seen, since = moved(), time.monotonic()
                else:
                    return reached()
            return True
        finally:
            self._boxes.remove(entry)


def _listen(box: queue.SimpleQueue[None], seconds: float, alive: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while alive() and (left := until - time.monotonic()) > 0:
        try:
            box.get(timeout=min(left, LOOK_S))
            return
        except queue.Empty:
            continue


def _true_or_raises(reached: Callable[[], bool]) -> bool:
    try:
        return reached()
    except Exception:
        return True
