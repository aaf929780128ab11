"""Ctrl-C in a notebook: `train()` is interrupted anywhere, the session lives on, `train()` is called again; the bits
are those of a run that was stopped between two steps and went on."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from support.engine import TinyLM, batches, copies, late, optimizer_of, settings
from support.faults import Spots, agree, learn, leftovers, most_modes, undisturbed
from support.faults import bits_of as bits_of_loop
from support.faults_hf import bits_of, forget_accelerate, ours_of, stopped_after, trainer

LONG_RUN = 100_000
THEN = 2
AGAIN = [
    *(("", "_start", nth) for nth in range(8, 900, 90)),
    *(("state.py", "__init__", nth) for nth in range(5, 250, 40)),
]
SPOTS = [(since, nth) for since in ("bind", "own", "_open") for nth in range(30, 1200, 240)]
MORE = [("bind_trainable", nth) for nth in range(97, 40_000, 997)]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    forget_accelerate()
    yield
    forget_accelerate()


@contextlib.contextmanager
def pressed(*seconds: float) -> Iterator[list[float]]:
    """Ctrl-C by a real signal, after each of these times. Gives those that are still to come."""
    times = list(seconds)

    def press(number: int, frame: Any) -> None:
        times.pop(0)
        if times:
            signal.setitimer(signal.ITIMER_REAL, times[0])
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, times[0])
    try:
        yield times
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(run: Any, *seconds: float) -> None:
    """`run()`, until Ctrl-C; a second one comes while the first is being told of."""
    with pytest.raises(KeyboardInterrupt), pressed(*seconds) as left:
        try:
            run()
        except KeyboardInterrupt:
            while left:  # until the second comes, unless it came already
                time.sleep(1e-3)
            raise


@pytest.mark.parametrize("presses", [1, 2])
@most_modes
def test_a_loop_of_ones_own(mode: str, presses: int) -> None:
    """A few hundred steps a second: where it falls is up to the machine."""
    dice = random.Random(f"{mode} {presses}")
    for _ in range(3):
        data, model = batches(), TinyLM()
        with copies(late("h2d", 2e-4)):
            optimizer = optimizer_of(model, settings(mode))
        learn(model, optimizer, data, 1)
        optimizer.synchronize()
        interrupted(
            lambda m=model, o=optimizer, d=data: learn(m, o, d, LONG_RUN),
            *[dice.uniform(0.005, 0.04) for _ in range(presses)],
        )
        optimizer.zero_grad()
        optimizer.synchronize()
        taken = optimizer.stats().steps
        before = bits_of_loop(model, optimizer)
        counted = {int(t.item()) for name, t in before[1].items() if name.endswith(".step")}
        assert counted == {taken}
        if mode != "delayed":  # where synchronize() itself changes what comes
            assert agree(before, undisturbed(mode, taken))
        rest = batches()
        for _ in range(taken):
            next(rest)
        learn(model, optimizer, rest, THEN)
        found = bits_of_loop(model, optimizer)
        optimizer.close()
        if mode != "delayed":
            assert agree(found, undisturbed(mode, taken + THEN))
    assert not leftovers()


TRAINED = pytest.mark.parametrize(
    "mode", ["overlapped", "speculative", *(pytest.param(m, marks=pytest.mark.slow) for m in ("in_order", "streamed"))]
)


@TRAINED
@pytest.mark.parametrize("presses", [1, 2])
def test_train_and_train_again(mode: str, presses: int, tmp_path: Path) -> None:
    dice = random.Random(f"{mode} {presses}")
    for n in range(2):
        made = trainer(mode, tmp_path, max_steps=LONG_RUN, latency_us=100, logging_steps=LONG_RUN)
        interrupted(made.train, *[dice.uniform(0.2, 0.5) for _ in range(presses)])
        if made.optimizer is None:
            continue  # it came before there was anything of ours
        made.args.max_steps = THEN
        taken = ours_of(made).stats().steps if ours_of(made).engine.arenas else 0
        made.train()
        found = bits_of(made)
        ours_of(made).close()
        assert agree(found, stopped_after(taken, THEN)), (n, taken)
        del made
    assert not leftovers()


@TRAINED
def test_a_new_trainer_over_the_same_model(mode: str, tmp_path: Path) -> None:
    """As the next cell of a notebook makes it; the first is neither closed nor forgotten."""
    first = trainer(mode, tmp_path, max_steps=LONG_RUN, latency_us=100, logging_steps=LONG_RUN)
    interrupted(first.train, 0.5)
    second = trainer(mode, tmp_path, model=first.model, max_steps=THEN)
    second.train()
    found = bits_of(second)
    ours_of(second).close()
    taken = ours_of(first).stats().steps if first.optimizer is not None and ours_of(first).engine.arenas else 0
    assert agree(found, new_trainer_after(taken)), taken
    if first.optimizer is not None:
        ours_of(first).close()


@pytest.mark.parametrize(("since", "nth"), [*SPOTS, *(pytest.param(*spot, marks=pytest.mark.slow) for spot in MORE)])
@pytest.mark.parametrize("mode", ["speculative", pytest.param("overlapped", marks=pytest.mark.slow)])
def test_wherever_it_falls(mode: str, since: str, nth: int, tmp_path: Path) -> None:
    """At chosen instructions of the engine's, where signals at random times hardly ever fall: while parameters are
    bound, an owner is noted, hooks are set. Then a new trainer over the same model."""
    first = trainer(mode, tmp_path, max_steps=2, logging_steps=LONG_RUN)
    spots = Spots("hf_offload/engine/", since, nth)
    with contextlib.suppress(KeyboardInterrupt), spots:
        first.train()
    assert spots.fell or (mode, since) == ("overlapped", "_open")  # where nothing is streamed, no hook is set
    ours = ours_of(first) if first.optimizer is not None else None  # `own` is first called while one is made
    taken = ours.stats().steps if ours is not None and ours.engine.arenas else 0
    second = trainer(mode, tmp_path, model=first.model, max_steps=THEN, logging_steps=LONG_RUN)
    second.train()
    found = bits_of(second)
    ours_of(second).close()
    if ours is not None:
        ours.close()
    assert agree(found, new_trainer_after(taken)), (spots.fell, taken)


@pytest.mark.parametrize(
    ("file", "since", "nth"), [*AGAIN, *(pytest.param("", *spot, marks=pytest.mark.slow) for spot in MORE)]
)
@pytest.mark.parametrize("mode", ["speculative", pytest.param("overlapped", marks=pytest.mark.slow)])
def test_the_same_trainer_wherever_it_falls(mode: str, file: str, since: str, nth: int, tmp_path: Path) -> None:
    """Again at chosen instructions: while the pipeline is made, while the state is shown. Then the same trainer."""
    made = trainer(mode, tmp_path, max_steps=THEN, logging_steps=LONG_RUN)
    spots = Spots(f"hf_offload/{file}", since, nth)
    with contextlib.suppress(KeyboardInterrupt), spots:
        made.train()
    assert spots.fell
    taken = ours_of(made).stats().steps if ours_of(made).engine.arenas else 0
    made.train()
    found = bits_of(made)
    ours_of(made).close()
    assert agree(found, stopped_after(taken, THEN)), (spots.fell, taken)


def test_a_hook_that_nobody_has_a_handle_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C falls between torch's setting a hook and our keeping its handle."""
    model, settings_ = TinyLM(), settings("speculative")
    first = optimizer_of(model, settings_)
    register = torch.Tensor.register_post_accumulate_grad_hook

    def pressed_after(p: torch.Tensor, hook: Any) -> Any:
        register(p, hook)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", pressed_after)
        model(next(batches()))
    second = optimizer_of(model, settings_)
    learn(model, second, batches(), THEN)
    assert agree(bits_of_loop(model, second), undisturbed("speculative", THEN))
    second.close()
    first.close()


@functools.cache
def new_trainer_after(steps: int) -> Any:
    model = None
    if steps:
        first = trainer("in_order", Path("/nowhere"), max_steps=steps)
        first.train()
        ours_of(first).close()
        model = first.model
    second: Trainer = trainer("in_order", Path("/nowhere"), model=model, max_steps=THEN)
    second.train()
    found = bits_of(second)
    ours_of(second).close()
    return found
