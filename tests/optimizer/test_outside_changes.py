"""Weights that somebody else wrote to: masters follow them, element by element, and stale masters never win."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.engine.checksum import checksum, device_checksum
from support.optimizer import (
    DTYPES,
    EXACT,
    Bag,
    Twin,
    assert_same_run,
    config,
    give,
    gradients,
    make_params,
    offload,
    same_bits,
    state,
    train,
    twins,
)

every_mode = pytest.mark.parametrize("schedule", EXACT)
every_wire = pytest.mark.parametrize("wire", DTYPES)
SHAPES = [(), (300,), (3, 40)]


def write(p: Tensor, value: float) -> None:
    with torch.no_grad():
        p.reshape(-1)[::3] = value  # a third of it: the rest keeps its digits


def by_version(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    optimizer.engine.wait_all()  # unlike synchronize(), leaves no checksum behind
    with torch.no_grad():
        for p in params:
            changed = p.clone()
            write(changed, 2.0)
            p.copy_(changed)


def by_data_copy(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    for p in params:
        version = p._version
        changed = p.data.clone()
        write(changed, 2.0)
        p.data.copy_(changed)
        assert p._version == version, "then this would not be the case that needs a checksum"


def after_synchronize(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    optimizer.synchronize()
    by_data_copy(optimizer, bag, params)


def after_eval(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    optimizer.eval()
    by_data_copy(optimizer, bag, params)


def after_state_dict(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    optimizer.state_dict()
    by_data_copy(optimizer, bag, params)


def after_the_models_state_dict(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    bag.state_dict()
    by_data_copy(optimizer, bag, params)


def through_the_models_state_dict(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    for tensor in bag.state_dict().values():
        write(tensor, 2.0)


def new_data(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    optimizer.engine.wait_all()
    for p in params:
        changed = p.data.clone()
        write(changed, 2.0)
        p.data = changed


def load_state_dict(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    loaded = copy.deepcopy(bag.state_dict())
    for tensor in loaded.values():
        write(tensor, 2.0)
    bag.load_state_dict(loaded)


def load_and_assign(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    loaded = copy.deepcopy(bag.state_dict())
    for (name, tensor), p in zip(loaded.items(), params):
        write(tensor, 2.0)
        loaded[name] = tensor
        p.data = tensor


def several_times(optimizer: OffloadAdam, bag: Bag, params: list[Any]) -> None:
    """The first wait for all remembers the checksums; later ones must not take the changed weights for ours."""
    optimizer.eval()
    by_data_copy(optimizer, bag, params)
    optimizer.synchronize()
    optimizer.state_dict()


WRITES: dict[str, Callable[[OffloadAdam, Bag, list[Any]], None]] = {
    f.__name__: f
    for f in (
        by_version,
        after_synchronize,
        after_eval,
        after_state_dict,
        after_the_models_state_dict,
        through_the_models_state_dict,
        new_data,
        load_state_dict,
        load_and_assign,
        several_times,
    )
}


@every_mode
@every_wire
@pytest.mark.parametrize("how", WRITES)
def test_masters_follow_what_was_written_and_keep_the_rest(
    how: str, wire: str, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    params = make_params(DTYPES[wire], SHAPES)
    others = twins(params)
    bag = Bag(params)
    optimizer = OffloadAdam(params, lr=1e-2, config=config(schedule), model=bag)
    twin = Twin([{"params": others, "lr": 1e-2}])

    def steps(numbers: range) -> None:
        for step in numbers:
            give(params, gradients(step, params))
            optimizer.step()
            give(others, gradients(step, others))
            twin.step()

    steps(range(3))
    changed = 0
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        WRITES[how](optimizer, bag, params)
        for q in others:
            before = q.detach().clone()
            write(q, 2.0)
            where = (before != q).reshape(-1).numpy()
            twin.master[q][where] = 2.0
            changed += int(where.sum())
        steps(range(3, 6))
        optimizer.synchronize()
    assert all(same_bits(p, q) for p, q in zip(params, others))
    for p, q in zip(params, others):
        assert same_bits(state(optimizer, p, "master").reshape(-1), torch.from_numpy(twin.master[q]))
        assert state(optimizer, p, "step").item() == 6, "moments and counts stay"
    warned = [r.message for r in caplog.records if "changed from outside" in r.message]
    assert len(warned) == 1 and f" {changed} weights" in warned[0]


@every_mode
@every_wire
@pytest.mark.parametrize("swap", ["copy_", "data.copy_", "data ="])
def test_an_average_swapped_in_and_out_changes_nothing(swap: str, wire: str, schedule: str) -> None:
    """EMA evaluation: other weights for a while, the old ones back, and the run goes on with the same bits."""
    params = make_params(DTYPES[wire], SHAPES)
    others = twins(params)
    optimizer, plain = offload(params, schedule, lr=1e-2), offload(others, schedule, lr=1e-2)
    train(optimizer, params, range(3))
    train(plain, others, range(3))
    optimizer.eval()
    kept = [p.data if swap == "data =" else p.detach().clone() for p in params]
    for values in ([torch.zeros_like(k) for k in kept], kept):
        for p, v in zip(params, values):
            if swap == "data =":
                p.data = v
            elif swap == "data.copy_":
                p.data.copy_(v)
            else:
                with torch.no_grad():
                    p.copy_(v)
        optimizer.synchronize()
    train(optimizer, params, range(3, 6))
    train(plain, others, range(3, 6))
    for p, q in zip(params, others):
        assert same_bits(p, q) and same_bits(state(optimizer, p, "master"), state(plain, q, "master"))


@every_mode
def test_looking_changes_nothing_and_warns_of_nothing(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(torch.bfloat16, SHAPES)
    others = twins(params)
    optimizer, plain = offload(params, schedule), offload(others, schedule)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        for step in range(4):
            train(optimizer, params, [step])
            train(plain, others, [step])
            optimizer.eval()
            optimizer.state_dict()
            optimizer.synchronize()
            optimizer.train()
    assert not caplog.records
    assert_same_run(optimizer, params, plain, others)


@every_mode
@every_wire
def test_reseed_returns_how_many_elements_changed(wire: str, schedule: str) -> None:
    params = make_params(DTYPES[wire], shapes=[(10,), (7,)])
    optimizer = offload(params, schedule)
    assert optimizer.reseed() == 0, "no masters yet"
    train(optimizer, params, range(2))
    masters = [state(optimizer, p, "master") for p in params]
    assert optimizer.reseed() == 0
    assert all(same_bits(state(optimizer, p, "master"), m) for p, m in zip(params, masters))
    params[0].data[:4] += 1.0
    params[1].data[3] = -5.0
    assert optimizer.reseed() == 5
    assert optimizer.reseed() == 0
    assert same_bits(state(optimizer, params[0], "master")[:4], params[0].detach()[:4].float())
    assert same_bits(state(optimizer, params[0], "master")[4:], masters[0][4:])
    assert state(optimizer, params[1], "master")[3].item() == -5.0


@every_mode
def test_after_reseed_the_next_step_warns_of_nothing(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(torch.bfloat16, shapes=[(10,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        params[0].data.fill_(1.0)
        optimizer.reseed()
        train(optimizer, params, [2])
    assert not caplog.records


@every_mode
def test_weights_loaded_before_the_first_step_are_trained_from(schedule: str) -> None:
    """field.md, 5: loaded after the optimizer was built, before or after the forward that binds."""
    for forward_first in (False, True):
        params = make_params(torch.bfloat16, shapes=[(10,)])
        bag = Bag(params)
        optimizer = OffloadAdam(params, lr=1e-3, config=config(schedule), model=bag)
        if forward_first:
            bag()
        bag.load_state_dict({"items.0": torch.full((10,), 4.0)})
        bag().backward()
        optimizer.step()
        optimizer.synchronize()
        torch.testing.assert_close(params[0].detach().float(), torch.full((10,), 4.0), rtol=0.01, atol=0.0)
        torch.testing.assert_close(state(optimizer, params[0], "master"), torch.full((10,), 3.999), rtol=1e-4, atol=0.0)


@every_mode
def test_a_max_norm_embedding_that_writes_in_its_forward(schedule: str) -> None:
    """torch renormalises rows in place in the forward: the masters follow, and stay within the bound."""
    torch.manual_seed(0)
    model = nn.Embedding(20, 8, max_norm=1.0)
    optimizer = OffloadAdam(model.parameters(), lr=0.3, config=config(schedule), model=model)
    for _ in range(5):
        optimizer.zero_grad()
        (-model(torch.arange(20)).square().sum()).backward()
        optimizer.step()
    optimizer.synchronize()
    with torch.no_grad():
        assert model(torch.arange(20)).norm(dim=1).max() < 1.001


# ---- checksums


@every_wire
def test_any_single_changed_bit_changes_the_checksums(wire: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2049, generator=generator).to(DTYPES[wire])
    kind = torch.int32 if wire == "float32" else torch.int16
    sums = checksum(p, 2), device_checksum(p)
    for at in [0, 2048, *torch.randint(0, 2049, (40,), generator=generator).tolist()]:
        for bit in (0, 5, 15):
            changed = p.clone()
            changed.view(kind)[at] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert checksum(changed, 2) != sums[0] and device_checksum(changed) != sums[1]
    for changed in (p.flip(0), torch.roll(p, 1), torch.zeros_like(p), p[:-1].clone()):
        assert checksum(changed, 2) != sums[0] and device_checksum(changed) != sums[1]
    swapped = p.clone()
    swapped[[3, 1200]] = swapped[[1200, 3]]
    assert checksum(swapped, 1) != sums[0] and device_checksum(swapped) != sums[1]
    assert (checksum(p.clone(), 1), device_checksum(p.clone())) == sums


def test_checksums_of_large_permuted_and_empty_tensors() -> None:
    large = torch.arange(3_000_001, dtype=torch.float32)
    changed = large.clone()
    changed[2_999_999] = 0.0
    assert device_checksum(large) != device_checksum(changed) and checksum(large, 2) != checksum(changed, 2)
    permuted = torch.randn(4, 5).t()
    assert checksum(permuted, 1) == checksum(permuted.t().contiguous(), 1)
    assert device_checksum(torch.zeros(0)) == 0
    assert checksum(torch.zeros(0), 1) == checksum(torch.zeros(0, 3), 1)
