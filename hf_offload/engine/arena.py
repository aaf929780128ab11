"""The host state: fp32 master weights, first and second moments, in flat pageable memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine import memory
from hf_offload.engine.alike import alike
from hf_offload.engine.formats import FLOAT32, State, StateFormat, blocks_of, state_bytes
from hf_offload.engine.moments import as_tensor, names_of
from hf_offload.engine.plan import Bucket, BucketPlan, ParamSpec, plan_buckets, spans_of
from hf_offload.engine.tensors import WIRE, layout_of, shaped_view
from hf_offload.errors import StateError, explain
from hf_offload.kernels import cpu
from hf_offload.transport import Segments

_NO_NOISE = np.zeros((0, cpu.NUM_NOISE), np.uint32)


@dataclass(frozen=True)
class Rounding:
    """What the noise of stochastic rounding depends on beside step and element.

    Attributes:
        seed: `rounding_seed`.
        numbers: each parameter's number in `param_groups`, which a resumed run has too.
    """

    seed: int
    numbers: Sequence[int]


class Spans(NamedTuple):
    """A bucket's pieces, in columns: each one's parameter, and in bytes, int64[pieces], where it starts there, how long
    it is, and where it lies in the bucket."""

    params: list[int]
    starts: np.ndarray
    nbytes: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, bucket: Bucket) -> Spans:
        params, *columns = zip(*spans_of(bucket))
        return cls(list(params), *(np.array(column, np.int64) for column in columns))


class Arena:
    """Host memory for the state of a list of parameters, fixed once made: 12 bytes per element, or what `kind` takes.

    Attributes:
        number: which of the engine's arenas it is.
        params: the parameters, on the device.
        kind: how m and v are held.
        plan: their buckets.
        state: master, float32[plan.numel], and what `kind` has.
        steps: float32[len(params)], steps taken by each parameter; a float as in torch's AdamW.
        resident: whether the state stays on the device, and is stepped there: `hf_offload.engine.resident`.
    """

    resident = False

    def __init__(
        self,
        params: Sequence[Tensor],
        units: Sequence[int],
        bucket_bytes: int,
        number: int = 0,
        kind: StateFormat = FLOAT32,
        rounding: Rounding | None = None,
    ) -> None:
        self.number = number
        self.kind = kind
        self._rounding = rounding or Rounding(0, range(len(params)))
        self.params = list(params)
        specs = [ParamSpec(p.numel(), WIRE[p.dtype], u) for p, u in zip(params, units)]
        self.specs = specs
        self.plan: BucketPlan = plan_buckets(specs, bucket_bytes, kind.block)
        self._block_start = self._count_blocks()
        self.state: State = self._allocate(kind.arrays(self.plan.numel, self._block_start[-1]))
        self.steps = np.zeros(len(self.params), np.float32)
        # One tensor whose elements all steps are: torch.save stores the memory under a view whole, once per tensor.
        self._steps = torch.from_numpy(self.steps)
        self._layouts = [layout_of(p) for p in self.params]
        self._all_alike: Callable[[Sequence[Tensor | None]], bool] | None = None  # until a step has looked at each
        self._quick = [(p.dtype, p.shape, p.stride()) for p in self.params]
        self.param_bytes = np.array([p.nbytes for p in self.params], np.int64)
        self.bucket_params = [np.array([p.param for p in b.pieces]) for b in self.plan.buckets]
        self._numbers = np.array(self._rounding.numbers, np.int64)
        self._first_blocks = [np.array([p.start // kind.block for p in b.pieces]) for b in self.plan.buckets]
        self.bucket_bounds = [np.array([p.offset for p in b.pieces] + [b.numel], np.int64) for b in self.plan.buckets]
        self.bucket_spans = [Spans.of(b) for b in self.plan.buckets]
        self.bucket_indices = [list(dict.fromkeys(spans.params)) for spans in self.bucket_spans]
        """By bucket: the parameters that it has a piece of."""
        pieces = np.array([p.param for b in self.plan.buckets for p in b.pieces], np.int64)
        self.piece_counts: list[int] = np.bincount(pieces, minlength=len(self.params)).tolist()
        self._home: list[State] = [self._part(slice(b.start, b.start + b.numel), self.blocks_of(b)) for b in
                                   self.plan.buckets]  # fmt: skip
        self._places = list(self._home)
        self.weight_segments: dict[int, tuple[Sequence[int], Segments]] = {}
        """By bucket: the runs of weights that its results were last sent to, for the addresses of the whole arena."""
        self.indices = list(range(len(self.params)))
        self._aliases = [p.detach() for p in self.params]
        self._pointers = [p.data_ptr() for p in self.params]
        self.set_units(units)

    def _allocate(self, arrays: Sequence[tuple[int, np.dtype]]) -> State:
        """Zeros: elements and dtype of each."""
        return tuple(memory.allocate(*arrays))

    @property
    def master(self) -> np.ndarray:
        """float32[plan.numel]."""
        return self.state[0]

    def _count_blocks(self) -> list[int]:
        """The first block of each parameter, in the arena, and how many there are."""
        first, at = [0] * (len(self.specs) + 1), 0
        for i in sorted(range(len(self.specs)), key=self.plan.param_start.__getitem__):
            first[i] = at
            at += blocks_of(self.specs[i].numel, self.kind.block)
        first[-1] = at
        return first

    def blocks_of(self, bucket: Bucket) -> slice:
        """The blocks of a bucket's elements, in the arena."""
        first = self._block_start[bucket.pieces[0].param] + bucket.pieces[0].start // self.kind.block
        return slice(first, first + sum(blocks_of(p.length, self.kind.block) for p in bucket.pieces))

    def _part(self, run: slice, blocks: slice) -> State:
        """The state of some elements; of a format with scales, theirs."""
        elements, scales = self.state[:3], self.state[3:]
        return *(a[run] for a in elements), *(a[blocks] if self.kind.scaled else a for a in scales)

    def noise(self, bucket: int, turns: np.ndarray) -> np.ndarray:
        """uint32[pieces, NUM_NOISE]: the noise with which a bucket is rounded.

        Args:
            turns: int64[params], the step that each parameter is at.
        """
        if self.kind.block == 1:
            return _NO_NOISE
        at, firsts = self.bucket_params[bucket], self._first_blocks[bucket]
        return cpu.noise_rows(self._rounding.seed, self._numbers[at], firsts, turns[at])

    @property
    def turns(self) -> np.ndarray:
        """int64[params]: the step that each parameter takes next."""
        return self.steps.astype(np.int64) + 1

    @property
    def nbytes(self) -> dict[str, int]:
        """What master, exp_avg and exp_avg_sq take of the host, in bytes."""
        return state_bytes(self.kind, [s.numel for s in self.specs])

    @property
    def device_bytes(self) -> int:
        """What the state takes of the device, in bytes."""
        return 0

    def state_of(self, bucket: int) -> State:
        """Where a bucket's state is now: at home in the flat arrays, or where speculation left it."""
        return self._places[bucket]

    def home_of(self, bucket: int) -> State:
        """A bucket's part of the flat arrays."""
        return self._home[bucket]

    def move(self, bucket: int, state: State) -> None:
        """From now on `state` is the bucket's."""
        self._places[bucket] = state

    def bring_home(self) -> None:
        """Copy what is elsewhere back into the flat arrays."""
        away = [k for k, (place, home) in enumerate(zip(self._places, self._home)) if place is not home]
        for k in away:
            for to, source in zip(self._home[k], self._places[k]):
                to[:] = source
        self._places = list(self._home)

    def let_go(self) -> None:
        """The state has moved: its memory here may be freed at once, though the last step still names this arena."""
        self.state, self._home, self._places = (), [], []

    def weights_of(self, indices: list[int], addresses: Sequence[int]) -> tuple[Sequence[Tensor | None], list[int]]:
        """Aliases of the memory that these parameters have now, and its addresses; None and 0 for all others.

        Args:
            addresses: of the memory of all parameters, just read.

        An alias keeps the memory, whatever `p.data = ...` puts into its place later. Both lists are the very same ones
        as long as all parameters are asked for and none has moved; they are not written to.
        """
        if len(indices) == len(self.params) and addresses == self._pointers:
            return self._aliases, self._pointers
        self._aliases, self._pointers = list(self._aliases), list(self._pointers)
        aliases: list[Tensor | None] = [None] * len(self.params)
        pointers = [0] * len(self.params)
        for i in indices:
            address = addresses[i]
            if address != self._pointers[i]:
                self._aliases[i], self._pointers[i] = self.params[i].detach(), address
            aliases[i], pointers[i] = self._aliases[i], address
        return aliases, pointers

    def set_units(self, units: Sequence[int]) -> None:
        """Say anew to which unit each parameter belongs: another model was attached. The layout stays.

        `bucket_units` then has, for each bucket, the units that wait for it: several where the layout is another
        model's.
        """
        self.bucket_units = [frozenset(units[p.param] for p in b.pieces) for b in self.plan.buckets]

    def slice_of(self, index: int) -> slice:
        """Where parameter `index` lies in the flat arrays."""
        start = self.plan.param_start[index]
        return slice(start, start + self.specs[index].numel)

    def state_views(self, index: int) -> dict[str, Tensor]:
        """Parameter `index`'s entry of `optimizer.state`: live views in its shape, and its 0-dim step."""
        first, p = self._block_start[index], self.params[index]
        blocks = slice(first, first + blocks_of(p.numel(), self.kind.block))
        master, m, v, *scales = map(as_tensor, self._part(self.slice_of(index), blocks))
        held = [shaped_view(m, p), shaped_view(v, p)]
        if self.kind.scaled:
            held = [held[0], scales[0], held[1], scales[1]]
        return {
            "step": self._steps[index], **dict(zip(names_of(self.kind), held)), "master": shaped_view(master, p),
        }  # fmt: skip

    def holds(self, t: Tensor) -> bool:
        """Whether `t` is a view of this state."""
        return any(a.size and a.ctypes.data <= t.data_ptr() < a.ctypes.data + a.nbytes
                   for a in self.state)  # fmt: skip

    def glance(self, indices: list[int]) -> None:
        """`check_unchanged`, at a fifth of its cost or less, for parameters whose address has not changed.

        Only `p.data = p.data.some_view()` gives other elements at the same address.
        """
        everyone = len(indices) == len(self.params)
        if everyone and self._all_alike is not None and self._all_alike(self.params):
            return
        for i in indices:
            p, (dtype, shape, stride) = self.params[i], self._quick[i]
            if p.dtype is not dtype or p.stride() != stride or p.shape != shape:
                self.check_unchanged((i,))
        if everyone and self._all_alike is None:
            self._all_alike = alike(self.params)

    def check_unchanged(self, indices: Iterable[int]) -> None:
        """Refuse parameters whose elements are no longer those the state was made for.

        Raises:
            StateError: the dtype, the device, the shape or the order of elements in memory changed, or the memory is an
                inference tensor's, whose writes no version counter tells of.
        """
        for i in indices:
            p = self.params[i]
            wire, layout = self.specs[i].wire, self._layouts[i]
            if WIRE.get(p.dtype) != wire or layout_of(p) != layout:
                was = f"a parameter of shape {layout[1]}, {wire} on {layout[0]}"
                raise StateError(
                    explain(was, f"{tuple(p.shape)}, strides {p.stride()}, {p.dtype} on {p.device}",
                            "its dtype, device, shape or memory format changed after its state was made",
                            "Convert, move or resize the model before the first training step, or make a new optimizer")
                )  # fmt: skip
            if p.is_inference():
                raise StateError(
                    explain(f"data of a parameter of shape {tuple(p.shape)}", "an inference tensor",
                            "p.data was set to what torch.inference_mode() made, which autograd cannot train",
                            "Use torch.no_grad() there, or p.copy_(values); set p.data = p.data.clone() to go on")
                )  # fmt: skip
