"""The engine: binds parameters to host state, takes steps, and lets whoever reads a weight wait for it.

It knows tensors and groups, not torch.optim: `hf_offload.optimizer` is its face to torch.
"""

from __future__ import annotations

import logging
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.config import OffloadConfig
from hf_offload.engine.arena import Arena, Rounding
from hf_offload.engine.census import Census
from hf_offload.engine.delay import Delay, works_of
from hf_offload.engine.figures import figures
from hf_offload.engine.formats import FORMATS
from hf_offload.engine.gates import Gates
from hf_offload.engine.gradients import DeviceSet, Found, GradientSet, MixedSet, StoreSet, collect
from hf_offload.engine.hyper import Coefficients
from hf_offload.engine.moving import give_back, share_out
from hf_offload.engine.owners import own
from hf_offload.engine.pipeline import Pipeline
from hf_offload.engine.placement import Placement
from hf_offload.engine.ranges import ranges_for
from hf_offload.engine.refusals import (
    check_model,
    check_overlap,
    check_streaming,
    module_of,
    several_ranks,
)
from hf_offload.engine.resident import ResidentArena
from hf_offload.engine.roll import Roll
from hf_offload.engine.scaling import Factor
from hf_offload.engine.schedules import Stages, make_schedule
from hf_offload.engine.seeding import reseed_masters, seeded_masters
from hf_offload.engine.share import Lot, make_share
from hf_offload.engine.skips import Skips, not_finite
from hf_offload.engine.speculation import Speculation
from hf_offload.engine.stats import Meter, Stats
from hf_offload.engine.step_threads import usable_threads
from hf_offload.engine.streaming import GradientStream
from hf_offload.engine.taking import Seating, take
from hf_offload.engine.tensors import check_apart
from hf_offload.engine.units import find_units
from hf_offload.engine.watch import Left, WeightWatch
from hf_offload.engine.work import ArenaWork, BucketWork, StepWork, bucket_works
from hf_offload.errors import StateError
from hf_offload.preflight import allocating
from hf_offload.timeline import NoTimeline, Timeline, open_timeline

logger = logging.getLogger(__name__)

ANYWHERE, ALL = -1, sys.maxsize
"""No device stream, and after every bucket: the step has ended, which all streams may know."""

OUTSIDE = -1
"""The unit of parameters that no hook guards: bound without a model, or not in it."""


class Engine:
    """Host-resident Adam state for a set of parameters, and the pipeline that steps it.

    Args:
        config: the settings.
        parameters: gives the parameters there are. At construction what is needed for them is checked against the
            host's memory and the pinned ring is reserved; state is allocated for them at the first grad-enabled
            forward of an attached model, or at the first step.
        groups: gives the optimizer's param_groups.
    """

    def __init__(
        self,
        config: OffloadConfig,
        parameters: Callable[[], Sequence[Tensor]],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self.config = config
        self.threads = usable_threads(config.threads)
        self.kind = FORMATS[config.state_dtype]
        self.placement = Placement(config, parameters(), self.threads)
        self._parameters = parameters
        self._groups = groups
        self._bound = False
        self._ranges = ranges_for(self.placement.kind)
        self.meter = Meter(open_timeline(config.timeline), self._ranges)
        self.watch = WeightWatch(self.threads)
        self.arenas: list[Arena] = []
        self.gates: Gates | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._place_of: dict[int, tuple[int, int]] = {}  # by the parameter's id: tensors hash slowly
        self._pipeline: Pipeline | None = None
        self.stream: GradientStream | None = None
        self._roll: Roll | None = None
        self._seating: Seating | None = None  # of the last step
        self._whole: StoreSet | None = None  # the last set in which no parameter was missing, and
        self._placeholders: list[Tensor | None] = []  # what stood in each `.grad` of it
        self.speculation = Speculation(config.shadow_bytes, self.threads) if config.shadow_bytes else None
        self._delay: Delay | None = None
        self._last_of_unit: dict[int, int] = {}
        self._waited_to: dict[int, int] = {}  # by device stream
        self._may_be_kept: list[ArenaWork] = []  # whose gradients nobody may have dropped yet
        self.share = make_share(config.device_state_bytes, config.stream_gradients)
        self.moved: Callable[[Sequence[Tensor]], None] = lambda params: None
        """Told of parameters whose state is somewhere else now, to the device or back."""
        self._untold: list[Tensor] = []
        self._gathered = False  # since the last step: what is pending knows where the gradients are
        self.skips = Skips()
        self._census: Census | None = None
        self._peak_gradient_bytes = 0
        self._closed = False
        self._displaced = False  # another engine was made for some of our parameters since
        try:
            own(parameters(), self)
        except BaseException:  # the step of another one does not end, or Ctrl-C came while it was awaited
            self.placement.close()
            raise

    # ---- what is known before a step

    @property
    def schedule(self) -> str:
        """The schedule that runs, or would run if a step were taken now."""
        if self._pipeline is not None:
            return self._pipeline.schedule.name
        return make_schedule(self._base, self.config, self.speculation).name

    @property
    def _base(self) -> str:
        if self.config.schedule != "auto":
            return self.config.schedule
        return "overlapped" if self.placement.kind == "cuda" and self.gates and not several_ranks() else "in_order"

    def is_bound(self, p: Tensor) -> bool:
        return id(p) in self._place_of

    @property
    def bound(self) -> int:
        """How many parameters have state."""
        return len(self._place_of)

    def state_views(self, p: Tensor) -> dict[str, Tensor]:
        """The `optimizer.state` entry of a bound parameter: live views of the host state."""
        arena, index = self._place_of[id(p)]
        return self.arenas[arena].state_views(index)

    def attach(self, model: nn.Module) -> None:
        """Hook `model`, so that each unit's forward waits for that unit's weights and no other.

        Raises:
            UnsupportedError: an embedding with sparse gradients, or DataParallel.
            ConfigError: a model that has none of the parameters.
        """
        self._check_open()
        root = module_of(model)
        hooked = self._attached
        known = self.gates.unit_of if self.gates is not None else {}
        if any(m is hooked for m in root.modules()) and all(id(p) in known for p in root.parameters()):
            return  # the same model again, or a mere wrapper around it: its hooks fire all the same
        check_model(root, self._parameters())
        self.wait_all()
        if self.gates is not None:
            self.gates.remove()
        self._model = weakref.ref(root)
        self.gates = Gates(root, find_units(root), self)
        self._census = Census(root, self._parameters())
        for arena in self.arenas:
            arena.set_units([self._unit_of(p) for p in arena.params])

    # ---- binding: state is allocated

    def bind_trainable(self) -> None:
        """Bind, once, the parameters that require a gradient now."""
        if not self._bound:
            self.bind(p for p in self._parameters() if p.requires_grad)
            self._bound = True

    def bind(self, params: Iterable[Tensor]) -> None:
        """Allocate state for those of `params` that have none yet; masters are seeded.

        Raises:
            HostMemoryError: the state (12 bytes a parameter, or what `state_dtype` takes) does not fit, or the system
                refuses it; nothing is bound.
            ConfigError: the shadow has no room for one bucket; nothing is bound.
        """
        params = list(params)
        if all(map(self._place_of.__contains__, map(id, params))):
            return
        fresh = [p for p in params if id(p) not in self._place_of]
        self._check_open()
        self.wait_all()
        lots = self._lots(fresh)
        staying = [p for lot in lots if lot.resident for p in lot.params]
        self.placement.settle(fresh, staying, bool(self.arenas), self.taken_bytes())
        check_apart([*(p for a in self.arenas for p in a.params), *fresh])
        own(fresh, self)
        if self.config.stream_gradients and self._pipeline is None:
            self._start()
        first = len(self.arenas)
        try:
            leaving = [p for lot in lots if not lot.resident for p in lot.params]
            # all of it, before anything is bound to it
            with self.placement.near(), allocating(self.placement.budget.need(leaving)):
                made = [self.new_arena(lot, first + n) for n, lot in enumerate(lots)]
                if self.stream is not None:
                    for arena in made:
                        self.stream.allocate(arena)
            if self.stream is not None:
                self.stream.settle()  # seeding goes through the ring
            with self.placement.near(), ExitStack() as seeding:
                for arena in made:
                    transport = self.placement.transport
                    seeding.enter_context(seeded_masters(arena, transport, self.threads, self.config.timeout_s))
                places = {id(p): (arena.number, i) for arena in made for i, p in enumerate(arena.params)}
                left = [*self.watch.left, *(Left(arena.params) for arena in made)]
                # one statement: an interrupt falls before or after it
                self.arenas, self._place_of, self.watch.left = [*self.arenas, *made], {**self._place_of, **places}, left
        except BaseException:
            if self.stream is not None:
                self.stream.release()
            raise
        if self.stream is not None:
            self.stream.open(self.arenas)

    def _lots(self, fresh: Sequence[Tensor]) -> list[Lot]:
        return self.share.lots(fresh, [self._unit_of(p) for p in fresh], self.rank(), self._resident_bytes())

    def new_arena(self, lot: Lot, number: int) -> Arena:
        """For state of `lot`, on the device or the host; nothing is bound to it yet."""
        units = [self._unit_of(p) for p in lot.params]
        if lot.resident:
            return ResidentArena(lot.params, units, number, self.placement.transport.adam(self.threads))
        numbers = {id(p): i for i, p in enumerate(self._parameters())}
        rounding = Rounding(self.config.rounding_seed, [numbers.get(id(p), -1) for p in lot.params])
        return Arena(lot.params, units, self.config.bucket_bytes, number, self.kind, rounding)

    def _resident_bytes(self) -> int:
        return sum(a.device_bytes for a in self.arenas)

    def replace(self, number: int, arena: Arena) -> None:
        """`arena` has the state of arena `number` from now on: it has moved to the device, or back."""
        self._whole, old = None, self.arenas[number]
        arenas, untold = [*self.arenas[:number], arena, *self.arenas[number + 1 :]], [*self._untold, *arena.params]
        self.arenas, self._untold = arenas, untold  # one statement: an interrupt falls before or after it
        self._tell_moved()
        if self.stream is not None:
            self.stream.open(self.arenas)
        if self._delay is None or not self._delay.pending:  # else its masters still are to become weights
            old.let_go()

    def _tell_moved(self) -> None:
        if self._untold:
            self.moved(self._untold)
            self._untold = []

    def hand_over(self, params: Sequence[Tensor]) -> None:
        """Another engine steps these from now on: no step or gradient of ours may come in between.

        Our hooks may still be on the model: they bind nothing any more. A step of ours that is asked for is taken.
        """
        self._displaced = True
        try:
            self.wait_all()
        finally:
            if self.stream is not None:
                self.stream.let_go(params)

    def taken_bytes(self) -> int:
        """Host memory that is ours, the ring left out."""
        more = (self.stream.nbytes if self.stream else 0) + (self.speculation.nbytes if self.speculation else 0)
        return sum(sum(a.nbytes.values()) for a in self.arenas) + more

    def _unit_of(self, p: Tensor) -> int:
        if self.gates is None:
            return OUTSIDE
        return self.gates.unit_of.get(id(p), OUTSIDE)

    # ---- the step

    def gather(self, groups: Sequence[Mapping[str, Any]]) -> GradientSet:
        """Every gradient of `groups`. Where gradients are streamed, what has not left yet leaves now.

        Raises:
            UnsupportedError, StateError: as `collect`. HostMemoryError: as `bind`.
        """
        if self._roll is None or not self._roll.holds(groups):
            self._roll, self._whole = Roll(groups), None
        roll = self._roll
        if not self._gathered and not self._closed:
            share_out(self, roll.params)
            self._gathered = True
        if not self.config.stream_gradients:
            return DeviceSet(collect(roll), self.threads)
        self._check_open()
        if self.stream is not None and not self.stream.incomplete and self._has_left():
            assert self._whole is not None
            return self._whole
        self._let_leave(roll)
        if self.stream is None:
            return DeviceSet(Found.of(()), self.threads)  # nothing is bound yet, for want of gradients
        items = collect(roll, self.stream.placeholders(roll.params))
        streamed = Found.of([g for g in items if g.value is None])
        found = StoreSet(streamed, [self._place_of[id(p)] for p in streamed.params], self.stream)
        if len(streamed) < len(items):
            staying = Found.of([g for g in items if g.value is not None])
            return MixedSet(items, DeviceSet(staying, self.threads), found)
        if len(items) == len(roll.params):
            self._whole, self._placeholders = found, [p.grad for p in items.params]
        return found

    def _has_left(self) -> bool:
        """Whether every gradient there can be has left. Looked at first, since it is so in most steps."""
        if self._whole is None or self._roll is None:
            return False
        return all(map(operator.is_, [p.grad for p in self._roll.params], self._placeholders))

    def _let_leave(self, roll: Roll) -> None:
        """Gradients that are still in `.grad`, or in incomplete buckets, leave."""
        if self.stream is not None:
            self.stream.take_back()
        here = collect(roll, self.stream.placeholders(roll.params) if self.stream else None)
        if any(value is not None for value in here.values):
            self.bind_trainable()
            self.bind(here.params)
        if self.stream is not None:
            self.stream.open(self.arenas)  # an interrupt may have come right after binding
            self.stream.flush()

    def step(self, groups: Sequence[Mapping[str, Any]], found: GradientSet, factor: Factor) -> None:
        """Take one step with the gradients `found`, multiplied by `factor`. Returns when `schedule` says so."""
        self._check_open()
        awaited = max(self._waited_to.values(), default=-1)
        self._wait_step()
        record = self.meter.begin(self.steps + 1)
        with self.meter.waiting("step"):
            self.bind_trainable()
            seating = self._seat(found.items)
            self._check_undelivered()
            self._reseed_suspects()
            pipeline = self._pipeline or self._start()
            self._learn(found.items, awaited)
            work = self._take(groups, found.items, factor, seating)
            pipeline.submit(work, record)
            self._gathered = False
            self.skips.taken()
        self._await_resident(pipeline, work)  # not exposed: what the device does between two steps is compute
        with self.meter.waiting("step"):
            if pipeline.schedule.returns_at_once:
                self._wait_units({OUTSIDE})  # no hook of ours tells when these are read
            else:
                pipeline.wait_all()
        self.meter.end()

    def _await_resident(self, pipeline: Pipeline, work: StepWork) -> None:
        """Return when the calling thread's device stream sees the weights whose state stays on the device."""
        count = sum(b.resident for b in work.delivered)
        if count:
            pipeline.wait_bucket(count - 1)
            self._waited_to[self.placement.transport.here()] = count - 1

    @property
    def attempts(self) -> int:
        """Steps taken or skipped since construction."""
        return self.steps + self.skips.count

    @property
    def steps(self) -> int:
        """How many steps were taken; one counts from the moment it can no longer be lost."""
        return self._pipeline.steps if self._pipeline is not None else 0

    def skip(self, factor: Factor) -> None:
        """A step that is not taken: no byte of state changes."""
        self._gathered = False
        self.skips.add()
        if self.stream is not None:
            self.stream.step_taken(factor.inverse, clipped=True)

    def not_finite(self, found: GradientSet) -> str:
        """Names of parameters whose gradients in `found` are not finite, the first few."""
        return not_finite(found.items.params, found.sums(), self._attached, self._groups())

    @property
    def _attached(self) -> nn.Module | None:
        return self._model() if self._model is not None else None

    def check_model(self) -> None:
        """Before a step: does the attached model still train what the optimizer steps?

        Raises:
            StateError: it has new parameters in place of some.
        """
        root = self._attached
        if self._census is not None and root is not None:
            self._census.check(root, self._parameters, rebuilt=self.watch.alert)

    def _learn(self, grads: Found, awaited: int) -> None:
        """What this step's forward showed of the hooks; `awaited`: the last bucket that one of them waited for.

        Raises:
            StateError: weights were read that no hook had waited for, while the step before was still writing them.
        """
        found = set() if self.gates is None else self.gates.end_of_step(grads.params)
        early = [u for u in sorted(found) if self._last_of_unit.get(u, -1) > awaited]
        if early:
            raise StateError(
                f"weights of {' and '.join(repr(self._unit_name(u)) for u in early)} were used in this step's forward "
                "though none of their modules was called, and the step before was still writing them: these gradients "
                "may be wrong, and were not stepped. From now on these weights are awaited before the model runs: drop "
                "the gradients with zero_grad() and go on. To be safe from the start use schedule='in_order'."
            )

    def _seat(self, grads: Found) -> Seating:
        """Where the state is of the parameters that are stepped; those that have none yet are bound."""
        if self._seating is None or not self._seating.holds(grads, [len(a.params) for a in self.arenas]):
            self.bind(grads.params)  # unfrozen or added later, or frozen since backward
            self._seating = Seating(grads, [len(a.params) for a in self.arenas], self._place_of)
        return self._seating

    def _take(self, groups: Sequence[Mapping[str, Any]], grads: Found, factor: Factor, seating: Seating) -> StepWork:
        """Freeze what the step needs: gradients, addresses, step counts, hyper-parameters."""
        rows = Coefficients(groups, factor.value)
        stores = None if self.stream is None else self.stream.stores
        addresses = [left.addresses for left in self.watch.left]  # the suspects were looked for just now
        works = take(self.arenas, seating.seats, grads, addresses, rows, stores)
        if self.stream is not None:
            self.stream.step_taken(factor.inverse, clipped=factor.clip != 1.0)
        else:
            self._may_be_kept = [work for work in works if not work.arena.resident]
        here = [work for work in works if self.stream is None or work.arena.resident]
        self._peak_gradient_bytes = max(self._peak_gradient_bytes, sum(work.nbytes for work in here))
        buckets = bucket_works(works, self._unit_name, self.rank())
        delivered = self._delay.next(buckets, self._most_steps()) if self._delay is not None else buckets
        if delivered is not buckets:  # what stays on the device is stepped when `step` has returned, too
            self._may_be_kept = works
        if self._delay is not None:
            # from here on an interrupt leaves what is pending to be delivered once more
            self._delay.delivering = True
        self._deliver(delivered)
        if self._delay is not None:
            self._delay.note_weights(buckets)
            self._delay.delivering = False
        return StepWork(works, buckets, delivered)

    def _deliver(self, delivered: Sequence[BucketWork]) -> None:
        """The weights of these buckets will be written from now on."""
        works = works_of(delivered)
        for work in works:
            params = work.params
            if self.config.poison:
                for p in params:
                    p.detach().fill_(math.nan)
            torch.autograd.graph.increment_version(params)
        for work in works:  # after all: parameters that are views of one tensor share its version counter
            work.note_weights()
            indices = None if work.whole else work.stepped.tolist()
            self.watch.note_step(work.arena.number, indices, work.weight_versions, work.weight_pointers)
        self._waited_to = {}
        self._last_of_unit = {unit: k for k, b in enumerate(delivered) for unit in b.units}

    def _most_steps(self) -> int:
        return max((int(a.steps.max()) for a in self.arenas if a.params), default=0)

    def _check_undelivered(self) -> None:
        """Delayed: nobody may have written to weights that the step before is still to be sent to."""
        if self._delay is not None and self._delay.overwritten():
            raise StateError(
                "schedule='delayed': a weight was written to while an update for it was pending, which would be lost. "
                "Call optimizer.synchronize() before you write to weights; load the last checkpoint to go on."
            )

    def rank(self) -> dict[int, int]:
        """Of each unit, its place in the order of forward."""
        ranks = {OUTSIDE: -1}
        if self.gates is not None:
            ranks.update(enumerate(self.gates.rank()))
        return ranks

    def _unit_name(self, unit: int) -> str:
        return "all" if unit == OUTSIDE or self.gates is None else self.gates.units.units[unit].name

    def _start(self) -> Pipeline:
        """The schedule is settled at the first step, or when streaming begins: then it is known if there is a model."""
        name = self._base
        if name != "in_order":
            check_overlap(name, self.gates is not None, several_ranks())
        if self.config.stream_gradients:
            check_streaming(several_ranks())
        stages = Stages(self.placement.transport, self.threads, self.config.timeout_s, self._ranges)
        schedule = make_schedule(name, self.config, self.speculation)
        with self.placement.near():
            pipeline = Pipeline(stages, schedule, self.speculation)
        delay = stream = None
        if name == "delayed":
            delay = Delay(self.config.delay_warmup_steps, lambda: pipeline.delivered)
        if self.config.stream_gradients:
            stream = GradientStream(
                self.placement.transport, pipeline, self.meter, self.threads, self.config.accumulate_dtype,
                self.speculation, self._groups, self._ranges,
            )  # fmt: skip
        # one statement: an interrupt falls before or after it
        self.stream, self._delay, self._pipeline = stream, delay, pipeline
        return pipeline

    # ---- waiting

    def wait_all(self) -> None:
        """Return when no step is under way, no update is pending, and the weights are on the device."""
        self._wait_step()
        if self._delay is not None and self._delay.pending and not self._closed:
            self._check_undelivered()
            with self.meter.waiting():
                self._send_pending(self._delay).wait_all()

    def _send_pending(self, delay: Delay) -> Pipeline:
        """Delayed: the pending update goes to the device."""
        assert self._pipeline is not None and self.meter.current is not None
        delay.delivering = True  # an interrupt from here on: it is delivered once more
        delivered = delay.pending
        self._deliver(delivered)
        self._pipeline.submit(StepWork((), (), delivered), self.meter.current)
        delay.end()
        return self._pipeline

    def _wait_step(self) -> None:
        """Return when no step is under way. Delayed: the last update may be pending."""
        if self._pipeline is not None and (self._pipeline.running or self._pipeline.failed):
            with self.meter.waiting():
                self._pipeline.wait_all()
        self._waited_to[ANYWHERE] = ALL
        self._may_be_kept = []

    def wait_outsider(self) -> None:
        """As `wait_all`, for somebody who may read or write the weights: the next step looks whether they did."""
        self.wait_all()
        if not self._closed:
            self.watch.arm()

    def wait_unguarded(self) -> None:
        """Wait for the weights that no hook guards."""
        self._wait_units(self._unguarded())

    def wait_gradients(self) -> None:
        """Wait until `.grad` may be written to. The whole step is waited for, a little longer than its copies take."""
        self._wait_step()

    def zero_gradients(self) -> bool:
        """Gradients that left during backward become zeros, where they are. Returns whether gradients are streamed."""
        if self.stream is not None:
            self.stream.zero()
        return self.stream is not None

    def settle_state(self) -> None:
        """Return when the flat arrays, which `optimizer.state` shows, are the state and nobody writes them."""
        self._wait_step()
        self._tell_moved()
        speculation = self.speculation
        if speculation is not None and self._pipeline is not None and not self._closed:
            self._pipeline.call(lambda: speculation.bring_home(self.arenas), "the state")

    def _unguarded(self) -> tuple[int, ...]:
        return (OUTSIDE, *self.gates.at_root) if self.gates is not None else (OUTSIDE,)

    def _wait_units(self, units: Iterable[int]) -> None:
        if self._pipeline is None or not (self._pipeline.running or self._pipeline.failed):
            self._waited_to[ANYWHERE] = ALL
            return
        here = self.placement.transport.here()
        last = max((self._last_of_unit.get(u, -1) for u in units), default=-1)
        if last > self._waited_to.get(here, -1) or self._pipeline.failed:
            if not self._pipeline.pass_bucket(last):
                with self.meter.waiting():
                    self._pipeline.wait_bucket(last)
            self._waited_to[here] = last

    def _wait_for_kept_gradients(self) -> None:
        """Gradients that nobody dropped after `step()` go on accumulating: not before their copies have ended."""
        if any(work.gradients_kept() for work in self._may_be_kept):
            self.wait_gradients()
        self._may_be_kept = []

    # ---- what the hooks on the model call

    def before_root(self) -> None:
        assert self.gates is not None
        if not self._closed:
            give_back(self)  # after an allocation that failed, say, when smaller batches are tried
        self._before_forward()
        self._wait_units(self._unguarded())

    def before_guard(self, guard: int) -> None:
        assert self.gates is not None
        self._before_forward()
        self._wait_units((*self._unguarded(), *self.gates.needs_of(guard)))

    def after_block(self, unit: int) -> None:
        assert self.gates is not None
        if unit == self.gates.last_block and self.gates.units.tail is not None:
            self.gates.end_of_blocks()
            self._wait_units({self.gates.units.tail})

    def before_state_read(self) -> None:
        self.wait_outsider()

    def before_state_load(self) -> None:
        self.wait_all()

    def after_state_load(self) -> None:
        self.watch.suspect_all()

    def _before_forward(self) -> None:
        if self._may_be_kept:
            self._wait_for_kept_gradients()
        if self.stream is not None:
            self.stream.take_back()  # after a backward that failed
        if not (self._bound or self._closed or self._displaced) and torch.is_grad_enabled():
            self.bind_trainable()
            self.watch.arm()  # before the first step nobody has a reason to wait before writing to weights

    # ---- weights changed from outside

    def reseed(self) -> int:
        """Masters again from every weight that is no longer its rounded master. Returns how many elements changed."""
        self._check_open()
        self.wait_all()
        self.watch.suspect_all()
        changed = self._reseed(self.watch.suspects())
        self.watch.arm()  # whoever asked may write again
        return changed

    def _reseed_suspects(self) -> None:
        changed = self._reseed(self.watch.suspects())
        if changed:
            logger.warning(
                "hf_offload: %d weights were changed from outside since the last step; their master weights now "
                "follow them.", changed,
            )  # fmt: skip

    def _reseed(self, suspects: Sequence[tuple[int, list[int]]]) -> int:
        changed = 0
        if suspects:
            self.settle_state()
            if self.stream is not None:
                self.stream.settle()  # the ring is needed
            check_apart(p for a in self.arenas for p in a.params)  # `a.data = b.data` shows as another address
        for number, indices in suspects:
            arena = self.arenas[number]
            arena.check_unchanged(indices)
            transport = self.placement.transport
            changed += reseed_masters(arena, set(indices), transport, self.threads, self.config.timeout_s)
            self.watch.note(number, indices)
        self.watch.settled()
        return changed

    # ---- figures and the end

    def stats(self) -> Stats:
        """The figures of the last finished step."""
        return figures(
            self.placement, self.arenas, self.meter.last_finished(), self.stream, self.speculation,
            schedule=self.schedule, steps=self.steps, skipped_steps=self.skips.count,
            peak_gradient_bytes=self._peak_gradient_bytes,
        )  # fmt: skip

    def record_to(self, timeline: Timeline | NoTimeline) -> None:
        """What is recorded from now on goes to `timeline`; what was recorded before is written."""
        if not self._closed:
            self._wait_step()
        recorded = self.meter.timeline
        self.meter.record_to(timeline)
        recorded.write()

    def close(self) -> None:
        """Finish the step under way, end the threads, free the pinned memory, take the hooks off the model.

        Raises:
            StateError: a step failed, this one or one before: the weights may be half stepped.
        """
        try:
            if not self._closed and self._pipeline is not None and not self._pipeline.failed:
                self.wait_all()  # delayed: the pending update, too
                self.settle_state()
        finally:
            self._closed = True
            try:
                self._send_what_is_left()
            finally:
                self._release()
        self.wait_all()  # there is nothing to wait for; it raises what the last step may have left behind

    def _send_what_is_left(self) -> None:
        """Delayed: Ctrl-C fell into the wait for the pending update; the step's thread ends with all it was given."""
        delay, pipeline = self._delay, self._pipeline
        if delay is not None and delay.pending and pipeline and not pipeline.failed and not delay.overwritten():
            pipeline.wait_all()
            self._send_pending(delay)

    def _release(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        if self.stream is not None:
            self.stream.close()
        self.placement.close()
        if self.gates is not None:
            self.gates.remove()
        self.meter.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this optimizer was closed: its threads and pinned memory are gone. Make a new one.")
