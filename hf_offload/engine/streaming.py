"""Gradients that leave during backward: a hook on each parameter takes its gradient, complete buckets go down at once.

Autograd's thread takes gradients and starts copies; the step's thread waits for each copy, puts it into the store and
frees the slot. A slot never waits for anything else, or the hook would block and backward never end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.gradients import refuse, refuse_streamed
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.inlets import Drop, Held, Inlet, Shared, Tap
from hf_offload.engine.pipeline import Pipeline
from hf_offload.engine.ranges import Ranges
from hf_offload.engine.speculation import Basis, Confidence, Speculation, copied
from hf_offload.engine.stats import Meter
from hf_offload.engine.store import GradientStore
from hf_offload.engine.streamed_gradient import StreamedGradient, graph_task
from hf_offload.engine.tensors import like_layout
from hf_offload.transport import Transport

T = TypeVar("T")


class GradientStream:
    """All taps of an engine.

    Args:
        groups: gives the optimizer's param_groups.

    Attributes:
        stores: one for each arena; one of nothing where the arena's gradients stay on the device.
        version: counts what changes the gradients: two equal readings, and they are the same.
        taken: bytes of gradients that were ever taken.
        peak: the most bytes of gradients the device held for us at one time.
        lending: whether placeholders were taken away for a backward that has not ended, or that failed.
        inverse: what the last step's gradients were multiplied by, clipping aside: the guess for the next one.
    """

    def __init__(
        self, transport: Transport, pipeline: Pipeline, meter: Meter, threads: int, accumulate_dtype: str,
        speculation: Speculation | None, groups: Callable[[], Sequence[Mapping[str, Any]]], ranges: Ranges,
    ) -> None:  # fmt: skip
        self.ranges = ranges
        self.stores: list[GradientStore] = []
        self._next: dict[Arena, GradientStore] = {}
        self._opened: list[Arena] = []
        self.shared = Shared(speculation)
        self.meter = meter
        self.version = 0
        self.peak = 0
        self.inverse = 1.0
        self.basis: Basis | None = None
        self.confidence = Confidence()
        self._guessed: list[dict[str, Any]] | None = None
        self._transport = transport
        self._pipeline = pipeline
        self._threads = threads
        self._accumulate_dtype = accumulate_dtype
        self._groups = groups
        self._taps: list[list[Tap]] = []
        self._inlets: list[list[Inlet]] = []
        self._tap_of: dict[int, tuple[Tensor, Tap]] = {}  # by the parameter's id: tensors hash slowly
        self.taken = 0
        self._group_of: tuple[object, list[np.ndarray]] = (None, [])
        self.lending = False
        self._lent_in: int | None = None
        self._torn = False
        self._free_all_slots()

    # ---- setting up

    def open(self, arenas: Sequence[Arena]) -> None:
        """Take the gradients of the parameters of `arenas`, of those that are new, from now on. What is not allocated
        yet is now: raises as `allocate`."""
        for number, arena in enumerate(arenas):
            if number < len(self._opened) and self._opened[number] is not arena:
                self._close(number)
            if number == len(self._opened) or self._opened[number] is not arena:
                self._open(arena)

    def allocate(self, arena: Arena) -> GradientStore:
        """The memory that streaming the gradients of `arena` takes; once, whoever asks.

        Raises:
            ConfigError: the shadow has no room for one bucket.
            MemoryError: the system refuses.
        """
        if arena not in self._next:
            streamed = Arena((), (), 1, arena.number) if arena.resident else arena
            store = GradientStore(streamed, self._accumulate_dtype, self._threads)
            if self.shared.speculation is not None:
                self.shared.speculation.reserve(streamed)
            self._next[arena] = store
        return self._next[arena]

    def release(self) -> None:
        """Free what was allocated for arenas that came to nothing."""
        unused, self._next = self._next, {}
        if self.shared.speculation is not None:
            for arena in unused:
                self.shared.speculation.release(arena.number)

    def cover(self) -> None:
        """What is free of the shadow, since state has moved to the device, goes to arenas that have nothing of it."""
        speculation = self.shared.speculation
        for store in self.stores:
            if speculation is not None and not speculation.covers(store.arena.number):
                speculation.reserve(store.arena)

    def _open(self, arena: Arena) -> None:
        store, number = self.allocate(arena), arena.number
        opened, arena = arena, store.arena
        inlets = [Inlet(arena.number, k, b) for k, b in enumerate(arena.plan.buckets)]
        taps = [Tap(p, StreamedGradient(p, self)) for p in arena.params]
        for inlet, bucket in zip(inlets, arena.plan.buckets):
            for spot, piece in enumerate(bucket.pieces):
                taps[piece.param].places.append((inlet, spot))
        tap_of = {**self._tap_of, **{id(p): (p, tap) for p, tap in zip(arena.params, taps)}}
        # one statement: an interrupt falls before or after it
        self.stores, self._inlets, self._taps, self._tap_of, self._opened = (
            _with(self.stores, number, store), _with(self._inlets, number, inlets), _with(self._taps, number, taps),
            tap_of, _with(self._opened, number, opened),
        )  # fmt: skip
        self._next.pop(opened, None)
        self.basis = None  # it knows nothing of this arena
        me = weakref.ref(self)
        for p, tap in zip(arena.params, taps):  # where an interrupt leaves one without, `flush` finds its gradients
            asked = p.requires_grad
            p.requires_grad_(True)  # torch takes no hook of a frozen parameter, which may be unfrozen later
            tap.handle = p.register_post_accumulate_grad_hook(_hook(me, tap))
            p.requires_grad_(asked)

    def _close(self, number: int) -> None:
        """The state of an arena has moved: gradients that left come back into `.grad`. Done again after an interrupt,
        it goes on."""
        self.flush()
        speculation = self.shared.speculation
        self.settle(speculation.clear if speculation is not None else lambda: None)
        store = self.stores[number]
        for i, (p, tap) in enumerate(zip(store.arena.params, self._taps[number])):
            if p.grad is tap.placeholder:
                p.grad = store.as_gradient(i)
            tap.close()  # last: what autograd adds to a placeholder whose tap is shut is lost
        gone = {id(p) for p in store.arena.params}
        self._tap_of = {of: tapped for of, tapped in self._tap_of.items() if of not in gone}
        self.version += 1

    def close(self) -> None:
        for p, tap in self._tap_of.values():
            tap.close()
            if p.grad is tap.placeholder:
                p.grad = None
        self._tap_of = {}

    def let_go(self, params: Iterable[Tensor]) -> None:
        """Their gradients stay in `.grad` from now on: somebody else takes them. `flush` still finds what is there."""
        for p in params:
            if id(p) in self._tap_of:
                self._tap_of[id(p)][1].close()

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    # ---- during backward, on autograd's thread

    def take(self, tap: Tap, p: Tensor) -> None:
        """A gradient is complete for this backward: it goes on its way, and a placeholder takes its place."""
        grad = p.grad
        assert grad is not None
        placeholder = tap.placeholder
        if type(grad) is StreamedGradient and grad is not placeholder:
            refuse_streamed(p)
        if grad is placeholder:  # autograd added to it, and it kept what was to be added
            grad, placeholder.incoming = placeholder.incoming, None
            assert grad is not None
            adds = True
        else:
            lent = tap.lent
            adds = self._still_lent() and lent
            tap.lent = False
        if (p.dtype, p.shape, p.device) != tap.kind:
            for store in self.stores:
                store.arena.check_unchanged(range(len(store.arena.params)))
        if grad.layout != torch.strided or (grad.dtype, grad.shape, grad.device) != tap.kind:
            refuse(p, grad)
        if p.grad is not placeholder:
            p.grad = placeholder
        if not (tap.plain and grad.is_contiguous()) or grad.is_neg():
            grad = like_layout(grad.resolve_neg(), p)
        self.taken += tap.nbytes
        held = grad if len(tap.places) == 1 else Held(grad, len(tap.places))
        for inlet, spot in tap.places:
            if inlet.grads[spot] is not None:  # a second backward, while others of the bucket had none in the first
                self.send(inlet)
            inlet.grads[spot] = held
            inlet.adds[spot] = adds
            inlet.missing -= 1
            if not inlet.missing:
                self.send(inlet)

    def send(self, inlet: Inlet) -> None:
        """Start the copy of what a bucket has; where the ring has no free slot, wait for one."""
        if self._torn:
            self.settle()  # an interrupt fell into the last call: its slot belongs to nobody
        self._torn = True
        spots = inlet.spots()
        self.version += 1
        self.peak = max(self.peak, self.taken - self.shared.released)
        for spot in spots:
            if not inlet.adds[spot]:
                inlet.renewed[spot] = self.version
        last = False
        if not inlet.missing:
            inlet.passes += 1
            last = inlet.passes == inlet.expected
            if last and self.basis is None:
                self._guess_the_step()
        slot = self._slot(inlet)
        event = self._transport.to_host(inlet.segments(spots), slot, self._transport.mark())
        shown = self.ranges.start("d2h", f"bucket {inlet.index}")
        job = Drop(
            self.shared, self.stores[inlet.arena], inlet, spots, slot, event, self.meter.upcoming, shown,
            last=last, basis=self.basis if last else None,
        )  # fmt: skip
        inlet.empty()
        self._pipeline.put(job)
        self._torn = False

    def accumulating(self, into: StreamedGradient) -> None:
        """Autograd adds to a placeholder, which is slow: for the rest of this backward take all the others away."""
        if self._lent_in == graph_task():
            return
        self.take_back()
        self.lending, self._lent_in = True, graph_task()  # first: an interrupt may come in the middle of the loop
        for p, tap in self._tap_of.values():
            if tap.placeholder is not into and p.grad is tap.placeholder:
                p.grad = None
                tap.lent = True
        me = weakref.ref(self)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _take_back(me))  # type: ignore[attr-defined]

    def take_back(self) -> bool:
        """Backward has ended, well or badly: parameters that got no gradient in it have their placeholder again.

        Returns:
            False if somebody has dropped all gradients meanwhile; then they have none.
        """
        if not self.lending:
            return True
        kept = any(p.grad is tap.placeholder for p, tap in self._tap_of.values())
        self.lending, self._lent_in = False, None
        for p, tap in self._tap_of.values():
            if tap.lent:
                tap.lent = kept and p.grad is not None and p.grad is not tap.placeholder  # it waits to be taken
                if p.grad is None and kept:
                    p.grad = tap.placeholder
        return kept

    def _still_lent(self) -> bool:
        """Whether the gradient that autograd made anew is to be added: not if the backward that lent it out failed, and
        then somebody dropped all gradients."""
        return self._lent_in == graph_task() or self.take_back()

    def _slot(self, inlet: Inlet) -> int:
        free = self.shared.free
        if not free or self._pipeline.failed:
            with self.meter.waiting("a slot of the ring"):
                self._pipeline.wait_until(lambda: free, f"a free slot for the gradients of bucket {inlet.index}")
        return free.popleft()

    # ---- between backward and step, on the training thread

    def placeholders(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """What stands in `.grad` of each of `params` for a gradient that left."""
        nobody = None, None
        return [tap.placeholder if tap else None for _, tap in (self._tap_of.get(id(p), nobody) for p in params)]

    def renewed(self, p: Tensor) -> int:
        """The version when the gradient of `p` was last made anew, not added to; 0 where it never was."""
        _, tap = self._tap_of[id(p)]
        return max((inlet.renewed[spot] for inlet, spot in tap.places), default=0)

    @property
    def incomplete(self) -> bool:
        """Whether something is still to leave."""
        return self.lending or not all(inlet.is_empty for inlets in self._inlets for inlet in inlets)

    def flush(self) -> None:
        """Send what did not leave by itself: incomplete buckets, and gradients that somebody put into `.grad`."""
        by_hand = False
        self.take_back()
        for p, tap in self._tap_of.values():
            grad = p.grad
            if grad is not None and grad is not tap.placeholder:
                self.take(tap, p)
                by_hand = True
        for inlets in self._inlets:
            for inlet in inlets:
                if not inlet.is_empty:
                    self.send(inlet)
        if by_hand:
            self.settle()  # whoever put them there may still write to them

    def settle(self, then: Callable[[], None] = lambda: None) -> None:
        """Wait until every gradient that left is in the store; `then()` is called on the step's thread.

        Raises:
            StateError: a copy failed. WaitTimeout: none ended for `timeout_s`.
        """
        with self.meter.waiting("gradients"):
            self._pipeline.call(then, "gradients on their way to the host")
        self._free_all_slots()  # after an interrupt in a hook some may belong to nobody
        self.taken = self.shared.released + sum(g.nbytes for g in self._waiting())

    def sums(self, params: Iterable[tuple[int, int]]) -> list[float]:
        """The sum of squares of each gradient, by (arena, index). Waits for all of them."""
        wanted: list[list[int]] = [[] for _ in self.stores]
        params = list(params)
        for arena, index in params:
            wanted[arena].append(index)

        def complete() -> None:
            for store, indices in zip(self.stores, wanted):
                store.sum_params(indices)

        self.settle(complete)
        found = [store.sums.tolist() for store in self.stores]
        return [found[arena][index] for arena, index in params]

    def zero(self) -> None:
        """`zero_grad(set_to_none=False)`: gradients on the host become zeros. Nothing of them may be under way."""
        self.flush()
        zeroed = [
            [i for i, (p, tap) in enumerate(zip(store.arena.params, taps)) if p.grad is tap.placeholder]
            for store, taps in zip(self.stores, self._taps)
        ]
        self.version += 1

        def write() -> None:
            if self.shared.speculation is not None:
                self.shared.speculation.clear()
            for store, params in zip(self.stores, zeroed):
                store.zero(params)

        self.settle(write)

    def dropped(self) -> None:
        """Somebody dropped all gradients: what waits to leave goes as well, and guessing begins anew."""
        self.basis, self._guessed = None, None
        for inlets in self._inlets:
            for inlet in inlets:
                inlet.passes = 0
                if not inlet.is_empty:
                    inlet.empty()

    def _waiting(self) -> list[Tensor]:
        """The gradients that wait in incomplete buckets, each once."""
        held = (grad for inlets in self._inlets for inlet in inlets for grad in inlet.grads)
        grads = [h.grad if isinstance(h, Held) else h for h in held if h is not None]
        return list({id(g): g for g in grads}.values())

    def step_taken(self, inverse: float, clipped: bool) -> None:
        """At `step()`: learn for the next guess.

        Args:
            inverse: what the gradients were multiplied by, clipping aside.
            clipped: whether clipping multiplied them by something else than 1.
        """
        if self._guessed is not None:
            same = inverse == self.inverse and not clipped and copied(self._groups()) == self._guessed
            self.confidence.learn(same)
        self.inverse = inverse
        self.basis, self._guessed = None, None
        for inlets in self._inlets:
            for inlet in inlets:
                inlet.expected, inlet.passes = inlet.passes or 1, 0

    def _guess_the_step(self) -> None:
        if self.shared.speculation is None or self._guessed is not None:
            return
        groups = self._groups()
        self._guessed = copied(groups)
        if self.confidence.guess():
            self.basis = Basis(Coefficients(self._guessed, self.inverse), self._numbers(groups))

    def _numbers(self, groups: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """The group of each parameter, per arena; looked up again where groups or arenas were added, or state moved."""
        shape = tuple(len(s.arena.params) for s in self.stores), tuple(len(g["params"]) for g in groups)
        if self._group_of[0] != shape:
            of = {p: n for n, g in enumerate(groups) for p in g["params"]}
            self._group_of = shape, [np.array([of.get(p, -1) for p in s.arena.params], np.int64) for s in self.stores]
        return self._group_of[1]

    def _free_all_slots(self) -> None:
        """A new list: a copy that an interrupt left behind gives its slot back to the old one."""
        self.shared.free = deque(range(len(self._transport.down)))
        self._torn = False


def _with(entries: Sequence[T], number: int, entry: T) -> list[T]:
    """`entries` with `entry` as number `number`: in the place of another, or as the last."""
    return [*entries[:number], entry, *entries[number + 1 :]]


def _hook(stream: weakref.ref[GradientStream], tap: Tap) -> Callable[[Tensor], None]:
    """The hook of one parameter; it holds the stream weakly, since the parameter may outlive it.

    This is `GradientStream.take` for the case that is met hundreds of times a step, at a third of its cost.
    """
    placeholder, nbytes = tap.placeholder, tap.nbytes
    inlet, spot = tap.places[0] if tap.places else (None, 0)
    simple = tap.plain and len(tap.places) == 1

    def arrived(p: Tensor) -> None:
        alive = stream()
        if alive is None or tap.shut:
            return
        grad = p.grad
        if (
            not simple or type(grad) is StreamedGradient or alive.lending or inlet.grads[spot] is not None  # type: ignore[union-attr]
            or grad.nbytes != nbytes or not grad.is_contiguous() or grad.is_neg()  # type: ignore[union-attr]
        ):  # fmt: skip
            alive.take(tap, p)
            return
        try:
            p.grad = placeholder
        except RuntimeError:  # the parameter was converted or resized: `take` says so
            alive.take(tap, p)
            return
        alive.taken += nbytes
        inlet.grads[spot] = grad  # type: ignore[union-attr]
        inlet.missing -= 1  # type: ignore[union-attr]
        if not inlet.missing:  # type: ignore[union-attr]
            alive.send(inlet)  # type: ignore[arg-type]

    return arrived


def _take_back(stream: weakref.ref[GradientStream]) -> None:
    alive = stream()
    if alive is not None:
        alive.take_back()
