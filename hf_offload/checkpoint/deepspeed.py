"""Adam's state in a DeepSpeed ZeRO stage 1 or 2 checkpoint, without DeepSpeed and without running its pickles.

Each rank saves one flat piece (a partition) of every param group: `R` partitions laid end to end are the group's
parameters, flattened, one after the other, with padding. `param_shapes` in the model's file gives their shapes in that
order; `param_slice_mappings` says which part of which parameter a partition holds and where. Read from the source of
DeepSpeed 0.14 to 0.19 (runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py, `state_dict`), and from checkpoints
that it wrote.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import torch_file
from hf_offload.checkpoint.adam_state import MOMENTS, AdamState, Group, Parameter, entry
from hf_offload.errors import CheckpointError, explain

LATEST = "latest"
MODEL_FILE = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_AGAIN = "Save it again with DeepSpeed, or copy it again from where it was"
_IN_DEEPSPEED = "Load it in DeepSpeed with ZeRO stage 1 or 2 on data-parallel ranks alone, and save it from there"


class _Fragment:
    """Stands for `deepspeed.utils.tensor_fragment.fragment_address`: elements `start` to `start + numel`."""

    __slots__ = ("numel", "start")

    def __setstate__(self, state: Any) -> None:
        self.numel, self.start = (state[name] for name in self.__slots__)
        if any(type(value) is not int or value < 0 for value in (self.numel, self.start)):
            raise ValueError("a fragment's place is not a pair of counts")


class _LossScaler:
    """Stands for DeepSpeed's loss scalers, of which only the scale is of interest."""

    __slots__ = ("scale",)

    def __setstate__(self, state: Any) -> None:
        self.scale = float(state["cur_scale"])


def _stage(value: int) -> int:
    """Stands for `deepspeed.runtime.zero.config.ZeroStageEnum`."""
    return int(value)


STUBS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""The only names of DeepSpeed's that a file may contain, and the harmless thing that is put in the place of each."""


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """What a ZeRO checkpoint holds.

    Attributes:
        stage: 1 or 2.
        version: of DeepSpeed, as it says itself.
        ranks: how many partitions there were.
        global_step: optimizer steps taken.
        state: with names and fp32 masters; groups and order are those of the optimizer that DeepSpeed was given.
        weights: the model's 16-bit (or fp32) weights and buffers by name, as views of the file.
        shared: names of tied weights -> the name under which their parameter is held.
        loss_scale: of fp16 training; None where there is none.
        said: what was converted on the way, in words.
    """

    stage: int
    version: str
    ranks: int
    global_step: int
    state: AdamState
    weights: Mapping[str, Tensor]
    shared: Mapping[str, str]
    loss_scale: float | None
    said: tuple[str, ...]


@dataclass(frozen=True)
class _Partition:
    """What one rank saved of one group: flat tensors, and where it says that each parameter's part lies in them."""

    flat: Mapping[str, Tensor]
    said: Mapping[str, _Fragment]

    @property
    def numel(self) -> int:
        return self.flat["exp_avg"].numel()


@dataclass(frozen=True)
class _Layout:
    """How a group's parameters lie in its partitions laid end to end.

    Attributes:
        shapes: of each parameter, in the order in which they lie there.
        offsets: first element of each.
        round_robin: whether that order is not the optimizer's.
    """

    shapes: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, int]
    round_robin: bool

    def on_rank(self, rank: int, size: int, name: str) -> tuple[int, int]:
        """The part of a parameter in the partition of a rank: start and number of elements (0: none)."""
        first = max(self.offsets[name], rank * size)
        last = min(self.offsets[name] + math.prod(self.shapes[name]), (rank + 1) * size)
        return first - rank * size, max(0, last - first)


def folder_of(folder: Path) -> Path | None:
    """The folder of DeepSpeed's files in a checkpoint: `global_stepN`, which `latest` names; None: it has none.

    Raises:
        CheckpointError: `latest` names a folder that is not there.
    """
    latest = folder / LATEST
    if latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        found = folder / tag
        # a name of a folder here and nothing else; the system refuses longer and stranger ones with an error
        if len(tag.encode()) > 255 or "\0" in tag or Path(tag).name != tag or tag in ("", "..") or not found.is_dir():
            raise CheckpointError(explain("file", str(latest), f"it names {tag[:60]!r}, no folder beside it", _AGAIN))
        return found
    folders = [p for p in (folder, *sorted(folder.glob("global_step*"))) if p.is_dir() and _has_optimizer(p)]
    if len(folders) > 1:
        cause = f"several DeepSpeed folders ({', '.join(p.name for p in folders)}) and no file 'latest'"
        raise CheckpointError(explain("checkpoint", str(folder), cause, "Write the right one's name into 'latest'"))
    return folders[0] if folders else None


def read(folder: Path) -> DeepSpeedCheckpoint:
    """The whole of it; tensors are views of the files but for parameters that lie on several ranks.

    Args:
        folder: the one that holds `latest`, or the `global_stepN` in it.

    Raises:
        CheckpointError: a file is missing or damaged, contains something that is not allowed, or is of another kind
            (ZeRO-3, model or pipeline parallel, experts, `elastic_checkpoint`, another optimizer than Adam).
    """
    inner = folder_of(folder)
    if inner is None:
        raise CheckpointError(explain("checkpoint", str(folder), "it has no DeepSpeed files", "Give another folder"))
    files = rank_files(inner)
    model = _load(inner / MODEL_FILE)
    ranks = [_load(path) for path in files]
    saved = [_need(path, whole, "optimizer_state_dict", dict) for path, whole in zip(files, ranks)]
    stage = _checked_stage(files[0], saved, len(files))
    said: list[str] = []
    groups = [
        _group(inner, layout, [_partition(path, rank, g) for path, rank in zip(files, saved)],
               _settings(files[0], saved[0], g, _optimizer_config(model)), said)
        for g, layout in enumerate(_layouts(inner / MODEL_FILE, model, saved[0]))
    ]  # fmt: skip
    scaler = saved[0].get("loss_scaler")
    shared, weights = model.get("shared_params") or {}, _need(inner / MODEL_FILE, model, "module", dict)
    return DeepSpeedCheckpoint(
        stage=stage,
        version=str(model.get("ds_version", "unknown")),
        ranks=len(files),
        global_step=_count(inner / MODEL_FILE, model, "global_steps"),
        state=AdamState(tuple(groups)),
        weights={name: t for name, t in weights.items() if isinstance(name, str) and isinstance(t, Tensor)},
        shared={str(key): str(value) for key, value in shared.items()} if isinstance(shared, Mapping) else {},
        loss_scale=scaler.scale if isinstance(scaler, _LossScaler) and _half(model) else None,
        said=tuple(dict.fromkeys(said)),
    )


def rank_files(inner: Path) -> list[Path]:
    """The optimizer files, by rank.

    Raises:
        CheckpointError: a rank is missing, or they are not those of ZeRO 1 or 2 on data-parallel ranks.
    """
    found: dict[int, Path] = {}
    for path in sorted(inner.iterdir()):
        if path.name.startswith(("layer_", "expp_rank_", "expert_")) or re.match(r"mp_rank_(?!00)\d+_", path.name):
            raise _other_kind(inner, f"{path.name}: model, pipeline or expert parallel")
        if re.fullmatch(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", path.name):
            raise _other_kind(inner, f"{path.name}: ZeRO stage 3")
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match is None:
            continue
        rank, model_rank = int(match[1]), int(match[2])
        if model_rank:
            raise _other_kind(inner, f"{path.name}: model parallel")
        if rank in found:
            raise _damaged(inner, f"both {found[rank].name} and {path.name} are of rank {rank}")
        found[rank] = path
    if not found:
        raise _damaged(inner, "no file *_optim_states.pt")
    if missing := sorted(set(range(max(found) + 1)) - set(found)):
        raise _damaged(inner, f"the optimizer files of ranks {missing[:8]} are missing")
    return [found[rank] for rank in range(len(found))]


def _has_optimizer(folder: Path) -> bool:
    return any(_OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir())


def _load(path: Path) -> Mapping[str, Any]:
    # The stubs count only where this is on the stack; torch keeps the list for the whole process.
    with torch.serialization.safe_globals(STUBS):
        whole = torch_file.read(path)
    if not isinstance(whole, Mapping):
        raise _damaged(path, "it holds no dict")
    return whole


def _checked_stage(path: Path, saved: Sequence[Mapping[str, Any]], ranks: int) -> int:
    stage = saved[0].get("zero_stage", 1)  # BF16_Optimizer (bf16 with fp32 gradients), which is a stage 1, writes none
    if stage not in (1, 2):
        raise _other_kind(path, f"ZeRO stage {stage}")
    if isinstance(saved[0].get("base_optimizer_state"), list):
        cause = "it was saved with elastic_checkpoint=true, without learning rates and other settings of the groups"
        remedy = "Save it in DeepSpeed with zero_optimization.elastic_checkpoint=false"
        raise CheckpointError(explain("file", str(path), cause, remedy))
    counts = saved[0].get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if any(type(count) is not int for count in counts):
        raise _damaged(path, "partition_count is missing")
    if len(set(counts)) > 1:
        raise _other_kind(path, f"groups on {counts} ranks: expert parallel")
    if counts and counts[0] != ranks:
        raise _damaged(path.parent, f"it was saved by {counts[0]} ranks, and the files of {ranks} are here")
    return int(stage)


def _shapes(path: Path, model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    groups = _need(path, model, "param_shapes", list)
    if not all(isinstance(group, Mapping) for group in groups):
        raise _damaged(path, "param_shapes is no list of dicts")
    found = [dict(group) for group in groups]
    for name, shape in ((n, s) for group in found for n, s in group.items()):
        if not isinstance(name, str) or not isinstance(shape, (torch.Size, tuple, list)):
            raise _damaged(path, f"the shape of {name!r} is {shape!r}")
        if any(type(n) is not int or n < 0 for n in shape):
            raise _damaged(path, f"the shape of {name!r} is {shape!r}")
    return [{name: tuple(shape) for name, shape in group.items()} for group in found]


def _layouts(path: Path, model: Mapping[str, Any], saved: Mapping[str, Any]) -> list[_Layout]:
    """Of each group. `param_alignment_paddings` (newer versions) are the gaps after each parameter."""
    groups = _shapes(path, model)
    gaps = saved.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    if not isinstance(gaps, list) or [len(g) if isinstance(g, list) else -1 for g in gaps] != [len(s) for s in groups]:
        raise _damaged(path, "param_alignment_paddings does not fit param_shapes")
    if any(type(gap) is not int or gap < 0 for group in gaps for gap in group):
        raise _damaged(path, "param_alignment_paddings are no counts")
    found = []
    for shapes, group in zip(groups, gaps):
        offsets, at = {}, 0
        for (name, shape), gap in zip(shapes.items(), group):
            offsets[name] = at
            at += math.prod(shape) + gap
        found.append(_Layout(shapes, offsets, _round_robin(model)))
    return found


def _settings(path: Path, saved: Mapping[str, Any], g: int, config: Mapping[str, Any]) -> dict[str, Any]:
    group = _base_group(path, saved, g)
    settings = {key: value for key, value in group.items() if key not in ("params", "step", "param_names")}
    if not isinstance(settings.get("lr"), (int, float, Tensor)) or not isinstance(settings.get("betas"), (tuple, list)):
        raise _other_kind(path, f"group {g} has the settings {sorted(settings)}: an optimizer that is not Adam")
    if not settings.pop("bias_correction", True):
        raise _other_kind(path, "bias_correction=false")
    # DeepSpeed's own Adams keep the kind of decay outside of their state; their default, too, is AdamW's
    decoupled = str(config.get("type", "")).lower() == "adamw" or config.get("adam_w_mode", True)
    return {"decoupled_weight_decay": bool(decoupled), **settings}


def _base_group(path: Path, saved: Mapping[str, Any], g: int) -> Mapping[str, Any]:
    base = _need(path, saved, "base_optimizer_state", dict)
    groups = _need(path, base, "param_groups", list)
    if g >= len(groups) or not isinstance(groups[g], Mapping):
        raise _damaged(path, f"it has {len(groups)} groups, and the model's file has more")
    return groups[g]


def _partition(path: Path, saved: Mapping[str, Any], g: int) -> _Partition:
    group = _base_group(path, saved, g)
    keys = _need(path, group, "params", list)
    if len(keys) != 1:
        raise _damaged(path, f"group {g} has {len(keys)} tensors instead of one flat one")
    masters = _need(path, saved, "single_partition_of_fp32_groups", list)
    said = _need(path, saved, "param_slice_mappings", list)
    if g >= len(masters) or g >= len(said) or not isinstance(said[g], Mapping):
        raise _damaged(path, f"group {g} is missing in it")
    base = _need(path, saved["base_optimizer_state"], "state", dict).get(keys[0])
    base = dict(base) if isinstance(base, Mapping) else {}
    if "step" not in base and "step" in group:  # apex's and older fused Adams count in the group
        base["step"] = group["step"]
    state = entry(str(path), keys[0], base)
    if not state:
        raise _damaged(path, f"group {g} has no moments: no step was taken before it was saved")
    flat = {name: state[name].reshape(-1) for name in MOMENTS} | {"step": state["step"]}
    if not isinstance(masters[g], Tensor) or not masters[g].is_floating_point():
        raise _damaged(path, f"the masters of group {g} are no tensor of floats")
    flat["master"] = masters[g].detach().reshape(-1)
    if not all(isinstance(f, _Fragment) for f in said[g].values()):
        raise _damaged(path, f"param_slice_mappings of group {g} holds other things than places")
    return _Partition(flat, said[g])


def _group(
    inner: Path, layout: _Layout, partitions: Sequence[_Partition], settings: Mapping[str, Any], said: list[str]
) -> Group:
    steps = {float(p.flat["step"]) for p in partitions}
    if len(steps) > 1:
        raise _damaged(inner, f"the ranks are at different steps ({sorted(steps)}): files of several checkpoints")
    if len(sizes := {p.numel for p in partitions}) > 1:
        raise _damaged(inner, f"the partitions of one group differ in size ({sorted(sizes)})")
    _check_places(inner, layout, partitions)
    names = _order(inner, layout, partitions)
    parameters = [Parameter(name, _joined(inner, name, layout, partitions, said)) for name in names]
    return Group(settings, tuple(parameters))


def _check_places(inner: Path, layout: _Layout, partitions: Sequence[_Partition]) -> None:
    """Compare where parameters must lie with where each rank says that they do.

    With `round_robin_gradients` and no gaps DeepSpeed (0.19.8) writes down other places than it uses: it adds up the
    sizes in the optimizer's order, while memory is in another. So they count only without.
    """
    if layout.round_robin:
        return
    for rank, partition in enumerate(partitions):
        places = {name: layout.on_rank(rank, partition.numel, name) for name in layout.shapes}
        here = {name: place for name, place in places.items() if place[1]}
        there = {name: (f.start, f.numel) for name, f in partition.said.items() if f.numel}
        if here != there:
            name = next(n for n in (*here, *there) if here.get(n) != there.get(n))
            cause = f"on rank {rank} {name} must be at {here.get(name)} (start, elements) and is said to be at "
            raise _damaged(inner, f"{cause}{there.get(name)}")


def _order(inner: Path, layout: _Layout, partitions: Sequence[_Partition]) -> list[str]:
    """The parameters in the order they had in the optimizer.

    `param_shapes` lists them as they lie in memory: with `round_robin_gradients` on R ranks the first, the R+1st, the
    2R+1st ... come first. Each rank lists its parts in the optimizer's order, which shows whether this is right.
    """
    names = list(layout.shapes)
    if layout.round_robin:
        places = [i for first in range(len(partitions)) for i in range(first, len(names), len(partitions))]
        names = [name for _, name in sorted(zip(places, names))]
    place = {name: i for i, name in enumerate(names)}
    for partition in partitions:
        order = [place.get(name, -1) for name in partition.said]
        if order != sorted(order) or -1 in order:
            raise _damaged(inner, "the order of its parameters cannot be told: the files list them differently")
    return names


def _joined(
    inner: Path, name: str, layout: _Layout, partitions: Sequence[_Partition], said: list[str]
) -> dict[str, Tensor]:
    """A parameter's state, put together from the ranks it lies on; a view where it lies on one."""
    shape, size = layout.shapes[name], partitions[0].numel
    parts = [(p.flat, *layout.on_rank(rank, size, name)) for rank, p in enumerate(partitions)]
    parts = [(flat, start, numel) for flat, start, numel in parts if numel]
    found = {"step": partitions[0].flat["step"]}
    for what in (*MOMENTS, "master"):
        pieces = [flat[what][start : start + numel] for flat, start, numel in parts]
        if (held := sum(piece.numel() for piece in pieces)) != math.prod(shape):
            raise _damaged(inner, f"{name} of shape {shape} has {math.prod(shape)} elements; the ranks hold {held}")
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else torch.zeros(0)
        if whole.dtype != torch.float32:
            said.append(f"{what} was {str(whole.dtype).removeprefix('torch.')} and is float32 now (exact)")
            whole = whole.float()
        found[what] = whole.view(shape)
    return found


def _round_robin(model: Mapping[str, Any]) -> bool:
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return bool(zero.get("round_robin_gradients")) if isinstance(zero, Mapping) else False


def _optimizer_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """`optimizer` of DeepSpeed's configuration, flat; empty where the optimizer was made outside of it."""
    config = model.get("ds_config")
    optimizer = config.get("optimizer") if isinstance(config, Mapping) else None
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    return {**(params if isinstance(params, Mapping) else {}), **(optimizer if isinstance(optimizer, Mapping) else {})}


def _half(model: Mapping[str, Any]) -> bool:
    config = model.get("ds_config")
    fp16 = config.get("fp16") if isinstance(config, Mapping) else None
    return isinstance(fp16, Mapping) and bool(fp16.get("enabled"))


def _need(path: Path, saved: Mapping[str, Any], key: str, kind: type) -> Any:
    value = saved.get(key) if isinstance(saved, Mapping) else None
    if not isinstance(value, kind):
        raise _damaged(path, f"{key} is {'missing' if value is None else 'a ' + type(value).__name__}")
    return value


def _count(path: Path, saved: Mapping[str, Any], key: str) -> int:
    value = _need(path, saved, key, int)
    return int(value)


def _damaged(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(explain("DeepSpeed checkpoint", str(path), f"it is damaged or incomplete: {cause}", _AGAIN))


def _other_kind(path: Path, what: str) -> CheckpointError:
    cause = f"{what}, which cannot be read here"
    return CheckpointError(explain("DeepSpeed checkpoint", str(path), cause, _IN_DEEPSPEED))


def files_in(folder: Path) -> Iterator[Path]:
    """What of a checkpoint's folder is DeepSpeed's own and means nothing without it."""
    inner = folder_of(folder)
    if inner is None:
        return
    if inner == folder:
        yield from folder.glob("*_states.pt")
    else:
        yield inner
    yield from (folder / name for name in (LATEST, "zero_to_fp32.py", "zero_to_torch.py"))
