"""Which parameters a checkpoint's optimizer state belongs to, and whether a model has the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_offload.errors import CheckpointError, explain

SHOWN = 3
"""How many parameters an error names."""

_SIXTEEN = ("bfloat16", "float16")


def describe(groups: list[dict[str, Any]], model: nn.Module | None, state_dtype: str = "float32") -> dict[str, Any]:
    """The `optimizer` entry of a manifest.

    Args:
        groups: an optimizer's `param_groups`.
        model: gives the parameters their names; None: they have none.
        state_dtype: how the moments are held.
    """
    names = _names(model)
    listed = [{"parameters": [_row(p, names.get(id(p))) for p in group["params"]]} for group in groups]
    return {"state_dtype": state_dtype, "groups": listed}


def check_fits(folder: Path, saved: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Refuse a checkpoint of another model, or one whose 16-bit weights would be less than its fp32 masters here.

    Args:
        saved: what `describe` gave.

    Returns:
        What will be converted, in words; nothing, as a rule.

    Raises:
        CheckpointError: parameters are missing here or of another shape, or their dtype does not fit.
    """
    rows = [row for group in saved["groups"] for row in group["parameters"] if row["name"] is not None]
    here = {_plain(name): p for name, p in model.named_parameters()}
    strange = [row for row in rows if row["name"] not in here]
    shapes = [row for row in rows if row["name"] in here and list(here[row["name"]].shape) != row["shape"]]
    if strange or shapes:
        parts = [
            f"it has {_some(strange)}, which this model has not" if strange else "",
            f"{_some(shapes)} has another shape here: {tuple(here[shapes[0]['name']].shape)}" if shapes else "",
        ]
        cause = "it is of another model: " + "; ".join(filter(None, parts))
        raise CheckpointError(explain("checkpoint", str(folder), cause, "Resume with the model that was trained"))
    frozen = [row for row in rows if row["trained"] and not here[row["name"]].requires_grad]
    if frozen:
        cause = f"{_some(frozen)} was trained there and is frozen here"
        remedy = "Freeze what was frozen there, no more, or start a new run from its weights"
        raise CheckpointError(explain("checkpoint", str(folder), cause, remedy))
    return _dtypes(folder, rows, here)


def _dtypes(folder: Path, rows: list[Mapping[str, Any]], here: Mapping[str, Tensor]) -> list[str]:
    said = []
    for was in sorted({row["dtype"] for row in rows}):
        for now in sorted({_dtype(here[row["name"]]) for row in rows if row["dtype"] == was} - {was}):
            if was in _SIXTEEN:
                cause = f"its weights are {was} with fp32 masters, this model's are {now}: the masters would be lost"
                remedy = (
                    f"Train in the same precision ({'--bf16' if was == 'bfloat16' else '--fp16'}), or convert it: "
                    f"hf-offload checkpoint convert {folder} --to adamw --fp32-weights --output DIR"
                )
                raise CheckpointError(explain("checkpoint", str(folder), cause, remedy))
            said.append(f"weights that were {was} are {now} here; the {was} values become the masters")
    return said


def _row(p: Tensor, name: str | None) -> dict[str, Any]:
    return {"name": name, "shape": list(p.shape), "dtype": _dtype(p), "trained": p.requires_grad}


def _dtype(p: Tensor) -> str:
    return str(p.dtype).removeprefix("torch.")


def _names(model: nn.Module | None) -> dict[int, str]:
    if model is None:
        return {}
    return {id(p): _plain(name) for name, p in model.named_parameters()}


def _plain(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put around a model."""
    parts = name.split(".")
    while parts and parts[0] in ("module", "_orig_mod"):
        parts = parts[1:]
    return ".".join(part for part in parts if part != "_orig_mod")


def _some(rows: list[Mapping[str, Any]]) -> str:
    named = ", ".join(f"{row['name']} {tuple(row['shape'])}" for row in rows[:SHOWN])
    return named + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")


def model_files(name: str) -> bool:
    """Whether the file of a checkpoint holds weights (and not optimizer, scheduler or random state)."""
    last = name.rpartition("/")[2]
    return last.endswith((".safetensors", ".index.json", ".bin")) and not last.startswith(("optimizer", "scheduler"))
