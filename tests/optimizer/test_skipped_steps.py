"""Steps that are not taken: under a loss scale in every schedule, and where gradients are not finite."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_offload.compat import OffloadGradScaler
from hf_offload.engine.norm import clip_factor
from hf_offload.engine.skips import ALARMING, Skips
from support.engine import LONG
from support.optimizer import make_params, offload
from support.outside import EVERY, Pair

every_mode = pytest.mark.parametrize("mode", EVERY)
OVERFLOW = 1e6  # what a gradient is multiplied by: beyond fp16


class Scaled(Pair):
    """A pair in fp16 whose OffloadAdam is driven by OffloadGradScaler, and its twin by GradScaler's rules by hand."""

    def __init__(self, mode: str, accumulation: int = 1, init_scale: float = 2.0**10, interval: int = 3) -> None:
        super().__init__(mode, "float16", accumulation)
        self.scaler = OffloadGradScaler("cpu", init_scale=init_scale, growth_interval=interval)
        self.scale, self.interval, self.good = init_scale, interval, 0
        self.skipped: list[bool] = []
        self.scales: list[float] = []

    def turn(
        self, clip: float | None = None, bad_micro: int | None = None, then: Callable[[], None] = lambda: None
    ) -> None:
        """One step of both, with an overflow in one of its micro-batches if asked. `then` is called before the step."""
        for micro in range(self.accumulation):
            seed, by = 100 * self.taken + micro, OVERFLOW if micro == bad_micro else 1.0
            self.scaler.scale(self.model(seed, by)).backward()
            (self.other(seed, by) * self.scale).backward()
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.optimizer.clip_grad_norm_(clip)
        then()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._twin(clip)
        self.model.zero_grad()  # as Trainer does: it is not the optimizer that is told
        self.other.zero_grad()
        self.taken += 1
        self.scales.append(self.scaler.get_scale())
        assert self.scales[-1] == self.scale

    def _twin(self, clip: float | None) -> None:
        overflow = not all(q.grad.isfinite().all() for q in self.others)
        self.skipped.append(overflow)
        if overflow:
            self.scale, self.good = self.scale / 2, 0
            return
        factor = 1.0 if clip is None else clip_factor(clip, self.optimizer.last_grad_norm or 0.0)
        self.follow()
        self.twin.step(1 / self.scale * factor)
        self.good += 1
        if self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0

    def check(self) -> None:
        super().check()
        stats = self.optimizer.stats()
        assert (stats.steps, stats.skipped_steps) == (self.skipped.count(False), self.skipped.count(True))


def memory(pair: Pair) -> list[bytes]:
    """Every byte of weights and state, with no wait that would deliver a pending update."""
    engine = pair.optimizer.engine
    engine.settle_state()
    arrays = [array for a in engine.arenas for array in (*a.state, a.steps)]
    weights = [p.detach().view(torch.int16).numpy() for p in pair.params]
    return [a.tobytes() for a in (*arrays, *weights)]


@every_mode
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_course_of_a_run(clip: float | None, accumulation: int, mode: str) -> None:
    """Far too large a scale at first: several overflows in a row, backoff, growth, overflow again."""
    pair = Scaled(mode, accumulation, init_scale=2.0**17, interval=2)
    for _ in range(14):
        pair.turn(clip)
    assert pair.skipped[:2] == [True, True] and True in pair.skipped[6:]
    pair.check()


@every_mode
@pytest.mark.parametrize("micro", [0, 1, 2])
def test_an_overflow_in_one_micro_batch_skips_the_step(micro: int, mode: str) -> None:
    pair = Scaled(mode, accumulation=3)
    for step in range(7):
        pair.turn(bad_micro=micro if step == 4 else None)
    assert pair.skipped == [step == 4 for step in range(7)]
    pair.check()


@every_mode
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_skipped_step_leaves_every_byte_and_a_pending_update(clip: float | None, mode: str) -> None:
    pair = Scaled(mode)
    for _ in range(4):
        pair.turn(clip)
    before = memory(pair)
    delay = pair.optimizer.engine._delay
    pending = delay.pending if delay is not None else None
    assert bool(pending) == (mode == "delayed")
    for _ in range(3):
        pair.turn(clip, bad_micro=0)
        assert memory(pair) == before
        assert delay is None or delay.pending is pending
    assert pair.skipped[4:] == [True] * 3
    pair.turn(clip)
    pair.check()


@every_mode
def test_weights_written_to_around_a_skipped_step(mode: str) -> None:
    pair = Scaled(mode)
    for _ in range(4):
        pair.turn()
    pair.write(lambda model: [p.data.mul_(1.5) for p in model.parameters()])
    pair.turn(bad_micro=0)
    pair.write(lambda model: [p.data.add_(0.25) for p in model.parameters()])
    pair.turn()
    pair.turn()
    pair.check()


def test_guessing_goes_on_after_a_skipped_step() -> None:
    """A guess made on the gradients that overflowed is never taken, and the next steps are guessed right again."""
    pair = Scaled("speculative", interval=100)
    engine = pair.optimizer.engine
    buckets = 0

    def all_is_guessed() -> None:
        nonlocal buckets
        buckets = len(engine.arenas[0].plan.buckets)
        engine.stream.settle()
        deadline = time.monotonic() + LONG
        while len(engine.speculation._guesses) < buckets:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    for step in range(8):
        pair.turn(bad_micro=0 if step == 3 else None, then=all_is_guessed)
    pair.check()
    stats = pair.optimizer.stats()  # missed: the first step, and the one after the scale went down
    assert (stats.speculation_hits, stats.speculation_misses) == (5 * buckets, 2 * buckets)


@pytest.mark.parametrize("mode", ["streamed in order", "delayed"])
@pytest.mark.parametrize("rule", ["when_clipping", "always", "never"])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_that_are_not_finite(clips: bool, rule: str, mode: str) -> None:
    """tests/optimizer/test_clipping.py has the other schedules."""
    pair = Pair(mode, "bfloat16", skip_nonfinite=rule)
    pair.steps(4)
    before = memory(pair)
    (pair.model(0) + pair.model.head.bias.float().sum() * math.inf).backward()
    if clips:
        pair.optimizer.clip_grad_norm_(math.inf)
    pair.optimizer.step()
    skips = rule == "always" or (rule == "when_clipping" and clips)
    assert pair.optimizer.stats().skipped_steps == int(skips)
    assert (memory(pair) == before) == skips
    pair.optimizer.zero_grad()
    if skips:
        pair.steps(2)
        pair.check()


# ---- what is said of them


def warned(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == level and "skipped whole" in r.message]


@every_mode
def test_the_warning_names_the_step_and_the_parameters(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(2)
    (pair.model(0) + pair.model.blocks[1].bias.float().sum() * math.nan).backward()
    pair.optimizer.clip_grad_norm_(1.0)
    pair.optimizer.step()
    (text,) = warned(caplog)
    assert "step 3 is skipped whole" in text and "not finite, of blocks.1.bias (skip_nonfinite='when_clipping'" in text


def test_names_without_a_model(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(shapes=[(3,)] * 5)
    for named in (params, [(f"w{i}", p) for i, p in enumerate(params)]):
        optimizer = offload(named)
        for p in params[1:]:
            p.grad = torch.full((3,), math.nan)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    texts = warned(caplog)
    assert "of parameter 1 of group 0, parameter 2 of group 0, parameter 3 of group 0 and 1 more (" in texts[0]
    assert "of w1, w2, w3 and 1 more (" in texts[1]


def test_a_run_in_which_every_step_is_skipped_is_told_of_with_rising_counts(caplog: pytest.LogCaptureFixture) -> None:
    (p,) = make_params(shapes=[(3,)])
    optimizer = offload([p])
    for _ in range(40):
        p.grad = torch.full((3,), math.nan)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert [text.split(";")[1].split()[0] for text in warned(caplog)] == ["1", "2", "4", "8", "16", "32"]
    assert optimizer.stats().skipped_steps == 40


def test_a_step_that_is_taken_ends_the_row(caplog: pytest.LogCaptureFixture) -> None:
    (p,) = make_params(shapes=[(3,)])
    optimizer = offload([p])
    for bad in (True, False, True):
        p.grad = torch.full((3,), math.nan if bad else 1.0)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert "step 1 is" in warned(caplog)[0] and "1 skipped so far, 1 in a row" in warned(caplog)[0]
    assert "step 3 is" in warned(caplog)[1] and "2 skipped so far, 1 in a row" in warned(caplog)[1]


def test_many_in_a_row_are_told_of_though_there_were_some_before() -> None:
    skips = Skips()
    for _ in range(1000):
        skips.add()
        skips.taken()
    told = []
    for n in range(1, 40):
        skips.add()
        if skips.worth_a_warning:
            told.append((skips.count, n))
    assert told == [(1008, 8), (1016, 16), (1024, 24), (1032, 32)]


def test_a_scalers_skips_are_told_of_at_info_until_they_are_too_many(caplog: pytest.LogCaptureFixture) -> None:
    pair = Scaled("in_order", init_scale=2.0**16)
    with caplog.at_level(logging.INFO, logger="hf_offload"):
        for _ in range(ALARMING):
            pair.turn(bad_micro=0)
    assert len(warned(caplog, logging.INFO)) == ALARMING - 1
    (text,) = warned(caplog)
    assert f"step {ALARMING} is skipped whole: gradients overflowed" in text and f"{ALARMING} in a row" in text


def test_a_scaler_that_skips_drops_what_was_pending() -> None:
    """Without a `zero_grad` of ours in between, a bound must not outlive the step it was for."""
    pair = Scaled("in_order")
    pair.turn(clip=1e-3, bad_micro=0)
    assert pair.optimizer._pending.norm is None
    pair.turn()
    pair.check()


def test_the_scaler_is_torchs_for_other_optimizers_when_it_skips() -> None:
    weight: Any = torch.nn.Parameter(torch.ones(4))
    sgd = torch.optim.SGD([weight], lr=1.0)
    scaler = OffloadGradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(sgd)
    scaler.update()
    assert scaler.get_scale() == 4.0 and torch.equal(weight, torch.ones(4))
