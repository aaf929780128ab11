"""What is in a checkpoint's folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_offload.checkpoint import adam_state, deepspeed, held, manifest, torch_file, weights
from hf_offload.checkpoint.adam_state import AdamState
from hf_offload.errors import CheckpointError, explain

SCALER, TRAINER_STATE, SCHEDULER = "scaler.pt", "trainer_state.json", "scheduler.pt"
SHOWN_SETTINGS = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")


@dataclass(frozen=True)
class GroupFacts:
    """One param group: how many tensors and elements, and its settings."""

    tensors: int
    elements: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class OptimizerFacts:
    """The optimizer's state.

    Attributes:
        steps: of the parameters, fewest and most.
        dtypes: in what each of `exp_avg`, `exp_avg_sq` and `master` is held -> number of parameters; codes with scales
            are "int8".
        without_state: parameters that took no step.
    """

    groups: tuple[GroupFacts, ...]
    steps: tuple[int, int] | None
    dtypes: dict[str, dict[str, int]]
    without_state: int


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        kind: "OffloadAdam", "AdamW", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "weights only" or "another optimizer".
        weights: dtype -> number of elements in the model's files.
        files: bytes of every file, by its path in the folder.
        written_by: what wrote the manifest; None: there is none, so changed bytes would not be noticed.
        trainer: global_step, epoch, best_metric, best_model_checkpoint, as far as they are there.
        scaler: scale and growth tracker of fp16 training.
        notes: what else one should know, in words.
    """

    folder: str
    kind: str
    weights: dict[str, int]
    weight_tensors: int
    optimizer: OptimizerFacts | None
    files: dict[str, int]
    written_by: str | None
    trainer: dict[str, Any]
    scaler: dict[str, Any] | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check_folder(folder: Path) -> None:
    """Refuse what is no checkpoint at all.

    Raises:
        FileNotFoundError: no such folder, or one without any file of a checkpoint.
    """
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such folder: give a checkpoint, as outputs/checkpoint-100", str(folder))
    known = (*adam_state.FILES, manifest.NAME, deepspeed.LATEST, TRAINER_STATE, weights.INDEX, weights.WEIGHTS,
             weights.ADAPTER)  # fmt: skip
    if not any((folder / name).exists() for name in known) and not any(folder.glob("*_optim_states.pt")):
        inside = sorted(p.name for p in folder.glob("checkpoint-*") if p.is_dir())
        hint = f"; there are checkpoints in it: {', '.join(inside[:5])}" if inside else ""
        raise FileNotFoundError(2, f"No checkpoint: it has none of {', '.join(known)}{hint}", str(folder))


def contents(folder: Path) -> Contents:
    """Read headers and small files; of the tensors only shapes and dtypes are looked at.

    Raises:
        CheckpointError: a file is damaged; `verify` says which ones.
        FileNotFoundError: it is no checkpoint.
    """
    check_folder(folder)
    written = manifest.read(folder)
    listed = weights.listed(folder)
    kind, state, notes = _optimizer(folder)
    elements: Counter[str] = Counter()
    for weight in listed.values():
        elements[weight.dtype] += weight.numel
    return Contents(
        folder=str(folder),
        kind=kind,
        weights=dict(elements),
        weight_tensors=len(listed),
        optimizer=None if state is None else facts(state),
        files={p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()},
        written_by=None if written is None else written.writer,
        trainer=trainer_state(folder),
        scaler=_scaler(folder),
        notes=tuple(notes),
    )


def facts(state: AdamState) -> OptimizerFacts:
    """Counts, settings and dtypes of a state."""
    groups = tuple(
        GroupFacts(
            len(group.parameters),
            sum(p.numel for p in group.parameters),
            {key: _plain(group.settings[key]) for key in SHOWN_SETTINGS if key in group.settings},
        )
        for group in state.groups
    )
    dtypes: dict[str, Counter[str]] = {}
    steps = []
    for p in state.parameters():
        if p.entry:
            steps.append(int(p.entry["step"]))
        for name, dtype in held.dtypes(p.entry).items():
            dtypes.setdefault(name, Counter())[dtype] += 1
    without = sum(1 for p in state.parameters() if not p.entry)
    span = (min(steps), max(steps)) if steps else None
    return OptimizerFacts(groups, span, {name: dict(count) for name, count in dtypes.items()}, without)


def trainer_state(folder: Path) -> dict[str, Any]:
    """What the Trainer knows of a checkpoint; empty without trainer_state.json.

    Raises:
        CheckpointError: the file is damaged.
    """
    whole = read_json(folder / TRAINER_STATE)
    kept = ("global_step", "epoch", "max_steps", "best_metric", "best_model_checkpoint")
    return {key: whole[key] for key in kept if key in whole}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        remedy = manifest.remedy_for(path.parent)
        raise CheckpointError(explain("file", str(path), f"it is no JSON: {error}", remedy)) from None
    if not isinstance(whole, dict):
        raise CheckpointError(explain("file", str(path), "it holds no JSON object", manifest.remedy_for(path.parent)))
    return whole


def _optimizer(folder: Path) -> tuple[str, AdamState | None, list[str]]:
    path = adam_state.find(folder)
    if path is not None:
        saved = torch_file.read(path)
        try:
            state = adam_state.parse(str(path), saved)
        except CheckpointError as error:
            return "another optimizer", None, [str(error)]
        return state.kind, state, []
    if deepspeed.folder_of(folder) is not None:
        found = deepspeed.read(folder)
        notes = [f"Saved by DeepSpeed {found.version} on {found.ranks} ranks at step {found.global_step}.", *found.said]
        return f"DeepSpeed ZeRO-{found.stage}", found.state, notes
    return (
        "weights only",
        None,
        ["No optimizer state that can be read here: a resume would start Adam anew, at step 0."],
    )


def _scaler(folder: Path) -> dict[str, Any] | None:
    if not (folder / SCALER).is_file():
        return None
    saved = torch_file.read(folder / SCALER)
    return {str(key): _plain(value) for key, value in saved.items()} if isinstance(saved, Mapping) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
