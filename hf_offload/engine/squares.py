"""The sum of squares of every streamed gradient, added up bucket by bucket as they arrive.

Each sum is the tree of `kernels.cpu.reduce`: blocks of 2^16 elements from the parameter's start. Blocks that lie in one
bucket whole are summed with it; those that a cut goes through, when the parameter's last bucket is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_offload.engine.arena import Arena
from hf_offload.engine.plan import Piece
from hf_offload.kernels import cpu


class _InBucket(NamedTuple):
    """What one bucket contributes.

    Attributes:
        blocks: those that lie in it whole.
        whole: parameters that do, which are neighbours; `firsts`: where their chunks start in the tree, and the end.
        cut: parameters of which it has a part.
    """

    blocks: cpu.Blocks
    whole: np.ndarray
    firsts: np.ndarray
    cut: list[int]


class Squares:
    """Sums of squares of the gradients of one arena. Used on the step's thread.

    Attributes:
        sums: float64[params], each gradient's, where `known` says so.
        known: bool[params].
    """

    def __init__(self, arena: Arena, threads: int) -> None:
        self._threads = threads
        sizes = [s.numel for s in arena.specs]
        chunks = [-(-n // cpu.CHUNK) for n in sizes]
        self._first_chunk, self._end_chunk = [0] * len(sizes), [0] * len(sizes)
        at = 0
        for i in sorted(range(len(sizes)), key=arena.plan.param_start.__getitem__):  # neighbours there, neighbours here
            self._first_chunk[i], self._end_chunk[i] = at, at + chunks[i]
            at += chunks[i]
        self._tree = np.zeros((at, cpu.LEAVES))
        self.sums = np.zeros(len(sizes))
        self.known = np.zeros(len(sizes), bool)
        buckets = arena.plan.buckets
        self._in = [self._contribution(b.pieces, sizes) for b in buckets]
        self._cut: dict[int, _Cut] = {}
        for k, mine in enumerate(self._in):
            for i in mine.cut:
                piece = next(p for p in buckets[k].pieces if p.param == i)
                self._cut.setdefault(i, _Cut(sizes[i])).has(k, piece)

    def _contribution(self, pieces: Sequence[Piece], sizes: Sequence[int]) -> _InBucket:
        starts: list[int] = []
        ends: list[int] = []
        leaves: list[int] = []
        for p in pieces:
            for number in _whole_blocks(p, sizes[p.param]):
                begin = number * cpu.BLOCK
                end = min(begin + cpu.BLOCK, sizes[p.param])
                starts.append(p.offset + begin - p.start)
                ends.append(p.offset + end - p.start)
                leaves.append(self._first_chunk[p.param] * cpu.LEAVES + number)
        whole = [p.param for p in pieces if p.length == sizes[p.param]]
        firsts = [self._first_chunk[i] for i in whole] + [self._end_chunk[i] for i in whole[-1:]]
        cut = [p.param for p in pieces if p.length != sizes[p.param]]
        blocks = cpu.Blocks(*(np.array(a, np.int64) for a in (starts, ends, leaves)))
        return _InBucket(blocks, np.array(whole, np.int64), np.array(firsts, np.int64), cut)

    def forget(self, k: int, params: Sequence[int]) -> None:
        """The gradients of `params` change in bucket k."""
        for i in params:
            if i in self._cut:
                self._cut[i].forget(k, anew=bool(self.known[i]))
        self.known[params] = False

    def add(self, k: int, grads: np.ndarray, held: str) -> list[int]:
        """Bucket k is complete: `grads` (held[numel]).

        Returns:
            Parameters cut into several buckets that are complete now: for `finish`.
        """
        mine = self._in[k]
        cpu.sum_blocks(grads, mine.blocks, self._tree, held, self._threads)
        if len(mine.whole):
            first = mine.firsts[0]
            self.sums[mine.whole] = cpu.sums_of_trees(self._tree[first : mine.firsts[-1]], mine.firsts - first)
            self.known[mine.whole] = True
        return [i for i in mine.cut if self._cut[i].added(k)]

    def finish(self, i: int, grad: np.ndarray, held: str) -> None:
        """The sum of a parameter whose buckets have all been added; `grad` (held[numel]): all of it."""
        first, end = self._first_chunk[i], self._end_chunk[i]
        leaves = self._tree[first:end].reshape(-1)
        for number in self._cut[i].blocks:
            part = grad[number * cpu.BLOCK : (number + 1) * cpu.BLOCK]
            leaves[number] = cpu.sum_of_squares(part, held, self._threads)
        self.sums[i] = cpu.sums_of_trees(self._tree[first:end], np.array([0, end - first]))[0]
        self.known[i] = True

    def sum_whole(self, i: int, grad: np.ndarray, held: str) -> None:
        """The sum of a parameter, whatever was added before."""
        self.sums[i] = cpu.sum_of_squares(grad, held, self._threads)
        self.known[i] = True


class _Cut:
    """A parameter that is cut into several buckets.

    Attributes:
        blocks: numbers of the blocks that lie in none of them whole.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buckets: set[int] = set()
        self._missing: set[int] = set()
        self.blocks = set(range(-(-size // cpu.BLOCK)))

    def has(self, k: int, piece: Piece) -> None:
        """`piece` of it lies in bucket k."""
        self._buckets.add(k)
        self._missing.add(k)
        self.blocks.difference_update(_whole_blocks(piece, self._size))

    def forget(self, k: int, anew: bool) -> None:
        """Its part in bucket k changes; `anew`: as the first of all."""
        if anew:
            self._missing.update(self._buckets)
        self._missing.add(k)

    def added(self, k: int) -> bool:
        """Its part in bucket k is in the tree. Returns whether all are."""
        self._missing.discard(k)
        return not self._missing


def _whole_blocks(piece: Piece, size: int) -> range:
    """Numbers of the blocks of a parameter of `size` elements that lie in `piece` whole."""
    end = piece.start + piece.length
    return range(-(-piece.start // cpu.BLOCK), -(-end // cpu.BLOCK) if end == size else end // cpu.BLOCK)
