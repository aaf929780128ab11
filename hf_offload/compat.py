"""Every internal of transformers, accelerate, torch.amp, PEFT and TRL that hf_offload touches, with
`hf_offload.compat_saving`, and no other file does.

Three moments:
- a module of transformers has been imported (`hf_offload.autoload` tells): the flag becomes known, and three methods of
  Trainer get a wrapper that does nothing unless `args.optim` is `offload_adam`;
- somebody asked for `offload_adam` or imported OffloadAdam (`activate`): the methods that clip, prepare, call callbacks
  and read weights get a wrapper that does nothing where no OffloadAdam is concerned;
- an internal is not where it was: one clear message, and `offload_adam` is refused rather than half working.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_offload import autoload, compat_saving, optim_args
from hf_offload.checks import clip_target, refuse_unsupported
from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, OffloadError, UnsupportedError, explain

if TYPE_CHECKING:
    from hf_offload.optimizer import OffloadAdam

NAME = "offload_adam"
WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger("hf_offload")

_misfits: list[str] = []  # what did not fit the installed libraries, for a message when offload_adam is used

Method = Callable[..., Any]


# ---------------------------------------------------------------------------------------------- registration


def register() -> None:
    """Make `optim="offload_adam"` known, now or when transformers is imported. Idempotent.

    Raises:
        UnsupportedError: the installed transformers or accelerate has moved what this file touches.
    """
    autoload.watch(autoload.TARGETS, autoload.adapt)
    require_fit()


def activate() -> None:
    """Wrap the methods that an OffloadAdam in use needs wrapped. Idempotent."""
    autoload.watch(_WHEN_ACTIVE, _adapt_active)
    autoload.watch(_READERS, _adapt_readers)


def require_fit() -> None:
    """Raise what `adapt` could only log.

    Raises:
        UnsupportedError: see `register`.
    """
    if _misfits:
        raise UnsupportedError("; ".join(_misfits))


def adapt(module: ModuleType) -> None:
    """Extend a module of `autoload.TARGETS` that has just been imported."""
    _fit(_WHEN_IMPORTED, module)


def _adapt_active(module: ModuleType) -> None:
    _fit(_WHEN_ACTIVE, module)


def _fit(actions: dict[str, Callable[[Any], None]], module: ModuleType) -> None:
    try:
        actions[module.__name__](module)
    except Exception as error:
        text = str(error) if isinstance(error, OffloadError) else _moved(module.__name__, f"{error!r}")
        _misfits.append(text)
        raise UnsupportedError(text) from error


def _moved(what: str, cause: str) -> str:
    library = what.partition(".")[0]
    version = _version(library)
    remedy = f"Install a newer hf-offload, or an older {library} (pip install '{library}<{version}')"
    return explain(library, version, f"hf_offload extends {what}, and it is not as expected: {cause}", remedy)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _wrap(owner: Any, name: str, make: Callable[[Method], Method]) -> None:
    """Replace method `name` of class `owner` by `make(original)`, once."""
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        raise UnsupportedError(_moved(f"{owner.__module__}.{owner.__qualname__}.{name}", "it is not there"))
    original = getattr(owner, name)
    if getattr(original, "_hf_offload", False):
        return
    wrapper: Any = functools.wraps(original)(make(original))
    wrapper._hf_offload = True
    setattr(owner, name, staticmethod(wrapper) if isinstance(found, staticmethod) else wrapper)


# ------------------------------------------------------------------------------------ the name and the handler


def _adapt_training_args(module: Any) -> None:
    """Add a member to the enum `OptimizerNames` in place: the parsers, TrainingArguments and TRL all consult it."""
    names: Any = module.OptimizerNames
    if NAME in names._value2member_map_:
        return
    member: Any = str.__new__(names, NAME)
    member._name_ = NAME.upper()
    member._value_ = NAME
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    # As a plain string, training_args.bin can be loaded where hf_offload is not installed.
    member.__reduce_ex__ = lambda protocol: (str, (NAME,))
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.13
        names._hashable_values_.append(NAME)
    type.__setattr__(names, member._name_, member)
    if names(NAME) is not member or member not in list(names):
        raise UnsupportedError(_moved(f"{module.__name__}.OptimizerNames", "a member cannot be added"))


def _adapt_trainer_optimizer(module: Any) -> None:
    module._OPTIMIZER_HANDLERS[NAME] = _handler


def _handler(context: Any) -> tuple[type[OffloadAdam], dict[str, Any]]:
    """What Trainer.create_optimizer calls for `optim="offload_adam"`: the class, and its keyword arguments."""
    from accelerate.state import AcceleratorState

    require_fit()
    activate()
    args, model = context.args, context.model
    given = optim_args.parse(args.optim_args, context.adam_kwargs["betas"])
    if model is not None:
        if not any(p.requires_grad for p in model.parameters()):
            cause = "every parameter of the model is frozen"
            remedy = "Unfreeze what is to be trained, or add an adapter"
            raise ConfigError(explain("requires_grad", False, cause, remedy))
        # Trainer does not move every model to the device (place_model_on_device=False): this is the last chance.
        cast_weights(model, AcceleratorState().mixed_precision, given.config)
    kwargs = {**context.optimizer_kwargs, **context.adam_kwargs, **given.adam, "config": given.config}
    return _trainer_adam(), {**kwargs, "offload_model": model}


@functools.cache
def _trainer_adam() -> type[OffloadAdam]:
    from hf_offload.optimizer import OffloadAdam

    class TrainerOffloadAdam(OffloadAdam):
        """OffloadAdam as Trainer builds it: Trainer takes a keyword called `model` for the parameter groups."""

        def __init__(self, params: Any, offload_model: nn.Module | None = None, **kwargs: Any) -> None:
            super().__init__(params, model=offload_model, **kwargs)

    return TrainerOffloadAdam


# ------------------------------------------------------------------------------------------------- Trainer


def asked(args: Any) -> bool:
    """Whether these TrainingArguments ask for `offload_adam`."""
    return getattr(args, "optim", None) == NAME


def _adapt_trainer(module: Any) -> None:
    if getattr(module, "_OPTIMIZER_HANDLERS", None) is None:
        cause = "it has no registry of optimizers yet (transformers.trainer_optimizer came with 5.8)"
        remedy = "Upgrade it: pip install -U 'transformers>=5.8'"
        raise UnsupportedError(explain("transformers", _version("transformers"), cause, remedy))
    _wrap(module.Trainer, "create_accelerator_and_postprocess", _checks_settings)
    _wrap(module.Trainer, "_move_model_to_device", _casts_before_the_move)
    _wrap(module.Trainer, "get_optimizer_cls_and_kwargs", _parses_optim_args)


def _checks_settings(original: Method) -> Method:
    # The first thing a Trainer does once it has its arguments, whatever made them.
    def create_accelerator_and_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        ask = getattr(self, "_ask_for_offload", None)  # OffloadTrainerMixin
        if ask is not None:
            ask()
        result = original(self, *args, **kwargs)
        if asked(self.args):
            require_fit()
            activate()
            optim_args.parse(self.args.optim_args)
            refuse_unsupported(self.accelerator, self.args)
        return result

    return create_accelerator_and_postprocess


def _casts_before_the_move(original: Method) -> Method:
    def _move_model_to_device(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if asked(self.args):
            config = optim_args.parse(self.args.optim_args).config
            cast_weights(model, self.accelerator.mixed_precision, config)
        return original(self, model, *args, **kwargs)

    return _move_model_to_device


def _parses_optim_args(original: Method) -> Method:
    def get_optimizer_cls_and_kwargs(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if asked(args):  # transformers' own parser, which runs first, has only a bare ValueError to say
            optim_args.parse(args.optim_args)
        return original(args, *rest, **kwargs)

    return get_optimizer_cls_and_kwargs


def _settles(original: Method) -> Method:
    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _abandon_step(self)
            raise
        optimizer = offload_of(self.optimizer)
        if optimizer is not None:
            optimizer.synchronize()
        return result

    return _inner_training_loop


def _adapt_trainer_in_use(module: Any) -> None:
    for owner, name in ((module.Trainer, "_get_output_dir"), (module.Trainer, "_push_from_checkpoint"),
                        (module, "rotate_checkpoints")):  # fmt: skip
        if not hasattr(owner, name):
            raise UnsupportedError(_moved(f"{module.__name__}.{name}", "it is not there"))
    _wrap(module.Trainer, "_inner_training_loop", _settles)
    _wrap(module.Trainer, "_save_checkpoint", compat_saving.saves_whole_folders)
    _wrap(module.Trainer, "_load_from_checkpoint", compat_saving.verifies_before_loading)
    _wrap(module.Trainer, "_load_optimizer_and_scheduler", compat_saving.maps_optimizer_state)
    _wrap(module.Trainer, "_load_best_model", compat_saving.verifies_the_best_model)


def _adapt_torch() -> None:
    _wrap(torch, "save", compat_saving.hashes_what_it_saves)
    _wrap(torch, "load", compat_saving.maps_what_it_loads)
    # pickle finds a function by the module it names
    torch.serialization.save, torch.serialization.load = torch.save, torch.load


def _abandon_step(trainer: Any) -> None:
    """After an error in mid-step: the last step ends, the gradients and the pending clip factor of this one go.

    auto_find_batch_size enters the loop again with the same optimizer and the same scaler.
    """
    optimizer = offload_of(trainer.optimizer)
    if optimizer is None:
        return
    try:
        optimizer.zero_grad()  # first: out of memory, the next line may fail, and stale gradients would be added to
        optimizer.engine.wait_all()  # not synchronize(): that allocates
    except Exception:
        logger.warning("hf_offload: the optimizer could not be brought to rest after an error", exc_info=True)
    scaler = getattr(trainer.accelerator, "scaler", None)
    if isinstance(scaler, OffloadGradScaler):
        scaler.forget_step()


def _waits_for_foreign_callbacks(original: Method) -> Method:
    def call_event(self: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_train_begin":  # report_to's callbacks come before those a Trainer is given
            self.callbacks.sort(key=lambda callback: not getattr(callback, "before_reports", False))
        optimizer = offload_of(self.optimizer)
        if optimizer is not None and any(_is_foreign(callback, event) for callback in self.callbacks):
            optimizer.synchronize()
        return original(self, event, *args, **kwargs)

    return call_event


def _is_foreign(callback: Any, event: str) -> bool:
    """Whether `callback` handles `event` with code that is neither ours nor transformers', and so may read weights."""
    module = getattr(getattr(callback, event), "__module__", None) or ""
    return module.partition(".")[0] not in ("transformers", "hf_offload")


# -------------------------------------------------------------------------------------------- Accelerator


def offload_of(optimizer: Any) -> OffloadAdam | None:
    """The OffloadAdam inside accelerate's wrappers, or None."""
    module = sys.modules.get("hf_offload.optimizer")
    kind = getattr(module, "OffloadAdam", None)
    if kind is None:
        return None
    while isinstance(optimizer, torch.optim.Optimizer):
        if isinstance(optimizer, kind):
            return optimizer
        optimizer = vars(optimizer).get("optimizer")
    return None


def offloaded(accelerator: Any) -> list[OffloadAdam]:
    """The OffloadAdams that were passed to `accelerator.prepare`."""
    return [ours for optimizer in accelerator._optimizers if (ours := offload_of(optimizer)) is not None]


def prepared_models(accelerator: Any) -> list[nn.Module]:
    """The models that were passed to `accelerator.prepare`."""
    return list(accelerator._models)


def _adapt_accelerator(module: Any) -> None:
    _wrap(module.Accelerator, "prepare", _refuses_in_prepare)
    _wrap(module.Accelerator, "prepare_optimizer", _prepares_optimizer)
    _wrap(module.Accelerator, "clip_grad_norm_", _clips_norm)
    _wrap(module.Accelerator, "clip_grad_value_", _clips_value)
    _wrap(module.Accelerator, "save_state", compat_saving.saves_state)
    _wrap(module.Accelerator, "load_state", compat_saving.loads_state)


def _refuses_in_prepare(original: Method) -> Method:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(offload_of(arg) is not None for arg in args):
            refuse_unsupported(self)
        return original(self, *args, **kwargs)

    return prepare


def _prepares_optimizer(original: Method) -> Method:
    def prepare_optimizer(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        ours = offload_of(optimizer)
        if ours is None:
            return original(self, optimizer, device_placement=device_placement)
        refuse_unsupported(self)
        adopt_scaler(self)
        # Otherwise AcceleratedOptimizer moves the state to the device: 12 bytes a parameter.
        return original(self, optimizer, device_placement=False)

    return prepare_optimizer


def _clips_norm(original: Method) -> Method:
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        ours = offloaded(self)
        if not ours:
            return original(self, parameters, max_norm, norm_type)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        optimizer = clip_target(ours, parameters, norm_type)
        if optimizer is None:
            return original(self, parameters, max_norm, norm_type)
        if isinstance(self.scaler, OffloadGradScaler):
            self.scaler.unscale_(optimizer)  # once between two updates, as torch demands
        return optimizer.clip_grad_norm_(max_norm)

    return clip_grad_norm_


def _clips_value(original: Method) -> Method:
    def clip_grad_value_(self: Any, parameters: Any, clip_value: float) -> Any:
        if offloaded(self) and self.scaler is not None:
            cause = "under fp16 loss scaling hf_offload unscales inside the step, so .grad still holds scaled values"
            remedy = "Clip by norm (accelerator.clip_grad_norm_), or train in bf16"
            raise UnsupportedError(explain("clip_value", clip_value, cause, remedy))
        return original(self, parameters, clip_value)

    return clip_grad_value_


# -------------------------------------------------------------------------------------------- loss scaling


class OffloadGradScaler(torch.amp.GradScaler):
    """A GradScaler that knows OffloadAdam; for other optimizers it is torch's.

    torch's unscales in place, and refuses fp16 gradients, since small ones would vanish. Here the optimizer looks for
    overflow in the scaled gradients and folds 1/scale into its step; skip, backoff and growth stay torch's.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, *args: Any, **kwargs: Any) -> dict[Any, Tensor]:
        ours = offload_of(optimizer)
        if ours is None:
            return super()._unscale_grads_(optimizer, inv_scale, *args, **kwargs)
        found_inf = ours.unscale_(inv_scale)
        return {found_inf.device: found_inf}

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ours = offload_of(optimizer)
        if ours is not None and any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            ours.skip_step()
            return None
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def forget_step(self) -> None:
        """Back to the start of an iteration, after an error in the middle of one."""
        if self._enabled:
            self._per_optimizer_states.clear()


def adopt_scaler(accelerator: Any) -> None:
    """Make accelerate's GradScaler, if it has one, an OffloadGradScaler: the same object, so references stay right.

    Raises:
        UnsupportedError: a scaler of another kind.
    """
    scaler = accelerator.scaler
    if scaler is None or isinstance(scaler, OffloadGradScaler):
        return
    plain: tuple[type, ...] = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
    if type(scaler) not in plain:
        cause = "only torch's own GradScaler can be taught to unscale on the host"
        raise UnsupportedError(explain("scaler", type(scaler).__qualname__, cause, "Train in bf16"))
    scaler.__class__ = OffloadGradScaler


# -------------------------------------------------------------------------------------------- fp32 weights


def cast_weights(model: nn.Module, mixed_precision: str, config: OffloadConfig) -> int:
    """Under bf16 or fp16 training, make the trainable fp32 weights 16-bit; their fp32 values become the masters.

    PEFT adapters and what the model keeps in fp32 (`_keep_in_fp32_modules*`) stay as they are. Idempotent.

    Returns:
        The number of elements cast.
    """
    from hf_offload.engine.masters import cast_trainable

    dtype = WIRE.get(str(mixed_precision))
    if dtype is None or not config.cast_fp32_weights:
        return 0
    count = cast_trainable(model, dtype, keep=_keeper(model))
    if count and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "hf_offload: %s fp32 weights are %s now, and their fp32 values are the master weights in host memory "
            "(cast_fp32_weights=false turns this off).",
            f"{count:,}",
            str(dtype).removeprefix("torch."),
        )
    return count


def _keeper(model: nn.Module) -> Callable[[str], bool]:
    """keep(name) for `cast_trainable`, with transformers' own reading of `_keep_in_fp32_modules`: a search by regex."""
    patterns: set[str] = set()
    adapters: list[str] = []
    for name, module in model.named_modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            patterns.update(getattr(module, attribute, None) or ())
        layers = getattr(module, "adapter_layer_names", ())  # PEFT's tuner layers and modules_to_save
        adapters += [f"{name}.{layer}." for layer in layers]
        if hasattr(module, "peft_config") and hasattr(module, "prompt_encoder"):
            adapters.append(f"{name}.prompt_encoder.".lstrip("."))
    alternation = re.compile("|".join(p.replace("*", ".*") for p in patterns)) if patterns else None

    def keep(name: str) -> bool:
        if any(name.startswith(adapter) or name == adapter[:-1] for adapter in adapters):
            return True
        return alternation is not None and alternation.search(name) is not None

    return keep


# ------------------------------------------------------------------------------------------ readers of weights


def synchronize_all() -> None:
    """Wait until the weights of every OffloadAdam there is are those of its last step."""
    module = sys.modules.get("hf_offload.optimizer")
    for optimizer in module.alive() if module is not None else ():
        optimizer.synchronize()


def _adapt_readers(module: ModuleType) -> None:
    name, methods = _READERS[module.__name__]
    for method in methods:
        try:
            _wrap(getattr(module, name), method, _waits_for_weights)
        except (AttributeError, UnsupportedError) as error:
            logger.warning("hf_offload: synchronize() the optimizer before %s.%s: %s", name, method, error)


def _waits_for_weights(original: Method) -> Method:
    def reader(*args: Any, **kwargs: Any) -> Any:
        synchronize_all()
        return original(*args, **kwargs)

    return reader


_WHEN_IMPORTED: dict[str, Callable[[Any], None]] = {
    "transformers.training_args": _adapt_training_args,
    "transformers.trainer_optimizer": _adapt_trainer_optimizer,
    "transformers.trainer": _adapt_trainer,
    "hf_offload.optimizer": lambda module: activate(),
}
_WHEN_ACTIVE: dict[str, Callable[[Any], None]] = {
    "torch.serialization": lambda module: _adapt_torch(),
    "transformers.trainer": _adapt_trainer_in_use,
    "transformers.trainer_callback": lambda module: _wrap(
        module.CallbackHandler, "call_event", _waits_for_foreign_callbacks
    ),
    "accelerate.accelerator": _adapt_accelerator,
}
# Code that reads (an EMA also writes) weights outside a forward, so that no hook sees it: module -> class, methods.
_READERS = {
    "torch.optim.swa_utils": ("AveragedModel", ("update_parameters",)),
    "diffusers.training_utils": ("EMAModel", ("step", "copy_to", "store", "restore")),
    "peft.tuners.tuners_utils": ("BaseTuner", ("merge_adapter", "unmerge_adapter", "_unload_and_optionally_merge")),
    "trl.generation.vllm_generation": ("VLLMGeneration", ("sync_weights",)),
    "trl.experimental.online_dpo.online_dpo_trainer": ("OnlineDPOTrainer", ("_move_model_to_vllm",)),
    "trl.experimental.async_grpo.async_grpo_trainer": ("AsyncGRPOTrainer", ("_sync_weight",)),
    "trl.experimental.async_distillation.async_distillation_trainer": ("AsyncDistillationTrainer", ("_sync_weight",)),
}
