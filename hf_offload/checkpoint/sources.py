"""The checkpoints that can be converted: where their state, weights and other files lie, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import adam_state, deepspeed, inspect, weights
from hf_offload.checkpoint.adam_state import AdamState, Group
from hf_offload.checkpoint.names import UNKNOWN, Model, in_file, named
from hf_offload.checkpoint.verify import unlike
from hf_offload.errors import CheckpointError, explain

Row = tuple[torch.dtype, Sequence[int], Callable[[], Tensor]]
"""A tensor to be written: dtype, shape, and how to get it."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to be converted.

    Attributes:
        kind: as `inspect` calls it.
        state: with names, if `named`.
        optimizer: the name of the file that its state goes into.
        files: the weights' files and the tensors in each. DeepSpeed's own copy where there is no such file.
        left_out: files and folders that are not copied.
        scheduler: a scheduler's state that lies in no file of its own.
    """

    folder: Path
    kind: str
    state: AdamState
    optimizer: str
    files: Mapping[str, Mapping[str, Row]]
    left_out: frozenset[str]
    scheduler: Mapping[str, Any] | None
    said: tuple[str, ...]

    def row(self, parameter: str) -> Row | None:
        """The weight of a parameter."""
        names = (parameter, in_file(parameter))
        return next((rows[name] for name in names for rows in self.files.values() if name in rows), None)


def read(folder: Path, model: Model = UNKNOWN) -> Source:
    """A checkpoint of OffloadAdam, AdamW or DeepSpeed.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    path = adam_state.find(folder)
    if path is not None:
        return _plain(folder, path, model)
    if deepspeed.folder_of(folder) is not None:
        return _deepspeeds(folder, model)
    cause = "it has no optimizer state"
    raise CheckpointError(explain("checkpoint", str(folder), cause, "There is nothing to convert: use it as it is"))


def _plain(folder: Path, path: Path, model: Model) -> Source:
    state = adam_state.read(path)
    known = named(folder, state, weights.listed(folder), model)
    return Source(folder, state.kind, known or state, path.name, _rows(folder), frozenset({path.name}), None, ())


def _rows(folder: Path) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for path in weights.files(folder):
        listed = weights.header(path)
        if strange := sorted({w.dtype for w in listed.values()} - set(weights.DTYPES)):
            cause = f"it holds tensors of the dtypes {strange}, which are not known here"
            raise CheckpointError(explain("file", str(path), cause, "Upgrade hf-offload"))
        found[path.name] = {name: (weights.DTYPES[w.dtype], w.shape, w.read) for name, w in listed.items()}
    return found


def _deepspeeds(folder: Path, model: Model) -> Source:
    found = deepspeed.read(folder)
    _check_masters(folder, found)
    said = [f"Read from DeepSpeed {found.version}, {found.ranks} ranks, step {found.global_step}.", *found.said]
    files = _rows(folder)
    if not files:
        kept = {name: t for name, t in found.weights.items() if name not in found.shared}
        files = {weights.WEIGHTS: {name: (t.dtype, tuple(t.shape), partial(_itself, t)) for name, t in kept.items()}}
        said.append(f"{weights.WEIGHTS} was missing, and is written from {deepspeed.MODEL_FILE}.")
    if found.loss_scale is not None and not (folder / inspect.SCALER).is_file():
        said.append(
            f"fp16's loss scale was {found.loss_scale:g}; the Trainer's GradScaler begins at 65536 and finds its own."
        )
    state, how = _trainers_groups(found.state, model)
    scheduler = None
    if not (folder / inspect.SCHEDULER).is_file():
        scheduler = _trainers_scheduler(state)
        said.append(
            f"DeepSpeed stepped a scheduler of its own; the {inspect.SCHEDULER} written here sets the Trainer's to "
            f"step {scheduler['last_epoch']} of its schedule: give it a fitting learning_rate and lr_scheduler_type."
        )
    left_out = frozenset(path.name for path in deepspeed.files_in(folder))
    kind = f"DeepSpeed ZeRO-{found.stage}"
    return Source(folder, kind, state, adam_state.OPTIMIZER, files, left_out, scheduler, (*said, *how))


def _itself(t: Tensor) -> Tensor:
    return t


def _check_masters(folder: Path, found: deepspeed.DeepSpeedCheckpoint) -> None:
    """After a step every master rounds to its weight: else the parameters do not lie where we look for them."""
    for p in found.state.parameters():
        weight = found.weights.get(p.name or "")
        if weight is None or weight.shape != p.entry["master"].shape:
            cause = f"{p.name} has no weight of its shape in {deepspeed.MODEL_FILE}"
        elif 2 * (count := unlike(p.entry["master"], weight)) > p.numel:
            cause = f"{count} of {p.numel} masters of {p.name} do not round to its weight: the layout is not understood"
        else:
            continue
        remedy = "Please report it, with the version of DeepSpeed and its configuration"
        raise CheckpointError(explain("DeepSpeed checkpoint", str(folder), cause, remedy))


def _trainers_scheduler(state: AdamState) -> dict[str, Any]:
    """What the Trainer's LambdaLR loads: how many steps were taken; its base rates and its function stay its own."""
    taken = max((int(p.entry["step"]) for p in state.parameters() if p.entry), default=0)
    rates = [float(group.settings["lr"]) for group in state.groups]
    return {"last_epoch": taken, "_step_count": taken + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}


def _trainers_groups(state: AdamState, model: Model) -> tuple[AdamState, tuple[str, ...]]:
    """The Trainer makes two groups, one without weight decay; DeepSpeed drops an empty one, or makes a single one."""
    if len(state.groups) != 1:
        return state, ("The param groups are those that DeepSpeed had.",)
    (group,) = state.groups
    by_name = {p.name: p for p in group.parameters}
    split = model.split([p.name for p in group.parameters if p.name is not None])
    if split is None:
        how = (
            "DeepSpeed had one param group, and how the Trainer would split it cannot be told without the model's "
            "config.json: it stays one."
        )
        return state, (how,)
    groups = tuple(Group(group.settings, tuple(by_name[name] for name in names)) for names in split)
    how = (
        f"DeepSpeed had one param group; it is split as the Trainer does ({' + '.join(str(len(n)) for n in split)} "
        f"parameters), with the settings it had (weight_decay {group.settings.get('weight_decay')} for all)."
    )
    return AdamState(groups), (how,)
