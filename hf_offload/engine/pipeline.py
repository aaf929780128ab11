"""The step's thread: it carries out one job after the other, and lets the training thread wait for buckets.

Everything runs on this one thread, *in order* too, so that an exception or Ctrl-C in the training thread never leaves
a step half done: a step is taken whole from the one assignment in `Pipeline.submit`, or not at all. Gradients that
arrive during backward are put away on it as well, and while it has nothing else to do it steps ahead.
"""

from __future__ import annotations

import os
import queue
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Protocol

from hf_offload.engine.resident import step_in_place
from hf_offload.engine.schedules import Schedule, Stages
from hf_offload.engine.speculation import Speculation
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.work import StepWork
from hf_offload.errors import StateError, TransportError, WaitTimeout, explain
from hf_offload.transport import Bell, Event
from hf_offload.transport.threads import Worker

HANDOVERS, HANDOVER_S = 3, 20e-6
"""How often, and for how many seconds, `submit` steps aside for the step's thread."""


class Job(Protocol):
    """Something for the step's thread to do once, however often it is told."""

    taken: bool

    def run(self, stages: Stages, schedule: Schedule) -> None: ...

    def end(self) -> None:
        """After `run`, also where it failed or was left out."""
        ...


class _Step:
    """One step: written by the step's thread, watched by the training thread."""

    def __init__(self, work: StepWork, record: StepRecord, mark: object, stream: int, bell: Bell) -> None:
        self.work: StepWork | None = work
        self.delivered = work.delivered
        self.record = record
        self.events: list[Event] = []
        self.taken = False
        self.ended = False
        self._mark = mark
        self._stream = stream
        self._bell = bell

    def run(self, stages: Stages, schedule: Schedule) -> None:
        assert self.work is not None
        stages.record = self.record
        self.work.count()
        on_host, first = self.work.on_host(), 0
        if on_host is not self.work:
            first = step_in_place(self.work, self._stream, self._posted)
            stages.moved += 1
        schedule.run(stages, on_host, self._mark, lambda k, event: self._posted(first + k, event))
        stages.drain()
        for event in self.events[:first]:  # once a step has ended, readers on any device stream may take its weights
            event.wait(stages.timeout_s)
        on_host.check_gradients_unchanged()

    def end(self) -> None:
        if self.work is not None:
            for work in self.work.arenas:
                work.gradients.drop()
        self.work = None
        self.record.finished = True
        self.ended = True

    def _posted(self, k: int, event: Event) -> None:
        assert k == len(self.events)
        self.events.append(event)
        self._bell.ring()


class _Call:
    """A function to be called on the step's thread, after everything that was asked for before."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.taken = False
        self.ended = False

    def run(self, stages: Stages, schedule: Schedule) -> None:
        self._function()

    def end(self) -> None:
        self.ended = True


class _Failure:
    """The error that ended the step's work for good, if any; shared by both threads."""

    error: BaseException | None = None


class Pipeline:
    """Runs steps on its own thread over `stages`, in the way of `schedule`.

    Raises:
        TransportError: the system gives no thread.
    """

    def __init__(self, stages: Stages, schedule: Schedule, speculation: Speculation | None = None) -> None:
        self.schedule = schedule
        self._stages = stages
        self._failure = _Failure()
        self._step: _Step | None = None
        self._joined: dict[int, int] = {}  # by device stream
        self._checked = 0
        self._bell = Bell()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        args = (self._jobs, stages, schedule, speculation, self._failure, self._bell)
        self._thread = Worker("step", _serve, args)
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread, self._pid, stages)
        self._thread.begin()  # last: an interrupt in here leaves no thread that nobody ends

    def submit(self, work: StepWork, record: StepRecord) -> None:
        """Hand over a step; the one before must have ended (`wait_all`). Returns at once."""
        self._check_process()
        transport = self._stages.transport
        step = _Step(work, record, transport.mark(), transport.here(), self._bell)
        self._joined = {}
        self._checked = 0
        self._step = step  # from here on the step is taken, wherever an interrupt hits this thread
        self._wake()
        # The interpreter would let this thread run on for 5 ms, with the device idle, before the step's thread begins;
        # unless it waits, as it does in order.
        for _ in range(HANDOVERS if self.schedule.returns_at_once else 0):
            if not step.taken:
                time.sleep(HANDOVER_S)

    def put(self, job: Job) -> None:
        """Hand over another job, after a step that an interrupt kept from being told of."""
        self._wake()
        self._jobs.put(job)

    def call(self, function: Callable[[], None], what: str) -> None:
        """Call `function` on the step's thread, after all that was asked for before, and wait for it.

        Raises:
            StateError: it failed, or something before it did; its cause is chained.
            WaitTimeout: as `wait_bucket`.
        """
        self._wake()
        job = _Call(function)
        self._jobs.put(job)
        self.wait_until(lambda: job.ended, what)

    @property
    def steps(self) -> int:
        """Number of the newest step, 0 before the first."""
        return self._step.record.step if self._step is not None else 0

    @property
    def delivered(self) -> object:
        """The buckets that the newest step delivers: the very object it was given. None before the first."""
        return self._step.delivered if self._step is not None else None

    @property
    def running(self) -> bool:
        return self._step is not None and not self._step.ended

    @property
    def failed(self) -> bool:
        return self._failure.error is not None

    def pass_bucket(self, k: int) -> bool:
        """Whether buckets 0 to k of the running step are there: then `wait_bucket`, which has nothing to wait for, is
        done. Raises as it does."""
        step = self._step
        if step is None or len(step.events) <= k or self.failed:
            return False
        first = self._joined.get(self._stages.transport.here(), 0)
        if not all(step.events[n].done() for n in range(first, k + 1)):
            return False
        self._join(step, k)
        return True

    def wait_bucket(self, k: int) -> None:
        """Wait for the weights of buckets 0 to k of the running step: the caller's device stream then sees them.

        Raises:
            StateError: the step failed; its cause is chained.
            WaitTimeout: nothing moved for `timeout_s` seconds: a slow step that goes on is not cut off.
        """
        step = self._step
        if step is None:
            self.wait_all()
            return
        self._wait(lambda: len(step.events) > k, _name(step, k))
        self._join(step, k)

    def wait_all(self) -> None:
        """Wait until the running step, if any, has ended and its weights are on the device. Raises as `wait_bucket`."""
        step = self._step
        if step is None:
            if self._failure.error is not None:
                raise _failed(self._failure.error) from self._failure.error
        else:
            self._wait(lambda: step.ended, _name(step, len(step.events)))
            self._join(step, len(step.events) - 1)

    def wait_until(self, reached: Callable[[], object], what: str) -> None:
        """Wait for something that the step's thread makes true. Raises as `wait_bucket`."""
        self._wait(lambda: bool(reached()), what)

    def close(self) -> None:
        """End the thread, after the jobs it was given. An interrupted close can be called again.

        Raises:
            WaitTimeout: nothing moved for `timeout_s` seconds, and the thread has not ended.
        """
        self._wake()
        if not _stop(self._jobs, self._thread, self._pid, self._stages):
            raise self._timeout("the end of the step's thread")
        self._finalizer.detach()

    def _wake(self) -> None:
        """Make sure that the step's thread knows of the newest step: an interrupt may have come right after `submit`
        took it. The thread takes each step once, however often it is told."""
        if self._step is not None and not self._step.taken:
            self._jobs.put(self._step)

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        self._check_process()
        self._wake()
        stages = self._stages
        in_time = self._bell.wait(
            lambda: reached() or self.failed, stages.timeout_s, lambda: stages.moved, self._thread.lives
        )
        if not in_time and not self._thread.lives() and self._failure.error is None:
            self._failure.error = TransportError("the step's thread has died")
        if self._failure.error is not None:
            raise _failed(self._failure.error) from self._failure.error
        if not in_time:
            raise self._timeout(what)

    def _join(self, step: _Step, k: int) -> None:
        """One copy after the other, so that each has `timeout_s` to itself."""
        here = self._stages.transport.here()
        for n in range(self._joined.get(here, 0), k + 1):
            try:
                self._stages.transport.join(step.events[n], self._stages.timeout_s)
            except WaitTimeout as error:
                raise self._timeout(_name(step, n)) from error
            except TransportError as error:
                raise _failed(error) from error
            self._joined[here] = n + 1
            if n == self._checked:  # other streams join later, when everybody may have written
                self._checked = n + 1
                step.delivered[n].check_arrived_unwritten()

    def _timeout(self, what: str) -> WaitTimeout:
        cause = f"waited in vain for {what}; no copy and no host step ended meanwhile"
        remedy = "Look for a stuck copy or thread; raise timeout_s if the machine is only slow"
        return WaitTimeout(explain("timeout_s", self._stages.timeout_s, cause, remedy))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                "the optimizer is used in a forked process, but its threads live in the parent only. Make a new "
                "optimizer in the child, or step in the parent."
            )


def _name(step: _Step, k: int) -> str:
    return step.delivered[k].name if 0 <= k < len(step.delivered) else "the end of the step"


def _failed(error: BaseException) -> StateError:
    # accelerate knows a batch that is too large by these words, and would try fewer rows on the broken state.
    told = str(error).replace("out of memory.", "out of memory:")
    return StateError(
        f"the optimizer's step failed ({type(error).__name__}: {told}); its state may be half stepped. Load the last "
        "checkpoint into a new optimizer to go on."
    )


def _serve(
    jobs: queue.SimpleQueue[Job | None],
    stages: Stages | None,
    schedule: Schedule,
    speculation: Speculation | None,
    failure: _Failure,
    bell: Bell,
) -> None:
    assert stages is not None
    try:
        while (job := _next(jobs, speculation, failure)) is not None:
            if not job.taken:
                job.taken = True
                error = failure.error or _attempt(lambda job=job: job.run(stages, schedule))  # type: ignore[misc]
                _note(error, failure)
                _note(_attempt(job.end), failure)
                del error
                bell.ring()
            del job
    except BaseException as error:  # this thread ends: whoever waits is told now, and not after `timeout_s`
        _note(error, failure)
        bell.ring()
    stages = None  # a traceback may keep this frame: the transport must not stay with it


def _note(error: BaseException | None, failure: _Failure) -> None:
    """The first error is the one that is told of."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # their locals hold the gradients
        failure.error = failure.error or error


def _next(jobs: queue.SimpleQueue[Job | None], speculation: Speculation | None, failure: _Failure) -> Job | None:
    """The next job; as long as there is none, buckets are stepped ahead one by one."""
    ahead = speculation is not None
    while ahead and failure.error is None:
        try:
            return jobs.get_nowait()
        except queue.Empty:
            ahead = _step_ahead(speculation, failure)
    return jobs.get()


def _step_ahead(speculation: Speculation | None, failure: _Failure) -> bool:
    """Returns whether there was anything to step."""
    assert speculation is not None
    try:
        return speculation.turn()
    except BaseException as error:
        failure.error = error
        return False


def _attempt(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except BaseException as error:
        return error
    return None


def _stop(jobs: queue.SimpleQueue[Job | None], thread: Worker, pid: int, stages: Stages) -> bool:
    """Tell the thread to end, and wait for it as long as anything moves. Returns whether it has ended."""
    if os.getpid() != pid:
        return True
    jobs.put(None)
    return thread.end(stages.timeout_s, lambda: stages.moved)
