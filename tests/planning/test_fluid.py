"""The event simulator against cases worked out by hand."""

from __future__ import annotations

import pytest

from hf_offload.fluid import Mailbox, Process, Signal, Work, World


def timed(world: World, ends: dict[str, float], name: str, *works: Work | Signal) -> Process:
    yield from works
    ends[name] = world.now


@pytest.mark.parametrize(
    ("rates", "ends"),
    [
        # nobody slows anybody down
        ({}, {"a": 4, "b": 10}),
        # a at half its speed beside b: 4 take 8; b does not notice
        ({("a", "b"): 0.5}, {"a": 8, "b": 10}),
        # both at half: a's 4 take 8, by when b has done 4 of 10; the other 6 at full speed
        ({("a", "b"): 0.5, ("b", "a"): 0.5}, {"a": 8, "b": 14}),
    ],
)
def test_work_slows_down_only_as_long_as_the_other_is_busy(
    rates: dict[tuple[str, str], float], ends: dict[str, float]
) -> None:
    world, found = World(rates), {}
    world.start(timed(world, found, "a", Work("a", 4)))
    world.start(timed(world, found, "b", Work("b", 10)))
    world.run()
    assert found == pytest.approx(ends)


def test_several_others_multiply_and_a_kind_may_slow_itself_down() -> None:
    world, found = World({("a", "b"): 0.5, ("a", "c"): 0.5, ("b", "b"): 0.5}), {}
    world.start(timed(world, found, "a", Work("a", 1)))
    world.start(timed(world, found, "c", Work("c", 4)))
    for name in ("one", "two"):
        world.start(timed(world, found, name, Work("b", 100)))
    world.run()
    # a: 1/8 of its speed beside b, b and c until 4: half is left, at a quarter: 2 more
    assert found == pytest.approx({"c": 4, "a": 6, "one": 200, "two": 200})


def test_a_signal_lets_go_of_those_who_wait_and_of_those_who_come_later() -> None:
    world, found, signal = World(), {}, Signal()

    def fires() -> Process:
        yield Work("x", 3)
        world.fire(signal)

    world.start(timed(world, found, "early", signal, Work("x", 1)))
    world.start(fires())
    world.start(timed(world, found, "late", Work("x", 5), signal))
    world.run()
    assert found == {"early": 4, "late": 5}


def test_a_mailbox_keeps_the_order_and_what_came_before_it_was_asked_for() -> None:
    world = World()
    mail: Mailbox[int] = Mailbox(world)
    found: list[tuple[float, int]] = []

    def receives() -> Process:
        yield Work("x", 1)
        for _ in range(3):
            found.append(((yield from mail.get()), world.now))

    def sends() -> Process:
        mail.put(1)
        mail.put(2)
        yield Work("x", 7)
        mail.put(3)

    world.start(receives())
    world.start(sends())
    world.run()
    assert found == [(1, 1), (2, 1), (3, 7)]


def test_what_waits_in_vain_does_not_keep_the_world_running() -> None:
    world, found = World(), {}
    world.start(timed(world, found, "never", Signal()))
    world.start(timed(world, found, "some time", Work("x", 2)))
    world.run()
    assert found == {"some time": 2}


def test_rounding_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends by the arithmetic ends: a rest of 1e-17 seconds would be one event more."""
    events: list[float] = []
    passing = World._pass_time
    monkeypatch.setattr(World, "_pass_time", lambda world: (events.append(world.now), passing(world)))
    for k in range(1, 200):
        world, found = World({("a", "b"): k / 211}), {}
        world.start(timed(world, found, "a", Work("a", 0.1)))
        world.start(timed(world, found, "b", Work("b", 1e4)))
        world.run()
    assert len(events) == 2 * 199
