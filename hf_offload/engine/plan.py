"""The bucket plan: which run of which parameter travels, and is stepped, with which others. Pure data, stdlib only.

Parameters lie in an *arena* (the flat master, m and v) unit by unit, within a unit dtype by dtype, whole and in order.
A bucket is a run of that arena: of one unit, of one wire dtype, at most `bucket_bytes` on the wire. A large parameter
is sliced, small ones share a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAD_BUCKETS = 8
LEAD_BYTES = 1 << 20
"""The first unit has nothing to hide behind on its way through copy, step and copy: cut into `LEAD_BUCKETS` buckets of
no less than `LEAD_BYTES`, its parts do at the same time what the whole would do in turn."""

WIRE_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the plan needs to know of one parameter: its elements, wire dtype and unit."""

    numel: int
    wire: str
    unit: int


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` elements of parameter `param` from its element `start`, at element `offset` of the bucket."""

    param: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `start + numel` of the arena: what is copied, stepped and waited for as one."""

    unit: int
    wire: str
    start: int
    numel: int
    pieces: tuple[Piece, ...]

    @property
    def itemsize(self) -> int:
        return WIRE_ITEMSIZE[self.wire]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def spans_of(bucket: Bucket) -> list[tuple[int, int, int, int]]:
    """Each piece's parameter, and in bytes: where it starts there, how long it is, and where it lies in the bucket."""
    size = bucket.itemsize
    return [(p.param, p.start * size, p.length * size, p.offset * size) for p in bucket.pieces]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Every bucket, in arena order, and where each parameter starts in the arena."""

    numel: int
    param_start: tuple[int, ...]
    buckets: tuple[Bucket, ...]


def plan_buckets(params: Sequence[ParamSpec], bucket_bytes: int, block: int = 1) -> BucketPlan:
    """Lay parameters out unit by unit (in increasing unit number) and cut each run into buckets.

    Empty parameters take no room and stand in no bucket. `bucket_bytes` below one element counts as one element. The
    first unit is cut finer, see `LEAD_BUCKETS`. A parameter is cut at multiples of `block` elements only, whatever
    `bucket_bytes`: a bucket may have that many.
    """
    starts = [0] * len(params)
    buckets: list[Bucket] = []
    at = 0
    for (unit, wire), members in _runs(params):
        run_start = at
        for i in members:
            starts[i] = at
            at += params[i].numel
        size = WIRE_ITEMSIZE[wire]
        most = max(1, bucket_bytes // size)
        if not run_start:
            most = min(most, max(LEAD_BYTES // size, -(-(at - run_start) // LEAD_BUCKETS)))
        most = max(1, most // block) * block
        pieces = [(i, starts[i], params[i].numel) for i in members]
        buckets.extend(_cut(unit, wire, run_start, at, most, block, pieces))
    return BucketPlan(at, tuple(starts), tuple(buckets))


def _runs(params: Sequence[ParamSpec]) -> Iterator[tuple[tuple[int, str], list[int]]]:
    """Parameters by unit, then by wire dtype in the order of first appearance, in the order given."""
    runs: dict[tuple[int, str], list[int]] = {}
    for i, p in enumerate(params):
        if p.numel:
            runs.setdefault((p.unit, p.wire), []).append(i)
    return iter(sorted(runs.items(), key=lambda run: run[0][0]))  # a stable sort keeps the order of dtypes


def _cut(
    unit: int, wire: str, start: int, end: int, most: int, block: int, params: list[tuple[int, int, int]]
) -> Iterator[Bucket]:
    """Cut the arena run [start, end) into buckets of at most `most` elements. `params`: (index, arena start, numel)."""
    first, low = 0, start
    while low < end:
        high = _end(min(low + most, end), params, first, block)
        pieces: list[Piece] = []
        k = first
        while k < len(params) and params[k][1] < high:
            index, p_start, numel = params[k]
            piece_low, piece_high = max(low, p_start), min(high, p_start + numel)
            pieces.append(Piece(index, piece_low - p_start, piece_high - piece_low, piece_low - low))
            if p_start + numel > high:
                break  # its rest opens the next bucket
            k += 1
        first = k
        yield Bucket(unit, wire, low, high - low, tuple(pieces))
        low = high


def _end(high: int, params: list[tuple[int, int, int]], first: int, block: int) -> int:
    """`high`, or as far before it as the parameter that it would cut must be cut."""
    if block == 1:
        return high
    for _, start, numel in params[first:]:
        if start <= high < start + numel:
            return high - (high - start) % block
        if start >= high:
            break
    return high
