"""The least exposed time that any engine with a given schedule could have: an ideal simulation. Stdlib only.

Four resources, each doing one thing at a time and switching at no cost: the device, the link down, the host, the link
up. No Python, no threads, no cache that two of them share, rings without end. What goes in are the times of each stage
measured alone; what comes out is the time by which the device's work is stretched in the steady state, and in front of
which unit's forward the device stands idle.

What bounds each schedule, where compute is long enough:

- `in_order`: everything. Each bucket is copied, stepped and copied back before the next, while the device waits.
- `overlapped`: the first unit's way down, through the host and up again, which has nothing to hide under; then every
  unit that host or link serve more slowly than forward comes to it.
- `streamed`: the same without the way down, of which only the last gradients to be ready, the first unit's, remain.
- `speculative_hit`: the first unit's last bucket: down, stepped, up. The rest is stepped already.
- `speculative_miss`: as `streamed`: in the ideal, a wrong guess costs nothing.
- `delayed`: the first unit's way up; the weights were ready before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

STEPS = 16
"""Simulated steps; by then the last half repeats itself."""


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """Seconds of each stage of one bucket, measured alone."""

    d2h: float
    host_step: float
    h2d: float


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """One unit of the model: seconds of its forward and backward on the device, and its buckets."""

    forward: float
    backward: float
    buckets: tuple[BucketTimes, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """What the ideal engine cannot hide, a step.

    Attributes:
        exposed: seconds by which a step is longer than its forward and backward.
        stalls: seconds the device stands idle before the forward of each unit, in forward order; they add up to
            `exposed`.
    """

    exposed: float
    stalls: tuple[float, ...]


@dataclass(slots=True)
class _Resource:
    """Serves one job after the other, in the order asked."""

    free: float = 0.0

    def run(self, ready: float, seconds: float) -> float:
        """The time at which a job that may begin at `ready` has ended."""
        self.free = max(self.free, ready) + seconds
        return self.free


Key = tuple[int, int]
"""A bucket: (unit, number in the unit)."""


@dataclass(slots=True)
class _Host:
    """The links and the host, between the end of one backward and the next."""

    down: _Resource = field(default_factory=_Resource)
    host: _Resource = field(default_factory=_Resource)
    up: _Resource = field(default_factory=_Resource)
    pending: dict[Key, float] = field(default_factory=dict)
    """Delayed: when each bucket of the step before has been stepped."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the device: its buckets in forward order, when each unit's gradients were ready, the end of all."""

    units: Sequence[UnitTimes]
    gradients: Sequence[float]
    end: float

    def forward_order(self) -> Iterator[tuple[Key, BucketTimes]]:
        for u, unit in enumerate(self.units):
            yield from (((u, b), times) for b, times in enumerate(unit.buckets))

    def backward_order(self) -> Iterator[tuple[Key, BucketTimes]]:
        for u in reversed(range(len(self.units))):
            yield from (((u, b), times) for b, times in enumerate(self.units[u].buckets))


def _in_order(step: _Step, on: _Host) -> dict[Key, float]:
    """Arrival of each bucket's weights. The same for the functions below."""
    at = step.end
    for _, times in step.forward_order():
        at += times.d2h + times.host_step + times.h2d
    return {key: at for key, _ in step.forward_order()}


def _overlapped(step: _Step, on: _Host) -> dict[Key, float]:
    arrivals = {}
    for key, times in step.forward_order():
        stepped = on.host.run(on.down.run(step.end, times.d2h), times.host_step)
        arrivals[key] = on.up.run(stepped, times.h2d)
    return arrivals


def _streamed(step: _Step, on: _Host) -> dict[Key, float]:
    for (unit, _), times in step.backward_order():
        on.down.run(step.gradients[unit], times.d2h)
    known = max(step.end, on.down.free)  # the norm needs the last gradient
    arrivals = {}
    for key, times in step.forward_order():
        arrivals[key] = on.up.run(on.host.run(known, times.host_step), times.h2d)
    return arrivals


def _speculative_hit(step: _Step, on: _Host) -> dict[Key, float]:
    """A hit's only work at `step()`, putting the weights into the ring, counts as 0 here."""
    stepped = {}
    for key, times in step.backward_order():
        stepped[key] = on.host.run(on.down.run(step.gradients[key[0]], times.d2h), times.host_step)
    known = max(step.end, on.down.free)
    return {key: on.up.run(max(known, stepped[key]), times.h2d) for key, times in step.forward_order()}


def _delayed(step: _Step, on: _Host) -> dict[Key, float]:
    arrivals = {
        key: on.up.run(max(step.end, on.pending.get(key, 0.0)), times.h2d) for key, times in step.forward_order()
    }
    for key, times in step.forward_order():
        on.pending[key] = on.host.run(on.down.run(step.end, times.d2h), times.host_step)
    return arrivals


SCHEDULES: Mapping[str, Callable[[_Step, _Host], dict[Key, float]]] = {
    "in_order": _in_order,
    "overlapped": _overlapped,
    "streamed": _streamed,
    "speculative_hit": _speculative_hit,
    "speculative_miss": _streamed,
    "delayed": _delayed,
}


def bound(schedule: str, units: Sequence[UnitTimes]) -> Bound:
    """Simulate `STEPS` steps of `schedule`, a name of SCHEDULES, and average the last half of them.

    Args:
        units: in forward order; backward runs through them the other way round.
    """
    device, on = _Resource(), _Host()
    arrivals: dict[Key, float] = {}
    stalls = [0.0] * len(units)
    counted = STEPS // 2
    for number in range(STEPS):
        for u, unit in enumerate(units):
            ready = max((arrivals.get((u, b), 0.0) for b in range(len(unit.buckets))), default=0.0)
            if number >= STEPS - counted:
                stalls[u] += max(0.0, ready - device.free)
            device.run(ready, unit.forward)
        gradients = [0.0] * len(units)
        for u in reversed(range(len(units))):
            gradients[u] = device.run(0.0, units[u].backward)
        arrivals = SCHEDULES[schedule](_Step(units, gradients, device.free), on)
    mean = tuple(s / counted for s in stalls)
    return Bound(sum(mean), mean)
