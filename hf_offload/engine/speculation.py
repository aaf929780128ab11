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


@dataclass
class Slot:
    """14 bytes a parameter of memory for one bucket: a state, and the weights on the wire."""

    state: np.ndarray
    weights: np.ndarray

    def state_for(self, numel: int) -> State:
        master, m, v = (row[:numel] for row in self.state)
        return master, m, v


@dataclass
class Guess:
    """One bucket's state and weights as they will be if `rows` are the step's coefficients."""

    rows: np.ndarray
    state: State
    weights: np.ndarray
    slot: Slot
    seconds: float


class Speculation:
    """The shadow, and what is in it. The step's thread alone works on it, but for `reserve`.

    A bucket's state is at home or, after a hit, in a slot; the next hit brings it home again and frees the slot. So no
    state is ever copied for a hit.

    Attributes:
        nbytes: what the shadow takes.
        hits, misses: buckets whose guess was accepted or dropped at a step.
    """

    def __init__(self, shadow_bytes: int, threads: int) -> None:
        self._shadow_bytes = shadow_bytes
        self._threads = threads
        self._free: list[Slot] = []
        self._elements = 0
        self.nbytes = 0
        self._lodging: dict[tuple[int, int], Slot] = {}
        self._waiting: deque[tuple[GradientStore, int, Basis, StepRecord]] = deque()
        self._guesses: dict[tuple[int, int], Guess] = {}
        self.hits = 0
        self.misses = 0

    def reserve(self, arena: Arena) -> None:
        """Make the slots, as large as the largest bucket and no more than there are buckets. Once.

        Raises:
            ConfigError: the shadow has no room for one bucket.
        """
        buckets = arena.plan.buckets
        if self.nbytes or not buckets:
            return
        self._elements = max(b.numel for b in buckets)
        itemsize = max(b.itemsize for b in buckets)
        each = self._elements * (STATE_BYTES + itemsize)
        count = min(self._shadow_bytes // each, len(buckets))
        if not count:
            raise ConfigError(
                explain("shadow_bytes", self._shadow_bytes, f"one bucket of this model takes {each} bytes of shadow",
                        f"Give at least {each}, lower bucket_bytes, or set shadow_bytes=0")
            )  # fmt: skip
        self._free = [
            Slot(np.empty((3, self._elements), np.float32), np.empty(self._elements * itemsize, np.uint8))
            for _ in range(count)
        ]
        self.nbytes = count * each

    def offer(self, store: GradientStore, bucket: int, basis: Basis, record: StepRecord) -> None:
        """The gradients of a bucket are complete, as far as one can tell."""
        self._waiting.append((store, bucket, basis, record))

    def turn(self) -> bool:
        """Step one bucket ahead, if one waits and there is room. Returns whether it did; else nothing waits."""
        while self._waiting:
            store, k, basis, record = self._waiting.popleft()
            key = id(store.arena), k
            at_home = key not in self._lodging
            if at_home and not self._free:
                continue
            slot = self._free.pop() if at_home else self._lodging[key]
            self._guess(key, store, k, basis, record, slot, at_home)
            return True
        return False

    def _guess(
        self, key: tuple[int, int], store: GradientStore, k: int, basis: Basis, record: StepRecord, slot: Slot,
        at_home: bool,
    ) -> None:  # fmt: skip
        arena = store.arena
        bucket = arena.plan.buckets[k]
        begin = time.perf_counter()
        rows = basis.rows.table(basis.groups[arena.number], arena.steps + 1, arena.bucket_params[k])
        state = slot.state_for(bucket.numel) if at_home else arena.home_of(k)
        weights = slot.weights[: bucket.nbytes].view(NUMPY_WIRE[bucket.wire])
        cpu.adam_step_into(
            arena.state_of(k), state, store.of_bucket(k), weights, arena.bucket_bounds[k], rows,
            wire=bucket.wire, threads=self._threads, grad_wire=store.held[k],
        )  # fmt: skip
        end = time.perf_counter()
        record.timeline.add("host_step", f"guess of bucket {k}", begin, end, record.step)
        self._guesses[key] = Guess(rows, state, weights, slot, end - begin)

    def forget(self, arena: Arena, bucket: int) -> None:
        """The bucket's gradients change: what was made of them is void."""
        if self._waiting:
            self._waiting = deque(w for w in self._waiting if not (w[0].arena is arena and w[1] == bucket))
        self._drop((id(arena), bucket))

    def accept(self, work: BucketWork) -> Guess | None:
        """At the step: the guess, if it was right. Its state is the bucket's now; its weights are to be sent at once.

        Without a right guess the bucket is as if nothing had been guessed.
        """
        key = id(work.work.arena), work.index
        guess = self._guesses.get(key)
        if guess is None:
            return None
        if not np.array_equal(guess.rows.view(np.uint32), work.coefficients().view(np.uint32)):
            self.misses += 1
            self._drop(key)
            return None
        self.hits += 1
        del self._guesses[key]
        work.work.arena.move(work.index, guess.state)
        if key in self._lodging:
            self._free.append(self._lodging.pop(key))
        else:
            self._lodging[key] = guess.slot
        return guess

    def clear(self) -> None:
        """Nothing is guessed any more, and nothing waits to be."""
        self._waiting.clear()
        for key in list(self._guesses):
            self._drop(key)

    def bring_home(self, arenas: Sequence[Arena]) -> None:
        """All state back into the flat arrays, whose views `optimizer.state` shows; all slots are free."""
        self.clear()
        for arena in arenas:
            arena.bring_home()
        self._free.extend(self._lodging.values())
        self._lodging.clear()

    def _drop(self, key: tuple[int, int]) -> None:
        guess = self._guesses.pop(key, None)
        if guess is not None and key not in self._lodging:
            self._free.append(guess.slot)


def copied(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups' settings as they are now, without their parameters."""
    return [{name: _value(v) for name, v in g.items() if name != "params"} for g in groups]


def _value(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
