"""State dicts with random edits: what loads can be stepped, what does not is refused, and not a byte has changed."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_offload.errors import StateError
from support.fuzz import both_sizes, examples_of, values
from support.optimizer import frozen_state_dict, give, gradients, make_params, offload, snapshot, train

SHAPES = [(5,), (3, 4), (6,), ()]
MAKERS: dict[str, Callable[[], Any]] = {
    "float": lambda: torch.ones(6),
    "its shape": lambda: torch.full((3, 4), 2.0),
    "0-dim": lambda: torch.tensor(3.0),
    "one of an int": lambda: torch.tensor([7]),
    "NaN": lambda: torch.full((6,), torch.nan),
    "double": lambda: torch.ones(6, dtype=torch.float64),
    "half": lambda: torch.ones(6, dtype=torch.float16),
    "float8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
    "int": lambda: torch.ones(6, dtype=torch.int64),
    "bool": lambda: torch.ones(6, dtype=torch.bool),
    "complex": lambda: torch.ones(6, dtype=torch.complex64),
    "sparse": lambda: torch.ones(6).to_sparse(),
    "sparse 0-dim": lambda: torch.tensor(3.0).to_sparse(),
    "meta": lambda: torch.ones(6, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.quint8),
    "expanded": lambda: torch.ones(1).expand(6),
    "strided": lambda: torch.arange(12.0)[::2],
    "negative": lambda: torch._neg_view(torch.ones(6)),
    "empty": lambda: torch.ones(0),
    "in a graph": lambda: torch.ones(6, requires_grad=True) * 2,
    "0-dim in a graph": lambda: torch.tensor(1e-3, requires_grad=True) * 2,
    "an array": lambda: np.ones(6, np.float32),
    "a NumPy number": lambda: np.float32(0.5),
    "a NumPy complex": lambda: np.complex64(1),
    "a lock": threading.Lock,
    "a generator": lambda: (i for i in range(3)),
    "a type": lambda: dict,
    "a tuple with a list": lambda: ([1], 2),
    "a set": lambda: {1, 2},
    "two switches": lambda: torch.tensor([True, False]),
}  # fmt: skip
strange = st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name]()) | values
ADDED = ("max_exp_avg_sq", "master", "amsgrad", "fused", "lr", "foreach", "params", 0, 9, "step")


@cache
def donor() -> dict[str, Any]:
    params = make_params(shapes=SHAPES)
    optimizer = offload([{"params": params[:2]}, {"params": params[2:], "betas": (0.8, 0.99)}], lr=0.7)
    train(optimizer, params, range(2))
    return frozen_state_dict(optimizer)


def edit(data: st.DataObject, saved: dict[str, Any]) -> Any:
    """One random edit, somewhere in the tree. Returns what is to be loaded: rarely something else altogether."""
    node: Any = saved
    while True:
        keys = list(range(len(node))) if isinstance(node, list) else sorted(node, key=str)
        key = data.draw(st.sampled_from(keys)) if keys else None
        inner = node[key] if key is not None else None
        if isinstance(inner, (dict, list)) and data.draw(st.integers(0, 4)):
            node = inner
            continue
        change = data.draw(st.sampled_from(("replace", "replace", "remove", "add", "repeat", "whole")))
        if change == "whole":
            return data.draw(strange) if data.draw(st.integers(0, 9)) == 0 else saved
        if change == "replace" and key is not None:
            node[key] = data.draw(strange)
        elif change == "remove" and key is not None:
            del node[key]
        elif change == "repeat" and key is not None and isinstance(node, list):
            node.append(copy.copy(node[key]))  # not deeper: an edit before may have put a generator there
            if data.draw(st.booleans()):
                del node[0]
        elif isinstance(node, dict):
            node[data.draw(st.sampled_from(ADDED))] = data.draw(strange)
        return saved


def load_edited(mode: str, wire: torch.dtype, changes: Callable[[dict[str, Any]], Any]) -> bool:
    """Whether it was loaded."""
    params = make_params(wire, SHAPES, seed=1)
    optimizer = offload([{"params": params[:2]}, {"params": params[2:]}], mode, lr=0.1)
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    given_state = changes(copy.deepcopy(donor()))
    try:
        optimizer.load_state_dict(given_state)
        loaded = True
    except StateError as error:
        assert len(str(error)) < 5000 and str(error).endswith(".")
        assert snapshot(optimizer, params) == before
        loaded = False
    give(params, gradients(2, params))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.synchronize()
    optimizer.close()
    return loaded


@both_sizes
@pytest.mark.parametrize(("mode", "wire"), [("in_order", torch.float32), ("speculative", torch.bfloat16)])
def test_random_edits(mode: str, wire: torch.dtype, examples: int) -> None:
    outcomes: set[bool] = set()

    @examples_of(examples // 2)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        def change(saved: dict[str, Any]) -> Any:
            for _ in range(data.draw(st.integers(1, 2))):
                saved = edit(data, saved) if isinstance(saved, dict) and saved else saved
            return saved

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.add(load_edited(mode, wire, change))

    check()
    assert outcomes == {True, False}


@pytest.mark.parametrize("what", MAKERS)
@pytest.mark.parametrize(
    "place",
    [("state", 2, "exp_avg"), ("state", 2, "step"), ("state", 2, "master"), ("state", 2), ("state",),
     ("param_groups", 1), ("param_groups", 1, "lr"), ("param_groups", 1, "betas"), ("param_groups", 1, "amsgrad"),
     ("param_groups", 1, "mine"),
     ("param_groups", 1, "decoupled_weight_decay"), ("param_groups", 1, "params"), ("param_groups", 1, "params", 0)],
    ids=lambda place: ".".join(map(str, place)),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_every_strange_value_at_every_place(place: tuple[Any, ...], what: str) -> None:
    def change(saved: dict[str, Any]) -> Any:
        node: Any = saved
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = MAKERS[what]()
        return saved

    load_edited("in_order", torch.float32, change)


def test_two_parameters_of_one_number() -> None:
    """Both would get the one's moments."""

    def change(saved: dict[str, Any]) -> Any:
        saved["param_groups"][1]["params"] = [2, 2]
        del saved["state"][3]
        return saved

    assert not load_edited("in_order", torch.float32, change)
