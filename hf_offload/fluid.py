"""A small discrete-event simulator of workers that slow each other down where they are busy at once. Stdlib only.

A process is a generator. It yields `Work(kind, seconds)`, to be busy for so long, or a `Signal`, to wait until that has
fired. Seconds are those of the work alone: beside work of other kinds it goes on at a part of its speed, as
`Rates` says, from the moment the other begins to the moment it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

Rates = Mapping[tuple[str, str], float]
"""`rates[a, b]`: the part of its speed, above 0 and at most 1, at which work of kind a goes on beside work of kind b.
Several others multiply. What is not named does not slow down."""


class Work(NamedTuple):
    """Be busy with work of this kind for so many seconds, if nothing slows it down."""

    kind: str
    seconds: float


class Signal:
    """Something that happens once."""

    __slots__ = ("fired", "waiting")

    def __init__(self, fired: bool = False) -> None:
        self.fired = fired
        self.waiting: list[Process] = []


Process = Generator["Work | Signal", None, Any]


class Mailbox(Generic[T]):
    """What one process hands to another, in order. One process receives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[T] = deque()
        self._arrival = Signal()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._world.fire(self._arrival)

    @property
    def empty(self) -> bool:
        return not self._items

    def get(self) -> Generator[Work | Signal, None, T]:
        """Wait for the next item: `item = yield from mailbox.get()`."""
        while not self._items:
            self._arrival = Signal()
            yield self._arrival
        return self._items.popleft()


class _Busy:
    __slots__ = ("kind", "left", "process")

    def __init__(self, process: Process, kind: str, left: float) -> None:
        self.process, self.kind, self.left = process, kind, left


class World:
    """The processes and the time.

    Args:
        rates: how kinds of work slow each other down.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self, rates: Rates | None = None) -> None:
        self.now = 0.0
        self._rates = dict(rates or {})
        self._ready: deque[Process] = deque()
        self._busy: list[_Busy] = []

    def start(self, process: Process) -> None:
        self._ready.append(process)

    def fire(self, signal: Signal) -> None:
        """Let everybody go on who waits for `signal`, now or later."""
        signal.fired = True
        self._ready.extend(signal.waiting)
        signal.waiting.clear()

    def run(self) -> None:
        """Until nobody is busy any more: all processes have ended or wait for what no one will do."""
        while True:
            while self._ready:
                self._go_on(self._ready.popleft())
            if not self._busy:
                return
            self._pass_time()

    def _go_on(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if not wanted.fired:
                    wanted.waiting.append(process)
                    return
            elif wanted.seconds > 0:
                self._busy.append(_Busy(process, wanted.kind, wanted.seconds))
                return

    def _pass_time(self) -> None:
        """To the end of the work that ends next."""
        speeds = [self._speed(busy) for busy in self._busy]
        passed = min(busy.left / speed for busy, speed in zip(self._busy, speeds))
        self.now += passed
        going_on = []
        for busy, speed in zip(self._busy, speeds):
            # what ends now by the arithmetic must end now, whatever rounding leaves of it
            busy.left = 0.0 if busy.left / speed <= passed else busy.left - speed * passed
            if busy.left > 0.0:
                going_on.append(busy)
            else:
                self._ready.append(busy.process)
        self._busy = going_on

    def _speed(self, busy: _Busy) -> float:
        speed = 1.0
        for other in self._busy:
            if other is not busy:
                speed *= self._rates.get((busy.kind, other.kind), 1.0)
        return speed
