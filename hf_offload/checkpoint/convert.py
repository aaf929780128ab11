"""From one optimizer's checkpoint to another's, in a new folder: OffloadAdam, plain AdamW, and from DeepSpeed ZeRO-1/2.

Tensors are views of the mapped source and are written from there, one after the other; what is held in memory is what
must be computed: 16-bit values widened for the target, and parameters that lay on several ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import adam_state, deepspeed, inspect, manifest, torch_file, weights
from hf_offload.checkpoint.adam_state import AdamState, Group, Parameter
from hf_offload.checkpoint.digest import Digest
from hf_offload.checkpoint.names import UNKNOWN, Model, in_file, named
from hf_offload.checkpoint.staging import Staged
from hf_offload.checkpoint.verify import check_files, unlike
from hf_offload.errors import CheckpointError, ConfigError, explain, nearest

Row = tuple[torch.dtype, Sequence[int], Callable[[], Tensor]]
"""A tensor to be written: dtype, shape, and how to get it."""

# what torch.optim.AdamW expects of a group beside lr, betas, eps and weight_decay
_ADAMW = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
          "decoupled_weight_decay": True, "fused": None}  # fmt: skip


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


@dataclass(frozen=True)
class Converted:
    """What was done.

    Attributes:
        kind: of the source, as `inspect` calls it.
        said: what one should know, in words.
    """

    kind: str
    to: str
    output: str
    said: tuple[str, ...]


def convert(
    folder: Path,
    to: str,
    output: Path,
    fp32_weights: bool | None = None,
    model: Model = UNKNOWN,
    told: Callable[[int], None] | None = None,
) -> Converted:
    """Write `folder` anew, as a checkpoint of another optimizer; `folder` itself is only read.

    Args:
        to: "adamw" or "offload_adam".
        output: the new folder; it appears whole, with a manifest, or not at all.
        fp32_weights: "adamw" only: whether the masters become the model's weights, in fp32. None: yes where the
            weights hold less than the masters; a plain AdamW has no other place for their lower bits.
        model: tells names and groups where the checkpoint does not.
        told: called with a number of bytes whenever so many more have been read or written.

    Raises:
        ConfigError: an unknown target, a source that is of that kind already, or an `output` inside the source.
        FileExistsError, FileNotFoundError: `output` exists, or `folder` is no checkpoint.
        CheckpointError: the source is damaged or cannot be converted; nothing was written.
    """
    if to not in TARGETS:
        raise ConfigError(explain("--to", to, "not a kind of checkpoint that can be written", nearest(to, TARGETS)))
    inspect.check_folder(folder)
    _check_output(folder, output)
    _check_whole(folder)
    source = read(folder, model)
    if TARGETS[to].kind == source.kind:
        raise ConfigError(explain("--to", to, f"{folder} is one already", "There is nothing to convert"))
    target = TARGETS[to](source, fp32_weights)
    with Staged(output) as staged:
        known = _copy(source, staged.path, told)
        known |= target.write(staged.path, told)
        manifest.write(staged.path, known, target.table())
        staged.commit()
    return Converted(source.kind, to, str(output), (*source.said, *target.said))


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


# ---- sources


def _plain(folder: Path, path: Path, model: Model) -> Source:
    state = adam_state.read(path)
    known = named(folder, state, weights.listed(folder), model)
    kind = "OffloadAdam" if state.has_masters else "AdamW"
    return Source(folder, kind, known or state, path.name, _rows(folder), frozenset({path.name}), None, ())


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
    scheduler = None
    if not (folder / inspect.SCHEDULER).is_file():
        if found.scheduler is not None and "last_epoch" in found.scheduler:
            scheduler = found.scheduler
            said.append(f"{inspect.SCHEDULER} is written from {deepspeed.MODEL_FILE}.")
        else:
            said.append(
                f"There is no {inspect.SCHEDULER}, since DeepSpeed stepped a scheduler of its own: the Trainer's "
                "begins at its start, so choose its settings for the steps that are left."
            )
    if found.loss_scale is not None and not (folder / inspect.SCALER).is_file():
        said.append(
            f"fp16's loss scale was {found.loss_scale:g}; the Trainer's GradScaler begins at 65536 and finds its own."
        )
    state, how = _trainers_groups(found.state, model)
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


# ---- targets


class ToAdamW:
    """Masters go; where they hold more than the weights, they become the weights."""

    kind = "AdamW"

    def __init__(self, source: Source, fp32_weights: bool | None) -> None:
        self.source = source
        self.said: list[str] = []
        more = source.state.has_masters and self._masters_hold_more()
        self.fp32 = more if fp32_weights is None else fp32_weights and source.state.has_masters
        if self.fp32 and not source.state.named:
            cause = "whose state is whose cannot be told here, so the masters cannot be put into the weights"
            remedy = (
                "Convert it where the checkpoint's config.json lies, or give --no-fp32-weights and lose their low bits"
            )
            raise CheckpointError(explain("--fp32-weights", True, cause, remedy))
        self._l2()

    def write(self, folder: Path, told: Callable[[int], None] | None) -> dict[str, Digest]:
        known = _write_state(self.source, self.state(), folder, told)
        if self.fp32:
            known |= self._write_weights(folder, told)
        elif self.source.state.has_masters:
            self.said.append("The masters are left out; the weights are as they were.")
            known |= _write_missing(self.source, folder, told)
        return known

    def state(self) -> AdamState:
        groups = [
            Group({**_ADAMW, **group.settings}, tuple(_without_master(p) for p in group.parameters))
            for group in self.source.state.groups
        ]
        return AdamState(tuple(groups))

    def table(self) -> dict[str, Any]:
        return _table(self.source, torch.float32 if self.fp32 else None)

    def _masters_hold_more(self) -> bool:
        rows = [self.source.row(p.name) for p in self.source.state.parameters() if p.name and "master" in p.entry]
        return not self.source.state.named or any(row is None or row[0] != torch.float32 for row in rows)

    def _l2(self) -> None:
        if any(group.settings.get("decoupled_weight_decay") is False for group in self.source.state.groups):
            self.said.append(
                "Its weight decay is L2's: go on with torch.optim.Adam, since AdamW would decay otherwise."
            )

    def _write_weights(self, folder: Path, told: Callable[[int], None] | None) -> dict[str, Digest]:
        masters = self._masters()
        changed = 0

        def weight(name: str, row: Row) -> Tensor:
            nonlocal changed
            kept = row[2]()
            differ = unlike(masters[name], kept)
            changed += differ
            if not differ:
                return masters[name]
            return torch.where(masters[name].to(kept.dtype) == kept, masters[name], kept.float())

        known = {}
        for file, rows in self.source.files.items():
            new = {
                name: (torch.float32, row[1], partial(weight, name, row)) if name in masters else row
                for name, row in rows.items()
            }
            known[file] = weights.write(folder / file, new, told=told)
        _correct_index(folder)
        _correct_config(folder)
        if changed:
            self.said.append(f"{changed} masters did not round to their weight, which was changed after training: the "
                             "weight is kept there, as a resume does.")  # fmt: skip
        self.said.append(
            "The weights are the fp32 masters now, 4 bytes each, and so says config.json. Load the model in float32 "
            "before you resume: a model in 16 bits would round them."
        )
        return known

    def _masters(self) -> dict[str, Tensor]:
        """The masters by the names in the weights' files; tied weights may be there under several."""
        masters: dict[str, Tensor] = {}
        rows = {name: row for of_file in self.source.files.values() for name, row in of_file.items()}
        same_shape: dict[tuple[int, ...], list[str]] = {}
        for p in self.source.state.parameters():
            if p.name is None or "master" not in p.entry:
                continue
            name = p.name if p.name in rows else in_file(p.name)
            if name not in rows or tuple(rows[name][1]) != p.shape:
                cause = f"the parameter {p.name} has a master and no weight of its shape in the model's files"
                remedy = "Give --no-fp32-weights, and lose the masters' low bits"
                raise CheckpointError(explain("checkpoint", str(self.source.folder), cause, remedy))
            masters[name] = p.entry["master"]
            same_shape.setdefault(tuple(rows[name][1]), []).append(name)
        for name, (dtype, shape, read) in rows.items():
            if name not in masters and dtype in (torch.bfloat16, torch.float16):
                for twin in same_shape.get(tuple(shape), ()):
                    if torch.equal(rows[twin][2](), read()):
                        masters[name] = masters[twin]
        return masters


class ToOffloadAdam:
    """The weights, as they were saved, become the masters where there are none."""

    kind = "OffloadAdam"

    def __init__(self, source: Source, fp32_weights: bool | None) -> None:
        if fp32_weights is not None:
            cause = "OffloadAdam has its fp32 masters in optimizer.pt, and the weights stay as they are"
            raise ConfigError(explain("--fp32-weights", fp32_weights, cause, "Leave it out"))
        self.source = source
        self.said: list[str] = []

    def write(self, folder: Path, told: Callable[[int], None] | None) -> dict[str, Digest]:
        state = self.source.state
        if not state.named:
            self.said.append("Whose state is whose cannot be told here, so no masters are written: OffloadAdam takes "
                             "them from the weights when it loads.")  # fmt: skip
        elif not state.has_masters:
            state = AdamState(tuple(replace(g, parameters=tuple(map(self._with_master, g.parameters)))
                                    for g in state.groups))  # fmt: skip
            self.said.append("The masters are the weights as they were saved.")
        known = _write_state(self.source, state, folder, told)
        return known | _write_missing(self.source, folder, told)

    def table(self) -> dict[str, Any]:
        return _table(self.source, None)

    def _with_master(self, p: Parameter) -> Parameter:
        row = self.source.row(p.name or "")
        if row is None or not p.entry or p.shape != tuple(row[1]):
            return p
        return replace(p, entry={**p.entry, "master": row[2]().float()})


TARGETS: dict[str, type[ToAdamW] | type[ToOffloadAdam]] = {"adamw": ToAdamW, "offload_adam": ToOffloadAdam}


# ---- writing


def _check_output(folder: Path, output: Path) -> None:
    if os.path.lexists(output):
        raise FileExistsError(17, "It is there already; give the name of a new folder", str(output))
    if output.resolve().is_relative_to(folder.resolve()):
        remedy = "Give a folder beside it, or elsewhere"
        raise ConfigError(explain("--output", str(output), "it would lie inside the checkpoint", remedy))


def _check_whole(folder: Path) -> None:
    """A damaged source must not become a checkpoint that its manifest calls whole: every file is checked first."""
    damages = check_files(folder).damages
    if damages:
        cause = "damaged: " + "; ".join(f"{damage.file}: {damage.what}" for damage in damages)
        raise CheckpointError(explain("checkpoint", str(folder), cause, manifest.remedy_for(folder)))


def _copy(source: Source, folder: Path, told: Callable[[int], None] | None) -> dict[str, Digest]:
    """Every file that no target writes anew."""
    for path in sorted(source.folder.iterdir()):
        if path.name in source.left_out or path.name == manifest.NAME:
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
            if told is not None:
                told(path.stat().st_size)
    if source.scheduler is not None:
        return {inspect.SCHEDULER: torch_file.write(dict(source.scheduler), folder / inspect.SCHEDULER)}
    return {}


def _write_state(
    source: Source, state: AdamState, folder: Path, told: Callable[[int], None] | None
) -> dict[str, Digest]:
    digest = torch_file.write(state.state_dict(), folder / source.optimizer)
    if told is not None:
        told(digest.bytes)
    return {source.optimizer: digest}


def _write_missing(source: Source, folder: Path, told: Callable[[int], None] | None) -> dict[str, Digest]:
    """The weights' files that were not there to be copied."""
    missing = {file: rows for file, rows in source.files.items() if not (folder / file).exists()}
    return {file: weights.write(folder / file, rows, told=told) for file, rows in missing.items()}


def _correct_index(folder: Path) -> None:
    index = folder / weights.INDEX
    if index.is_file():
        whole = inspect.read_json(index)
        total = sum(w.stop - w.start for w in weights.listed(folder).values())
        whole["metadata"] = {**(whole.get("metadata") or {}), "total_size": total}
        index.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _correct_config(folder: Path) -> None:
    """`from_pretrained` loads in the dtype that config.json names."""
    config = folder / "config.json"
    whole = inspect.read_json(config)
    names = [name for name in ("dtype", "torch_dtype") if name in whole]
    if names:
        config.write_text(json.dumps({**whole, **dict.fromkeys(names, "float32")}, indent=2) + "\n", encoding="utf-8")


def _without_master(p: Parameter) -> Parameter:
    return replace(p, entry={name: t for name, t in p.entry.items() if name != "master"})


def _table(source: Source, dtype: torch.dtype | None) -> dict[str, Any]:
    """The manifest's table of parameters; `dtype` None: each as in its weights' file."""
    return {"state_dtype": "float32", "groups": [{"parameters": list(_table_rows(source, group, dtype))}
                                                 for group in source.state.groups]}  # fmt: skip


def _table_rows(source: Source, group: Group, dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
    for p in group.parameters:
        row = source.row(p.name) if p.name is not None else None
        shape = p.shape if p.shape is not None else tuple(row[1]) if row is not None else ()
        held = dtype or (row[0] if row is not None else torch.float32)
        yield {"name": p.name, "shape": list(shape), "dtype": str(held).removeprefix("torch.")}
