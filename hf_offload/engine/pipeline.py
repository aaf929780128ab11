"""The step's thread: it carries out one step after the other, and lets the training thread wait for buckets.

Everything runs on this one thread, *in order* too, so that an exception or Ctrl-C in the training thread never leaves
a step half done.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from hf_offload.engine.schedules import Schedule, Stages
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.work import BucketWork
from hf_offload.errors import StateError, WaitTimeout, explain
from hf_offload.transport import Event


class _Progress:
    """How far the running step is. Shared by the step's thread and the training thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.works: Sequence[BucketWork] = ()
        self.events: list[Event] = []
        self.running = False
        self.error: BaseException | None = None

    def start(self, works: Sequence[BucketWork]) -> None:
        with self.changed:
            self.works, self.events, self.running = works, [], True

    def posted(self, k: int, event: Event) -> None:
        with self.changed:
            assert k == len(self.events)
            self.events.append(event)
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.running = False
            self.works = ()  # lets go of the gradients
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, reached: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
        """Block until `reached()`.

        Raises:
            StateError: the step failed; its cause is chained.
            WaitTimeout: nothing moved for `timeout_s` seconds: a slow step that goes on is not cut off.
        """
        with self.changed:
            seen, deadline = len(self.events), time.monotonic() + timeout_s
            while not reached() and self.error is None:
                self.changed.wait(max(0.0, deadline - time.monotonic()))
                if len(self.events) != seen:
                    seen, deadline = len(self.events), time.monotonic() + timeout_s
                elif time.monotonic() >= deadline and not reached() and self.error is None:
                    remedy = "Look for a stuck copy or thread; raise timeout_s if the machine is only slow"
                    raise WaitTimeout(explain("timeout_s", timeout_s, f"waited in vain for {what()}", remedy))
            if self.error is not None:
                raise StateError(
                    f"the optimizer's step failed ({type(self.error).__name__}: {self.error}); its state may be half "
                    "stepped. Load the last checkpoint into a new optimizer to go on."
                ) from self.error


class Pipeline:
    """Runs steps on its own thread over `stages`, in the way of `schedule`."""

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        self.schedule = schedule
        self._stages = stages
        self._progress = _Progress()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        thread = threading.Thread(target=_serve, args=(self._jobs,), name="hf_offload-step", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, thread, self._pid)

    def submit(self, works: Sequence[BucketWork], record: StepRecord) -> None:
        """Hand over a step; the one before must have ended (`wait_all`). Returns at once."""
        if os.getpid() != self._pid:
            raise StateError("optimizer.step() in a forked process: the optimizer's threads live in its parent only")
        progress, stages, schedule = self._progress, self._stages, self.schedule
        mark = stages.transport.mark()
        progress.start(works)

        def carry_out() -> None:
            error: BaseException | None = None
            try:
                stages.record = record
                schedule.run(stages, works, mark, progress.posted)
                stages.drain()
            except BaseException as caught:
                error = caught
            record.finished.set()
            progress.end(error)

        self._jobs.put(carry_out)

    @property
    def running(self) -> bool:
        return self._progress.running

    @property
    def failed(self) -> bool:
        return self._progress.error is not None

    def wait_bucket(self, k: int) -> None:
        """Wait for the weights of buckets 0 to k of the running step: the caller's device stream then sees them."""
        progress = self._progress
        progress.wait(lambda: len(progress.events) > k, self._stages.timeout_s, lambda: self._name(k))
        self._stages.transport.join(progress.events[k], self._stages.timeout_s)

    def wait_all(self) -> None:
        """Wait until the running step, if any, has ended and its weights are on the device."""
        progress = self._progress
        progress.wait(lambda: not progress.running, self._stages.timeout_s, lambda: self._name(len(progress.events)))
        if progress.events:
            self._stages.transport.join(progress.events[-1], self._stages.timeout_s)

    def close(self) -> None:
        """End the thread, after the step it is carrying out."""
        self._finalizer()

    def _name(self, k: int) -> str:
        works = self._progress.works
        return works[k].name if k < len(works) else "the end of the step"


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its closure holds the step's gradients


def _stop(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:
        jobs.put(None)
        if not threading.current_thread().name.startswith("hf_offload-"):  # the collector may run on one of ours
            thread.join()
