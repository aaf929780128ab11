"""The host's kernels and copies, timed alone and beside other work: one part of a calibration."""

from __future__ import annotations

import ctypes
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload.bench.cores import ENGINE, STEP_THREAD
from hf_offload.engine.formats import FLOAT32, State, StateFormat, Task, blocks_of
from hf_offload.engine.plan import WIRE_ITEMSIZE
from hf_offload.engine.tensors import NUMPY_WIRE
from hf_offload.kernels import cpu
from hf_offload.simulation import PART
from hf_offload.transport.host import PART_BYTES

BITS = 0x3A
"""What every byte of a gradient is: 7e-4 as bfloat16 and float32. Denormal squares would be slower than real ones."""
MOVES = 5
PASSES, LEAST_S, MOST_TIMES = 5, 0.02, 100
"""Measures of a kernel, after two passes over the sample that touch the memory. Each is the mean of as many passes as
take LEAST_S: of a small model one takes less than the system takes for itself now and then."""


@dataclass(frozen=True)
class Measured:
    """Repeated measures of one thing.

    Attributes:
        value: the median.
        spread: interquartile range over median; 0 of a single one.
    """

    value: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        middle = statistics.median(values)
        if len(values) < 2 or middle <= 0:
            return cls(middle, 0.0)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (high - low) / middle)


class Bench:
    """State, gradients and weights of a sample of buckets, and the engine's kernels on them.

    Args:
        sizes: parameters of each bucket.
        wire: their dtype on the wire.
        threads: of the host step.

        kind: how m and v are held.
    """

    def __init__(self, sizes: Sequence[int], wire: str, threads: int, kind: StateFormat = FLOAT32) -> None:
        total, item = sum(sizes), WIRE_ITEMSIZE[wire]
        self.wire, self.threads, self.params = wire, threads, total
        self._buckets = [slice(end - n, end) for n, end in zip(sizes, np.cumsum(sizes).tolist())]
        self._kind = kind
        self._state, self._shadow = ([_state_of(kind, n) for n in sizes] for _ in range(2))
        self._gradients = np.full(total * item, BITS, np.uint8).view(NUMPY_WIRE[wire])
        self._made = np.zeros(total * item, np.uint8).view(NUMPY_WIRE[wire])
        largest = max(sizes)
        self._slot, self._room = (np.full(largest * item, BITS, np.uint8).view(NUMPY_WIRE[wire]) for _ in range(2))
        self._rest_s = min(self._move() for _ in range(MOVES))
        self._row = cpu.coefficients(
            lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=100, grad_scale=1.0, decoupled=True,
            maximize=False,
        )[None]  # fmt: skip

    def measure(self) -> dict[str, Measured]:
        """Seconds a parameter, by the names of `simulation.HostCost`, `norm` excepted."""
        works: dict[str, Callable[[int, slice, int], Any]] = {
            "step": self._step, "guess": self._guess, "put": self._put, "add": self._add, "squares": self._squares,
            "narrow": self._narrow, "take": self._take,
        }  # fmt: skip
        return {name: self._passes(work) for name, work in works.items()}

    def step_all(self) -> None:
        """One host step of the whole sample."""
        self._once(self._step)

    def move_and_rest(self) -> None:
        """One copy of the largest bucket's gradients, as the host transport moves them; then a rest of the time it
        takes alone."""
        self._move()
        time.sleep(self._rest_s)

    def _move(self) -> float:
        begin = time.perf_counter()
        to, source, nbytes = self._room.ctypes.data, self._gradients.ctypes.data, self._room.nbytes
        for at in range(0, nbytes, PART_BYTES):
            ctypes.memmove(to + at, source + at, min(PART_BYTES, nbytes - at))
        return time.perf_counter() - begin

    def _passes(self, work: Callable[[int, slice, int], Any]) -> Measured:
        self._once(work)
        times = math.ceil(min(MOST_TIMES, LEAST_S / max(self._once(work), 1e-9)))
        found = [sum(self._once(work) for _ in range(times)) / times for _ in range(PASSES)]
        return Measured.of([seconds / self.params for seconds in found])

    def _once(self, work: Callable[[int, slice, int], Any]) -> float:
        spent = 0.0
        for k, at in enumerate(self._buckets):
            n = at.stop - at.start
            self._slot[:n] = self._gradients[at]  # as after a copy: just written
            begin = time.perf_counter()
            work(k, at, n)
            spent += time.perf_counter() - begin
        return spent

    def _step(self, k: int, at: slice, n: int) -> None:
        self._kind.step(self._state[k], self._task(self._slot[:n], self._room[:n]))

    def _guess(self, k: int, at: slice, n: int) -> None:
        task = self._task(self._gradients[at], self._made[at])
        for low in range(0, n, PART):
            self._kind.step_ahead(self._state[k], self._shadow[k], task, (low, min(low + PART, n)))

    def _task(self, grads: np.ndarray, weights: np.ndarray) -> Task:
        bounds, noise = np.array([0, grads.size], np.int64), np.zeros((1, cpu.NUM_NOISE), np.uint32)
        return Task(grads, weights, bounds, self._row, noise, self.wire, None, self.threads)

    def _put(self, k: int, at: slice, n: int) -> None:
        cpu.put(self._slot[:n], self._gradients[at], self.wire, self.wire, self.threads)

    def _add(self, k: int, at: slice, n: int) -> None:
        cpu.add(self._slot[:n], self._gradients[at], self.wire, self.wire, self.threads)

    def _squares(self, k: int, at: slice, n: int) -> None:
        cpu.sum_of_squares(self._gradients[at], self.wire, self.threads)

    def _narrow(self, k: int, at: slice, n: int) -> None:
        cpu.narrow(self._state[k][0], self._room[:n], self.wire, self.threads)

    def _take(self, k: int, at: slice, n: int) -> None:
        self._room[:n] = self._made[at]


def _state_of(kind: StateFormat, numel: int) -> State:
    """As after some steps: no zeros, no denormals in masters."""
    state = tuple(np.zeros(*part) for part in kind.arrays(numel, blocks_of(numel, kind.block)))
    for array in state if not kind.scaled else state[:1]:
        array.fill(1e-3 if array.dtype == np.float32 else BITS)
    return state


class Turns:
    """How often something was done, and from when to when, seconds on `time.perf_counter`'s clock."""

    def __init__(self) -> None:
        self.count = 0
        self.begin = self.end = time.perf_counter()

    def take(self, once: Callable[[], None]) -> None:
        once()
        self.count += 1
        self.end = time.perf_counter()

    @property
    def seconds_a_turn(self) -> float:
        """The mean, whatever time was lost in between: a scheduler may let one thread wait for several turns of the
        other's, which a median would not show."""
        return (self.end - self.begin) / self.count


def seconds_a_turn(once: Callable[[], None], at_least_s: float) -> float:
    """Seconds that `once()` takes, over at least so many seconds and three turns, after one that is not counted."""
    once()
    turns = Turns()
    while turns.count < 3 or turns.end - turns.begin < at_least_s:
        turns.take(once)
    return turns.seconds_a_turn


@contextmanager
def kept_busy(once: Callable[[], None], name: str, started: Callable[[], None]) -> Iterator[Turns]:
    """In here a thread repeats `once()`, at least once; what is given out can be read afterwards.

    Args:
        name: whose work it stands for: the step's thread (`step`) or a copy's (`d2h`).
        started: called once the thread runs.
    """
    stop, turns = threading.Event(), Turns()

    def repeat() -> None:
        turns.begin = time.perf_counter()
        while not (stop.is_set() and turns.count):
            turns.take(once)

    thread = threading.Thread(target=repeat, name=STEP_THREAD if name == "step" else f"{ENGINE}{name}", daemon=True)
    thread.start()
    try:
        started()
        yield turns
    finally:
        stop.set()
        thread.join()
