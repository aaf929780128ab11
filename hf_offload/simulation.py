"""What a step of each schedule takes: the engine's pipeline, simulated bucket by bucket. Stdlib only, pure.

The processes are the engine's threads: the training thread with the device, the step's thread, and a link each way.
They do what `hf_offload.engine.schedules` and `.streaming` do, in the same order and with the same ring; what each
piece takes comes from a calibration. `hf_offload.bench.bound` is the ideal beside this: no overhead, a ring without
end, nobody slowed down by anybody.

Kinds of work, each of which a `fluid.Rates` may slow down beside another:

- `device`: forward and backward.
- `host`: kernels on the host's cores.
- `copy`: the part of a copy that takes a core of the host; only where there is no GPU. Two at once share one.
- `link`, `python`: what passes without slowing anybody down: the bytes' time on the link, the threads' hand-overs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hf_offload.fluid import Mailbox, Process, Rates, Signal, Work, World

DEVICE, HOST, COPY, LINK, PYTHON = "device", "host", "copy", "link", "python"
PART = 1 << 19
"""Parameters that are stepped ahead in one go; as `engine.speculation.PART`."""
STEPS, COUNTED = 7, 3
"""Simulated steps, and how many of the last are averaged: by then each repeats the one before."""


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What travels and is stepped as one: parameters, and bytes on the wire."""

    params: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit of the model: seconds of its forward and backward in one micro-batch, and its buckets."""

    forward: float
    backward: float
    buckets: tuple[BucketSize, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds a parameter that each of the host's kernels takes, alone.

    Attributes:
        step: the Adam step, from a gradient on the wire.
        guess: the same into a shadow, during backward.
        put, add: a gradient into the store, in place of what is there, or to it.
        squares: the sum of squares of a stored gradient.
        narrow: weights made from the masters once more (`delayed`).
        take: weights made ahead, into the ring.
        norm: the norm of gradients on the device, before `step()`.
    """

    step: float
    guess: float = 0.0
    put: float = 0.0
    add: float = 0.0
    squares: float = 0.0
    narrow: float = 0.0
    take: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One direction of the link.

    Attributes:
        per_byte: seconds a byte is under way.
        core_per_byte: seconds of one of the host's cores; 0 where a GPU's copy engine moves the bytes. The two pass at
            the same time: the longer counts.
        latency: seconds of each copy beside these, from asking for it to knowing of its end.
    """

    per_byte: float
    core_per_byte: float = 0.0
    latency: float = 0.0

    def work(self, nbytes: int) -> tuple[Work, Work]:
        """What a copy of so many bytes does, one after the other."""
        core = self.core_per_byte * nbytes
        return Work(LINK, self.latency + max(0.0, self.per_byte * nbytes - core)), Work(COPY, core)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Everything the simulation has to know of machine and engine.

    Attributes:
        step_s: seconds of the training thread in `clip_grad_norm_`, `step()` and `zero_grad()`, hand-overs included,
            with the device idle.
        bucket_s: seconds of the step's thread beside the kernel, for each bucket whose weights go up or whose gradients
            are put away, and that is there when its turn comes.
        fetch_s: the same for a bucket whose gradients the step asks for; both, where its weights go up at once.
        idle_s: seconds more where the thread had to wait for it: to wake up, on a core that has rested.
        rates: who slows whom down.
    """

    host: HostCost
    down: LinkCost
    up: LinkCost
    step_s: float = 0.0
    bucket_s: float = 0.0
    fetch_s: float = 0.0
    idle_s: float = 0.0
    rates: Rates = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a schedule goes about a step.

    Attributes:
        waits: `step()` returns when all is done (*in order*).
        delayed: the weights of the step before go up.
        streamed: gradients leave during backward.
        guesses: how the buckets are stepped during backward: None: not at all; True: rightly; False: in vain.
    """

    waits: bool = False
    delayed: bool = False
    streamed: bool = False
    guesses: bool | None = None


SCHEDULES: dict[str, Way] = {
    "in_order": Way(waits=True),
    "overlapped": Way(),
    "streamed": Way(streamed=True),
    "speculative_hit": Way(streamed=True, guesses=True),
    "speculative_miss": Way(streamed=True, guesses=False),
    "delayed": Way(delayed=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of one step in the steady state.

    Attributes:
        step: from a step's begin to the next one's.
        compute: what forward and backward take alone, with nobody beside them.
    """

    step: float
    compute: float

    @property
    def exposed(self) -> float:
        """What the optimizer adds to the compute, by standing in its way or by slowing it down."""
        return self.step - self.compute


def simulate(
    way: Way,
    units: Sequence[UnitWork],
    costs: Costs,
    *,
    accumulation: int = 1,
    slots: int = 4,
    clip: bool = True,
    shadow_bytes: int | None = None,
    state_bytes: float = 12.0,
) -> Outcome:
    """Simulate `STEPS` steps of a schedule, as `SCHEDULES["overlapped"]`, and average the last of them.

    Args:
        units: in forward order; backward runs through them the other way round.
        accumulation: micro-batches in a step.
        slots: of the ring, each way.
        clip: whether the gradients' norm is needed before the step.
        shadow_bytes: room for guesses, filled in forward order; None: for all.
        state_bytes: of it that a parameter takes beside its weight.
    """
    run = _Run(way, units, costs, accumulation, slots, clip)
    _cover(run.buckets, shadow_bytes, state_bytes)
    run.world.run()
    assert len(run.begun) == STEPS + 1, "the simulation stands still"
    compute = accumulation * sum(unit.forward + unit.backward for unit in units)
    return Outcome((run.begun[STEPS] - run.begun[STEPS - COUNTED]) / COUNTED, compute)


def _cover(buckets: Sequence[_Bucket], shadow_bytes: int | None, state_bytes: float) -> None:
    """Give buckets room in the shadow as `engine.speculation` does."""
    left = float("inf") if shadow_bytes is None else float(shadow_bytes)
    for bucket in buckets:
        left -= state_bytes * bucket.size.params + bucket.size.nbytes
        if left < 0:
            return
        bucket.covered = True


class _Bucket:
    """One bucket: its unit, its size, and what is known of it in the step under way."""

    __slots__ = ("ahead", "arrived", "covered", "passes", "size", "unit")

    def __init__(self, unit: int, size: BucketSize) -> None:
        self.unit, self.size = unit, size
        self.arrived = Signal(fired=True)  # its weights are on the device
        self.ahead = 0  # parameters stepped on a guess
        self.passes = 0  # micro-batches whose gradients are in the store
        self.covered = False  # by the shadow


class _Run:
    """The processes of one simulation and what they share."""

    def __init__(
        self, way: Way, units: Sequence[UnitWork], costs: Costs, accumulation: int, slots: int, clip: bool
    ) -> None:
        self.way, self.units, self.costs = way, units, costs
        self.accumulation, self.slots, self.clip = accumulation, slots, clip
        self.world = World({**costs.rates, (COPY, COPY): 0.5})
        self.buckets = [_Bucket(u, b) for u, unit in enumerate(units) for b in unit.buckets]
        self.of_unit = [[b for b in self.buckets if b.unit == u] for u in range(len(units))]
        self.params = sum(b.size.params for b in self.buckets)
        self.begun: list[float] = []  # when each step began
        self.jobs: Mailbox[tuple[str, _Bucket | None, Signal]] = Mailbox(self.world)
        self.lanes = {name: Mailbox[tuple[int, Signal]](self.world) for name in ("down", "up")}
        self.free_slots = deque(range(slots))
        self.slot_freed = Signal()
        self.up_busy: deque[Signal] = deque()
        self.waiting: deque[_Bucket] = deque()  # to be stepped ahead
        self.step_ended = Signal(fired=True)
        self.steps_taken = 0
        self.rested = False  # the step's thread, since its last bucket
        for process in (self.train(), self.serve(), *(self.carry(name) for name in self.lanes)):
            self.world.start(process)

    # ---- the training thread, and the device

    def train(self) -> Process:
        for _ in range(STEPS + 1):
            self.begun.append(self.world.now)
            for micro in range(self.accumulation):
                for u, unit in enumerate(self.units):
                    for bucket in self.of_unit[u]:
                        yield bucket.arrived
                    yield Work(DEVICE, unit.forward)
                for u in reversed(range(len(self.units))):
                    yield Work(DEVICE, self.units[u].backward)
                    if self.way.streamed:
                        yield from self.send_gradients(u, last=micro == self.accumulation - 1)
            yield from self.step()

    def send_gradients(self, unit: int, last: bool) -> Process:
        """The unit's gradients are complete: the last bucket's first, as backward finds them."""
        for bucket in reversed(self.of_unit[unit]):
            while not self.free_slots:
                self.slot_freed = Signal()
                yield self.slot_freed
            self.free_slots.popleft()
            self.jobs.put(("drop last" if last else "drop", bucket, self.bring_down(bucket)))

    def step(self) -> Process:
        if self.clip and not self.way.streamed:
            yield Work(DEVICE, self.costs.host.norm * self.params)
        if self.clip and self.way.streamed:
            settled = Signal()
            self.jobs.put(("call", None, settled))
            yield settled
        yield self.step_ended
        yield Work(PYTHON, self.costs.step_s)
        self.step_ended = Signal()
        for bucket in self.buckets:
            bucket.arrived = Signal()
        self.jobs.put(("step", None, self.step_ended))
        if self.way.waits:
            yield self.step_ended

    # ---- the links

    def bring_down(self, bucket: _Bucket) -> Signal:
        """Ask for the copy of a bucket's gradients; its end."""
        done = Signal()
        self.lanes["down"].put((bucket.size.nbytes, done))
        return done

    def send_up(self, bucket: _Bucket) -> None:
        self.up_busy.append(bucket.arrived)
        self.lanes["up"].put((bucket.size.nbytes, bucket.arrived))

    def carry(self, name: str) -> Process:
        cost = self.costs.down if name == "down" else self.costs.up
        while True:
            nbytes, done = yield from self.lanes[name].get()
            yield from cost.work(nbytes)
            self.world.fire(done)

    # ---- the step's thread

    def serve(self) -> Process:
        while True:
            if self.jobs.empty and self.waiting:
                yield from self.step_ahead()
                continue
            since = self.world.now
            what, bucket, signal = yield from self.jobs.get()
            self.rested |= self.world.now > since
            if what == "step":
                yield from self.take_step()
                self.world.fire(signal)
            elif bucket is None:
                self.world.fire(signal)
            else:
                yield from self.wait(signal)
                yield from self.put_away(bucket, last=what == "drop last")

    def put_away(self, bucket: _Bucket, last: bool) -> Process:
        host, params = self.costs.host, bucket.size.params
        yield from self.kernel(host.add if bucket.passes else host.put, bucket)
        bucket.passes = 0 if last else bucket.passes + 1
        self.free_slots.append(0)
        self.world.fire(self.slot_freed)
        if last:
            yield Work(HOST, host.squares * params)
            bucket.ahead = 0
            if self.way.guesses is not None and bucket.covered:
                self.waiting.append(bucket)

    def step_ahead(self) -> Process:
        bucket = self.waiting[0]
        part = min(PART, bucket.size.params - bucket.ahead)
        yield Work(HOST, self.costs.host.guess * part)
        bucket.ahead += part
        if bucket.ahead == bucket.size.params:
            self.waiting.popleft()

    def take_step(self) -> Process:
        first = not self.steps_taken
        self.steps_taken += 1
        if self.way.waits and not self.way.streamed:
            yield from self.one_by_one()
        elif self.way.streamed:
            yield from self.from_store()
        elif self.way.delayed and not first:
            yield from self.deliver()
            yield from self.coming_down(deliver=False)
        else:
            yield from self.coming_down(deliver=True)
        while self.up_busy:
            yield self.up_busy.popleft()

    def one_by_one(self) -> Process:
        for bucket in self.buckets:
            yield from self.wait(self.bring_down(bucket))
            yield from self.kernel(self.costs.host.step, bucket, self.costs.fetch_s + self.costs.bucket_s)
            self.lanes["up"].put((bucket.size.nbytes, bucket.arrived))
            yield from self.wait(bucket.arrived)

    def coming_down(self, deliver: bool) -> Process:
        coming: list[Signal] = []
        for k, bucket in enumerate(self.buckets):
            while len(coming) < min(len(self.buckets), k + self.slots):
                coming.append(self.bring_down(self.buckets[len(coming)]))
            yield from self.wait(coming[k])
            if deliver:
                yield from self.room()
            beside = self.costs.fetch_s + (self.costs.bucket_s if deliver else 0.0)
            yield from self.kernel(self.costs.host.step, bucket, beside)
            if deliver:
                self.send_up(bucket)

    def deliver(self) -> Process:
        for bucket in self.buckets:
            yield from self.room()
            yield from self.kernel(self.costs.host.narrow, bucket)
            self.send_up(bucket)

    def from_store(self) -> Process:
        host = self.costs.host
        self.waiting.clear()
        for bucket in self.buckets:
            yield from self.room()
            guessed, rest = bool(bucket.ahead) and bool(self.way.guesses), bucket.size.params - bucket.ahead
            if guessed:
                yield Work(HOST, host.guess * rest)
            yield from self.kernel(host.take if guessed else host.step, bucket)
            self.send_up(bucket)

    def kernel(self, per_param: float, bucket: _Bucket, beside: float | None = None) -> Iterable[Work]:
        """A bucket's kernel, and what the thread has to do beside it; None: `bucket_s`."""
        beside = self.costs.bucket_s if beside is None else beside
        yield Work(PYTHON, beside + (self.costs.idle_s if self.rested else 0.0))
        self.rested = False
        yield Work(HOST, per_param * bucket.size.params)

    def wait(self, signal: Signal) -> Process:
        """The step's thread rests until `signal` has fired, unless it has."""
        since = self.world.now
        yield signal
        self.rested |= self.world.now > since

    def room(self) -> Process:
        """A slot of the ring, for weights to go up from: that of the copy `slots` copies ago."""
        if len(self.up_busy) >= self.slots:
            yield from self.wait(self.up_busy.popleft())
