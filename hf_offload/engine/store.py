"""The gradient store: where streamed gradients wait for the step, and micro-batches add up. Pageable host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine import memory
from hf_offload.engine.arena import Arena
from hf_offload.engine.plan import WIRE_ITEMSIZE
from hf_offload.engine.squares import Squares
from hf_offload.engine.tensors import NUMPY_WIRE, flat
from hf_offload.kernels import cpu

_ALIGN = 64  # bytes: where a run of another dtype begins


class GradientStore:
    """The gradients of one arena: 2 bytes a parameter on a 16-bit wire, 4 where they are added up in float32.

    The step's thread alone writes it.

    Args:
        accumulate_dtype: "wire", which rounds to nearest even as autograd does, or "float32".

    Attributes:
        nbytes: what it takes.
    """

    def __init__(self, arena: Arena, accumulate_dtype: str, threads: int) -> None:
        self.arena = arena
        self._threads = threads
        self.held = [b.wire if accumulate_dtype == "wire" else "float32" for b in arena.plan.buckets]
        """Per bucket: bfloat16, float16 or float32."""
        self._starts, self.nbytes = _layout(arena, self.held)
        self._memory = memory.allocate((self.nbytes, np.dtype(np.uint8)))[0]
        self._of_bucket = [
            self._view(start, b.numel, held) for start, b, held in zip(self._starts, arena.plan.buckets, self.held)
        ]
        first: dict[int, tuple[int, int]] = {}
        for k, b in enumerate(arena.plan.buckets):
            for piece in b.pieces:
                first.setdefault(piece.param, (k, piece.offset))
        self._first = first
        self._squares = Squares(arena, threads)

    def of_bucket(self, k: int) -> np.ndarray:
        """held[numel]: the gradients of bucket k."""
        return self._of_bucket[k]

    def of_param(self, i: int) -> tuple[np.ndarray, str]:
        """held[numel], and what `held` is: the gradient of parameter i, which must not be empty."""
        k, offset = self._first[i]
        held = self.held[k]
        start = self._starts[k] + offset * WIRE_ITEMSIZE[held]
        return self._view(start, self.arena.specs[i].numel, held), held

    def as_gradient(self, i: int) -> Tensor:
        """The gradient of parameter i as autograd would have left it: a copy on the parameter's device. It must be held
        as on the wire."""
        p = self.arena.params[i]
        grad = torch.empty_like(p, requires_grad=False)
        if p.numel():
            array, held = self.of_param(i)
            assert held == self.arena.specs[i].wire
            bits = torch.from_numpy(array if held == "float32" else array.view(np.int16))
            flat(grad).copy_(bits.view(p.dtype))
        return grad

    def _view(self, start: int, numel: int, held: str) -> np.ndarray:
        return self._memory[start : start + numel * WIRE_ITEMSIZE[held]].view(NUMPY_WIRE[held])

    def receive(self, k: int, slot: np.ndarray, spots: Sequence[int], adds: Sequence[bool]) -> None:
        """Take the pieces `spots` of bucket k from `slot` (wire[numel]); `adds`, for each
        piece of the bucket: to what is there, or instead of it."""
        bucket, held = self.arena.plan.buckets[k], self.held[k]
        for first, last, add in _runs(spots, adds):
            low = bucket.pieces[first].offset
            high = bucket.pieces[last].offset + bucket.pieces[last].length
            move = cpu.add if add else cpu.put
            move(slot[low:high], self._of_bucket[k][low:high], bucket.wire, held, self._threads)
        self._squares.forget(k, [bucket.pieces[spot].param for spot in spots])

    def zero(self, params: Sequence[int]) -> None:
        """These gradients become zeros, as `zero_grad(set_to_none=False)` makes them."""
        for i in params:
            if self.arena.specs[i].numel:
                self.of_param(i)[0][:] = 0
        self._squares.known[list(params)] = False

    def sum_bucket(self, k: int) -> None:
        """After the last micro-batch of bucket k: the sums of squares of the parameters that are now complete."""
        for i in self._squares.add(k, self._of_bucket[k], self.held[k]):
            self._squares.finish(i, *self.of_param(i))

    def sum_params(self, params: Sequence[int]) -> None:
        """The sums of squares of `params`, as far as they are not known."""
        for i in params:
            if not self._squares.known[i] and self.arena.specs[i].numel:
                self._squares.sum_whole(i, *self.of_param(i))

    @property
    def sums(self) -> np.ndarray:
        """float64[params]: the sum of squares of each gradient, after `sum_params`."""
        return self._squares.sums


def _layout(arena: Arena, held: Sequence[str]) -> tuple[list[int], int]:
    """Where each bucket starts, and all bytes. Buckets follow each other without a gap while their dtype stays."""
    starts, at, before = [], 0, None
    for bucket, kind in zip(arena.plan.buckets, held):
        if kind != before:
            at, before = -(-at // _ALIGN) * _ALIGN, kind
        starts.append(at)
        at += bucket.numel * WIRE_ITEMSIZE[kind]
    return starts, at


def _runs(spots: Sequence[int], adds: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Neighbouring spots of one kind as (first, last, adds)."""
    runs: list[tuple[int, int, bool]] = []
    for spot in spots:
        add = adds[spot]
        if runs and runs[-1][1] == spot - 1 and runs[-1][2] == add:
            runs[-1] = (runs[-1][0], spot, add)
        else:
            runs.append((spot, spot, add))
    return runs
