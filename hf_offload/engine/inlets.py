"""Where gradients leave: a tap for each parameter, an inlet for each bucket, the job that puts them into the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hf_offload.engine.plan import Bucket
from hf_offload.engine.schedules import Schedule, Stages
from hf_offload.engine.speculation import Basis, Speculation
from hf_offload.engine.stats import StepRecord
from hf_offload.engine.store import GradientStore
from hf_offload.engine.streamed_gradient import StreamedGradient
from hf_offload.transport import Event, Segment


class Tap:
    """Where one parameter's gradients leave.

    Attributes:
        placeholder: what `.grad` is once the gradient has left.
        places: the (inlet, spot) of each of its pieces.
        lent: the placeholder was taken away so that autograd makes a new gradient, which is to be added.
        plain: whether the parameter's memory is contiguous.
        nbytes: bytes of one gradient.
        kind: dtype, shape and device of the parameter.
        handle: takes the hook off the parameter; None before it is set, or where an interrupt came in between.
        shut: nothing is taken any more, though the hook may still be there for want of a handle.
    """

    __slots__ = ("handle", "kind", "lent", "nbytes", "placeholder", "places", "plain", "shut")

    def __init__(self, p: Tensor, placeholder: StreamedGradient) -> None:
        self.placeholder = placeholder
        self.places: list[tuple[Inlet, int]] = []
        self.lent = False
        self.plain = p.is_contiguous()
        self.nbytes = p.numel() * p.element_size()
        self.kind = p.dtype, p.shape, p.device
        self.handle: RemovableHandle | None = None
        self.shut = False

    def close(self) -> None:
        """Gradients stay in `.grad` from now on."""
        self.shut = True
        if self.handle is not None:
            self.handle.remove()


class Held:
    """A gradient of several pieces, kept until the last of their copies has ended."""

    __slots__ = ("grad", "left")

    def __init__(self, grad: Tensor, pieces: int) -> None:
        self.grad = grad
        self.left = pieces


class Inlet:
    """One bucket that fills up during backward.

    Attributes:
        arena, index: which bucket it is.
        grads: per piece, the gradient that waits to leave; None while it is not there.
        adds: per piece, whether it is added to what the store has.
        missing: how many are not there yet.
        passes: how often the bucket has left complete since the last step.
        expected: how often it did before the last step.
        renewed: per piece, the stream's version when it last left without being added to what was there.
    """

    __slots__ = ("_every", "_runs", "adds", "arena", "expected", "grads", "index", "missing", "passes", "renewed")

    def __init__(self, arena: int, index: int, bucket: Bucket) -> None:
        size = bucket.itemsize
        self.arena, self.index = arena, index
        self._runs = [(p.start * size, p.length * size, p.offset * size) for p in bucket.pieces]
        self._every = list(range(len(bucket.pieces)))
        self.passes = 0
        self.expected = 1
        self.renewed = [0] * len(self._runs)
        self.empty()

    def empty(self) -> None:
        self.grads: list[Tensor | Held | None] = [None] * len(self._runs)
        self.adds = [False] * len(self._runs)
        self.missing = len(self._runs)

    @property
    def is_empty(self) -> bool:
        return self.missing == len(self._runs)

    def spots(self) -> list[int]:
        """Which pieces are there."""
        return [spot for spot, grad in enumerate(self.grads) if grad is not None] if self.missing else self._every

    def segments(self, spots: Sequence[int]) -> list[Segment]:
        found = []
        for spot in spots:
            held, (start, nbytes, offset) = self.grads[spot], self._runs[spot]
            grad = held.grad if type(held) is Held else held
            found.append(Segment(grad.data_ptr() + start, nbytes, offset, grad))  # type: ignore[union-attr]
        return found


class Shared:
    """What both threads know of the stream.

    Attributes:
        free: down slots that nobody uses. The training thread takes, the step's thread puts back.
        released: bytes of gradients that the device has got back. Written by the step's thread.
    """

    def __init__(self, speculation: Speculation | None) -> None:
        self.free: deque[int] = deque()
        self.released = 0
        self.speculation = speculation


class Drop:
    """The job of putting one bucket's pieces into the store, once they have come down.

    Args:
        event: the copy into down slot `slot`; `shown`: its range; `record`: of the step it is for.
        last: whether the bucket is complete, as far as one can tell.
        basis: on what to guess the step of it, if it is complete.
    """

    def __init__(
        self, shared: Shared, store: GradientStore, inlet: Inlet, spots: Sequence[int], slot: int, event: Event,
        record: StepRecord, shown: int, *, last: bool, basis: Basis | None,
    ) -> None:  # fmt: skip
        self.taken = False
        self._shared = shared
        self._free = shared.free
        self._store = store
        self._bucket = inlet.index
        self._spots, self._adds = spots, inlet.adds
        self._grads: Sequence[Tensor | Held | None] = inlet.grads
        self._slot, self._event = slot, event
        self._record, self._shown = record, shown
        self._last, self._basis = last, basis

    def run(self, stages: Stages, schedule: Schedule) -> None:
        name = f"bucket {self._bucket}"
        stages.arrived(self._event, name, self._record, self._shown)
        self._let_go()
        shared, store, k = self._shared, self._store, self._bucket
        if shared.speculation is not None:
            shared.speculation.forget(store.arena, k)
        begun = stages.work(name)
        store.receive(k, stages.down(self._slot, store.arena.plan.buckets[k]), self._spots, self._adds)
        self._free.append(self._slot)
        if self._last:
            store.sum_bucket(k)
            if self._basis is not None and shared.speculation is not None:
                shared.speculation.offer(store, k, self._basis, self._record)
        stages.worked(self._record, name, begun)

    def _let_go(self) -> None:
        """The device may have the memory back."""
        released = 0
        for spot in self._spots:
            held = self._grads[spot]
            if isinstance(held, Held):
                held.left -= 1
                released += held.grad.nbytes if held.left == 0 else 0
            elif held is not None:
                released += held.nbytes
        self._grads = ()
        self._shared.released += released

    def end(self) -> None:
        self._grads = ()
