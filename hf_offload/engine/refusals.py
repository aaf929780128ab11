"""What an engine refuses before it starts: models it cannot hook, and schedules that nothing could wait for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_offload.errors import ConfigError, UnsupportedError, explain


def module_of(model: nn.Module) -> nn.Module:
    """The module to hook: what DistributedDataParallel wraps.

    Raises:
        UnsupportedError: DataParallel.
    """
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            explain("model", "DataParallel", "its replicas are copied anew in every forward",
                    "Use one GPU, or DistributedDataParallel (torchrun, accelerate launch)")
        )  # fmt: skip
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def check_model(root: nn.Module, params: Iterable[Tensor]) -> None:
    """Refuse to hook a model that cannot be trained with `params`.

    Raises:
        UnsupportedError: an embedding with sparse gradients.
        ConfigError: a model that has none of the parameters.
    """
    for name, m in root.named_modules():
        if getattr(m, "sparse", False) and isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            raise UnsupportedError(
                explain(f"{name}.sparse", True, "sparse gradients are not supported", "Make it with sparse=False")
            )
    theirs = set(map(id, root.parameters()))
    if not any(id(p) in theirs for p in params):
        raise ConfigError(
            explain("model", type(root).__name__, "it has none of the optimizer's parameters",
                    "Attach the model whose parameters the optimizer was given")
        )  # fmt: skip


def several_ranks() -> bool:
    """Whether several processes train together."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_overlap(schedule: str, model: bool, ranks: bool) -> None:
    """Refuse a schedule whose `step()` returns at once where nothing could wait for the weights.

    Raises:
        ConfigError: no model is attached, or several processes train together.
    """
    if not model:
        raise ConfigError(
            explain("schedule", schedule, "no model is attached, so nothing can wait for the weights",
                    "Give OffloadAdam(..., model=model), call optimizer.attach(model), or use 'in_order'")
        )  # fmt: skip
    if ranks:
        raise ConfigError(
            explain("schedule", schedule, "several processes train together, where only 'in_order' is supported",
                    "Use schedule='auto' or 'in_order'")
        )  # fmt: skip


def check_streaming(ranks: bool) -> None:
    """Refuse gradients that leave before they are averaged.

    Raises:
        ConfigError: several processes train together.
    """
    if ranks:
        cause = "several processes train together, and gradients would leave before they are averaged"
        raise ConfigError(explain("stream_gradients", True, cause, "Leave it out, with schedule='in_order'"))
