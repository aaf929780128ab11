"""The step's thread: it carries out one step after the other, and lets the training thread wait for buckets.

Everything runs on this one thread, *in order* too, so that an exception or Ctrl-C in the training thread never leaves
a step half done: a step is taken whole from the one assignment in `Pipeline.submit`, or not at all.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable

from hf_offload.engine.schedules import Schedule, Stages
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.work import StepWork
from hf_offload.errors import StateError, TransportError, WaitTimeout, explain
from hf_offload.transport import Bell, Event


class _Step:
    """One step: written by the step's thread, watched by the training thread."""

    def __init__(self, work: StepWork, record: StepRecord, mark: object) -> None:
        self.work: StepWork | None = work
        self.record = record
        self.mark = mark
        self.arrivals = [w.arrival_check() for w in work.buckets]
        self.events: list[Event] = []
        self.bell = Bell()
        self.taken = False
        self.ended = False

    def posted(self, k: int, event: Event) -> None:
        assert k == len(self.events)
        self.events.append(event)
        self.bell.ring()

    def end(self) -> None:
        self.work = None  # lets go of the gradients
        self.record.finished = True
        self.ended = True
        self.bell.ring()


class _Failure:
    """The error that ended the step's work for good, if any; shared by both threads."""

    error: BaseException | None = None


class Pipeline:
    """Runs steps on its own thread over `stages`, in the way of `schedule`."""

    def __init__(self, stages: Stages, schedule: Schedule) -> None:
        self.schedule = schedule
        self._stages = stages
        self._failure = _Failure()
        self._step: _Step | None = None
        self._joined = 0
        self._jobs: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        args = (self._jobs, stages, schedule, self._failure)
        self._thread = threading.Thread(target=_serve, args=args, name="hf_offload-step", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread, self._pid)
        self._thread.start()  # last: an interrupt in here leaves no thread that nobody ends

    def submit(self, work: StepWork, record: StepRecord) -> None:
        """Hand over a step; the one before must have ended (`wait_all`). Returns at once."""
        self._check_process()
        step = _Step(work, record, self._stages.transport.mark())
        self._joined = 0
        self._step = step  # from here on the step is taken, wherever an interrupt hits this thread
        self._wake()

    @property
    def steps(self) -> int:
        """Number of the newest step, 0 before the first."""
        return self._step.record.step if self._step is not None else 0

    @property
    def running(self) -> bool:
        return self._step is not None and not self._step.ended

    @property
    def failed(self) -> bool:
        return self._failure.error is not None

    def wait_bucket(self, k: int) -> None:
        """Wait for the weights of buckets 0 to k of the running step: the caller's device stream then sees them.

        Raises:
            StateError: the step failed; its cause is chained.
            WaitTimeout: nothing moved for `timeout_s` seconds: a slow step that goes on is not cut off.
        """
        assert self._step is not None
        step = self._step
        self._wait(step, lambda: len(step.events) > k, k)
        self._join(step, k)

    def wait_all(self) -> None:
        """Wait until the running step, if any, has ended and its weights are on the device. Raises as `wait_bucket`."""
        step = self._step
        if step is not None:
            self._wait(step, lambda: step.ended, len(step.events))
            self._join(step, len(step.events) - 1)

    def close(self) -> None:
        """End the thread, after the step it is carrying out. An interrupted close can be called again."""
        self._wake()
        _stop(self._jobs, self._thread, self._pid)
        self._finalizer.detach()

    def _wake(self) -> None:
        """Make sure that the step's thread knows of the newest step: an interrupt may have come right after `submit`
        took it. The thread takes each step once, however often it is told."""
        if self._step is not None and not self._step.taken:
            self._jobs.put(self._step)

    def _wait(self, step: _Step, reached: Callable[[], bool], k: int) -> None:
        self._check_process()
        self._wake()
        stages = self._stages
        in_time = step.bell.wait(lambda: reached() or self.failed, stages.timeout_s, lambda: stages.moved)
        if self._failure.error is not None:
            raise _failed(self._failure.error) from self._failure.error
        if not in_time:
            raise self._timeout(step, k)

    def _join(self, step: _Step, k: int) -> None:
        """One copy after the other, so that each has `timeout_s` to itself."""
        while self._joined <= k:
            try:
                self._stages.transport.join(step.events[self._joined], self._stages.timeout_s)
            except WaitTimeout as error:
                raise self._timeout(step, self._joined) from error
            except TransportError as error:
                raise _failed(error) from error
            self._joined += 1
            step.arrivals[self._joined - 1].unwritten()

    def _timeout(self, step: _Step, k: int) -> WaitTimeout:
        what = step.arrivals[k].name if k < len(step.arrivals) else "the end of the step"
        cause = f"waited in vain for {what}; no copy and no host step ended meanwhile"
        remedy = "Look for a stuck copy or thread; raise timeout_s if the machine is only slow"
        return WaitTimeout(explain("timeout_s", self._stages.timeout_s, cause, remedy))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "the optimizer is used in a forked process, but its threads live in the parent only. Make a new "
                "optimizer in the child, or step in the parent."
            )


def _failed(error: BaseException) -> StateError:
    return StateError(
        f"the optimizer's step failed ({type(error).__name__}: {error}); its state may be half stepped. Load the last "
        "checkpoint into a new optimizer to go on."
    )


def _serve(jobs: queue.SimpleQueue[_Step | None], stages: Stages | None, schedule: Schedule, failure: _Failure) -> None:
    assert stages is not None
    while (step := jobs.get()) is not None:
        if not step.taken:
            step.taken = True
            error = failure.error or _carry_out(step, stages, schedule)
            if error is not None:
                traceback.clear_frames(error.__traceback__)  # their locals hold the gradients
                failure.error = error
            step.end()
            del error
        del step
    stages = None  # a traceback may keep this frame: the transport must not stay with it


def _carry_out(step: _Step, stages: Stages, schedule: Schedule) -> BaseException | None:
    assert step.work is not None
    work = step.work
    try:
        stages.record = step.record
        work.count()
        schedule.run(stages, work.buckets, step.mark, step.posted)
        stages.drain()
        work.check_gradients_unchanged()
    except BaseException as error:
        return error
    return None


def _stop(jobs: queue.SimpleQueue[_Step | None], thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:
        jobs.put(None)
        # the collector may run on one of our threads
        if thread.is_alive() and not threading.current_thread().name.startswith("hf_offload-"):
            thread.join()
