"""Which core works for whom while the emulated device runs.

A GPU's copy engines leave the host's cores alone; the threads that stand for them do not. So the host step has cores of
its own, and training thread and copies share the rest. Left to the system, a thread that is woken often lands behind a
kernel on its core for milliseconds, while the next core has nothing to do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STEP_THREAD = "hf_offload-step"
ENGINE = "hf_offload-"


def engine_threads() -> list[threading.Thread]:
    """The living threads of all engines and their transports."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(ENGINE)]


@dataclass(frozen=True)
class Cores:
    """The step's cores, and those of the training thread and the copies; all for both where there are too few."""

    step: frozenset[int]
    rest: frozenset[int]

    def pin(self) -> None:
        """Bind the training thread, which calls this, and all threads of engines to their cores."""
        if not hasattr(os, "sched_setaffinity"):
            return
        for thread in engine_threads():
            if thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, self.step if thread.name == STEP_THREAD else self.rest)
        os.sched_setaffinity(0, self.rest)

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """In here the calling thread may be pinned; afterwards it runs where it could before."""
        if not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def spare(cores: int) -> int:
    """How many of so many cores the host step leaves to training thread and copies, which seldom all work at once."""
    return 0 if cores == 1 else 1 if cores < 6 else 2


def divide(usable: frozenset[int], threads: int) -> Cores:
    """Give the host step as many cores as it has threads, if that leaves any."""
    ordered = sorted(usable)
    if threads >= len(ordered):
        return Cores(usable, usable)
    return Cores(frozenset(ordered[:threads]), frozenset(ordered[threads:]))


def usable_cores() -> frozenset[int]:
    """The cores this process may use; as many as the machine has where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
