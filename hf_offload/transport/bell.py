"""Waiting for another thread in a way that Ctrl-C cannot spoil.

A KeyboardInterrupt that arrives in `threading.Condition.__enter__` right after it took its lock leaves that lock held
for ever, and the thread that wants to notify hangs (`threading.Event` is built on it). Nothing here holds a lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Bell:
    """Wakes the threads that wait for something to become true. May be rung from any thread."""

    __slots__ = ("_boxes",)

    def __init__(self) -> None:
        self._boxes: list[queue.SimpleQueue[None]] = []

    def ring(self) -> None:
        """Let every waiting thread look again; call it after what they wait for has become true."""
        for box in tuple(self._boxes):
            box.put(None)

    def wait(self, reached: Callable[[], bool], timeout_s: float, moved: Callable[[], int] = lambda: 0) -> bool:
        """Block, without the GIL, until `reached()`.

        Returns:
            False if it was not reached and `moved()` did not change for `timeout_s` seconds.
        """
        if reached():
            return True
        box: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._boxes.append(box)  # before looking again: what is rung from now on is heard
        try:
            seen, since = moved(), time.monotonic()
            while not reached():
                left = since + timeout_s - time.monotonic()
                if left > 0:
                    _listen(box, left)
                elif moved() != seen:
                    seen, since = moved(), time.monotonic()
                else:
                    return reached()
            return True
        finally:
            self._boxes.remove(box)


def _listen(box: queue.SimpleQueue[None], seconds: float) -> None:
    try:
        box.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    except queue.Empty:
        return
