"""What transformers knows of a checkpoint's model: its parameters' names, and how the Trainer groups them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class TransformersModel:
    """A `hf_offload.checkpoint.names.Model` from the folder's config.json. Neither weights nor code are loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def groups(self) -> Sequence[Sequence[str]] | None:
        return self._groups

    def split(self, names: Sequence[str]) -> Sequence[Sequence[str]] | None:
        if self._groups is None:
            # adapters have no norms and no biases, so that the Trainer decays all of them
            return [list(names), []] if all(".lora_" in name for name in names) else None
        wanted = set(names)
        split = [[name for name in group if name in wanted] for group in self._groups]
        return split if sum(map(len, split)) == len(names) else None

    @cached_property
    def _groups(self) -> list[list[str]] | None:
        if not (self._folder / "config.json").is_file():
            return None
        try:
            from transformers import Trainer

            model = _without_weights(self._folder)
            decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
            names = [name for name, _ in model.named_parameters()]
        except Exception as error:  # whatever transformers makes of a config.json: then nothing is known
            logger.debug("hf_offload: no model can be made from %s: %s", self._folder / "config.json", error)
            return None
        return [[name for name in names if name in decayed], [name for name in names if name not in decayed]]


def _without_weights(folder: Path) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = (config.architectures or [""])[0]
    cls = getattr(transformers, named, None)
    with torch.device("meta"):
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls(config)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
