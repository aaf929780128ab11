"""Two trainers in one process: one after the other, in turn, in two threads, over two models or over one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from support.engine import TinyLM, batches, copies, late, optimizer_of, ours, settings
from support.faults import SOON, agree, every_mode, learn, leftovers, undisturbed
from support.faults import bits_of as bits_of_loop
from support.faults_hf import bits_of, forget_accelerate, ours_of, stopped_after, trainer

TRAINED = pytest.mark.parametrize("mode", ["overlapped", "speculative"])


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    forget_accelerate()
    yield
    forget_accelerate()


@every_mode
def test_two_loops_in_turn(mode: str) -> None:
    models = [TinyLM(seed=seed) for seed in (0, 1)]
    optimizers = [optimizer_of(model, settings(mode)) for model in models]
    data = [batches(seed + 1) for seed in (0, 1)]
    for _ in range(3):
        for of in (0, 1):
            learn(models[of], optimizers[of], data[of], 1)
    for of in (0, 1):
        found = bits_of_loop(models[of], optimizers[of])
        optimizers[of].close()
        assert agree(found, undisturbed(mode, 3, seed=of))


@every_mode
def test_two_loops_where_one_fails(mode: str) -> None:
    """A failed step of one is no concern of the other."""
    from unittest.mock import patch

    from hf_offload.errors import OffloadError, StateError
    from hf_offload.transport import host

    models = [TinyLM(seed=seed) for seed in (0, 1)]
    good, bad = (optimizer_of(model, settings(mode)) for model in models)
    data = [batches(seed + 1) for seed in (0, 1)]
    learn(models[0], good, data[0], 1)
    learn(models[1], bad, data[1], 1)
    bad.synchronize()
    real, rings = host.HostCopy._move, [bad.engine.placement.transport.down, bad.engine.placement.transport.up]

    def move(copy: Any) -> None:
        assert copy._held is not None
        if any(copy._held[1] is ring for ring in rings):
            raise OSError("injected")
        real(copy)

    with patch.object(host.HostCopy, "_move", move):
        with pytest.raises(OffloadError, match="injected"):
            learn(models[1], bad, data[1], 3)
            bad.synchronize()
        learn(models[0], good, data[0], 1)
        with pytest.raises(StateError):
            bad.close()
    learn(models[0], good, data[0], 1)
    found = bits_of_loop(models[0], good)
    good.close()
    assert agree(found, undisturbed(mode, 3))


def test_ctrl_c_while_the_first_optimizers_step_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second was not made: it has no threads and no ring, though who keeps the error keeps its frames."""
    model, data = TinyLM(), batches()
    first = optimizer_of(model, settings("overlapped"))
    learn(model, first, data, 1)
    alone = ours()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(first.engine, "wait_all", interrupted)
        optimizer_of(model, settings("overlapped"))
    assert ours() == alone
    del caught
    learn(model, first, data, 2)
    found = bits_of_loop(model, first)
    first.close()
    assert agree(found, undisturbed("overlapped", 3))


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound"])
@every_mode
def test_the_first_optimizer_is_gone_on_with_after_all(mode: str, bound: bool) -> None:
    """A second one was made for the same model, and dropped again before it took a step."""
    model, data = TinyLM(), batches()
    first = optimizer_of(model, settings(mode))
    if bound:
        learn(model, first, data, 1)
    optimizer_of(model, settings("in_order")).close()
    learn(model, first, data, 3 - bound)
    found = bits_of_loop(model, first)
    first.close()
    if mode != "delayed" or not bound:  # handing over applies the pending update, as any wait for all does
        assert agree(found, undisturbed(mode, 3))


@every_mode
@pytest.mark.parametrize("first", ["closed", "open", "forgotten", "in mid-step"])
def test_one_model_by_two_optimizers_one_after_the_other(first: str, mode: str) -> None:
    """The second starts from the weights the first has left, whatever became of the first."""

    def second_of(mode: str, first: str) -> Any:
        model, data = TinyLM(), batches()
        with copies(late("h2d", 2e-3)):
            one = optimizer_of(model, settings(mode))
        learn(model, one, data, 2)
        if first != "in mid-step":
            one.synchronize()
        if first == "closed":
            one.close()
        elif first == "forgotten":
            del one
        two = optimizer_of(model, settings(mode))
        learn(model, two, data, 3)
        found = bits_of_loop(model, two)
        two.close()
        if first in ("open", "in mid-step"):
            one.close()
        assert not any(m._forward_pre_hooks for m in model.modules()) or first == "forgotten"
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters()) or first == "forgotten"
        return found

    assert agree(second_of(mode, first), second_of(mode, "closed"))


@TRAINED
def test_two_trainers_one_after_the_other(mode: str, tmp_path: Path) -> None:
    for _ in range(2):
        made = trainer(mode, tmp_path, max_steps=3)
        made.train()
        found, alive = bits_of(made), weakref.ref(ours_of(made).engine)
        assert agree(found, stopped_after(0, 3))
        del made
        gc.collect()
        assert alive() is None and not leftovers()


@TRAINED
def test_a_trainer_inside_a_trainer(mode: str, tmp_path: Path) -> None:
    """One trains in the other's callback: interleaved, with steps of both under way."""

    class Inner(TrainerCallback):
        found: list[Any] = []  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                inner = trainer(mode, tmp_path / "inner", max_steps=3)
                inner.train()
                self.found.append(bits_of(inner))
                ours_of(inner).close()

    callback = Inner()
    outer = trainer(mode, tmp_path, max_steps=3, callbacks=[callback], latency_us=500)
    outer.train()
    expected = stopped_after(0, 3)
    assert agree(bits_of(outer), expected) and agree(callback.found.pop(), expected)
    ours_of(outer).close()


@TRAINED
def test_two_trainers_in_two_threads(mode: str, tmp_path: Path) -> None:
    """Made here, since seeds and accelerate's settings are the process's."""
    made = [trainer(mode, tmp_path / str(n), max_steps=6) for n in range(2)]
    failed: list[BaseException] = []

    def work(one: Any) -> None:
        try:
            one.train()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join(SOON)
    assert not failed and not any(t.is_alive() for t in threads)
    losses = [[h["loss"] for h in one.state.log_history if "loss" in h] for one in made]
    assert all(len(found) == 6 and found[-1] < found[0] for found in losses)
    for one in made:
        ours_of(one).close()
