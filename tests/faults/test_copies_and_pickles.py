"""Copies and pickles in the middle of training: of the model right and free of the engine, of the optimizer refused."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.errors import UnsupportedError
from support.engine import TinyLM, batches, copies, late, optimizer_of, settings
from support.faults import SOON, agree, bits_of, every_mode, learn, most_modes, total, twin_of, undisturbed


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


HOWS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy of a pickle": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


def in_flight(mode: str, steps: int = 3) -> tuple[TinyLM, OffloadAdam, Any]:
    """The last step's weights are still on their way up, where the schedule lets them."""
    data = batches()
    with copies(late("h2d", 2e-3)):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, steps)
    return model, optimizer, data


@most_modes
@pytest.mark.parametrize("how", HOWS)
def test_a_copy_of_the_model_has_the_new_weights_and_trains_by_itself(how: str, mode: str) -> None:
    model, optimizer, data = in_flight(mode)
    twin = HOWS[how](model)
    saved = copy.deepcopy(optimizer.state_dict())
    again = twin_of(twin, settings(mode))
    again.load_state_dict(saved)
    others = batches()
    for _ in range(3):
        next(others)
    learn(twin, again, others, 2)
    found = bits_of(twin, again)
    again.close()
    learn(model, optimizer, data, 2)
    kept = bits_of(model, optimizer)
    optimizer.close()
    expected = undisturbed(mode, 5)
    if mode == "delayed":  # saving applies the pending update: the copy starts from there, as the original goes on
        assert agree(found, kept)
    else:
        assert agree(found, expected) and agree(kept, expected)


@most_modes
@pytest.mark.parametrize("how", HOWS)
def test_a_copy_drags_nothing_along(how: str, mode: str) -> None:
    """Neither the engine nor the gradients: the copy lives on, the optimizer and the model are collected."""
    model, optimizer, data = in_flight(mode)
    model(next(data)).backward()  # gradients are there, or left, or are placeholders
    twin = HOWS[how](model)
    assert all(p.grad is None for p in twin.parameters()), "as torch's copies of parameters"
    alive = [weakref.ref(x) for x in (model, optimizer, optimizer.engine, optimizer.engine.placement.transport)]
    optimizer.zero_grad()
    del model, optimizer
    gc.collect()
    assert [x for x in alive if x() is not None] == []
    twin(next(data)).backward()
    assert all(type(p.grad) is torch.Tensor for p in twin.parameters())


@most_modes
def test_a_copy_in_the_middle_of_an_accumulation_disturbs_nothing(mode: str) -> None:
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    for _ in range(3):
        (model(next(data)) / 2).backward()
        for how in HOWS.values():
            how(model)
        (model(next(data)) / 2).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = bits_of(model, optimizer)
    optimizer.close()
    assert mode == "delayed" or agree(found, undisturbed(mode, 3, accumulation=2))


@every_mode
def test_a_shallow_copy_is_the_same_model(mode: str) -> None:
    model, optimizer, data = in_flight(mode)
    learn(copy.copy(model), optimizer, data, 2)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 5))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save(optimizer, io.BytesIO()),
    "inside a dict": lambda optimizer: copy.deepcopy({"optimizer": optimizer}),
    "a bound method": lambda optimizer: pickle.dumps(optimizer.step),
}  # fmt: skip


@most_modes
@pytest.mark.parametrize("how", REFUSED)
def test_copies_of_the_optimizer_are_refused_and_harm_nothing(how: str, mode: str) -> None:
    model, optimizer, data = in_flight(mode)
    with pytest.raises(UnsupportedError, match=r"threads and pinned memory.*optimizer\.state_dict\(\)"):
        REFUSED[how](optimizer)
    learn(model, optimizer, data, 2)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 5))


def test_the_model_goes_to_a_spawned_process() -> None:
    model, optimizer, _ = in_flight("overlapped")
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=total, args=(pickle.loads(pickle.dumps(model)), answer))
    child.start()
    found = answer.get(timeout=90)
    child.join(SOON)
    assert child.exitcode == 0
    optimizer.synchronize()
    assert found == sum(p.double().sum().item() for p in model.parameters())
    optimizer.close()
