"""What one step asks of the pipeline: plain data, taken by the training thread, carried out by the step's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.plan import Bucket
from hf_offload.errors import StateError
from hf_offload.transport import Segment


@dataclass(frozen=True, slots=True)
class ArenaWork:
    """The parameters of one arena that are stepped, by their index in it.

    The step's thread never reads `p.grad`: backward writes it in C++ without the GIL.

    Attributes:
        grads: each parameter's gradient in the parameter's memory order; None where it is not stepped, and once it has
            been copied.
        counters: tensors without memory that share the gradients' version counters.
        weights: each stepped parameter's memory as it was when the step was taken: `p.data = ...` may swap it since.
        versions: the gradients' version counters when they were taken.
        weight_versions: the weights', by `note_weights`, after the step has moved them.
        grad_pointers, weight_pointers: device addresses; 0 where a parameter is not stepped.
        coefficients: float32[params, NUM_COEF], inactive rows where a parameter is not stepped.
        stepped: int64, the indices of those that are stepped.
        pieces_left: int64[params], the pieces of each whose copies have not ended.
    """

    arena: Arena
    grads: list[Tensor | None]
    counters: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]
    versions: Sequence[int]
    weight_versions: list[int]
    grad_pointers: Sequence[int]
    weight_pointers: Sequence[int]
    coefficients: np.ndarray
    stepped: np.ndarray
    pieces_left: np.ndarray

    @property
    def is_stepped(self) -> np.ndarray:
        """bool[params]."""
        mask = np.zeros(len(self.weights), bool)
        mask[self.stepped] = True
        return mask

    def let_go(self, param: int) -> None:
        """One more piece of a gradient has been copied. After its last one the gradient is not held any longer."""
        self.pieces_left[param] -= 1
        if self.pieces_left[param] == 0:
            self.grads[param] = None

    def note_weights(self) -> None:
        self.weight_versions[:] = [0 if w is None else w._version for w in self.weights]


@dataclass(frozen=True, slots=True)
class ArrivalCheck:
    """The weights of one bucket and their version counters since `step()`, looked at when they are first waited for.

    Until then nobody may write to them; from then on everybody may, an embedding with `max_norm` in its forward, say.
    """

    name: str
    params: Sequence[Tensor]
    versions: Sequence[int]

    def unwritten(self) -> None:
        """Raise StateError if a version counter moved: the copy may have overwritten what was written."""
        if any(p._version != version for p, version in zip(self.params, self.versions)):
            raise StateError(
                f"{self.name}: a weight was written to while the step's result was on its way to it, and may have been "
                "overwritten. Call optimizer.synchronize() before you write to weights, and write it again."
            )


@dataclass(frozen=True, slots=True)
class BucketWork:
    """One bucket of one step: bucket number `index` of the arena's plan."""

    work: ArenaWork
    index: int
    name: str

    @property
    def bucket(self) -> Bucket:
        return self.work.arena.plan.buckets[self.index]

    @property
    def units(self) -> frozenset[int]:
        return self.work.arena.bucket_units[self.index]

    def gradient_segments(self) -> list[Segment]:
        return self._segments(self.work.grad_pointers, self.work.grads)

    def weight_segments(self) -> list[Segment]:
        return self._segments(self.work.weight_pointers, self.work.weights)

    def coefficients(self) -> np.ndarray:
        return self.work.coefficients[self.work.arena.bucket_params[self.index]]

    def check_gradients_unchanged(self) -> None:
        """After the copy: nobody may have written to the gradients while they were being copied.

        Raises:
            StateError: a gradient's version counter moved.
        """
        for piece in self.bucket.pieces:
            counter = self.work.counters[piece.param]
            if counter is not None and counter._version != self.work.versions[piece.param]:
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
        for piece in self.bucket.pieces:
            weight = self.work.weights[piece.param]
            if weight is not None and weight._version != self.work.weight_versions[piece.param]:
                raise StateError(
                    f"{self.name}: a weight was written to while the step was still under way, whose result would "
                    "overwrite it. Call optimizer.synchronize() before you write to weights. Load the last checkpoint "
                    "to go on."
                )

    def arrival_check(self) -> ArrivalCheck:
        work = self.work
        found = [p.param for p in self.bucket.pieces if work.weights[p.param] is not None]
        return ArrivalCheck(self.name, [work.arena.params[i] for i in found], [work.weight_versions[i] for i in found])

    def _segments(self, pointers: Sequence[int], owners: Sequence[Tensor | None]) -> list[Segment]:
        size = self.bucket.itemsize
        return [
            Segment(pointers[p.param] + p.start * size, p.length * size, p.offset * size, owners[p.param])
            for p in self.bucket.pieces
            if self.work.weights[p.param] is not None
        ]

    def let_go_of_gradients(self) -> None:
        """The bucket's gradients are on the host: the device may have their memory back."""
        for piece in self.bucket.pieces:
            if self.work.weights[piece.param] is not None:
                self.work.let_go(piece.param)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One whole step: what is stepped, and its buckets in the order in which they go."""

    arenas: Sequence[ArenaWork]
    buckets: Sequence[BucketWork]

    def count(self) -> None:
        """One step more for each parameter that is stepped; on the step's thread, where nothing can interrupt it."""
        for work in self.arenas:
            work.arena.steps[work.stepped] += 1

    def check_gradients_unchanged(self) -> None:
        """Once more for all at the end: torch moves a version counter only when the writing operation has ended.

        Raises:
            StateError: a gradient's version counter moved.
        """
        for work in self.buckets:
            work.check_gradients_unchanged()


def version_counter(t: Tensor) -> Tensor:
    """A tensor that shares `t`'s version counter and holds none of its memory."""
    counter = t.detach()
    counter.data = counter.new_empty(0)
    return counter


def bucket_works(
    works: Sequence[ArenaWork], unit_name: Callable[[int], str], rank: Mapping[int, int]
) -> list[BucketWork]:
    """Every bucket with something to step, in the order forward needs its unit (`rank[unit]`)."""
    found = []
    for work in works:
        stepped = work.is_stepped
        for i, units in enumerate(work.arena.bucket_units):
            if stepped[work.arena.bucket_params[i]].any():
                first = min(units, key=rank.__getitem__)
                found.append((rank[first], BucketWork(work, i, f"bucket {i} of unit {unit_name(first)!r}")))
    return [work for _, work in sorted(found, key=lambda f: f[0])]  # stable: arena order within a unit
