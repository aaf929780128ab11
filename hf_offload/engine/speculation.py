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

from hf_offload.engine import memory
from hf_offload.engine.arena import Arena
from hf_offload.engine.formats import State, Task, state_bytes
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.plan import Bucket
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.store import GradientStore
from hf_offload.engine.tensors import NUMPY_WIRE
from hf_offload.engine.work import BucketWork
from hf_offload.errors import ConfigError, explain

PART = 1 << 19
"""Elements that are stepped ahead in one go, 0.5 ms of a core: what arrives, and `step()`, wait no longer than that."""
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
    """The shadow of one bucket: room for another state of it, and for its weights on the wire.

    14 bytes a parameter, with float32 state and a 16-bit wire.
    """

    def __init__(self, arena: Arena, bucket: Bucket, threads: int) -> None:
        blocks = arena.blocks_of(bucket)
        of_state = arena.kind.arrays(bucket.numel, blocks.stop - blocks.start)
        arrays = memory.allocate(*of_state, (bucket.nbytes, np.dtype(np.uint8)))
        memory.touch(arrays, threads)  # a guess whose pages the system has yet to find takes ten times as long
        self.state: State = tuple(arrays[:-1])
        self.weights = arrays[-1]
        self.nbytes = self.bytes_for(arena, bucket)

    @staticmethod
    def bytes_for(arena: Arena, bucket: Bucket) -> int:
        return sum(state_bytes(arena.kind, [p.length for p in bucket.pieces]).values()) + bucket.nbytes


class Guess:
    """One bucket's state and weights as they will be if `rows` are the step's coefficients. Made part by part.

    Attributes:
        rows, noise: the coefficients' and the rounding's rows it is made with.
        state: where the new state goes; `weights`: wire[numel], the new weights.
        seconds: that it has taken so far.
    """

    def __init__(
        self, store: GradientStore, bucket: int, rows: np.ndarray, noise: np.ndarray, state: State,
        weights: np.ndarray, record: StepRecord,
    ) -> None:  # fmt: skip
        self.rows, self.noise, self.state, self.weights = rows, noise, state, weights
        self.seconds = 0.0
        self.of = store.arena.number, bucket
        self._store, self._bucket, self._record = store, bucket, record
        self._done = 0

    def is_what(self, work: BucketWork) -> bool:
        """Whether the step asks for the very same: equal coefficients, bit for bit, and equal noise."""
        same = np.array_equal(self.rows.view(np.uint32), work.coefficients().view(np.uint32))
        return same and np.array_equal(self.noise, work.noise())

    def go_on(self, threads: int) -> bool:
        """Step one part more. Returns whether that was the last."""
        begin = time.perf_counter()
        arena, k = self._store.arena, self._bucket
        bucket = arena.plan.buckets[k]
        low, high = self._done, min(self._done + PART, bucket.numel)
        task = Task(
            self._store.of_bucket(k), self.weights, arena.bucket_bounds[k], self.rows, self.noise, bucket.wire,
            self._store.held[k], threads,
        )  # fmt: skip
        arena.kind.step_ahead(arena.state_of(k), self.state, task, (low, high))
        end = time.perf_counter()
        self._record.timeline.add("host_step", f"guess of bucket {k}", begin, end, self._record.step)
        self.seconds += end - begin
        self._done = high
        return high == bucket.numel


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
        self._making: Guess | None = None
        self._guesses: dict[tuple[int, int], Guess] = {}
        self.hits = 0
        self.misses = 0
        self._fits = False  # whether there ever was room for a bucket

    def reserve(self, arena: Arena) -> None:
        """Make a slot for each bucket of `arena`, in the order of forward, as long as there is room.

        What forward needs last has the most time to be stepped behind it, and can best do without.

        Raises:
            ConfigError: the shadow has no room for one bucket of the first arena that has any. Later ones, of state
                that comes back from the device, do without.
        """
        self.release(arena.number)  # an interrupt may have fallen right after
        slots, nbytes = dict(self._slots), self.nbytes
        for k, bucket in enumerate(arena.plan.buckets):
            need = Slot.bytes_for(arena, bucket)
            if nbytes + need > self._shadow_bytes:
                break
            slots[arena.number, k] = Slot(arena, bucket, self._threads)
            nbytes += need
        if not slots and arena.plan.buckets and not self._fits:
            raise ConfigError(
                explain("shadow_bytes", self._shadow_bytes, f"the first bucket of this model takes {need} bytes of it",
                        f"Give at least {need}, lower bucket_bytes, or set shadow_bytes=0")
            )  # fmt: skip
        self._slots, self.nbytes, self._fits = slots, nbytes, self._fits or bool(slots)

    def release(self, number: int) -> None:
        """Free the slots of an arena that came to nothing."""
        slots = {of: slot for of, slot in self._slots.items() if of[0] != number}
        self._slots, self.nbytes = slots, sum(slot.nbytes for slot in slots.values())

    def covers(self, number: int) -> bool:
        """Whether a bucket of the arena has a slot."""
        return any(arena == number for arena, _ in self._slots)

    def offer(self, store: GradientStore, bucket: int, basis: Basis, record: StepRecord) -> None:
        """The gradients of a bucket are complete, as far as one can tell."""
        if (store.arena.number, bucket) in self._slots:
            self._waiting.append((store, bucket, basis, record))

    def turn(self) -> bool:
        """Step a part of one bucket ahead, if one waits. Returns whether there was anything to do."""
        if self._making is None:
            if not self._waiting:
                return False
            self._making = self._begin(*self._waiting.popleft())
        if self._making is not None and self._making.go_on(self._threads):
            self._guesses[self._making.of] = self._making
            self._making = None
        return True

    def _begin(self, store: GradientStore, k: int, basis: Basis, record: StepRecord) -> Guess | None:
        arena = store.arena
        slot = self._slots[arena.number, k]
        try:
            turns = arena.turns
            rows = basis.rows.table(basis.groups[arena.number], turns, arena.bucket_params[k])
        except (ArithmeticError, ValueError, TypeError):
            return None  # settings that have become impossible: `step()` says so
        state = slot.state if arena.state_of(k) is arena.home_of(k) else arena.home_of(k)
        weights = slot.weights.view(NUMPY_WIRE[arena.plan.buckets[k].wire])
        return Guess(store, k, rows, arena.noise(k, turns), state, weights, record)

    def forget(self, arena: Arena, bucket: int) -> None:
        """The bucket's gradients change: what was made of them is void."""
        if self._waiting:
            self._waiting = deque(w for w in self._waiting if not (w[0].arena is arena and w[1] == bucket))
        self._guesses.pop((arena.number, bucket), None)
        if self._making is not None and self._making.of == (arena.number, bucket):
            self._making = None

    def accept(self, work: BucketWork) -> Guess | None:
        """At the step: the guess, if it was right. Its state is the bucket's now; its weights are to be sent at once.

        Without a right guess the bucket is as if nothing had been guessed.
        """
        of = work.work.arena.number, work.index
        guess, half = self._guesses.pop(of, None), self._making
        if half is not None and half.of == of:
            guess, self._making = half, None
        if guess is None:
            return None
        if not guess.is_what(work):
            self.misses += 1
            return None
        while guess is half and not guess.go_on(self._threads):
            pass
        self.hits += 1
        work.work.arena.move(work.index, guess.state)
        return guess

    def clear(self) -> None:
        """Nothing is guessed any more, and nothing waits to be."""
        self._waiting.clear()
        self._making = None
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
