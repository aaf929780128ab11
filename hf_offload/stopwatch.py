"""Whose time is whose: forward and backward of each unit of a model, by marks in the device's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from hf_offload.engine.units import UnitMap
from hf_offload.optimizer import OffloadAdam


class Subject(Protocol):
    """A model on a device, and how it is made to compute."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        ...

    def forward(self, rows: int) -> Tensor:
        """Ask for the forward of a micro-batch of so many rows; the loss."""
        ...

    def mark(self) -> Any:
        """A point in the device's time: when all it was asked for so far will be done."""
        ...

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two marks. Call it after `synchronize`."""
        ...

    def synchronize(self) -> None:
        """Return when the device has done all it was asked for."""
        ...

    def settle(self) -> None:
        """New threads of the engine are there: bind them to cores, if that is to be."""
        ...

    def join(self, optimizer: OffloadAdam) -> None:
        """An optimizer was made for the model."""
        ...


@dataclass(frozen=True)
class Passed:
    """One micro-batch: seconds of each unit's forward and backward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.forward) + sum(self.backward)


class Stopwatch:
    """Hooks that mark where each unit's forward begins and when its last gradient is there."""

    def __init__(self, subject: Subject, units: UnitMap) -> None:
        self._subject, self._count = subject, len(units.units)
        self._starts: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._forward = False
        for guard in units.guards:
            self._handles.append(guard.module.register_forward_pre_hook(self._starting(sorted(guard.units))))
        for u, unit in enumerate(units.units):
            for p in unit.params:
                if p.requires_grad:
                    self._handles.append(p.register_post_accumulate_grad_hook(self._ending(u)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def run(self, rows: int) -> Passed:
        """One micro-batch, timed."""
        subject = self._subject
        self._starts, self._ends = {}, {}
        subject.synchronize()
        begin, self._forward = subject.mark(), True
        loss = subject.forward(rows)
        middle, self._forward = subject.mark(), False
        loss.backward()  # type: ignore[no-untyped-call]
        end = subject.mark()
        subject.synchronize()
        return Passed(self._split(begin, middle, forward=True), self._split(middle, end, forward=False))

    def _starting(self, units: list[int]) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            if self._forward:
                for u in units:
                    if u not in self._starts:
                        self._starts[u] = self._subject.mark()

        return hook

    def _ending(self, u: int) -> Callable[..., None]:
        def hook(p: Tensor) -> None:
            self._ends[u] = self._subject.mark()

        return hook

    def _split(self, begin: Any, end: Any, forward: bool) -> tuple[float, ...]:
        """The time from `begin` to `end` by unit. What lies outside the marks goes to the first or the last unit."""
        marks = self._starts if forward else self._ends
        at = sorted((self._subject.between(begin, mark), u) for u, mark in marks.items())
        whole = self._subject.between(begin, end)
        found = [0.0] * self._count
        if not at:
            found[0] = whole
        for k, (seconds, u) in enumerate(at):
            if forward:
                found[u] += (at[k + 1][0] if k + 1 < len(at) else whole) - (seconds if k else 0.0)
            else:
                found[u] += (whole if k + 1 == len(at) else seconds) - (at[k - 1][0] if k else 0.0)
        return tuple(max(0.0, seconds) for seconds in found)
