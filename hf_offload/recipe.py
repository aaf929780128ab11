"""Recipes: one YAML file that says what is trained, on what, and how, read into frozen dataclasses.

Reading a recipe imports neither torch nor transformers; `training_arguments` does, to have transformers itself check
the `training` section.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload import strict_yaml
from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, RecipeError, cut, explain, nearest, said_by, shown

if TYPE_CHECKING:
    from transformers import TrainingArguments

TRAINERS = ("causal_lm",)
DTYPES = ("bfloat16", "float16", "float32")
TOKENIZERS = ("pretrained", "byte_level")
LOSS_ON = ("answers", "all")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model. Exactly one of `path` and `config`.

    Attributes:
        path: a folder with config.json and weights, or a hub id.
        config: `model_type` and the fields of that configuration; the model starts from random weights.
        dtype: of the weights as loaded: bfloat16, float16 or float32.
        attn_implementation: as in from_pretrained; None: transformers chooses.
        trust_remote_code: whether code that comes with the model, or from a hub's repository of kernels, may run.
        freeze: patterns (as in a shell) of parameter names that are not trained.
        shape: `model_type` and configuration fields of `path`, so that a plan needs no hub; never used to train.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    dtype: str = "bfloat16"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    freeze: tuple[str, ...] = ()
    shape: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, DTYPES)
        if (self.path is None) == (self.config is None):
            cause = "neither is given" if self.path is None else "both are given"
            remedy = "Give one of them; `model.config=null` on the command line takes the other out"
            raise RecipeError(f"model.path and model.config: {cause}. {remedy}.")
        if is_foreign_kernel(self.attn_implementation) and not self.trust_remote_code:
            cause = "names a repository, whose compiled code transformers would fetch and run"
            remedy = "Name one that transformers has (sdpa, eager), or set model.trust_remote_code=true"
            raise RecipeError(explain("model.attn_implementation", self.attn_implementation, cause, remedy))
        for name in ("config", "shape"):
            given = getattr(self, name)
            if given is not None and not isinstance(given.get("model_type"), str):
                remedy = "Name the architecture, as in `model_type: llama`"
                raise RecipeError(f"model.{name}.model_type: missing. {remedy}.")


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer: `pretrained` (from `path`, or the model's) or the built-in `byte_level` (260 tokens)."""

    kind: str = "pretrained"
    path: str | None = None

    def __post_init__(self) -> None:
        _one_of("tokenizer.kind", self.kind, TOKENIZERS)
        if self.kind == "byte_level" and self.path is not None:
            raise RecipeError(
                explain("tokenizer.path", self.path, "byte_level is built in and has no path", "Take one of them out")
            )


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What every kind of data has.

    Attributes:
        block_size: tokens in a row: texts are cut into rows of exactly this, chats are truncated to it.
        eval_fraction: part of the rows kept for evaluation, 0 to below 1.
    """

    kind: str
    block_size: int = 512
    eval_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise RecipeError(explain("data.block_size", self.block_size, "below 2", "Give at least 2 tokens"))
        if not 0 <= self.eval_fraction < 1:
            cause = "not from 0 to below 1"
            raise RecipeError(explain("data.eval_fraction", self.eval_fraction, cause, "Give a part such as 0.05"))


@dataclass(frozen=True, kw_only=True)
class PydocTopics(DataSpec):
    """The language reference that ships with every Python (`pydoc_data.topics`), some 500,000 characters of English."""


@dataclass(frozen=True, kw_only=True)
class TextFiles(DataSpec):
    """A text file, or all files of a folder whose names match `pattern` (as in a shell)."""

    path: str
    pattern: str = "*.txt"


@dataclass(frozen=True, kw_only=True)
class JsonlChat(DataSpec):
    """JSON lines, each `{"messages": [{"role": ..., "content": ...}, ...]}`; `loss_on`: answers or all."""

    path: str
    loss_on: str = "answers"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("data.loss_on", self.loss_on, LOSS_ON)


DATA_KINDS: dict[str, type[DataSpec]] = {"pydoc_topics": PydocTopics, "text": TextFiles, "jsonl": JsonlChat}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, typed. `training` holds checked names and types; `training_arguments` checks the values."""

    trainer: str
    model: ModelSpec
    tokenizer: TokenizerSpec
    data: DataSpec
    training: Mapping[str, Any] = field(default_factory=dict)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    source: str = ""


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    import hf_offload.recipes as package

    folder = Path(package.__path__[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str) -> Path:
    """The file of a recipe given by path or by a shipped recipe's name.

    Raises:
        RecipeError: neither.
    """
    path = expanded(name_or_path)
    if os.path.isfile(path):
        return path
    known = shipped()
    if name_or_path in known:
        return known[name_or_path]
    if os.path.isdir(path):
        raise RecipeError(explain("recipe", name_or_path, "is a folder, not a recipe", "Give a YAML file in it"))
    cause = "no such file, and no shipped recipe has this name"
    raise RecipeError(explain("recipe", name_or_path, cause, nearest(name_or_path, known)))


def copy(name: str, destination: Path | None, force: bool = False) -> list[Path]:
    """Copy a recipe and the data file beside it that it names; returns what was written.

    Args:
        destination: a file, or a folder (anything that does not end in .yaml); None: `NAME.yaml` here.

    Raises:
        RecipeError: a file is in the way and `force` is not given; nothing is written then.
    """
    source = find(name)
    target = Path(f"{source.stem}.yaml") if destination is None else expanded(str(destination))
    if target.is_dir() or target.suffix not in (".yaml", ".yml"):
        target = target / source.name
    raw = strict_yaml.parse(strict_yaml.read_text(source), str(source))
    pairs = [(source, target)]
    data = raw.get("data") if isinstance(raw, dict) else None
    written = data.get("path") if isinstance(data, dict) else None
    if isinstance(written, str) and not Path(written).is_absolute() and os.path.isfile(source.parent / written):
        if ".." in Path(written).parts:
            cause = "leads out of the recipe's folder, and its copy would be written outside of DEST"
            raise RecipeError(explain("data.path", written, cause, "Copy the recipe by hand, or `recipes show` it"))
        pairs.append((source.parent / written, target.parent / written))
    for start, end in pairs:
        if os.path.lexists(end) and not force:
            raise RecipeError(explain("DEST", str(end), "is there already", "Give another, or --force to overwrite it"))
        if end.exists() and end.samefile(start):
            raise RecipeError(explain("DEST", str(end), "is the recipe itself", "Give another"))
        if not Path(os.path.realpath(end)).is_relative_to(os.path.realpath(target.parent)):
            cause = "a link there leads out of its folder, and what it leads to would be written"
            raise RecipeError(explain("DEST", str(end), cause, "Take the link away, or give another"))
    for start, end in pairs:
        end.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(start, end)
    return [end for _, end in pairs]


def load(name_or_path: str, overrides: Sequence[str] = (), output_dir: str | None = None) -> Recipe:
    """Read a recipe, apply overrides, check every key and type.

    Args:
        overrides: `dotted.key=value`, values in YAML; the last one wins.
        output_dir: wins over `training.output_dir` from wherever.

    Raises:
        RecipeError: anything that does not fit, named by the path of its key.
    """
    path = find(name_or_path)
    raw = strict_yaml.parse(strict_yaml.read_text(path), str(path))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: holds no recipe. Write `key: value` lines; `hf-offload recipes show` has examples.")
    raw = written = _absolute_paths(raw, path.parent)
    for override in overrides:
        raw = apply_override(raw, override)
    raw = _without_stale_shape(raw, written)
    if output_dir is not None:
        raw = _set(raw, ["training", "output_dir"], output_dir, "--output-dir")
    return from_mapping(raw, source=str(path))


def from_mapping(raw: Mapping[str, Any], source: str = "") -> Recipe:
    """A typed recipe from parsed YAML. Raises RecipeError."""
    known = [f.name for f in dataclasses.fields(Recipe) if f.name != "source"]
    where = source or "the recipe"
    for key, value in raw.items():
        if key not in known:
            raise RecipeError(explain(str(key), value, f"unknown key in {where}", nearest(str(key), known)))
    for key in ("trainer", "model", "data"):
        if raw.get(key) is None:
            raise RecipeError(f"{key}: missing from {where}. Add this key.")
    model = strict_yaml.build(ModelSpec, raw["model"], "model")
    return Recipe(
        trainer=_trainer(raw["trainer"]),
        model=model,
        tokenizer=_tokenizer(raw.get("tokenizer"), model),
        data=_data(raw["data"]),
        training=_training(raw.get("training")),
        offload=_offload(raw.get("offload")),
        source=source,
    )


def apply_override(raw: dict[str, Any], override: str) -> dict[str, Any]:
    """`raw` with one `dotted.key=value` applied; `raw` itself stays as it is. Raises RecipeError."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        remedy = "Write it as in training.max_steps=20"
        raise RecipeError(explain("override", override, "not of the form key=value", remedy))
    if len(names) > strict_yaml.DEEPEST:
        cause, remedy = f"{len(names):,} keys within one another", f"Write {strict_yaml.DEEPEST} at most"
        raise RecipeError(explain("override", override, cause, remedy))
    return _set(raw, names, strict_yaml.parse(text, f"override {cut(key)}"), override)


def _set(raw: dict[str, Any], names: list[str], value: Any, said: str) -> dict[str, Any]:
    name, rest = names[0], names[1:]
    if not rest:
        return {**raw, name: value}
    inner = raw.get(name)
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        remedy = f"Override {name} itself, or a key that holds others"
        raise RecipeError(explain("override", said, f"{name!r} holds {shown(inner)}, nothing below it", remedy))
    return {**raw, name: _set(inner, rest, value, said)}


def _without_stale_shape(raw: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The shape written in a recipe is that of the model named there: another path takes it out."""
    now, before = raw.get("model"), written.get("model")
    if not isinstance(now, dict) or not isinstance(before, dict):
        return raw
    if now.get("path") == before.get("path") or now.get("shape") != before.get("shape"):
        return raw
    return {**raw, "model": {key: value for key, value in now.items() if key != "shape"}}


def _absolute_paths(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths written in the file are meant from the file's folder; those on the command line from the current one."""
    changed = dict(raw)
    for section in ("data", "model", "tokenizer"):
        inner = raw.get(section)
        if isinstance(inner, dict) and isinstance(inner.get("path"), str):
            here = folder / expanded(inner["path"])
            if section == "data" or os.path.exists(here) or looks_local(inner["path"]):
                changed[section] = {**inner, "path": str(here)}
    return changed


def looks_local(path: str) -> bool:
    """Whether a model's path is meant as a folder: a hub id is `name` or `owner/name`, with no leading dot or ~."""
    parts = path.replace("\\", "/").split("/")
    if len(parts) > 2 or path.startswith((".", "~", "/", "\\")) or path.endswith(("/", "\\")):
        return True
    return os.path.exists(path)  # unlike Path's, also of names that are too long


def is_foreign_kernel(implementation: object) -> bool:
    """Whether an `attn_implementation` is `owner/name` on a hub instead of one that transformers has."""
    return isinstance(implementation, str) and "/" in implementation


def expanded(path: str) -> Path:
    """The path with a leading ~ as the home folder; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise RecipeError(explain(name, value, "not a valid value", nearest(value, valid)))


def _trainer(value: Any) -> str:
    if value == "sft":
        remedy = "Use causal_lm, which trains on chats with the loss on the answers, or TRL's SFTTrainer with --optim"
        raise RecipeError(explain("trainer", value, "comes with a later version", f"{remedy} offload_adam"))
    if value not in TRAINERS:
        raise RecipeError(explain("trainer", value, "not a valid trainer", nearest(str(value), TRAINERS)))
    return str(value)


def _tokenizer(raw: Any, model: ModelSpec) -> TokenizerSpec:
    spec = strict_yaml.build(TokenizerSpec, raw, "tokenizer")
    if spec.kind == "pretrained" and spec.path is None and model.path is None:
        remedy = "Give tokenizer.path, or tokenizer.kind: byte_level"
        raise RecipeError(f"tokenizer.path: missing, and a model built from model.config brings none. {remedy}.")
    return spec


def _data(raw: Any) -> DataSpec:
    if not isinstance(raw, dict):
        raise RecipeError(explain("data", raw, "not a mapping", "Write `kind: ...` and its keys under it"))
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in DATA_KINDS:
        raise RecipeError(explain("data.kind", kind, "not a valid kind of data", nearest(str(kind), DATA_KINDS)))
    return strict_yaml.build(DATA_KINDS[kind], raw, "data")


def _offload(raw: Any) -> OffloadConfig:
    values = strict_yaml.typed_fields(OffloadConfig, raw, "offload")
    try:
        return OffloadConfig.from_mapping(values)
    except ConfigError as error:
        raise RecipeError(f"offload.{error}") from None


def _training(raw: Any) -> Mapping[str, Any]:
    """The section as given: its names and types are transformers' own, checked by `training_arguments`."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise RecipeError(explain("training", raw, "not a mapping", "Write TrainingArguments as `key: value` under it"))
    cause = "a recipe always trains with offload_adam"
    if raw.get("optim") not in (None, "offload_adam"):
        raise RecipeError(explain("training.optim", raw["optim"], cause, "Leave it out"))
    if raw.get("optim_args") is not None:
        remedy = "Write its settings under `offload:`"
        raise RecipeError(explain("training.optim_args", raw["optim_args"], cause, remedy))
    return {str(key): value for key, value in raw.items() if value is not None and key != "optim"}


def training_arguments(recipe: Recipe, **defaults: Any) -> TrainingArguments:
    """transformers' TrainingArguments from the recipe's `training` section.

    Args:
        defaults: values for what the recipe does not set.

    Raises:
        RecipeError: an unknown name, a value of another type, or one that transformers refuses.
    """
    from transformers import TrainingArguments

    raw = dict(recipe.training)
    if isinstance(raw.get("resume_from_checkpoint"), bool):
        # Trainer.train takes true for "the last checkpoint in output_dir", though the field is typed as text.
        raw["resume_from_checkpoint"] = str(raw["resume_from_checkpoint"]).lower()
    _rename_checkpointing(raw, {field.name for field in dataclasses.fields(TrainingArguments)})
    values = strict_yaml.typed_fields(TrainingArguments, raw, "training")
    try:
        return TrainingArguments(**{**defaults, **values})
    except Exception as error:  # what transformers and accelerate raise on odd values differs from field to field
        cause = said_by(error)
        raise RecipeError(f"training: transformers refuses these TrainingArguments: {cause}") from error


def _rename_checkpointing(raw: dict[str, Any], known: set[str]) -> None:
    """transformers is renaming gradient_checkpointing to activation_checkpointing: recipes may use either name."""
    new = "activation" if "activation_checkpointing" in known else "gradient"
    old = "gradient" if new == "activation" else "activation"
    for ending in ("_checkpointing", "_checkpointing_kwargs"):
        if old + ending in raw and new + ending not in raw:
            raw[new + ending] = raw.pop(old + ending)
