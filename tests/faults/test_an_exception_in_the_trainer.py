"""An error in a Trainer's run, wherever it comes, and then `train()` again: the bits of a run that was stopped between
two steps and went on. And out of memory with `auto_find_batch_size`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from transformers import Trainer, TrainerCallback

from support.faults import Boom, agree, leftovers
from support.faults_hf import EXACT, bits_of, forget_accelerate, ours_of, rows, stopped_after, trainer

MODES = pytest.mark.parametrize(
    "mode", ["overlapped", "speculative", *(pytest.param(m, marks=pytest.mark.slow) for m in ("in_order", "streamed"))]
)
THEN = 3


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    forget_accelerate()
    yield
    forget_accelerate()


class FailsAt(TrainerCallback):
    """Raises at one event, once, when two steps were taken."""

    def __init__(self, event: str) -> None:
        self.armed = True
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.armed and state.global_step >= 2:
            self.armed = False
            raise Boom("injected")


EVENTS = (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log",
    "on_evaluate", "on_prediction_step", "on_save",
)  # fmt: skip


def again(made: Trainer, folder: Path) -> Any:
    """`train()` once more; the bits, and how many steps there had been."""
    taken = ours_of(made).stats().steps if ours_of(made).engine.arenas else 0
    made.args.max_steps, made.args.save_strategy, made.args.eval_strategy = THEN, "no", "no"
    made.train()
    found = bits_of(made)
    ours_of(made).close()
    return found, taken


@MODES
@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_that_raises(event: str, mode: str, tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    made = trainer(
        mode, tmp_path, callbacks=[FailsAt(event)], latency_us=500, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, **more,
    )  # fmt: skip
    with pytest.raises(Boom):
        made.train()
    before = bits_of(made)
    found, taken = again(made, tmp_path)
    assert taken == (3 if event == "on_optimizer_step" else 2)
    other = trainer(mode, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=taken)
    other.train()
    assert agree(before, bits_of(other))
    other.args.max_steps = THEN
    other.train()
    assert agree(found, bits_of(other))
    ours_of(other).close()
    del made, other
    assert not leftovers()


class Rows(list):  # type: ignore[type-arg]
    """A dataset that fails at the row it has come to."""

    armed = True

    def __getitem__(self, i: Any) -> Any:
        Rows.seen += 1
        if self.armed and Rows.seen > 10:
            self.armed = False
            raise Boom("injected")
        return super().__getitem__(i)

    seen = 0


def by_data(mode: str, folder: Path) -> Trainer:
    Rows.seen = 0
    return trainer(mode, folder, data=Rows(rows()))


def by_collator(mode: str, folder: Path) -> Trainer:
    from transformers import default_data_collator

    calls: list[int] = []

    def collate(batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # one batch is fetched ahead
            raise Boom("injected")
        return default_data_collator(batch)

    return trainer(mode, folder, collate=collate)


def by_worker(mode: str, folder: Path) -> Trainer:
    from transformers import default_data_collator

    calls: list[int] = []

    def collate(batch: Any) -> Any:
        calls.append(1)
        if get_worker_info() is not None and len(calls) == 3:
            raise Boom("injected")
        return default_data_collator(batch)

    return trainer(mode, folder, collate=collate, dataloader_num_workers=1)


class FailsInLoss(Trainer):
    """In backward, in forward, in the loss itself; once, in the third step."""

    how = "loss"
    armed = True
    error: Callable[[], BaseException] = staticmethod(lambda: Boom("injected"))
    at = 2

    def _raise(self, *args: Any) -> None:
        raise self.error()

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.armed or self.state.global_step != self.at:
            return super().training_step(model, *args, **kwargs)
        self.armed = False
        middle = model.inner.layers[1]
        if self.how == "loss that is NaN":
            super().training_step(model, *args, **kwargs)
            self._raise()
        hooks: dict[str, Callable[[], Any]] = {
            "backward": lambda: middle.up.weight.register_hook(self._raise),
            "forward": lambda: middle.register_forward_hook(self._raise),
        }
        handle = hooks[self.how]()
        try:
            return super().training_step(model, *args, **kwargs)
        finally:
            handle.remove()


def by_loss(how: str) -> Callable[[str, Path], Trainer]:
    kind = type("Fails", (FailsInLoss,), {"how": how})
    return lambda mode, folder: trainer(mode, folder, kind=kind)


MAKERS: dict[str, Callable[[str, Path], Trainer]] = {
    "the dataset": by_data, "the collator": by_collator, "a loader's worker": by_worker,
    **{how: by_loss(how) for how in ("forward", "backward", "loss that is NaN")},
}  # fmt: skip


@MODES
@pytest.mark.parametrize("where", MAKERS)
def test_an_error_in_the_data_or_the_model(where: str, mode: str, tmp_path: Path) -> None:
    made = MAKERS[where](mode, tmp_path)
    with pytest.raises(Boom):
        made.train()
    made.args.dataloader_num_workers = 0
    found, taken = again(made, tmp_path)
    assert taken in (1, 2)
    assert agree(found, stopped_after(taken, THEN))


# ---- out of memory


@MODES
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_smaller_batch_is_a_run_begun_with_it(how: str, at: int, mode: str, tmp_path: Path) -> None:
    """accelerate tries again with nine tenths of the rows: 10 become 9. Steps taken before count as training."""
    fails = {"how": how, "at": at, "error": staticmethod(lambda: torch.OutOfMemoryError("CUDA out of memory."))}
    kind = type("Fails", (FailsInLoss,), fails)
    made = trainer(mode, tmp_path, kind=kind, auto_find_batch_size=True, per_device_train_batch_size=10, max_steps=THEN)
    made.train()
    assert made._train_batch_size == 9
    found = bits_of(made)
    assert ours_of(made).stats().steps == at + THEN
    ours_of(made).close()
    expected = stopped_after(at, THEN, batch=10 if at else 9, then_batch=9)
    assert agree(found, expected)


@pytest.mark.parametrize("mode", EXACT)
def test_what_failed_is_freed_before_the_next_try(mode: str, tmp_path: Path) -> None:
    alive: list[int] = []
    made_grads: list[weakref.ref[Any]] = []

    class Fails(FailsInLoss):
        how = "backward"
        error = staticmethod(lambda: torch.OutOfMemoryError("CUDA out of memory."))

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.armed and made_grads:
                gc.collect()
                alive.append(sum(g() is not None for g in made_grads))
                made_grads.clear()
            if self.armed and self.state.global_step == self.at:
                handles = [p.register_hook(watch) for p in model.inner.layers[2].parameters()]
                try:
                    return super().training_step(model, *args, **kwargs)
                finally:
                    for handle in handles:
                        handle.remove()
            return super().training_step(model, *args, **kwargs)

    def watch(grad: torch.Tensor) -> torch.Tensor:
        memory = grad.detach().numpy().copy()
        made_grads.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    made = trainer(mode, tmp_path, kind=Fails, auto_find_batch_size=True, per_device_train_batch_size=10)
    made.train()
    assert alive == [0]
    ours_of(made).close()


def test_a_device_that_runs_full_in_a_step_is_not_taken_for_a_batch_too_large(tmp_path: Path) -> None:
    """The state may be half stepped: fewer rows must not be tried on it, again and again."""
    from unittest.mock import patch

    from hf_offload.errors import StateError
    from hf_offload.transport import host
    from hf_offload.transport.cuda_device import DeviceMemoryError

    tries: list[int] = []

    class Counts(Trainer):
        def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
            tries.append(batch_size or 0)
            return super()._inner_training_loop(batch_size, *args, **kwargs)

    real, armed = host.HostCopy._move, []

    def move(copy: Any) -> None:
        if armed:
            raise DeviceMemoryError("CUDA out of memory. It ran out at a copy.")
        real(copy)

    class Arms(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                armed.append(1)

    with patch.object(host.HostCopy, "_move", move):
        made = trainer("overlapped", tmp_path, kind=Counts, callbacks=[Arms()], auto_find_batch_size=True)
        with pytest.raises(StateError, match=r"half stepped.*checkpoint"):
            made.train()
    assert len(tries) == 1
    with pytest.raises(StateError):
        ours_of(made).close()
