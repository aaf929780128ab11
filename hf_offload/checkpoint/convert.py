"""From one optimizer's checkpoint to another's, in a new folder: OffloadAdam, plain AdamW, and from DeepSpeed ZeRO-1/2.

Tensors are views of the mapped source and are written from there, one after the other. Moments held in fewer bytes are
decoded for AdamW one parameter at a time, into a file that is mapped. What else must be computed is held in memory:
16-bit weights widened to masters, and parameters that lay on several ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import held, inspect, manifest, scratch, sources, torch_file, weights
from hf_offload.checkpoint.adam_state import AdamState, Group, Parameter
from hf_offload.checkpoint.digest import Digest
from hf_offload.checkpoint.held import MOMENTS
from hf_offload.checkpoint.names import UNKNOWN, Model, in_file
from hf_offload.checkpoint.sources import Row, Source
from hf_offload.checkpoint.staging import Staged
from hf_offload.checkpoint.verify import check_files, unlike
from hf_offload.errors import CheckpointError, ConfigError, explain, nearest

# what torch.optim.AdamW expects of a group beside lr, betas, eps and weight_decay
_ADAMW = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
          "decoupled_weight_decay": True, "fused": None}  # fmt: skip


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
    source = sources.read(folder, model)
    if TARGETS[to].kind == source.kind:
        raise ConfigError(explain("--to", to, f"{folder} is one already", "There is nothing to convert"))
    target = TARGETS[to](source, fp32_weights)
    with Staged(output) as staged:
        known = _copy(source, staged.path, told)
        known |= target.write(staged.path, told)
        manifest.write(staged.path, known, target.table())
        staged.commit()
    return Converted(source.kind, to, str(output), (*source.said, *target.said))


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
        known = _write_state(self.source, _in_float32(self.state(), folder), folder, told)
        if (was := self.source.state.state_dtype) != "float32":
            self.said.append(f"exp_avg and exp_avg_sq were {was} and are float32: the same values.")
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
        return _table(self.source, torch.float32 if self.fp32 else None, "float32")

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
                    if _equal(rows[twin][2](), read()):
                        masters[name] = masters[twin]
                        break
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
        return _table(self.source, None, self.source.state.state_dtype)

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


def _equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, which reads both to the end, only if they begin alike."""
    begin = slice(0, 64)
    return torch.equal(a.reshape(-1)[begin], b.reshape(-1)[begin]) and torch.equal(a, b)


def _without_master(p: Parameter) -> Parameter:
    return replace(p, entry={name: t for name, t in p.entry.items() if name != "master"})


def _in_float32(state: AdamState, folder: Path) -> AdamState:
    """The same state with moments in fp32; those that were not are mapped from a scratch file in `folder`."""
    small = [p for p in state.parameters() if p.entry and any(t.itemsize < 4 for t in _moments(p))]
    if not small:
        return state
    widened = iter(scratch.mapped((t for p in small for t in held.in_float32(p.entry).values()), folder))
    new = {id(p): dict(zip(MOMENTS, islice(widened, len(MOMENTS)))) for p in small}

    def with_floats(p: Parameter) -> Parameter:
        if id(p) not in new:
            return p
        rest = {name: t for name, t in p.entry.items() if name not in held.names_in(p.entry)}
        return replace(p, entry={"step": p.entry["step"], **new[id(p)], **rest})

    return AdamState(tuple(replace(g, parameters=tuple(map(with_floats, g.parameters))) for g in state.groups))


def _moments(p: Parameter) -> Iterator[Tensor]:
    return (p.entry[name] for name in held.shaped_in(p.entry))


def _table(source: Source, dtype: torch.dtype | None, state_dtype: str) -> dict[str, Any]:
    """The manifest's table of parameters; `dtype` None: each as in its weights' file."""
    groups = [{"parameters": list(_table_rows(source, group, dtype))} for group in source.state.groups]
    return {"state_dtype": state_dtype, "groups": groups}


def _table_rows(source: Source, group: Group, dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
    for p in group.parameters:
        row = source.row(p.name) if p.name is not None else None
        shape = p.shape if p.shape is not None else tuple(row[1]) if row is not None else ()
        kept = dtype or (row[0] if row is not None else torch.float32)
        yield {"name": p.name, "shape": list(shape), "dtype": str(kept).removeprefix("torch."), "trained": True}
