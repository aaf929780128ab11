"""`OffloadTrainer`, and the mixin that gives other trainers (TRL's among them) the same optimizer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.training_args import OptimizerNames

from hf_offload import compat, optim_args
from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, explain

compat.register()


class OffloadTrainerMixin:
    """Goes before a Trainer class: `class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer): ...`.

    It does what `--optim offload_adam` does, with the settings as an `OffloadConfig`.

    Args:
        *args, **kwargs: the trainer's own.
        offload: the engine's settings; None: those in `args.optim_args`, else the defaults.

    Raises:
        ConfigError: `args.optim` names another optimizer, or settings are given here and in `args.optim_args`.
        UnsupportedError: DeepSpeed, FSDP or several GPUs in one process.
    """

    args: Any

    def __init__(self, *args: Any, offload: OffloadConfig | None = None, **kwargs: Any) -> None:
        if offload is not None and not isinstance(offload, OffloadConfig):
            cause = "not an OffloadConfig"
            raise ConfigError(explain("offload", offload, cause, "Write offload=OffloadConfig(schedule='overlapped')"))
        compat.register()
        self.offload_config = offload
        super().__init__(*args, **kwargs)

    def _ask_for_offload(self) -> None:
        """Called by `compat` as soon as the trainer has its TrainingArguments, given or made by itself."""
        args = self.args
        if args.optim not in (compat.NAME, *_DEFAULTS):
            cause = f"{type(self).__name__} sets optim={compat.NAME!r}"
            remedy = "Leave optim out of the TrainingArguments, or use a trainer without OffloadTrainerMixin"
            raise ConfigError(explain("optim", str(getattr(args.optim, "value", args.optim)), cause, remedy))
        args.optim = OptimizerNames(compat.NAME)
        if self.offload_config is not None:
            args.optim_args = optim_args.render(self.offload_config, args.optim_args)


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """`transformers.Trainer` with Adam's state in host memory: `OffloadTrainer(..., offload=OffloadConfig())`."""


_DEFAULTS = ("adamw_torch", "adamw_torch_fused")
