"""What one step asks of the pipeline: plain data, taken by the training thread, carried out by the step's thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.formats import Task
from hf_offload.engine.plan import Bucket
from hf_offload.engine.store import GradientStore
from hf_offload.errors import StateError
from hf_offload.transport import Segments


class Gradients(Protocol):
    """Where a step's gradients are: still on the device, or in the store."""

    def let_go(self, bucket: Bucket) -> None:
        """The gradients of `bucket` have been copied."""
        ...

    def unwritten(self, indices: Sequence[int]) -> bool:
        """Whether nobody wrote to the gradients of these parameters since the step was taken."""
        ...

    def drop(self) -> None:
        """The step has ended, well or badly: it holds no gradient any more."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceGradients:
    """Gradients that `step()` found in `.grad`. The step's thread never reads `.grad`: backward writes it in C++
    without the GIL.

    Attributes:
        grads: each parameter's gradient in the parameter's memory order; None where it is not stepped. Once a gradient
            has been copied, only a tensor without memory that shares its version counter.
        storages: their memory, whatever `.data = ...` puts into its place before it has been copied.
        versions: the version counters when the step was taken.
        pointers: device addresses; 0 where a parameter is not stepped.
        pieces_left: for each parameter, how many of its pieces have not been copied yet.
    """

    grads: list[Tensor | None]
    storages: list[object]
    versions: list[int]
    pointers: Sequence[int]
    pieces_left: list[int]

    def let_go(self, bucket: Bucket) -> None:
        for piece in bucket.pieces:
            i = piece.param
            if self.grads[i] is not None:
                self.pieces_left[i] -= 1
                if self.pieces_left[i] == 0:
                    self.grads[i] = _counter(self.grads[i])  # type: ignore[arg-type]
                    self.storages[i] = None

    def unwritten(self, indices: Sequence[int]) -> bool:
        if len(indices) == len(self.grads):
            return versions_of(self.grads) == self.versions
        return versions_of([self.grads[i] for i in indices]) == [self.versions[i] for i in indices]

    def drop(self) -> None:
        self.grads[:] = [None] * len(self.grads)
        self.storages[:] = self.grads


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The version counters; 0 for None."""
    return [0 if t is None else t._version for t in tensors]


def _counter(t: Tensor) -> Tensor:
    """A tensor that shares `t`'s version counter and holds none of its memory."""
    counter = t.detach()
    counter.data = _nothing(t.dtype, t.device)
    return counter


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class StoredGradients:
    """Gradients that left during backward and are complete in `store`."""

    store: GradientStore

    def let_go(self, bucket: Bucket) -> None:
        """The device holds none of them."""

    def unwritten(self, indices: Sequence[int]) -> bool:
        return True

    def drop(self) -> None:
        """The store stays."""


@dataclass(frozen=True, slots=True)
class ArenaWork:
    """The parameters of one arena that are stepped, by their index in it.

    Attributes:
        gradients: where theirs are.
        weights: each stepped parameter's memory as it was when the step was taken: `p.data = ...` may swap it since.
        weight_versions: their version counters, by `note_weights`, after the step has moved them; empty until then.
        weight_pointers: device addresses; 0 where a parameter is not stepped.
        coefficients: float32[params, NUM_COEF], inactive rows where a parameter is not stepped.
        stepped: int64, the indices of those that are stepped.
        turns: int64[params], the step that each takes.
    """

    arena: Arena
    gradients: DeviceGradients | StoredGradients
    weights: Sequence[Tensor | None]
    weight_versions: list[int]
    weight_pointers: list[int]
    coefficients: np.ndarray
    stepped: np.ndarray
    turns: np.ndarray

    @property
    def is_stepped(self) -> np.ndarray:
        """bool[params]."""
        mask = np.zeros(len(self.weights), bool)
        mask[self.stepped] = True
        return mask

    @property
    def whole(self) -> bool:
        """Whether all parameters of the arena are stepped."""
        return len(self.stepped) == len(self.weights)

    @property
    def params(self) -> list[Tensor]:
        """Those that are stepped."""
        return self.arena.params if self.whole else [self.arena.params[i] for i in self.stepped.tolist()]

    @property
    def nbytes(self) -> int:
        """Bytes of their gradients on the wire."""
        return int(self.arena.param_bytes[self.stepped].sum())

    def gradients_kept(self) -> bool:
        """Whether a gradient that was taken from `.grad` still stands there."""
        if not isinstance(self.gradients, DeviceGradients):
            return False
        taken = zip(self.arena.params, self.gradients.pointers)
        return any(at and p.grad is not None and p.grad.data_ptr() == at for p, at in taken)

    def note_weights(self) -> None:
        self.weight_versions[:] = versions_of(self.weights)

    def written(self) -> bool:
        """Whether somebody wrote to a weight since `note_weights`."""
        return any(
            w is not None and (w._version != v or p.data_ptr() != at)
            for w, v, p, at in zip(self.weights, self.weight_versions, self.arena.params, self.weight_pointers)
        )


@dataclass(frozen=True, slots=True)
class BucketWork:
    """One bucket of one step: bucket number `index` of the arena's plan."""

    work: ArenaWork
    index: int
    unit: str

    @property
    def name(self) -> str:
        return f"bucket {self.index} of unit {self.unit!r}"

    @property
    def bucket(self) -> Bucket:
        return self.work.arena.plan.buckets[self.index]

    @property
    def resident(self) -> bool:
        """Whether its state stays on the device."""
        return self.work.arena.resident

    @property
    def units(self) -> frozenset[int]:
        return self.work.arena.bucket_units[self.index]

    def gradient_segments(self) -> Segments:
        gradients = self.work.gradients
        assert isinstance(gradients, DeviceGradients)
        return self._segments(gradients.pointers, gradients.grads)

    def stored_gradients(self) -> tuple[np.ndarray, str]:
        """The bucket's part of the store, and its format."""
        gradients = self.work.gradients
        assert isinstance(gradients, StoredGradients)
        return gradients.store.of_bucket(self.index), gradients.store.held[self.index]

    def weight_segments(self) -> Segments:
        """On the step's thread alone."""
        work, known = self.work, self.work.arena.weight_segments.get(self.index)
        if known is not None and known[0] is work.weight_pointers:  # nothing has moved since the last step
            return known[1]
        segments = self._segments(work.weight_pointers, work.weights)
        work.arena.weight_segments[self.index] = work.weight_pointers, segments
        return segments

    def coefficients(self) -> np.ndarray:
        return self.work.coefficients[self.work.arena.bucket_params[self.index]]

    def noise(self) -> np.ndarray:
        return self.work.arena.noise(self.index, self.work.turns)

    def task(self, grads: np.ndarray, weights: np.ndarray, held: str | None, threads: int) -> Task:
        """The step of the bucket with `grads` (of format `held`; None: the wire's), its new weights to `weights`."""
        arena = self.work.arena
        return Task(
            grads, weights, arena.bucket_bounds[self.index], self.coefficients(), self.noise(),
            self.bucket.wire, held, threads,
        )  # fmt: skip

    def let_go_of_gradients(self) -> None:
        """The bucket's gradients are on the host: the device may have their memory back."""
        self.work.gradients.let_go(self.bucket)

    def check_gradients_unchanged(self) -> None:
        """After the copy: nobody may have written to the gradients while they were being copied.

        Raises:
            StateError: a gradient's version counter moved.
        """
        if not self.work.gradients.unwritten(self._indices):
            raise StateError(
                f"{self.name}: a gradient was written to while optimizer.step() was still copying it, so the "
                "step read a mixture. Use optimizer.zero_grad() instead of model.zero_grad(set_to_none=False), or "
                "call optimizer.synchronize() before you write to a gradient. Load the last checkpoint to go on."
            )

    def check_weights_unwritten(self) -> None:
        """Before the copy: what somebody wrote to a weight since `step()` would be lost under it.

        Raises:
            StateError: a weight's version counter moved.
        """
        if self._written(self.work.weights):
            raise StateError(
                f"{self.name}: a weight was written to while the step was still under way, whose result would "
                "overwrite it. Call optimizer.synchronize() before you write to weights. Load the last checkpoint "
                "to go on."
            )

    def check_arrived_unwritten(self) -> None:
        """When the weights are first waited for: until then nobody may write to them; from then on everybody may, an
        embedding with `max_norm` in its forward, say.

        Raises:
            StateError: a version counter moved: the copy may have overwritten what was written.
        """
        if self._written(self.work.arena.params):
            raise StateError(
                f"{self.name}: a weight was written to while the step's result was on its way to it, and may have been "
                "overwritten. Call optimizer.synchronize() before you write to weights, and write it again."
            )

    def _written(self, tensors: Sequence[Tensor | None]) -> bool:
        weights, versions, indices = self.work.weights, self.work.weight_versions, self._indices
        if self.work.whole and len(indices) == len(weights):
            return versions_of(tensors) != versions
        stepped = [i for i in indices if weights[i] is not None]
        return versions_of([tensors[i] for i in stepped]) != [versions[i] for i in stepped]

    @property
    def _indices(self) -> list[int]:
        """Its parameters in the arena, those that are not stepped as well."""
        return self.work.arena.bucket_indices[self.index]

    def _segments(self, pointers: Sequence[int], owners: Sequence[Tensor | None]) -> Segments:
        params, starts, nbytes, offsets = self.work.arena.bucket_spans[self.index]
        addresses = np.array([pointers[i] for i in params], np.int64) + starts
        if self.work.whole:
            return Segments(addresses, nbytes, offsets, [owners[i] for i in params])
        stepped = self.work.is_stepped[params]
        theirs = [owners[i] for i, mine in zip(params, stepped.tolist()) if mine]
        return Segments(addresses[stepped], nbytes[stepped], offsets[stepped], theirs)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One whole step.

    Attributes:
        arenas: what is stepped.
        buckets: its buckets in the order in which they go.
        delivered: the buckets whose weights reach the device in this step, in the order in which they arrive: those
            that are stepped, or, delayed, those of the step before.

    What stays on the device comes first in both.
    """

    arenas: Sequence[ArenaWork]
    buckets: Sequence[BucketWork]
    delivered: Sequence[BucketWork]

    def count(self) -> None:
        """One step more for each parameter that is stepped; on the step's thread, where nothing can interrupt it."""
        for work in self.arenas:
            work.arena.steps[work.stepped] += 1

    def on_host(self) -> StepWork:
        """The step as a schedule sees it: without what stays on the device."""
        if not any(work.resident for work in (*self.buckets[:1], *self.delivered[:1])):
            return self
        buckets = [work for work in self.buckets if not work.resident]
        exact = self.delivered is self.buckets
        return StepWork(self.arenas, buckets, buckets if exact else [w for w in self.delivered if not w.resident])

    def check_gradients_unchanged(self) -> None:
        """Once more for all at the end: torch moves a version counter only when the writing operation has ended.

        Raises:
            StateError: a gradient's version counter moved.
        """
        for work in self.buckets:
            work.check_gradients_unchanged()


def bucket_works(
    works: Sequence[ArenaWork], unit_name: Callable[[int], str], rank: Mapping[int, int]
) -> list[BucketWork]:
    """Every bucket with something to step, in the order forward needs its unit (`rank[unit]`); first of all those that
    stay on the device."""
    found = []
    for work in works:
        everything = work.whole
        stepped = () if everything else work.is_stepped
        for i, units in enumerate(work.arena.bucket_units):
            if everything or stepped[work.arena.bucket_params[i]].any():
                first = min(units, key=rank.__getitem__)
                found.append((rank[first], BucketWork(work, i, unit_name(first))))
    ordered = [work for _, work in sorted(found, key=lambda f: f[0])]  # stable: arena order within a unit
    return sorted(ordered, key=lambda work: not work.resident)
