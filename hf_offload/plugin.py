"""`OffloadPlugin` and `OffloadAccelerator`: the offloaded optimizer in training loops that use accelerate alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_offload import compat
from hf_offload.checks import refuse_unsupported
from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, StateError, UnsupportedError, explain
from hf_offload.optimizer import OffloadAdam

compat.register()


@dataclass(frozen=True, kw_only=True)
class OffloadPlugin:
    """What an `OffloadAccelerator` is told.

    Attributes:
        config: settings of the OffloadAdam that takes the place of a `torch.optim.AdamW`. An OffloadAdam that is
            passed to `prepare` keeps its own; `cast_fp32_weights` is taken from here.
    """

    config: OffloadConfig = field(default_factory=OffloadConfig)


class OffloadAccelerator(Accelerator):
    """`accelerate.Accelerator` whose `prepare` gives the model a host-resident Adam.

    - An OffloadAdam is attached to the model that owns its parameters.
    - A `torch.optim.AdamW` or `Adam` is replaced by an OffloadAdam over the same parameter groups: use what `prepare`
      returns. A learning-rate scheduler that was built on the old one goes on working.
    - Under bf16 or fp16, trainable fp32 weights become 16-bit and their fp32 values the masters.

    Args:
        *args, **kwargs: accelerate's own.
        offload_plugin: the settings; None: the defaults.

    Raises:
        ConfigError: `offload_plugin` is something else.
        UnsupportedError: DeepSpeed, FSDP, Megatron-LM, XLA; in `prepare`, an optimizer that is neither OffloadAdam nor
            torch's Adam or AdamW.
    """

    def __init__(self, *args: Any, offload_plugin: OffloadPlugin | None = None, **kwargs: Any) -> None:
        if offload_plugin is not None and not isinstance(offload_plugin, OffloadPlugin):
            remedy = "Write offload_plugin=OffloadPlugin(config=OffloadConfig(...))"
            raise ConfigError(explain("offload_plugin", offload_plugin, "not an OffloadPlugin", remedy))
        compat.register()
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        self.offload_plugin = offload_plugin or OffloadPlugin()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. Models and optimizers may come in one call or, models first, in several."""
        config = self.offload_plugin.config
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        for model in models:
            compat.cast_weights(model, self.mixed_precision, config)
        swapped = [self._offloaded(arg, config) if isinstance(arg, torch.optim.Optimizer) else arg for arg in args]
        for arg in swapped:
            optimizer = compat.offload_of(arg)
            if optimizer is not None:
                self._attach(optimizer, [*models, *compat.prepared_models(self)])
        return super().prepare(*swapped, device_placement=device_placement)

    def synchronize(self) -> None:
        """Wait until the weights of every prepared model are those of the last step."""
        for optimizer in compat.offloaded(self):
            optimizer.synchronize()

    def wait_for_everyone(self) -> None:
        """As accelerate's: the place after which scripts read and save weights."""
        self.synchronize()
        super().wait_for_everyone()

    def end_training(self) -> None:
        """As accelerate's, after the last step's weights have arrived."""
        self.synchronize()
        super().end_training()

    @staticmethod
    def _offloaded(optimizer: torch.optim.Optimizer, config: OffloadConfig) -> torch.optim.Optimizer:
        return optimizer if compat.offload_of(optimizer) is not None else take_over(optimizer, config)

    @staticmethod
    def _attach(optimizer: OffloadAdam, models: list[nn.Module]) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [model for model in models if any(id(p) in mine for p in model.parameters())]
        if owners:
            optimizer.attach(owners[0])
        elif models:
            cause = "none of the models passed to prepare() has the optimizer's parameters"
            remedy = "Build the optimizer from the parameters of the model that you prepare"
            raise StateError(explain("optimizer", type(optimizer).__name__, cause, remedy))


def take_over(old: torch.optim.Optimizer, config: OffloadConfig) -> OffloadAdam:
    """An OffloadAdam in place of a user's `torch.optim.Adam` or `AdamW`, whose groups it shares.

    A scheduler that was built on `old` goes on driving the learning rates: both have the same `param_groups` list.

    Raises:
        UnsupportedError: `old` is something else (a subclass may step differently).
    """
    if type(old) not in (torch.optim.Adam, torch.optim.AdamW):
        cause = "hf_offload can stand in for torch.optim.Adam and torch.optim.AdamW only"
        remedy = "Pass one of these, or an OffloadAdam; or use accelerate's own Accelerator for this optimizer"
        raise UnsupportedError(explain("optimizer", type(old).__qualname__, cause, remedy))
    d = old.defaults
    new = OffloadAdam(
        old.param_groups,
        **{name: d[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")},
        decoupled_weight_decay=d.get("decoupled_weight_decay", type(old) is torch.optim.AdamW),
        config=config,
    )
    if old.state:
        new.load_state_dict(old.state_dict())
        old.state.clear()
    old.param_groups = new.param_groups
    old._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns that nothing was stepped

    def step(closure: Any = None) -> None:
        cause = "accelerator.prepare() put an OffloadAdam in its place"
        raise StateError(explain("optimizer", type(old).__name__, cause, "Call step() on what prepare() returned"))

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    old.step = step  # type: ignore[method-assign, assignment]
    return new
