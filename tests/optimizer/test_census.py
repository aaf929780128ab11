"""A model that no longer trains what the optimizer steps: refused or warned of, where torch says nothing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from hf_offload import OffloadAdam
from hf_offload.errors import StateError
from support.engine import settings
from support.optimizer import same_bits
from support.outside import EVERY, Pair, Piece, Pieces, changed

Rebuild = Callable[[Any], object]
every_mode = pytest.mark.parametrize("mode", EVERY)


# ---- replaced: refused


def load_and_assign(model: nn.Module) -> None:
    model.load_state_dict(changed(model.state_dict()), assign=True)


def a_new_head(model: Any) -> None:
    model.head = Piece(model.size, torch.bfloat16)


def one_new_parameter(model: Any) -> None:
    model.blocks[1].bias = nn.Parameter(torch.zeros_like(model.blocks[1].bias))


def weight_norm(model: Any) -> None:
    """`weight` becomes two parameters of another name: both are new."""
    nn.utils.parametrizations.weight_norm(model.head, "weight")


def a_copy_in_its_place(model: Any) -> None:
    model.blocks = copy.deepcopy(model.blocks)


def swapped_on_conversion(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float32).to(torch.bfloat16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


REPLACED = (load_and_assign, a_new_head, one_new_parameter, a_copy_in_its_place, swapped_on_conversion)


@every_mode
@pytest.mark.parametrize("rebuild", REPLACED, ids=lambda f: f.__name__)
def test_a_replaced_parameter_is_refused_before_anything_is_stepped(rebuild: Rebuild, mode: str) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(4)
    rebuild(pair.model)
    before = pair.optimizer.stats().steps
    pair.model(0).backward()
    with pytest.raises(StateError, match=r"params=.*new parameters in their place.*param_groups"):
        pair.optimizer.step()
    assert pair.optimizer.stats().steps == before


def test_also_where_all_that_the_optimizer_has_is_gone() -> None:
    """Then there is no gradient at all, and a step would be no step."""
    pair = Pair("in_order", "bfloat16")
    pair.step()
    load_and_assign(pair.model)
    pair.model(0).backward()
    with pytest.raises(StateError, match=r"blocks\.0\.weight, blocks\.0\.bias, blocks\.1\.weight and 5 more"):
        pair.optimizer.step()


@every_mode
def test_the_remedy_works(mode: str) -> None:
    """The new one takes the old one's place in its group: it is trained from its own values, with new state."""
    pair = Pair(mode, "bfloat16")
    pair.steps(4)
    pair.optimizer.synchronize()
    one_new_parameter(pair.model)
    old, new = pair.params[3], pair.model.blocks[1].bias
    pair.model(0).backward()
    with pytest.raises(StateError, match=r"params='blocks\.1\.bias'"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    listed = pair.optimizer.param_groups[0]["params"]
    listed[[p is old for p in listed].index(True)] = new
    for _ in range(2):
        pair.model(0).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    pair.optimizer.synchronize()
    assert pair.optimizer.state[new]["step"].item() == 2
    assert same_bits(pair.optimizer.state[new]["master"].bfloat16(), new) and new.abs().min() > 0


@every_mode
def test_replaced_before_the_first_step(mode: str) -> None:
    pair = Pair(mode, "bfloat16")
    a_new_head(pair.model)
    pair.model(0).backward()
    with pytest.raises(StateError, match=r"head\.weight, head\.bias"):
        pair.optimizer.step()


def test_replaced_before_it_was_attached_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Pieces(torch.bfloat16)
    optimizer = OffloadAdam(model.parameters(), config=settings("overlapped", threads=1))
    a_new_head(model)
    optimizer.attach(model)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "2 parameters of the optimizer (shapes (7, 7), (7,)) are not in the attached Pieces" in record.message
    assert "head.bias, head.weight" in record.message


# ---- added: warned of, once


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def an_adapter(model: Any) -> None:
    model.blocks[0].adapter = nn.Parameter(torch.zeros(3))


def a_module(model: Any) -> None:
    model.extra = Piece(3, torch.float32)


@every_mode
@pytest.mark.parametrize("add", [an_adapter, a_module, weight_norm], ids=lambda f: f.__name__)
def test_a_trainable_parameter_that_no_group_has_is_warned_of_once(
    add: Rebuild, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(4)  # of the next three steps none has a number at which the model is looked at in any case
    assert not warnings_of(caplog)
    pair.optimizer.synchronize()
    add(pair.model)
    for _ in range(3):
        pair.model(0).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.optimizer.synchronize()
    told = [m for m in warnings_of(caplog) if "no group of the optimizer has" in m]
    assert len(told) == 1 and "add_param_group" in told[0]
    assert {"an_adapter": "blocks.0.adapter", "a_module": "extra.weight", "weight_norm": "head.p"}[
        add.__name__
    ] in told[0]


@pytest.mark.parametrize("steps", [5, 12])
def test_without_any_wait_it_is_noticed_before_the_steps_have_doubled(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair("in_order")
    pair.steps(steps)
    a_module(pair.model)
    for _ in range(steps):
        pair.model(0).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    assert len(warnings_of(caplog)) == 1


def test_unfrozen_though_no_group_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """Gradual unfreezing over an optimizer that was given the trainable parameters alone."""
    model = Pieces()
    model.head.requires_grad_(False)
    optimizer = OffloadAdam([p for p in model.parameters() if p.requires_grad], model=model)
    model(0).backward()
    optimizer.step()
    assert not warnings_of(caplog)
    model.head.requires_grad_(True)
    model(0).backward()
    optimizer.step()
    assert len(warnings_of(caplog)) == 1 and "head.weight, head.bias" in warnings_of(caplog)[0]


@every_mode
def test_a_group_that_is_added_is_all_it_takes(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    an_adapter(pair.model)
    adapter = pair.model.blocks[0].adapter
    pair.optimizer.add_param_group({"params": [adapter]})
    for _ in range(3):
        (pair.model(0) + adapter.sum()).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.optimizer.synchronize()
    assert not warnings_of(caplog)
    assert pair.optimizer.state[adapter]["step"].item() == 3 and adapter.abs().min() > 0


# ---- nothing to say


def tied(model: Any) -> None:
    model.head.weight = model.blocks[0].weight


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.head, "weight", nn.Identity())


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.head, "weight", amount=0.3)


def moved_within(model: Any) -> None:
    model.head, model.blocks[0] = model.blocks[0], model.head


def wrapped(model: Any) -> None:
    model.blocks = nn.ModuleList(list(model.blocks))


@every_mode
@pytest.mark.parametrize("rebuild", [parametrized, pruned, moved_within, wrapped], ids=lambda f: f.__name__)
def test_a_parameter_that_only_moved_is_trained_on(
    rebuild: Rebuild, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(rebuild)
    pair.steps(2)
    pair.check()
    assert not [m for m in warnings_of(caplog) if "group" in m or "no longer" in m]


@every_mode
def test_weights_tied_after_steps(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The one that nobody uses any more is told of; the other gets both gradients."""
    pair = Pair(mode, "bfloat16")
    pair.steps(3)
    pair.write(tied)
    pair.steps(2)
    pair.check()
    assert warnings_of(caplog) == ["hf_offload: no longer in the model, and so no longer trained: head.weight."]


def test_what_the_optimizer_was_never_meant_to_train(caplog: pytest.LogCaptureFixture) -> None:
    """Two optimizers over one model, and one over a model and something beside it."""
    model, beside = Pieces(), nn.Parameter(torch.ones(3))
    first = OffloadAdam(model.blocks.parameters(), model=model)
    second = OffloadAdam([*model.head.parameters()], model=model)
    third = OffloadAdam([*Pieces().parameters()])
    whole = Pieces()
    fourth = OffloadAdam([*whole.parameters(), beside], model=whole)
    for _ in range(4):
        model(0).backward()
        (whole(0) + beside.sum()).backward()
        for optimizer in (first, second, third, fourth):
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    assert not warnings_of(caplog)
