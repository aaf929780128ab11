"""From a calibration to seconds: what of it goes into the simulation, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_offload import prediction
from hf_offload.calibration import Calibration, Engine, Link, UnitCost
from hf_offload.config import OffloadConfig
from hf_offload.engine.plan import ParamSpec, plan_buckets
from hf_offload.prediction import Curve, Work
from hf_offload.simulation import SCHEDULES, HostCost, LinkCost, Way

UNITS = (
    UnitCost(params=3_000_000, wire="bfloat16", forward=(0.5, 0.25), backward=(1.0, 0.5)),
    UnitCost(params=5_000_000, wire="bfloat16", forward=(0.0, 0.125), backward=(0.0, 0.25)),
)
CONFIG = OffloadConfig(bucket_bytes=4_000_000)


def made(**changes: Any) -> Calibration:
    free = LinkCost(per_byte=0.0)
    given: dict[str, Any] = {
        "machine": {}, "model": {"name": "m", "digest": "d"}, "units": UNITS, "seq_len": 8, "rows": (1, 2),
        "threads": 2, "state_dtype": "float32", "host": HostCost(step=1e-6),
        "engine": Engine(step_s=0, bucket_s=0, fetch_s=0, idle_s=0),
        "link": Link(transport="host", emulates=True, down=free, up=free),
    }  # fmt: skip
    return Calibration(**{**given, **changes})


def by_name(found: Calibration, config: OffloadConfig, work: Work) -> dict[str, prediction.Prediction]:
    return {p.schedule: p for p in prediction.predict(found, config, work)}


def test_buckets_are_cut_as_the_engine_cuts_them() -> None:
    units = prediction.units_of(made(), CONFIG, Work(tokens=4))
    specs = [ParamSpec(1_500_000, "bfloat16", 0)] * 2 + [ParamSpec(1_000_000, "bfloat16", 1)] * 5
    cut = plan_buckets(specs, CONFIG.bucket_bytes).buckets
    assert [(b.params, b.nbytes) for unit in units for b in unit.buckets] == [(b.numel, b.nbytes) for b in cut]
    assert (units[0].forward, units[0].backward) == (0.5 + 1.0, 1.0 + 2.0)


def test_in_order_is_compute_and_host_step() -> None:
    told = by_name(made(), CONFIG, Work(tokens=4, accumulation=3, clip=False))["in_order"]
    assert told.compute == pytest.approx(3 * (1.5 + 3.0 + 0.5 + 1.0))
    assert told.exposed == pytest.approx(8.0)
    assert told.step == pytest.approx(told.compute + told.exposed)


def test_what_the_engine_takes_reaches_the_simulation() -> None:
    """*In order* each bucket is waited for."""
    way = LinkCost(per_byte=0.0, latency=0.1)
    quick = made(link=Link(transport="host", emulates=True, down=way, up=way))
    slow = dataclasses.replace(quick, engine=Engine(step_s=1.0, bucket_s=0.25, fetch_s=0.125, idle_s=0.5))
    took, free = (by_name(found, CONFIG, Work(tokens=4, clip=False))["in_order"].exposed for found in (slow, quick))
    buckets = sum(len(unit.buckets) for unit in prediction.units_of(slow, CONFIG, Work(tokens=4)))
    assert took - free == pytest.approx(1.0 + buckets * (0.25 + 0.125 + 0.5))


def test_all_schedules_are_predicted_or_those_asked_for() -> None:
    assert list(by_name(made(), CONFIG, Work(tokens=4))) == list(SCHEDULES)
    found = prediction.predict(made(), CONFIG, Work(tokens=4), ["delayed"])
    assert [p.schedule for p in found] == ["delayed"]


def test_an_emulated_link_lies_on_top_of_the_hosts_copies() -> None:
    copies = LinkCost(per_byte=0.0, core_per_byte=2e-9, latency=1e-5)
    found = made(link=Link(transport="host", emulates=True, down=copies, up=copies, emulation_s=2e-5))
    config = dataclasses.replace(CONFIG, link_gb_s=0.25, link_latency_us=30.0)
    costs = prediction.costs_of(found, config)
    assert costs.down == costs.up == LinkCost(per_byte=4e-9, core_per_byte=2e-9, latency=pytest.approx(6e-5))
    assert prediction.costs_of(found, CONFIG).down == copies, "no link is emulated"
    real = made(link=Link(transport="cuda", emulates=False, down=LinkCost(per_byte=5e-11), up=copies))
    assert prediction.costs_of(real, CONFIG).down.per_byte == 5e-11


def test_who_slows_whom_down_reaches_the_simulation() -> None:
    slow = by_name(made(rates={"device beside host": 0.5}), CONFIG, Work(tokens=40))
    alone = by_name(made(), CONFIG, Work(tokens=40))
    assert slow["overlapped"].step > alone["overlapped"].step
    assert slow["in_order"].step == alone["in_order"].step
    assert slow["overlapped"].compute == alone["overlapped"].compute


@pytest.mark.parametrize(
    ("resident", "left"),
    [
        (0.0, 8_000_000),
        (0.25, 6_000_000),
        (0.375, 5_000_000),
        (1.0, 0),
    ],
)
def test_what_stays_on_the_device_neither_travels_nor_is_stepped(resident: float, left: int) -> None:
    units = prediction.units_of(made(), CONFIG, Work(tokens=4, resident=resident))
    assert sum(b.params for unit in units for b in unit.buckets) == left
    assert sum(b.nbytes for unit in units for b in unit.buckets) == 2 * left
    assert sum(b.params for b in units[1].buckets) == min(left, 5_000_000), "what forward needs first stays"


@pytest.mark.parametrize(
    ("ran", "way"),
    [
        ("in_order", Way(waits=True)),
        ("in_order+streamed", Way(waits=True, streamed=True)),
        ("overlapped", SCHEDULES["overlapped"]),
        ("overlapped+streamed", SCHEDULES["streamed"]),
        ("overlapped+streamed+speculative", SCHEDULES["speculative_hit"]),
        ("delayed", SCHEDULES["delayed"]),
    ],
)
def test_names_of_the_stats(ran: str, way: Way) -> None:
    assert prediction.way_of(ran) == way
    assert prediction.predict_as_trained(made(), CONFIG, Work(tokens=4), ran).step > 0


def test_shadow_and_ring_are_those_of_the_settings() -> None:
    slow = made(host=HostCost(step=1e-5, guess=1e-5))
    some = OffloadConfig(bucket_bytes=4_000_000, stream_gradients=True, shadow_bytes=14 * 2_000_000)
    work = Work(tokens=400)
    name = "overlapped+streamed+speculative"
    covered = prediction.predict_as_trained(slow, CONFIG, work, name).step
    assert covered < prediction.predict_as_trained(slow, some, work, name).step


def curve(exposed: list[float]) -> Curve:
    tokens = tuple(range(1, len(exposed) + 1))
    return Curve("overlapped", tokens, tuple(10.0 + e for e in exposed), (10.0,) * len(exposed))


@pytest.mark.parametrize(
    ("exposed", "at"),
    [
        ([2, 1, 0.4, 0.1], 3),
        ([0.1, 0.1], 1),
        ([2, 2], None),
        ([2, 0.1, 2, 0.1], 4),
        ([0.1, 2], None),
    ],
)
def test_where_it_vanishes_and_does_not_come_back(exposed: list[float], at: int | None) -> None:
    assert curve(exposed).vanishes_at == at


def test_curves_are_the_predictions_at_each_size() -> None:
    work = Work(tokens=4, accumulation=2, clip=False)
    found = {c.schedule: c for c in prediction.curves(made(), CONFIG, work, [2, 4, 8])}
    assert list(found) == list(SCHEDULES)
    for name, told in by_name(made(), CONFIG, work).items():
        assert found[name].tokens == (2, 4, 8)
        assert found[name].steps[1] == told.step
        assert found[name].compute[1] == told.compute
