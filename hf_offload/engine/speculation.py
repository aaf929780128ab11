"""Stepping ahead: buckets whose gradients have arrived are stepped during backward, into shadow, on a guess.

The guess is that nothing will scale the gradients but what scaled them in the last step (so: no clipping), that the
learning rates and the other settings stay, and that the backward under way is the step's last. `step()` compares the
rows of coefficients it really uses with those that were guessed: equal bits, and the shadow is the result; else the
shadow is dropped. Until then nothing but shadow is written. Nothing is ever undone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload.engine.arena import Arena, State
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.store import GradientStore
from hf_offload.engine.tensors import NUMPY_WIRE
from hf_offload.engine.work import BucketWork
from hf_offload.errors import ConfigError, explain
from hf_offload.kernels import cpu

STATE_BYTES = 12
REMEMBERED = 4
"""Steps looked back on: guessing goes on while one of them would have been guessed right."""


@dataclass(frozen=True)
class Basis:
    """What the coming step is guessed to be. Taken by the training thread when a backward's first gradient arrives.

    Attributes:
        rows: the coefficients' rows, of settings copied then.
        groups: per arena, int64[params]: each parameter's group, -1 where it has none.
    """

    rows: Coefficients
    groups: Sequence[np.ndarray]


class Confidence:
    """Whether guessing is worth it, from how the last guesses would have done, made or not."""

    def __init__(self) -> None:
        self._right: deque[bool] = deque([True], maxlen=REMEMBERED)

    def learn(self, right: bool) -> None:
        """The last step was, or would have been, guessed right."""
        self._right.append(right)

    def guess(self) -> bool:
        return any(self._right)


class Slot:
    """The shadow of one bucket: room for another state of it, and for its weights on the wire. 14 bytes a parameter."""

    def __init__(self, numel: int, itemsize: int) -> None:
        memory = np.empty((3, numel), np.float32)
        memory.fill(0.0)  # touched here: a guess whose pages the system has yet to find takes ten times as long
        self.state: State = memory[0], memory[1], memory[2]
        self.weights = np.empty(numel * itemsize, np.uint8)
        self.weights.fill(0)

    @staticmethod
    def bytes_for(numel: int, itemsize: int) -> int:
        return numel * (STATE_BYTES + itemsize)


@dataclass
class Guess:
    """One bucket's state and weights as they will be if `rows` are the step's coefficients."""

    rows: np.ndarray
    state: State
    weights: np.ndarray
    seconds: float


class Speculation:
    """The shadow, and what is in it. The step's thread alone works on it, but for `reserve`.

    A bucket that is covered has two places for its state, at home and in its slot. The guess is made in the one where
    the state is not; a hit makes that one the state. So no state is ever copied for a hit.

    Attributes:
        nbytes: what the shadow takes.
        hits, misses: buckets whose guess was accepted or dropped at a step.
    """

    def __init__(self, shadow_bytes: int, threads: int) -> None:
        self._shadow_bytes = shadow_bytes
        self._threads = threads
        self.nbytes = 0
        self._slots: dict[tuple[int, int], Slot] = {}
        self._waiting: deque[tuple[GradientStore, int, Basis, StepRecord]] = deque()
        self._guesses: dict[tuple[int, int], Guess] = {}
        self.hits = 0
        self.misses = 0

    def reserve(self, arena: Arena) -> None:
        """Make a slot for each bucket of `arena`, in the order of forward, as long as there is room.

        What forward needs last has the most time to be stepped behind it, and can best do without.

        Raises:
            ConfigError: the shadow has no room for one bucket.
        """
        if any(number == arena.number for number, _ in self._slots):
            return  # an interrupt fell right after
        for k, bucket in enumerate(arena.plan.buckets):
            need = Slot.bytes_for(bucket.numel, bucket.itemsize)
            if self.nbytes + need > self._shadow_bytes:
                break
            self._slots[arena.number, k] = Slot(bucket.numel, bucket.itemsize)
            self.nbytes += need
        if not self._slots and arena.plan.buckets:
            raise ConfigError(
                explain("shadow_bytes", self._shadow_bytes, f"the first bucket of this model takes {need} bytes of it",
                        f"Give at least {need}, lower bucket_bytes, or set shadow_bytes=0")
            )  # fmt: skip

    def offer(self, store: GradientStore, bucket: int, basis: Basis, record: StepRecord) -> None:
        """The gradients of a bucket are complete, as far as one can tell."""
        if (store.arena.number, bucket) in self._slots:
            self._waiting.append((store, bucket, basis, record))

    def turn(self) -> bool:
        """Step one bucket ahead, if one waits. Returns whether it did."""
        if not self._waiting:
            return False
        self._guess(*self._waiting.popleft())
        return True

    def _guess(self, store: GradientStore, k: int, basis: Basis, record: StepRecord) -> None:
        arena = store.arena
        bucket, slot = arena.plan.buckets[k], self._slots[arena.number, k]
        begin = time.perf_counter()
        try:
            rows = basis.rows.table(basis.groups[arena.number], arena.steps + 1, arena.bucket_params[k])
        except (ArithmeticError, ValueError, TypeError):
            return  # settings that have become impossible: `step()` says so
        now = arena.state_of(k)
        state = slot.state if now is arena.home_of(k) else arena.home_of(k)
        weights = slot.weights.view(NUMPY_WIRE[bucket.wire])
        cpu.adam_step_into(
            now, state, store.of_bucket(k), weights, arena.bucket_bounds[k], rows,
            wire=bucket.wire, threads=self._threads, grad_wire=store.held[k],
        )  # fmt: skip
        end = time.perf_counter()
        record.timeline.add("host_step", f"guess of bucket {k}", begin, end, record.step)
        self._guesses[arena.number, k] = Guess(rows, state, weights, end - begin)

    def forget(self, arena: Arena, bucket: int) -> None:
        """The bucket's gradients change: what was made of them is void."""
        if self._waiting:
            self._waiting = deque(w for w in self._waiting if not (w[0].arena is arena and w[1] == bucket))
        self._guesses.pop((arena.number, bucket), None)

    def accept(self, work: BucketWork) -> Guess | None:
        """At the step: the guess, if it was right. Its state is the bucket's now; its weights are to be sent at once.

        Without a right guess the bucket is as if nothing had been guessed.
        """
        guess = self._guesses.pop((work.work.arena.number, work.index), None)
        if guess is None:
            return None
        if not np.array_equal(guess.rows.view(np.uint32), work.coefficients().view(np.uint32)):
            self.misses += 1
            return None
        self.hits += 1
        work.work.arena.move(work.index, guess.state)
        return guess

    def clear(self) -> None:
        """Nothing is guessed any more, and nothing waits to be."""
        self._waiting.clear()
        self._guesses.clear()

    def bring_home(self, arenas: Sequence[Arena]) -> None:
        """All state back into the flat arrays, whose views `optimizer.state` shows."""
        self.clear()
        for arena in arenas:
            arena.bring_home()


def copied(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups' settings as they are now, without their parameters."""
    return [{name: _value(v) for name, v in g.items() if name != "params"} for g in groups]


def _value(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
