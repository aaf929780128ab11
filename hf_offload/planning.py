"""`hf-offload plan`: from what was asked, through the model's size and this machine's, to a `planner.Plan`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_offload import environment, hostmem, planner
from hf_offload.config import AUTO, OffloadConfig
from hf_offload.errors import ConfigError, explain
from hf_offload.planner import Counts, Machine, Plan, Shape, Workload

if TYPE_CHECKING:
    from hf_offload.recipe import Recipe

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `hf-offload plan`; None where not given. Units as in the names, GB = 1e9 bytes."""

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    params: str | None = None
    model: str | None = None
    trainable: str | None = None
    weight_bytes: int | None = None
    batch: int | None = None
    seq_len: int | None = None
    accumulation: int | None = None
    checkpointing: bool | None = None
    link_gb_s: float | None = None
    host_bw_gb_s: float | None = None
    tflops: float | None = None
    gpu_gb: float | None = None
    host_gb: float | None = None
    stream_gradients: bool | None = None
    state_dtype: str | None = None
    device_state_bytes: str | None = None
    ranks_per_node: int = 1


@dataclass(frozen=True)
class Answer:
    """A plan, where the model was read from, which options were not given, and what the figures leave out."""

    plan: Plan
    source: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Subject:
    """The model of a plan and what its recipe says about the step."""

    counts: Counts
    shape: Shape | None
    source: str
    notes: tuple[str, ...]
    offload: OffloadConfig
    workload: Mapping[str, Any]


def answer(asked: Asked) -> Answer:
    """The plan for what was asked.

    Raises:
        ConfigError: no model or several, a number that does not read as one or is out of range, an unknown model.
    """
    subject = _subject(asked)
    assumed: list[str] = []
    work = _chosen(asked, _fields(Workload), subject.workload, assumed)
    speeds = _chosen(asked, ("link_gb_s", "host_bw_gb_s", "tflops"), {}, assumed)
    for name in ("batch", "seq_len", "accumulation"):
        if not 1 <= work[name] < 1e12:
            cause = "not from 1 to 1e12"
            raise ConfigError(explain(f"--{name.replace('_', '-')}", work[name], cause, "Give a number of at least 1"))
    for name, value in speeds.items():
        _positive(name, value)
    offload = subject.offload
    if asked.state_dtype is not None:
        offload = dataclasses.replace(offload, state_dtype=asked.state_dtype)
    machine = Machine(**speeds, gpu_bytes=_gpu_bytes(asked), host_bytes=_host_bytes(asked))
    plan = planner.make(
        subject.counts,
        workload=Workload(**work),
        machine=machine,
        shape=subject.shape,
        bucket_bytes=subject.offload.bucket_bytes,
        ring_slots=subject.offload.ring_slots,
        streaming=_streaming(subject.offload, asked.stream_gradients),
        state_dtype=offload.state_dtype,
        ranks_per_node=asked.ranks_per_node,
        device_state_bytes=_device_state(asked, offload, machine.gpu_bytes),
    )
    return Answer(plan=plan, source=subject.source, assumed=tuple(assumed), notes=subject.notes)


def _device_state(asked: Asked, offload: OffloadConfig, gpu_bytes: int | None) -> int | None:
    """Bytes; None: as much as the GPU has room for."""
    option, text = "--device-state-bytes", asked.device_state_bytes
    value = offload.device_state_bytes if text is None else AUTO if text == AUTO else _bytes(option, text)
    dataclasses.replace(offload, device_state_bytes=value)  # refuses what does not go together
    if value != AUTO:
        return int(value)
    if gpu_bytes is None:
        cause = "no NVIDIA GPU was found here, so nobody knows what it has left"
        raise ConfigError(explain(option if text else "offload.device_state_bytes", AUTO, cause, "Give --gpu-gb"))
    return None


def _bytes(option: str, text: str) -> int:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e18:
        raise ConfigError(explain(option, text, "not a number of bytes", f"Write it as 40e9, or {AUTO!r}"))
    return int(value)


def _streaming(offload: OffloadConfig, asked: bool | None) -> planner.Streaming | None:
    if not (offload.stream_gradients if asked is None else asked):
        return None
    return planner.Streaming(
        on_device=offload.ring_slots * offload.bucket_bytes,
        accumulate_bytes=4 if offload.accumulate_dtype == "float32" else None,
        shadow_bytes=offload.shadow_bytes,
    )


def as_json(given: Answer) -> dict[str, Any]:
    """The answer as plain data; see `planner.as_json`."""
    return {
        **planner.as_json(given.plan),
        "source": given.source,
        "assumed": list(given.assumed),
        "notes": list(given.notes),
    }


def parse_count(setting: str, text: str) -> int:
    """`7e9`, `7_000_000_000`, `7B`, `135M` as a whole number. Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+]?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", text)
    remedy = "Write it as 7e9, 7B or 135M"
    if match is None:
        raise ConfigError(explain(setting, text, "not a number of parameters", remedy))
    value = float(match[1].replace("_", "")) * _SUFFIXES[match[2].lower()]
    if not 1 <= value < 1e18:
        raise ConfigError(explain(setting, text, "not from 1 to 1e18", remedy))
    return round(value)


def _subject(asked: Asked) -> _Subject:
    given = [name for name in ("params", "model", "recipe") if getattr(asked, name) is not None]
    if len(given) != 1:
        cause = "no model is given" if not given else f"given twice: by {' and by '.join(given)}"
        raise ConfigError(f"plan: {cause}. Give one of --params N, --model PATH_OR_HUB_ID and a recipe.")
    if asked.overrides and asked.recipe is None:
        raise ConfigError(explain("overrides", " ".join(asked.overrides), "there is no recipe", "Give a recipe first"))
    if asked.weight_bytes not in (None, 2, 4):
        remedy = "Give 2 for bf16 and fp16, 4 for fp32"
        raise ConfigError(explain("--weight-bytes", asked.weight_bytes, "neither 2 nor 4", remedy))
    if asked.params is not None:
        subject = _from_params(asked.params, asked.weight_bytes or 2)
    elif asked.model is not None:
        subject = _from_model(asked.model, asked.weight_bytes or 2)
    else:
        subject = _from_recipe(asked)
    return subject if asked.trainable is None else _with_trainable(subject, asked.trainable)


def _from_params(text: str, weight_bytes: int) -> _Subject:
    return _Subject(
        counts=_counts(parse_count("--params", text), weight_bytes),
        shape=None,
        source=f"{text} parameters",
        notes=(),
        offload=OffloadConfig(),
        workload={},
    )


def _from_model(path: str, weight_bytes: int) -> _Subject:
    from hf_offload import model_shapes

    sketch = model_shapes.of_path(path, "--model", trainable_bytes=weight_bytes)
    return _Subject(
        counts=sketch.counts,
        shape=sketch.shape,
        source=sketch.source,
        notes=sketch.notes,
        offload=OffloadConfig(),
        workload={},
    )


def _from_recipe(asked: Asked) -> _Subject:
    from hf_offload import model_shapes, recipe

    spec = recipe.load(str(asked.recipe), asked.overrides)
    args = recipe.training_arguments(spec, output_dir="outputs", **plannable(spec))
    weight_bytes = asked.weight_bytes or _weight_bytes(spec, bool(args.bf16 or args.fp16))
    sketch = model_shapes.of_spec(spec.model, trainable_bytes=weight_bytes)
    # `gradient_checkpointing` has become `activation_checkpointing`; either may be there.
    checkpointing = any(getattr(args, name, None) for name in ("gradient_checkpointing", "activation_checkpointing"))
    return _Subject(
        counts=sketch.counts,
        shape=sketch.shape,
        source=f"{asked.recipe} ({sketch.source})",
        notes=sketch.notes,
        offload=spec.offload,
        workload={
            "batch": args.per_device_train_batch_size,
            "seq_len": spec.data.block_size,
            "accumulation": args.gradient_accumulation_steps,
            "checkpointing": checkpointing,
        },
    )


def plannable(spec: Recipe) -> dict[str, Any]:
    """A recipe for a GPU can be planned without one: transformers would refuse its bf16 here."""
    import torch

    return {"use_cpu": not torch.cuda.is_available(), "report_to": "none"}


def _weight_bytes(spec: Recipe, mixed: bool) -> int:
    """fp32 weights are cast to 16 bit under bf16 or fp16 training unless `cast_fp32_weights` is off."""
    return 4 if spec.model.dtype == "float32" and not (mixed and spec.offload.cast_fp32_weights) else 2


def _counts(params: int, weight_bytes: int) -> Counts:
    return Counts(trainable_16=params) if weight_bytes == 2 else Counts(trainable_32=params)


def _with_trainable(subject: _Subject, text: str) -> _Subject:
    trainable, total = parse_count("--trainable", text), subject.counts.total
    if trainable > total:
        cause = f"more than the model's {total:,} parameters"
        raise ConfigError(explain("--trainable", text, cause, "Give at most that many"))
    weight_bytes = 2 if subject.counts.trainable_16 else 4
    # The rest is taken to be frozen in 16 bit, which is how a base model for adapters is loaded.
    frozen = total - trainable
    counts = dataclasses.replace(_counts(trainable, weight_bytes), frozen=frozen, frozen_bytes=2 * frozen)
    return dataclasses.replace(subject, counts=counts)


def _chosen(asked: Asked, names: tuple[str, ...], fallback: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Each option as given, else as in the recipe, else left to its default and listed in `assumed`."""
    chosen = {}
    defaults = {**_defaults(Workload), **_defaults(Machine)}
    for name in names:
        value = getattr(asked, name)
        if value is None:
            value = fallback.get(name)
        if value is None:
            value = defaults[name]
            assumed.append(_as_option(name, value))
        chosen[name] = value
    return chosen


def _as_option(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value:g}"


def _fields(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _defaults(cls: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _positive(name: str, value: float) -> None:
    if not 0 < value < 1e12:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(explain(flag, value, "not a number above 0", "Give a number above 0"))


def _gpu_bytes(asked: Asked) -> int | None:
    if asked.gpu_gb is not None:
        _positive("gpu_gb", asked.gpu_gb)
        return round(asked.gpu_gb * planner.GB)
    found = environment.gpus()
    return found[0][1] if found else None


def _host_bytes(asked: Asked) -> int | None:
    if asked.host_gb is not None:
        _positive("host_gb", asked.host_gb)
        return round(asked.host_gb * planner.GB)
    memory = hostmem.available_host_bytes()
    return memory.available if memory.known else None
