"""bfloat16 and int8 state: the same bits for every exact schedule, bucket size, thread count and order of binding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine.arena import Arena
from hf_offload.engine.budget import Budget
from hf_offload.engine.speculation import Speculation
from support.engine import MODES, bits

COMPACT = ("bfloat16", "int8")
EXACT = [name for name in MODES if name != "delayed"]


class Wide(nn.Module):
    """Parameters of less than a block, of some blocks and a rest, and of whole blocks. The head's weight, many blocks,
    lies behind a rest: counted from the unit's start its blocks begin elsewhere than counted from its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.up = nn.Linear(32, 250, bias=False)
        self.head = nn.Linear(250, 50)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return nn.functional.cross_entropy(self.head(self.up(h)).flatten(0, 1).float(), x.flatten())


def trained(
    state_dtype: str, mode: str, steps: int = 4, model: nn.Module | None = None, max_norm: float = 1.0, **more: Any
) -> dict[str, Any]:
    """Every bit of weights and state after some steps."""
    settings = {"threads": 1, "ring_slots": 2, **MODES[mode], **more}
    if mode == "small shadow":
        settings["shadow_bytes"] = 40_000
    model = model or Wide()
    generator = torch.Generator().manual_seed(1)
    with OffloadAdam(
        model.parameters(), lr=1e-2, config=OffloadConfig(state_dtype=state_dtype, **settings), model=model
    ) as optimizer:
        for _ in range(steps):
            model(torch.randint(0, 50, (4, 8), generator=generator)).backward()
            optimizer.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return all_bits(model, optimizer)


def all_bits(model: nn.Module, optimizer: OffloadAdam) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    found = {f"{n} of {i}": bits(t).tolist() for i, entry in state.items() for n, t in entry.items()}
    return found | {name: bits(p).tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("state_dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_bits_depend_neither_on_schedule_nor_on_buckets_nor_on_threads(state_dtype: str) -> None:
    expected = trained(state_dtype, "in_order", bucket_bytes=1 << 20)
    for mode in EXACT:
        for bucket_bytes, threads in ((2, 1), (1000, 2), (5000, 1)):
            found = trained(state_dtype, mode, bucket_bytes=bucket_bytes, threads=threads)
            assert found == expected, f"{mode}, bucket_bytes={bucket_bytes}, threads={threads}"


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_the_seed_is_the_only_thing_that_moves_the_rounding(state_dtype: str) -> None:
    first, again, other = (trained(state_dtype, "in_order", rounding_seed=seed) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_guess_that_was_rounded_with_other_noise_is_a_miss(state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where coefficients no longer change from step to step, the noise alone tells which step was guessed."""
    expected, begin, noise = trained(state_dtype, "in_order", max_norm=1e9), Speculation._begin, Arena.noise
    guesses = 0

    def of_the_next_step(self: Speculation, *args: Any) -> Any:
        nonlocal guesses
        found = begin(self, *args)
        if found is not None:
            store, k = args[:2]
            found.noise = noise(store.arena, k, store.arena.turns + 1)
            guesses += 1
        return found

    monkeypatch.setattr(Speculation, "_begin", of_the_next_step)
    assert trained(state_dtype, "speculative", max_norm=1e9) == expected and guesses


@pytest.mark.parametrize(("state_dtype", "each"), [("float32", 8), ("bfloat16", 4), ("int8", 2)])
def test_figures_and_budget_count_what_is_held(state_dtype: str, each: int) -> None:
    model = Wide()
    with optimizer_of(model, state_dtype) as optimizer:
        train(optimizer, model)
        params = list(model.parameters())
        count = sum(p.numel() for p in params)
        scales = sum(-(-p.numel() // 128) for p in params) if state_dtype == "int8" else 0
        held = {"master": 4 * count, **dict.fromkeys(("exp_avg", "exp_avg_sq"), each * count // 2 + scales)}
        (arena,) = optimizer.engine.arenas
        assert sum(a.nbytes for a in arena.state) == sum(held.values())
        found = optimizer.stats().host_bytes
        assert {name: found[name] for name in held} == held == Budget(optimizer.config).need(params)


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_a_parameter_that_is_bound_later_rounds_as_one_that_was_there(state_dtype: str) -> None:
    """Its number is its place in param_groups, not in the arena."""
    found = []
    for unfrozen_from in (0, 1):
        model = Wide()
        given = torch.Generator().manual_seed(2)
        params = list(model.parameters())
        params[0].requires_grad_(unfrozen_from == 0)
        config = OffloadConfig(state_dtype=state_dtype, threads=1)
        with OffloadAdam(params, lr=1e-2, config=config) as optimizer:
            for step in range(3):
                for i, p in enumerate(params):
                    values = torch.randn(p.shape, generator=given).to(p.dtype)
                    p.grad = values if i or step >= 1 else None
                params[0].requires_grad_(unfrozen_from <= step)
                optimizer.step()
            found.append(all_bits(model, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("held", ["float32", *COMPACT])
@pytest.mark.parametrize("state_dtype", ["float32", *COMPACT])
def test_state_dicts_convert_between_all_of_them(held: str, state_dtype: str) -> None:
    """What is loaded is what was saved, as nearly as the format holds it; there and back it is what it was."""
    source, target = Wide(), Wide()
    with optimizer_of(source, held) as a, optimizer_of(target, state_dtype) as b:
        train(a, source)
        saved = copy.deepcopy(a.state_dict())
        target.load_state_dict(source.state_dict())
        b.load_state_dict(saved)
        with optimizer_of(Wide(), "float32") as floats, optimizer_of(Wide(), "float32") as converted:
            floats.load_state_dict(saved)
            converted.load_state_dict(copy.deepcopy(b.state_dict()))
            for i, entry in floats.state_dict()["state"].items():
                close(entry, converted.state_dict()["state"][i], held, state_dtype)
        train(b, target)  # and goes on


def close(entry: dict[str, Any], other: dict[str, Any], held: str, state_dtype: str) -> None:
    """Half a unit of the last place of the format that holds less: 8 bits of mantissa, or 4."""
    assert torch.equal(entry["step"], other["step"]) and torch.equal(entry["master"], other["master"])
    order = ["float32", "bfloat16", "int8"]
    half = {"float32": 0.0, "bfloat16": 2**-8, "int8": 2**-4}
    loses = half[state_dtype] if order.index(state_dtype) > order.index(held) else 0.0
    for name in ("exp_avg", "exp_avg_sq"):
        least = entry[name].abs().max().item() * 2**-17 if loses and state_dtype == "int8" else 0.0
        torch.testing.assert_close(other[name], entry[name], rtol=loses, atol=least)


def optimizer_of(model: nn.Module, state_dtype: str) -> OffloadAdam:
    config = OffloadConfig(state_dtype=state_dtype, threads=1, bucket_bytes=1000)
    return OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)


def train(optimizer: OffloadAdam, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model(torch.randint(0, 50, (4, 8), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["overlapped", "speculative", "delayed"])
@pytest.mark.parametrize("state_dtype", COMPACT)
def test_resuming_gives_the_bits_of_the_run_that_never_stopped(state_dtype: str, mode: str) -> None:
    """Under another bucket size, too: the noise depends on parameter, element and step alone."""

    def make(model: nn.Module, bucket_bytes: int) -> OffloadAdam:
        config = OffloadConfig(state_dtype=state_dtype, bucket_bytes=bucket_bytes, threads=1, **MODES[mode])
        return OffloadAdam(model.parameters(), lr=1e-2, model=model, config=config)

    def run(stop: int | None) -> dict[str, Any]:
        model = Wide()
        generator = torch.Generator().manual_seed(1)
        optimizer = make(model, 900)
        for step in range(6):
            if step == 3:  # the run that goes on waits, too: delayed saves what is pending
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                if stop is not None:
                    optimizer.close()
                    model = Wide()
                    optimizer = make(model, stop)
                    model.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
            model(torch.randint(0, 50, (4, 8), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found = all_bits(model, optimizer)
        optimizer.close()
        return found

    assert run(None) == run(900) == run(3000)
