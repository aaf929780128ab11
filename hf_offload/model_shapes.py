"""What the planner needs to know of a model, from its configuration alone: built on the meta device, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_offload import models
from hf_offload.errors import RecipeError, said_by
from hf_offload.planner import Counts, Shape
from hf_offload.recipe import ModelSpec, looks_local


@dataclass(frozen=True)
class Sketch:
    """A model as the planner sees it, what it was read from, and what the figures leave out."""

    counts: Counts
    shape: Shape | None
    source: str
    notes: tuple[str, ...] = ()


def of_path(path: str, setting: str, *, trainable_bytes: int = 2, trust_remote_code: bool = False) -> Sketch:
    """A sketch of a folder's or a hub id's model.

    Args:
        trainable_bytes: 2 or 4, of one trainable weight on the device.

    Raises:
        RecipeError: there is no such model, or the hub cannot be reached.
    """
    return of_config(models.pretrained_config(path, setting, trust_remote_code), path, trainable_bytes=trainable_bytes)


def of_spec(spec: ModelSpec, *, trainable_bytes: int = 2) -> Sketch:
    """A sketch of a recipe's model; `model.shape` stands in for a hub id, so that the plan needs no hub.

    Raises:
        RecipeError: there is no such model.
    """
    if spec.config is not None:
        config, source = models.scratch_config(spec.config, "model.config"), "model.config of the recipe"
    elif spec.shape is not None and not looks_local(spec.path or ""):
        config, source = models.scratch_config(spec.shape, "model.shape"), "model.shape of the recipe"
    else:
        path = spec.path or ""
        config, source = models.pretrained_config(path, "model.path", spec.trust_remote_code), path
    return of_config(config, source, trainable_bytes=trainable_bytes, freeze=spec.freeze)


def of_config(config: Any, source: str, *, trainable_bytes: int, freeze: tuple[str, ...] = ()) -> Sketch:
    """A sketch from a transformers configuration.

    Raises:
        RecipeError: it is not a causal language model's.
    """
    model = on_meta(config, source)
    models.freeze(model, freeze)
    shape, notes = shape_of(config, model)
    return Sketch(counts=count(model, trainable_bytes), shape=shape, source=source, notes=notes)


def on_meta(config: Any, source: str) -> Any:
    """The causal language model of a configuration, with shapes and without storage. Raises RecipeError."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        cause = said_by(error)
        raise RecipeError(f"model={source!r}: cannot be built as a causal language model: {cause}") from error
    model.tie_weights()
    return model


def count(model: Any, trainable_bytes: int) -> Counts:
    """Parameters of a model. `parameters()` gives a tied tensor once. Frozen weights are counted at 2 bytes."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    held = {"trainable_16": trainable} if trainable_bytes == 2 else {"trainable_32": trainable}
    return Counts(**held, frozen=frozen, frozen_bytes=trainable_bytes * frozen)


def shape_of(config: Any, model: Any) -> tuple[Shape | None, tuple[str, ...]]:
    """The shape behind the activations, or None and a note where the configuration does not say."""
    text = config.get_text_config()
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if any(not isinstance(getattr(text, name, None), int) for name in needed):
        return None, ("This architecture's configuration does not give the shape that activations depend on.",)
    heads, hidden = text.num_attention_heads, text.hidden_size
    notes = []
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        notes.append("A mixture of experts: compute and activations are counted as if it were dense.")
    shape = Shape(
        layers=text.num_hidden_layers,
        hidden=hidden,
        intermediate=getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * hidden,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocab=text.vocab_size,
        gated=any("gate" in name.rsplit(".", 1)[-1] for name, _ in model.named_modules()),
    )
    return shape, tuple(notes)
