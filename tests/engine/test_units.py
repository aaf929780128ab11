"""Dividing real architectures into units, and training each of them overlapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam
from hf_offload.engine.units import UnitMap, find_units
from support.engine import copies, late, same, settings, state, weights
from support.engine_models import MAKERS, made

# name -> (blocks, whether there is a tail)
EXPECTED = {
    "llama": (["model.layers.0", "model.layers.1", "model.layers.2"], True),
    "peft_llama": ([f"base_model.model.model.layers.{i}" for i in range(3)], True),
    "gpt2": ([f"transformer.h.{i}" for i in range(3)], True),
    "t5": ([f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)], True),
    "vit": (["vit.embeddings", *(f"vit.layers.{i}" for i in range(3))], True),
    "clip": (
        [f"{side}_model.{m}" for side in ("text", "vision")
         for m in ("embeddings", *(f"encoder.layers.{i}" for i in range(3)))],
        True,
    ),
    "bert": (["bert.embeddings", *(f"bert.encoder.layer.{i}" for i in range(3))], True),
    "albert": ([], False),  # one layer, called three times
    "sequential": (["0", "1", "2", "3", "4"], False),
    "transformer": ([f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)], True),
    "linear": ([], False),
    "pairs_in_lists": ([f"layers.{i}" for i in range(3)], True),
    "one_block_twice": (["layers.0", "layers.1"], False),
}  # fmt: skip


@pytest.fixture(params=sorted(MAKERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def owners(units: UnitMap) -> dict[int, int]:
    return {id(p): u for u, unit in enumerate(units.units) for p in unit.params}


def test_each_parameter_is_in_exactly_one_unit(name: str) -> None:
    model, _ = made(name)
    units = find_units(model)
    members = [id(p) for unit in units.units for p in unit.params]
    assert len(members) == len(set(members))
    assert set(members) == {id(p) for p in model.parameters()}


def test_blocks_and_tail_are_found(name: str) -> None:
    model, _ = made(name)
    units = find_units(model)
    blocks, tail = EXPECTED[name]
    assert [u.name for u in units.units if u.is_block] == blocks
    assert units.units[0].name == "embeddings"
    assert (units.tail is not None) == tail
    if tail:
        assert units.tail == len(units.units) - 1 and units.units[-1].name == "tail"


def test_guards_cover_every_parameter(name: str) -> None:
    """A module outside blocks covers what it owns, a block all that is in it, and each waits for the right units."""
    model, _ = made(name)
    units = find_units(model)
    unit_of, covered = owners(units), set()
    assert len({id(g.module) for g in units.guards}) == len(units.guards)
    for guard in units.guards:
        inside = list(guard.module.parameters(recurse=guard.block is not None))
        assert guard.units == {unit_of[id(p)] for p in inside}
        assert not isinstance(guard.module, nn.ModuleList), "nobody calls a list"
        covered.update(map(id, inside))
    assert covered == {id(p) for p in model.parameters()}


def test_shared_parameters_are_guarded_wherever_they_are_used() -> None:
    model, _ = made("t5")
    units = find_units(model)
    shared = model.get_parameter("shared.weight")
    users = [m for m in model.modules() if any(p is shared for p in m.parameters(recurse=False))]
    needs = {id(g.module): g.units for g in units.guards}
    assert len(users) > 1 and model.get_submodule("lm_head") in users
    assert all(0 in needs[id(m)] for m in users)


def test_modules_of_one_class_among_others_are_blocks_too() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)])})
    assert [u.name for u in find_units(model).units if u.is_block] == ["a.0", "a.2"]


BF16 = ("llama", "peft_llama", "t5", "clip")
CASES = [(name, torch.float32) for name in sorted(MAKERS)] + [(name, torch.bfloat16) for name in BF16]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_every_architecture_trains_overlapped_as_in_order(name: str, dtype: torch.dtype) -> None:
    """All copies are late: whoever reads a weight unguarded, or in the wrong order, reads an old one."""

    def run(schedule: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], OffloadAdam]:
        model, call = made(name)
        model.to(dtype)
        model.train()
        losses = []
        with copies(late("h2d", 2e-3) if schedule == "overlapped" else None):
            params = [p for p in model.parameters() if p.requires_grad]
            config = settings(schedule, bucket_bytes=2048, ring_slots=3)
            optimizer = OffloadAdam(params, lr=1e-2, config=config, model=model)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
        for _ in range(3):
            with autocast:
                loss = call()
            loss.backward()
            losses.append(loss.item())
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return losses, weights(model), state(optimizer), optimizer

    expected, found = run("in_order"), run("overlapped")
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
    assert same(found[2], expected[2])
    assert len(set(found[0])) == 3, "the loss moves"
    gates = found[3].engine.gates
    assert gates is not None and not gates.at_root, "every weight was seen behind a hook"
    for run_ in (expected, found):
        run_[3].close()


ORDERS = {
    "llama": [0, 1, 2, 3, 4],
    "t5": [0, 1, 2, 5, 3, 4],  # the encoder's last norm is in the tail
    "pairs_in_lists": [0, 1, 2, 3, 4],
    "one_block_twice": [0, 1, 2],
}


@pytest.mark.parametrize("which", sorted(ORDERS))
def test_the_first_forward_records_the_order_units_run_in(which: str) -> None:
    model, call = made(which)
    optimizer = OffloadAdam(model.parameters(), config=settings("overlapped"), model=model)
    call().backward()
    optimizer.step()
    gates = optimizer.engine.gates
    assert gates is not None
    assert gates.order == ORDERS[which]
    ranks = gates.rank()
    assert sorted(range(len(ranks)), key=ranks.__getitem__)[: len(gates.order)] == gates.order
    optimizer.close()
