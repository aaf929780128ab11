"""Adam's state as a checkpoint holds it, whoever wrote it: groups of parameters, each with its step and moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import held, torch_file
from hf_offload.checkpoint.held import CODES, INT8_NAMES, MOMENTS
from hf_offload.errors import CheckpointError, explain

OPTIMIZER = "optimizer.pt"
FILES = (OPTIMIZER, "optimizer.bin")
"""The Trainer's name for it, and accelerate's."""
_REMEDY = "Give a checkpoint whose optimizer is Adam, AdamW or OffloadAdam"


@dataclass(frozen=True)
class Parameter:
    """One parameter's state.

    Attributes:
        name: its name in the model; None where the checkpoint does not say.
        entry: `step` (0-dim float32), the moments as `held` describes them, and perhaps `master` in the parameter's
            shape; empty where no step has been taken.
    """

    name: str | None
    entry: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...] | None:
        return tuple(self._one.shape) if self.entry else None

    @property
    def numel(self) -> int:
        return self._one.numel() if self.entry else 0

    @property
    def _one(self) -> Tensor:
        return self.entry[held.shaped_in(self.entry)[0]]


@dataclass(frozen=True)
class Group:
    """A param group: `lr`, `betas`, `eps`, `weight_decay` and what else was saved, and its parameters in order."""

    settings: Mapping[str, Any]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class AdamState:
    """The state of Adam, AdamW or OffloadAdam."""

    groups: tuple[Group, ...]

    def parameters(self) -> Iterator[Parameter]:
        for group in self.groups:
            yield from group.parameters

    @property
    def has_masters(self) -> bool:
        return any("master" in p.entry for p in self.parameters())

    @property
    def kind(self) -> str:
        """Whose it is: torch's AdamW has neither masters nor codes."""
        ours = self.has_masters or any(held.names_in(p.entry) == INT8_NAMES for p in self.parameters())
        return "OffloadAdam" if ours else "AdamW"

    @property
    def state_dtype(self) -> str:
        """How all moments are held, or "mixed"; "float32" where there are none."""
        found = {dtype for p in self.parameters() for name, dtype in held.dtypes(p.entry).items() if name in MOMENTS}
        return "mixed" if len(found) > 1 else next(iter(found), "float32")

    @property
    def named(self) -> bool:
        """Whether the name of every parameter is known."""
        return all(p.name is not None for p in self.parameters())

    def with_names(self, names: Sequence[Sequence[str]]) -> AdamState:
        """The same state; `names` are those of each group's parameters, in order."""
        groups = [
            replace(group, parameters=tuple(replace(p, name=n) for p, n in zip(group.parameters, of_group)))
            for group, of_group in zip(self.groups, names)
        ]
        return AdamState(tuple(groups))

    def fits(self, names: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether these could be the names: as many in each group, each of its parameter's shape."""
        sizes = [len(group.parameters) for group in self.groups]
        if sizes != [len(of_group) for of_group in names]:
            return False
        pairs = zip(self.parameters(), (name for of_group in names for name in of_group))
        return all(p.shape is None or p.shape == shapes.get(name) for p, name in pairs)

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict()`: what `optimizer.pt` holds."""
        state, groups, number = {}, [], 0
        for group in self.groups:
            numbers = list(range(number, number + len(group.parameters)))
            groups.append({**group.settings, "params": numbers})
            state.update({i: dict(p.entry) for i, p in zip(numbers, group.parameters) if p.entry})
            number += len(numbers)
        return {"state": state, "param_groups": groups}


def find(folder: Path) -> Path | None:
    """The file with the optimizer's state; None: there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read(path: Path) -> AdamState:
    """The state in a file; its tensors are views of it.

    Raises:
        CheckpointError: the file is missing or damaged, or another optimizer's.
    """
    return parse(str(path), torch_file.read(path))


def parse(where: str, saved: Any) -> AdamState:
    """What is in the state dict of an Adam.

    Args:
        where: names the file in errors.

    Raises:
        CheckpointError: it is no state dict, another optimizer's, or entries are missing or of another shape.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(explain("file", where, "it holds no state of a torch optimizer", _REMEDY))
    parsed = tuple(_group(where, group, state) for group in groups)
    known = {key for group in groups for key in group["params"]}
    if strangers := [key for key in state if key not in known]:
        raise CheckpointError(explain("file", where, f"no group has the parameters {strangers[:5]}", _REMEDY))
    return AdamState(parsed)


def _group(where: str, group: Any, state: Mapping[Any, Any]) -> Group:
    keys = group.get("params") if isinstance(group, Mapping) else None
    if not isinstance(keys, list) or not all(isinstance(key, (int, str)) for key in keys):
        raise CheckpointError(explain("file", where, "a param group has no list 'params'", _REMEDY))
    names = group.get("param_names")
    named = isinstance(names, list) and len(names) == len(keys) and all(isinstance(n, str) for n in names)
    settings = {key: value for key, value in group.items() if key != "params"}
    of_keys = names if named else [None] * len(keys)
    parameters = tuple(Parameter(name, entry(where, key, state.get(key))) for key, name in zip(keys, of_keys))
    return Group(settings, parameters)


def entry(where: str, key: Any, saved: Any) -> dict[str, Tensor]:
    """One parameter's state, checked; empty if it has none.

    Raises:
        CheckpointError: it is not Adam's, or its tensors differ in shape.
    """
    if saved is None or saved == {}:
        return {}
    place = f"state of parameter {key}"
    names = held.names_in(saved) if isinstance(saved, Mapping) else MOMENTS
    if not isinstance(saved, Mapping) or any(name not in saved for name in ("step", *names)):
        has = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        cause = f"the {place} has {has}, which is not Adam's (step, {', '.join(names)})"
        raise CheckpointError(explain("file", where, cause, _REMEDY))
    if "max_exp_avg_sq" in saved:
        remedy = "There is no AMSGrad here; train on with torch.optim.AdamW"
        raise CheckpointError(explain("file", where, f"the {place} is AMSGrad's", remedy))
    if names == INT8_NAMES and any(name in saved for name in MOMENTS):
        cause = f"the {place} has its moments twice, as floats and as int8 codes"
        raise CheckpointError(explain("file", where, cause, _REMEDY))
    shaped = (*held.shaped_in(saved), "master")
    found = {name: _tensor(where, f"{name} in the {place}", saved[name], name in CODES) for name in shaped
             if name in saved}  # fmt: skip
    if len({t.shape for t in found.values()}) != 1:
        cause = f"tensors of one parameter differ in shape in the {place}"
        raise CheckpointError(explain("file", where, cause, _REMEDY))
    numel = next(iter(found.values())).numel()
    scales = {name: _scale(where, f"{name} in the {place}", saved[name], numel) for name in names if name not in shaped}
    return {"step": _step(where, place, saved["step"]), **found, **scales}


def _tensor(where: str, what: str, value: Any, codes: bool) -> Tensor:
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    if not plain or not (value.dtype == torch.uint8 if codes else value.is_floating_point()):
        cause = f"{what} is not a plain tensor of {'uint8' if codes else 'floats'}"
        raise CheckpointError(explain("file", where, cause, _REMEDY))
    return value


def _scale(where: str, what: str, value: Any, numel: int) -> Tensor:
    value = _tensor(where, what, value, codes=True)
    wanted = held.blocks(numel)
    if value.shape != (wanted,):
        cause = f"{what} has the shape {tuple(value.shape)}: {wanted} scales are wanted, one for {held.BLOCK} elements"
        raise CheckpointError(explain("file", where, cause, _REMEDY))
    return value


def _step(where: str, place: str, value: Any) -> Tensor:
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)) or not 0 <= plain < 2**53 or plain != int(plain):
        raise CheckpointError(explain("file", where, f"step in the {place} is not a count", _REMEDY))
    return value if isinstance(value, Tensor) and value.dim() == 0 else torch.tensor(float(plain))
