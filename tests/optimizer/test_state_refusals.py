"""State dicts that do not fit: refused by a StateError that says why, and nothing is changed, not by a byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload import OffloadAdam, hostmem
from hf_offload.errors import HostMemoryError, OffloadError, StateError
from support.optimizer import (
    EXACT,
    config,
    frozen_state_dict,
    give,
    gradients,
    make_params,
    offload,
    snapshot,
    train,
)

SHAPES = [(5,), (3, 4), (6,)]
Spoil = Callable[[dict[str, Any]], Any]


def entry(change: Callable[[dict[Any, Any]], Any], number: int = 2) -> Spoil:
    return lambda saved: change(saved["state"][number])


def group(change: Callable[[dict[Any, Any]], Any], number: int = 1) -> Spoil:
    return lambda saved: change(saved["param_groups"][number])


def setting(name: str, value: Any) -> Spoil:
    return group(lambda g: g.update({name: value}))


def value(name: str, made: Any) -> Spoil:
    return entry(lambda e: e.update({name: made}))


@dataclass
class Instead:
    """What is loaded instead of the state dict."""

    made: Any


def other(made: Any) -> Spoil:
    return lambda saved: Instead(made)


ONES = torch.ones(6)
WRONG: dict[str, tuple[Spoil, str]] = {
    # the whole
    "None": (other(None), "'NoneType': not a dict"),
    "a list": (other([1]), "'list': not a dict"),
    "a module's": (other({"weight": torch.ones(3)}), r"\['weight'\].*'param_groups' and a dict 'state'"),
    "empty": (other({}), "'param_groups' and a dict 'state'"),
    "no groups": (lambda s: s.pop("param_groups"), "'param_groups' and a dict 'state'"),
    "no state": (lambda s: s.pop("state"), "'param_groups' and a dict 'state'"),
    "state a list": (lambda s: s.update(state=[1, 2]), "'param_groups' and a dict 'state'"),
    "groups a dict": (lambda s: s.update(param_groups={}), "'param_groups' and a dict 'state'"),
    # groups
    "one group less": (lambda s: s["param_groups"].pop(), r"groups of \[2\] .*has groups of \[2, 1\]"),
    "one group more": (lambda s: s["param_groups"].append({"params": []}), r"groups of \[2, 1, 0\]"),
    "other sizes": (group(lambda g: g["params"].append(3)), r"groups of \[2, 2\] .*has groups of \[2, 1\]"),
    "a group a list": (lambda s: s["param_groups"].__setitem__(0, [1]), r"param_groups'\]\[0\]=\[1\].*list 'params'"),
    "no params": (group(lambda g: g.pop("params")), "a dict with a list 'params' of numbers"),
    "params a number": (setting("params", 3), "a dict with a list 'params' of numbers"),
    "params of lists": (setting("params", [[2]]), "a dict with a list 'params' of numbers"),
    "lr nan": (setting("lr", float("nan")), "lr=nan"),
    "lr text": (setting("lr", "fast"), "lr='fast': not a number"),
    "lr on meta": (setting("lr", torch.tensor(1.0, device="meta")), "lr=tensor.*not a number"),
    "betas one": (setting("betas", (1.0, 0.9)), r"betas\[0\]=1.0"),
    "betas None": (setting("betas", None), "betas=None: not two numbers"),
    "maximize text": (setting("maximize", "no"), "maximize='no': not a bool"),
    "amsgrad": (setting("amsgrad", True), "amsgrad=True: the saved state is AMSGrad's"),
    "L2": (setting("decoupled_weight_decay", False), r"decoupled_weight_decay=False: .*Make the optimizer with deco"),
    "decoupled text": (setting("decoupled_weight_decay", "yes"), "decoupled_weight_decay='yes'"),
    # entries
    "entry a list": (lambda s: s["state"].update({2: [1]}), r"state'\]\[2\]=\[1\]: not a dict"),
    "entry a tensor": (lambda s: s["state"].update({2: ONES}), r"state'\]\[2\]=.*: not a dict"),
    "entry a number": (lambda s: s["state"].update({2: 0}), r"state'\]\[2\]=0: not a dict"),
    "SGD's": (lambda s: s["state"].update({2: {"momentum_buffer": ONES}}), "step, exp_avg, exp_avg_sq missing"),
    "no step": (entry(lambda e: e.pop("step")), "step missing"),
    "no exp_avg": (entry(lambda e: e.pop("exp_avg")), "exp_avg missing"),
    "no exp_avg_sq": (entry(lambda e: e.pop("exp_avg_sq")), "exp_avg_sq missing"),
    "AMSGrad's maximum": (value("max_exp_avg_sq", ONES), "this is AMSGrad's state"),
    "a stranger": (lambda s: s["state"].update({7: dict(s["state"][2])}), r"\[7\]: no group has parameters of these"),
    "a stranger by name": (lambda s: s["state"].update(x={}), r"\['x'\]: no group has parameters of these numbers"),
    "another shape": (value("exp_avg", torch.ones(5)), r"\['exp_avg'\]=\(5,\): the parameter is \(6,\)"),
    "one that broadcasts": (value("exp_avg_sq", torch.ones(1)), r"\['exp_avg_sq'\]=\(1,\): the parameter is \(6,\)"),
    "0-dim": (value("exp_avg", torch.ones(())), r"\['exp_avg'\]=\(\): the parameter is \(6,\)"),
    "master's shape": (value("master", torch.ones(6, 1)), r"\['master'\]=\(6, 1\): the parameter is \(6,\)"),
    "exp_avg None": (value("exp_avg", None), r"\['exp_avg'\]='NoneType': not a plain tensor of floats"),
    "exp_avg text": (value("exp_avg", "junk"), r"\['exp_avg'\]='str': not a plain tensor"),
    "exp_avg a list": (value("exp_avg", [1.0] * 6), r"\['exp_avg'\]='list': not a plain tensor"),
    "exp_avg NumPy's": (value("exp_avg", np.ones(6, np.float32)), r"\['exp_avg'\]='ndarray': not a plain tensor"),
    "exp_avg integers": (value("exp_avg", torch.ones(6, dtype=torch.int64)), r"torch.int64.*not a plain tensor"),
    "exp_avg complex": (value("exp_avg", torch.ones(6, dtype=torch.complex64)), r"torch.complex64.*not a plain"),
    "exp_avg sparse": (value("exp_avg", torch.ones(6).to_sparse()), r"torch.sparse_coo.*not a plain tensor"),
    "exp_avg on meta": (value("exp_avg", torch.ones(6, device="meta")), r"on meta.*not a plain tensor"),
    "master None": (value("master", None), r"\['master'\]='NoneType': not a plain tensor"),
    "step None": (value("step", None), r"\['step'\]=None: not a count of steps"),
    "step text": (value("step", "3"), r"\['step'\]='3': not a count of steps"),
    "step negative": (value("step", -1), r"\['step'\]=-1: not a count"),
    "step nan": (value("step", torch.tensor(float("nan"))), r"\['step'\]=nan: not a count"),
    "step inf": (value("step", float("inf")), r"\['step'\]=inf: not a count"),
    "step between": (value("step", torch.tensor(2.5)), r"\['step'\]=2.5: not a count"),
    "step a bool": (value("step", True), r"\['step'\]=True: not a count"),
    "step two": (value("step", torch.ones(2)), r"\['step'\]=tensor.*: not a count"),
    "step none": (value("step", torch.ones(0)), r"\['step'\]=tensor.*: not a count"),
    "step on meta": (value("step", torch.ones((), device="meta")), r"\['step'\]=tensor.*: not a count"),
    "step complex": (value("step", torch.ones((), dtype=torch.complex64)), r"\['step'\]=tensor.*: not a count"),
    "step huge": (value("step", 10**400), r"\['step'\]=<a whole number of 1329 bits>: not a count"),
}


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_refused_and_nothing_changed(what: str, stepped: bool, schedule: str) -> None:
    """The spoilt part is the last one that is looked at; the file's other values differ from those in place."""
    spoil, match = WRONG[what]
    donor_params = make_params(shapes=SHAPES)
    donor = offload([{"params": donor_params[:2]}, {"params": donor_params[2:]}], lr=0.7)
    train(donor, donor_params, range(3))
    saved = frozen_state_dict(donor)
    result = spoil(saved)
    given = result.made if isinstance(result, Instead) else saved

    params = make_params(torch.bfloat16, SHAPES, seed=1)
    optimizer = offload([{"params": params[:2]}, {"params": params[2:]}], schedule, lr=0.1)
    if stepped:
        train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    with pytest.raises(StateError, match=match) as caught:
        optimizer.load_state_dict(given)
    assert snapshot(optimizer, params) == before
    assert str(caught.value).endswith("."), "the remedy"
    train(optimizer, params, [2])


INT8_SHAPES = [(5,), (3, 4), (300,)]
"""The last has three blocks."""
WRONG_INT8: dict[str, tuple[Spoil, str]] = {
    "no codes": (entry(lambda e: e.pop("exp_avg_codes")), "exp_avg_codes missing"),
    "no scale": (entry(lambda e: e.pop("exp_avg_sq_scale")), r"exp_avg_sq_scale missing.*Adam or AdamW"),
    "a scale too few": (entry(lambda e: e.update(exp_avg_scale=e["exp_avg_scale"][:-1])),
                        r"\['exp_avg_scale'\]='torch.uint8\[2\]': .*one uint8 for each 128 of the parameter's 300"),
    "a scale for each element": (value("exp_avg_sq_scale", torch.ones(300, dtype=torch.uint8)),
                                 r"\['exp_avg_sq_scale'\]='torch.uint8\[300\]'"),
    "scales in two dimensions": (value("exp_avg_scale", torch.ones((1, 3), dtype=torch.uint8)), r"uint8\[1, 3\]"),
    "scales of floats": (value("exp_avg_scale", torch.ones(3)), r"\['exp_avg_scale'\]='torch.float32\[3\]'"),
    "a scale on meta": (value("exp_avg_scale", ONES[:3].to("meta", torch.uint8)), r"uint8\[3\] on meta'"),
    "a sparse scale": (value("exp_avg_scale", ONES[:3].byte().to_sparse()), r"\[3\] torch.sparse_coo'"),
    "a scale that is no tensor": (value("exp_avg_scale", [1, 1, 1]), r"\['exp_avg_scale'\]='list'"),
    "codes of floats": (value("exp_avg_codes", torch.ones(300)), r"float32.*: not a plain tensor of uint8"),
    "codes that are signed": (value("exp_avg_sq_codes", torch.ones(300, dtype=torch.int8)), "plain tensor of uint8"),
    "codes None": (value("exp_avg_codes", None), r"\['exp_avg_codes'\]='NoneType': not a plain tensor of uint8"),
    "codes of another shape": (value("exp_avg_codes", torch.ones(299, dtype=torch.uint8)),
                               r"\['exp_avg_codes'\]=\(299,\): the parameter is \(300,\)"),
    "both kinds at once": (value("exp_avg", torch.ones(300)), "there twice, as floats and as int8 codes.*Take one"),
    "floats of the one, codes of the other": (
        entry(lambda e: e.update(exp_avg=torch.ones(300), step=e.pop("exp_avg_codes"))), "exp_avg_codes missing"),
    "AMSGrad's maximum": (value("max_exp_avg_sq", torch.ones(300)), "this is AMSGrad's state"),
}  # fmt: skip


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("what", WRONG_INT8)
def test_int8_entries_that_do_not_fit_are_refused_and_nothing_changed(what: str, state_dtype: str) -> None:
    spoil, match = WRONG_INT8[what]
    donor_params = make_params(shapes=INT8_SHAPES)
    donor = offload([{"params": donor_params[:2]}, {"params": donor_params[2:]}], settings={"state_dtype": "int8"})
    train(donor, donor_params, range(3))
    saved = frozen_state_dict(donor)
    spoil(saved)

    params = make_params(torch.bfloat16, INT8_SHAPES, seed=1)
    here = {"state_dtype": state_dtype}
    optimizer = offload([{"params": params[:2]}, {"params": params[2:]}], "overlapped", here, lr=0.1)
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    with pytest.raises(StateError, match=match) as caught:
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer, params) == before and str(caught.value).endswith(".")
    train(optimizer, params, [2])


@pytest.mark.parametrize("when", ["pre-hook", "post-hook"])
def test_a_hook_that_raises(when: str) -> None:
    """Before: nothing has changed yet. After: all of it has, as with torch."""
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    train(optimizer, params, range(3))
    saved = frozen_state_dict(optimizer)
    train(optimizer, params, [3])
    before = snapshot(optimizer, params)

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    getattr(optimizer, f"register_load_state_dict_{when.replace('-', '_')}")(fail)
    with pytest.raises(KeyError, match="mine"):
        optimizer.load_state_dict(saved)
    assert (snapshot(optimizer, params) == before) == (when == "pre-hook")
    assert float(optimizer.state[params[0]]["step"]) == (4 if when == "pre-hook" else 3)


def test_a_pre_hook_that_makes_junk_is_refused_as_junk() -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    optimizer.register_load_state_dict_pre_hook(lambda o, s: {"junk": 1})
    with pytest.raises(StateError, match=r"\['junk'\]"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_no_room_for_the_state_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    donor_params = make_params(shapes=SHAPES)
    donor = offload(donor_params, lr=0.7)
    train(donor, donor_params, range(3))
    params = make_params(shapes=SHAPES)
    optimizer = offload(params, lr=0.1)
    before = snapshot(optimizer, params)
    monkeypatch.setattr(hostmem, "available_host_bytes", lambda root=None: hostmem.HostMemory(100, 1000, "a test"))
    with pytest.raises(HostMemoryError, match="a test"):
        optimizer.load_state_dict(donor.state_dict())
    assert snapshot(optimizer, params) == before and not optimizer.engine.arenas
    monkeypatch.undo()
    optimizer.load_state_dict(donor.state_dict())
    assert float(optimizer.state[params[0]]["step"]) == 3


def test_every_refusal_is_of_our_own_tree() -> None:
    assert issubclass(StateError, OffloadError) and issubclass(StateError, RuntimeError)


def test_a_failed_step_is_not_hidden_by_loading() -> None:
    """A half stepped optimizer says so; it does not take new state as if nothing had been."""
    params = make_params(shapes=[(50,)])
    optimizer = OffloadAdam(params, config=config())
    train(optimizer, params, [0])
    saved = frozen_state_dict(optimizer)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the link is down")

    optimizer.engine.placement.transport.to_device = broken  # type: ignore[method-assign]
    give(params, gradients(1, params))
    with pytest.raises(StateError, match="the link is down"):
        optimizer.step()
    for use in (lambda: optimizer.load_state_dict(saved), optimizer.state_dict, optimizer.synchronize, optimizer.step):
        with pytest.raises(StateError, match=r"half stepped.*Load the last checkpoint into a new optimizer"):
            use()
    with pytest.raises(StateError, match="half stepped"):
        optimizer.close()
