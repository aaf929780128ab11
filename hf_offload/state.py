"""Loading optimizer state: checked whole before anything changes, then copied into the host state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import StateError, explain

_MOMENTS = ("exp_avg", "exp_avg_sq")


def loadable(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter that has one in `state_dict`, checked.

    Raises:
        StateError: other groups or sizes, AMSGrad state, another mode of weight decay, or missing entries.
    """
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise StateError(
            explain("state_dict", f"groups of {saved_sizes} parameters", f"this optimizer has groups of {sizes}",
                    "Load it into an optimizer made for the same model with the same groups")
        )  # fmt: skip
    found: dict[Tensor, dict[str, Any]] = {}
    for group, saved_group in zip(groups, saved):
        _check_mode(group, saved_group)
        for p, number in zip(group["params"], saved_group["params"]):
            entry = state_dict["state"].get(number)
            if entry:
                _check_entry(p, number, entry)
                found[p] = dict(entry)
    return found


def load_state(optimizer: Any, entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Copy checked entries into the host state; a parameter without an entry starts anew."""
    engine = optimizer.engine
    for p in optimizer._parameters():
        if not engine.is_bound(p):
            continue
        views = engine.state_views(p)
        entry = entries.get(p)
        if entry is None:
            for name in ("step", *_MOMENTS):
                views[name].zero_()
            continue
        for name in ("step", *_MOMENTS, "master"):
            if name in entry:
                views[name].copy_(torch.as_tensor(entry[name]))
    optimizer._fill_state()
    engine.watch.suspect_all()


def _check_mode(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if saved.get("amsgrad"):
        raise StateError(explain("amsgrad", True, "the saved state is AMSGrad's", "Load a state without amsgrad"))
    ours = group["decoupled_weight_decay"]
    theirs = saved.get("decoupled_weight_decay", ours)
    if theirs != ours:
        raise StateError(
            explain("decoupled_weight_decay", theirs, f"the state was saved with another mode of decay than {ours}",
                    f"Make the optimizer with decoupled_weight_decay={theirs}")
        )  # fmt: skip


def _check_entry(p: Tensor, number: int, entry: Mapping[str, Any]) -> None:
    missing = [name for name in ("step", *_MOMENTS) if name not in entry]
    if missing:
        raise StateError(
            explain(f"state[{number}]", sorted(entry), f"{', '.join(missing)} missing", "Load the state of an Adam(W)")
        )
    if "max_exp_avg_sq" in entry:
        raise StateError(explain(f"state[{number}]", "max_exp_avg_sq", "this is AMSGrad's state", "Load one without"))
    for name in (*_MOMENTS, "master"):
        if name in entry and tuple(entry[name].shape) != tuple(p.shape):
            raise StateError(
                explain(f"state[{number}][{name!r}]", tuple(entry[name].shape), f"the parameter is {tuple(p.shape)}",
                        "Load the state of this very model")
            )  # fmt: skip
