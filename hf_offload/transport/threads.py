"""Threads of ours: a system that gives none, one that dies, and one that never ends, are told of; nobody hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from hf_offload.errors import TransportError, explain
from hf_offload.transport.bell import Bell

PREFIX = "hf_offload-"


class Worker(threading.Thread):
    """A thread whose end can be waited for in a way that Ctrl-C cannot spoil.

    A KeyboardInterrupt in `Thread.is_alive` or `Thread.join` marks a thread as stopped that goes on running. Whether
    this one lives is a plain flag.

    Args:
        target, args: what it does, where `work` is not overridden.
    """

    def __init__(self, name: str, target: Callable[..., None] | None = None, args: tuple[Any, ...] = ()) -> None:
        super().__init__(name=PREFIX + name, target=target, args=args, daemon=True)
        self._pid = os.getpid()
        self._bell = Bell()
        self._ended = False

    def work(self) -> None:
        super().run()

    def run(self) -> None:
        try:
            self.work()
        finally:  # whatever ended it
            self._ended = True
            self._bell.ring()

    def lives(self) -> bool:
        """Whether it may still do what it was asked for. In a forked child no thread does."""
        return not self._ended and os.getpid() == self._pid

    def begin(self) -> None:
        """Start it.

        Raises:
            TransportError: the system gives no new thread.
        """
        try:
            self.start()
        except (RuntimeError, MemoryError) as error:
            if self.ident is not None:
                raise
            self._ended = True
            cause = f"the system gave this process no new thread ({error})"
            remedy = (
                "Raise the limit on processes and threads (`ulimit -u`, or the container's limit on pids), or end "
                "programs that have many"
            )
            raise TransportError(explain("thread", self.name, cause, remedy)) from error

    def end(self, timeout_s: float, moved: Callable[[], int] = lambda: 0) -> bool:
        """Wait until it has ended, which it was told to. Not on a thread of ours: the garbage collector may run there.

        Returns:
            False if it did not end and `moved()` did not change for `timeout_s` seconds.
        """
        if threading.current_thread().name.startswith(PREFIX) or self.ident is None:
            return True
        if not self._bell.wait(lambda: not self.lives(), timeout_s, moved):
            return False
        if os.getpid() == self._pid:
            self.join()  # it does nothing any more
        return True
