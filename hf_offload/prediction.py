"""From a calibration to seconds per step, for any batch, accumulation and schedule. Pure; nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_offload import planner
from hf_offload.calibration import Calibration
from hf_offload.config import OffloadConfig
from hf_offload.simulation import SCHEDULES, BucketSize, Costs, LinkCost, Outcome, UnitWork, Way, simulate

VANISHED = 0.05
"""The part of a step's compute below which what is exposed counts as vanished."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step does.

    Attributes:
        tokens: of one micro-batch; accumulation: micro-batches in a step.
        clip: whether the gradients' norm is needed before the step.
        resident: the part of the parameters whose state stays on the device: they neither travel nor are stepped on
            the host. What forward needs first stays.
    """

    tokens: int
    accumulation: int = 1
    clip: bool = True
    resident: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one step.

    Attributes:
        schedule: a name of `simulation.SCHEDULES`.
        step: from a step's begin to the next one's.
        compute: what forward and backward take alone.
        exposed: the rest: what the optimizer adds.
    """

    schedule: str
    step: float
    compute: float
    exposed: float


def predict(found: Calibration, config: OffloadConfig, work: Work, schedules: Iterable[str] = ()) -> list[Prediction]:
    """The step of each schedule.

    Args:
        config: bucket size, ring, shadow and emulated link count; its schedule does not.
        schedules: names of `simulation.SCHEDULES`; none: all.
    """
    units, costs = units_of(found, config, work), costs_of(found, config)
    return [_prediction(name, _outcome(SCHEDULES[name], units, costs, config, work)) for name in schedules or SCHEDULES]


def predict_as_trained(found: Calibration, config: OffloadConfig, work: Work, ran: str) -> Prediction:
    """The step of the schedule that a run's figures name, as `overlapped+streamed+speculative`.

    Guesses are taken to be right, as they are in steps that are not clipped.
    """
    outcome = _outcome(way_of(ran), units_of(found, config, work), costs_of(found, config), config, work)
    return _prediction(ran, outcome)


def way_of(ran: str, hits: bool = True) -> Way:
    """How a schedule goes about a step, by the name that `stats()` gives it."""
    base, *more = ran.split("+")
    return Way(
        waits=base == "in_order",
        delayed=base == "delayed",
        streamed="streamed" in more,
        guesses=hits if "speculative" in more else None,
    )


def _prediction(name: str, outcome: Outcome) -> Prediction:
    return Prediction(name, outcome.step, outcome.compute, outcome.exposed)


def _outcome(way: Way, units: Sequence[UnitWork], costs: Costs, config: OffloadConfig, work: Work) -> Outcome:
    shadow = config.shadow_bytes or None
    block = planner.STATE_BLOCK
    return simulate(
        way, units, costs, accumulation=work.accumulation, slots=config.ring_slots, clip=work.clip,
        shadow_bytes=shadow,
        state_bytes=planner.MASTER_BYTES + 2 * planner.moment_bytes(block, config.state_dtype) / block,
    )  # fmt: skip


def units_of(found: Calibration, config: OffloadConfig, work: Work) -> list[UnitWork]:
    """The model's units as they are simulated: their buckets cut as the engine cuts them."""
    from hf_offload.engine.formats import FORMATS
    from hf_offload.engine.plan import ParamSpec, plan_buckets

    specs = [ParamSpec(unit.params, unit.wire, u) for u, unit in enumerate(found.units)]
    buckets: list[list[BucketSize]] = [[] for _ in found.units]
    staying = work.resident * found.params
    for bucket in plan_buckets(specs, config.bucket_bytes, FORMATS[found.state_dtype].block).buckets:
        stays = min(bucket.numel, round(staying))
        staying -= stays
        if bucket.numel > stays:
            leaving = bucket.numel - stays
            buckets[bucket.unit].append(BucketSize(leaving, leaving * bucket.itemsize))
    return [
        UnitWork(_seconds(unit.forward, work.tokens), _seconds(unit.backward, work.tokens), tuple(mine))
        for unit, mine in zip(found.units, buckets)
    ]


def _seconds(line: tuple[float, float], tokens: int) -> float:
    fixed, per_token = line
    return fixed + per_token * tokens


def costs_of(found: Calibration, config: OffloadConfig) -> Costs:
    """What each piece of work takes. An emulated link lies on top of the host's own copies."""
    down, up = found.link.down, found.link.up
    if found.link.emulates:
        down, up = (_emulated(cost, config, found.link.emulation_s) for cost in (down, up))
    rates: dict[tuple[str, str], float] = {}
    for name, rate in found.rates.items():
        one, _, other = name.partition(" beside ")
        rates[one, other] = max(rate, 0.01)
    engine = found.engine
    return Costs(
        host=found.host, down=down, up=up, step_s=engine.step_s, bucket_s=engine.bucket_s, fetch_s=engine.fetch_s,
        idle_s=engine.idle_s, rates=rates,
    )  # fmt: skip


def _emulated(cost: LinkCost, config: OffloadConfig, emulation_s: float) -> LinkCost:
    if config.link_gb_s is None and not config.link_latency_us:
        return cost
    per_byte = 0.0 if config.link_gb_s is None else 1.0 / (config.link_gb_s * 1e9)
    latency = cost.latency + config.link_latency_us * 1e-6 + emulation_s
    return LinkCost(per_byte=per_byte, core_per_byte=cost.core_per_byte, latency=latency)


# ---- over many batch sizes


@dataclass(frozen=True)
class Curve:
    """One schedule's seconds per step over micro-batches of `tokens`."""

    schedule: str
    tokens: tuple[int, ...]
    steps: tuple[float, ...]
    compute: tuple[float, ...]

    @property
    def vanishes_at(self) -> int | None:
        """The first micro-batch from which on what is exposed is below VANISHED of the compute; None: beyond."""
        found = None
        for tokens, step, compute in zip(self.tokens, self.steps, self.compute):
            if step - compute > VANISHED * compute:
                found = None
            elif found is None:
                found = tokens
        return found


def curves(
    found: Calibration, config: OffloadConfig, work: Work, tokens: Sequence[int], schedules: Iterable[str] = ()
) -> list[Curve]:
    """Step time against micro-batch size, for each schedule. Arguments as `predict`'s."""
    at = [predict(found, config, _with_tokens(work, n), schedules) for n in tokens]
    return [
        Curve(each[0].schedule, tuple(tokens), tuple(p.step for p in each), tuple(p.compute for p in each))
        for each in zip(*at)
    ]


def _with_tokens(work: Work, tokens: int) -> Work:
    return Work(**{**asdict(work), "tokens": tokens})


def as_json(predictions: Sequence[Prediction]) -> dict[str, Mapping[str, Any]]:
    """Seconds of one step, by schedule."""
    return {
        p.schedule: {"step_seconds": p.step, "compute_seconds": p.compute, "exposed_seconds": p.exposed}
        for p in predictions
    }
