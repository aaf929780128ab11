"""The gradients of a step: which parameters have one, and whether it is one we can step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from hf_offload.engine.norm import gradient_norm, gradient_sums, norm_of_sums
from hf_offload.engine.roll import Roll
from hf_offload.engine.streamed_gradient import StreamedGradient
from hf_offload.engine.tensors import is_dense, like_layout
from hf_offload.errors import StateError, UnsupportedError, explain


class Gradient(NamedTuple):
    """One parameter that has a gradient: `value` lies in the parameter's memory order, `group` is its group's index.

    `value` is `.grad` itself unless that had another layout; None where the gradient has left the device.
    """

    param: Tensor
    value: Tensor | None
    group: int


class Found(Sequence[Gradient]):
    """Gradients in columns: a step looks at all of one kind at once, and seldom at one gradient by itself."""

    __slots__ = ("groups", "params", "values")

    def __init__(self, params: list[Tensor], values: list[Tensor | None], groups: list[int]) -> None:
        self.params = params
        self.values = values
        self.groups = groups

    @classmethod
    def of(cls, gradients: Sequence[Gradient]) -> Found:
        return cls([p for p, _, _ in gradients], [v for _, v, _ in gradients], [n for _, _, n in gradients])

    def __len__(self) -> int:
        return len(self.params)

    def __iter__(self) -> Iterator[Gradient]:
        return map(Gradient._make, zip(self.params, self.values, self.groups))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class GradientSet(Protocol):
    """All gradients of a step, in the order of `param_groups`, and how to tell whether they are still the same."""

    items: Found

    def norm(self) -> float:
        """sqrt(Σ g²), a Python float; inf or NaN where a gradient has one."""
        ...

    def sums(self) -> Sequence[float]:
        """Σ g² of each gradient."""
        ...

    def remember(self) -> object:
        """What `same_as` and `overlaps` take."""
        ...

    def same_as(self, memory: object) -> bool:
        """Whether these are, unchanged, the gradients that were remembered."""
        ...

    def overlaps(self, memory: object) -> bool:
        """Whether some of these were remembered, as they are or as they were before something was added to them."""
        ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """A mark that was left on each gradient, and the gradients' version counters then."""

    token: object
    versions: Sequence[int]


class DeviceSet:
    """Gradients in `.grad`."""

    def __init__(self, items: Found, threads: int) -> None:
        self.items = items
        self._threads = threads

    def norm(self) -> float:
        return gradient_norm(self._values(), self._threads)

    def sums(self) -> Sequence[float]:
        return gradient_sums(self._values(), self._threads)

    def _values(self) -> list[Tensor]:
        return [value for value in self.items.values if value is not None]

    def remember(self) -> object:
        grads = [p.grad for p in self.items.params]
        seen = _Seen(object(), [g._version for g in grads])  # type: ignore[union-attr]
        for g in grads:
            setattr(g, _TOKEN, seen.token)
        return seen

    def same_as(self, memory: object) -> bool:
        return (
            isinstance(memory, _Seen)
            and len(self.items) == len(memory.versions)
            and all(_is(p.grad, memory.token, v) for p, v in zip(self.items.params, memory.versions))
        )

    def overlaps(self, memory: object) -> bool:
        if not isinstance(memory, _Seen):
            return False
        return any(getattr(p.grad, _TOKEN, None) is memory.token for p in self.items.params)


_TOKEN = "_hf_offload_seen"


def _is(grad: Tensor | None, token: object, version: int) -> bool:
    return grad is not None and getattr(grad, _TOKEN, None) is token and grad._version == version


class Streams(Protocol):
    """Who has the gradients that left: `hf_offload.engine.streaming.GradientStream`."""

    version: int

    def sums(self, params: Iterable[tuple[int, int]]) -> list[float]: ...
    def renewed(self, p: Tensor) -> int: ...


class StoreSet:
    """Gradients in the store.

    Args:
        places: the (arena, index) of each parameter.
        version: the stream's, when they were gathered.
    """

    def __init__(self, items: Found, places: Sequence[tuple[int, int]], stream: Streams) -> None:
        self.items = items
        self._places = places
        self._stream = stream

    def norm(self) -> float:
        return norm_of_sums(self.sums())

    def sums(self) -> Sequence[float]:
        return self._stream.sums(self._places)

    def remember(self) -> object:
        return self._stream.version, self.items

    def same_as(self, memory: object) -> bool:
        if not isinstance(memory, tuple) or memory[0] != self._stream.version:
            return False
        if memory[1] is self.items:
            return True
        before: Found = memory[1]
        return len(before) == len(self.items) and all(map(operator.is_, self.items.params, before.params))

    def overlaps(self, memory: object) -> bool:
        if not isinstance(memory, tuple):
            return False
        remembered = set(map(id, memory[1].params))
        return any(id(p) in remembered and self._stream.renewed(p) <= memory[0] for p in self.items.params)


class MixedSet:
    """Some in `.grad`, some in the store.

    Args:
        items: all of them.
        device, store: the two parts.
    """

    def __init__(self, items: Found, device: DeviceSet, store: StoreSet) -> None:
        self.items = items
        self._device, self._store = device, store

    def norm(self) -> float:
        return norm_of_sums(self.sums())

    def sums(self) -> Sequence[float]:
        store, device = iter(self._store.sums()), iter(self._device.sums())
        return [next(store if g.value is None else device) for g in self.items]

    def remember(self) -> object:
        return _Both(self._device.remember(), self._store.remember())

    def same_as(self, memory: object) -> bool:
        return (
            isinstance(memory, _Both)
            and self._device.same_as(memory.device)
            and self._store.same_as(memory.store)
        )  # fmt: skip

    def overlaps(self, memory: object) -> bool:
        return isinstance(memory, _Both) and (
            self._device.overlaps(memory.device) or self._store.overlaps(memory.store)
        )


@dataclass(frozen=True, slots=True)
class _Both:
    device: object
    store: object


def collect(roll: Roll, placeholders: Sequence[Tensor | None] | None = None) -> Found:
    """Every gradient of the optimizer, in the order of `param_groups`.

    Args:
        placeholders: what stands in `.grad` for a gradient that left during backward, for each parameter of the roll.

    Raises:
        UnsupportedError: a gradient that is sparse, or whose dtype, device or shape is not its parameter's.
        StateError: a gradient that left for an optimizer that is gone.
    """
    grads = [p.grad for p in roll.params]
    if roll.all_plain(grads):
        return Found(roll.params, grads, roll.groups)
    found: list[Gradient] = []
    add, make, strided = found.append, tuple.__new__, torch.strided  # `Gradient(...)` itself takes twice as long
    for i, (p, grad, number, (dtype, nbytes)) in enumerate(zip(roll.params, grads, roll.groups, roll.plain)):
        if grad is None:
            continue
        # Whether nothing is to be said of it, at a third of the cost of `_checked`: torch itself lets none be set whose
        # shape or device is not the parameter's, and the step refuses parameters that became others since.
        if (
            type(grad) is Tensor and grad.dtype is dtype and grad.layout is strided and grad.nbytes == nbytes
            and grad.is_contiguous() and not grad.is_neg()
        ):  # fmt: skip
            add(make(Gradient, (p, grad, number)))
        elif type(grad) is StreamedGradient:
            if placeholders is None or grad is not placeholders[i]:
                refuse_streamed(p)
            found.append(Gradient(p, None, number))
        else:
            found.append(Gradient(p, _checked(p, grad), number))
    return Found.of(found)


def _checked(p: Tensor, grad: Tensor) -> Tensor:
    if not grad.is_sparse and grad.dtype is p.dtype and grad.shape == p.shape and grad.device == p.device:
        if grad.is_contiguous() and p.is_contiguous() and not grad.is_neg():
            return grad
        if grad.layout == torch.strided:
            # The gradient of an imaginary part may be a view whose memory holds the values with the other sign.
            value = grad.resolve_neg()
            return like_layout(value, p) if is_dense(p) else value  # else the step refuses it, for what became of p
    refuse(p, grad)


def refuse_streamed(p: Tensor) -> NoReturn:
    """Raise that what stands in `.grad` is somebody else's."""
    raise StateError(
        f"the gradient of a parameter of shape {tuple(p.shape)} was streamed to another optimizer, or to one that is "
        "gone. Drop it with zero_grad(), and run backward again."
    )


def refuse(p: Tensor, grad: Tensor) -> NoReturn:
    """Raise what is wrong with a gradient whose layout, dtype, device or shape is not its parameter's."""
    shape = tuple(p.shape)
    if grad.layout != torch.strided:
        raise UnsupportedError(
            explain(f"gradient of a parameter of shape {shape}", str(grad.layout), "sparse gradients are not supported",
                    "Make the layer with sparse=False (nn.Embedding's default)")
        )  # fmt: skip
    raise UnsupportedError(
        explain(f"gradient of a parameter of shape {shape}", f"{tuple(grad.shape)} {grad.dtype} on {grad.device}",
                f"the parameter is {shape} {p.dtype} on {p.device}",
                "Let autograd make the gradients, in the parameter's own dtype")
    )  # fmt: skip
