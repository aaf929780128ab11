"""`hf-offload plan --calibrate`, and what plans and runs then know: from options to calibration and predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_offload import calibration, planner, prediction, recipe
from hf_offload.calibration import Calibration
from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, explain
from hf_offload.planner import Plan, Workload
from hf_offload.planning import Asked, plannable
from hf_offload.recipe import Recipe

CURVE_POINTS, CURVE_OCTAVES = 13, 6
"""Micro-batches of a curve: from an eighth of the plan's to eight times it."""


@dataclass(frozen=True)
class Trained:
    """A model as it would be trained.

    Attributes:
        name: where it was read from.
        config: transformers' configuration.
        weights: dtype of its weights once training has begun; autocast: what it computes in, None: the same.
        device: cpu or cuda.
        freeze: as in `recipe.ModelSpec`.
        clip: whether gradients are clipped.
    """

    name: str
    config: Any
    weights: str
    autocast: str | None
    device: str
    checkpointing: bool
    freeze: tuple[str, ...] = ()
    clip: bool = True

    def on_meta(self) -> Any:
        """The model without storage."""
        from hf_offload import model_shapes, models

        model = model_shapes.on_meta(self.config, self.name)
        models.freeze(model, self.freeze)
        return self._ready(model)

    def built(self) -> Any:
        """The model with random weights, on its device.

        Raises:
            HostMemoryError, ConfigError: it does not fit.
        """
        import torch
        from transformers import AutoModelForCausalLM

        from hf_offload import models
        from hf_offload.preflight import check_host_budget
        from hf_offload.subjects import check_room

        sizes = [p.numel() * getattr(torch, self.weights).itemsize for p in self.on_meta().parameters()]
        need = {"weights": sum(sizes), "gradients": sum(sizes)}
        if self.device == "cpu":
            check_host_budget(need, None)
        check_room(need, self.device)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=getattr(torch, self.weights))
        models.freeze(model, self.freeze)
        return self._ready(model.train())

    def _ready(self, model: Any) -> Any:
        model.tie_weights()
        if self.checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            if self.freeze:
                model.enable_input_require_grads()
        return model

    def facts(self, offload: OffloadConfig) -> dict[str, Any]:
        """What a calibration of it is kept by."""
        from hf_offload.subjects import facts

        return facts(self.name, self.on_meta(), self.device, offload, self.weights)


def of_recipe(spec: Recipe, args: Any, name: str) -> Trained:
    """A recipe's model, as `hf-offload train` would train it. `args`: its TrainingArguments. Raises RecipeError."""
    from hf_offload import models

    if spec.model.config is not None:
        config = models.scratch_config(spec.model.config, "model.config")
    elif spec.model.shape is not None and not recipe.looks_local(spec.model.path or ""):
        config = models.scratch_config(spec.model.shape, "model.shape")  # needs no hub
    else:
        config = models.pretrained_config(spec.model.path or "", "model.path", spec.model.trust_remote_code)
    mixed = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    cast = mixed is not None and spec.offload.cast_fp32_weights and spec.model.dtype == "float32"
    checkpointing = any(getattr(args, n, None) for n in ("gradient_checkpointing", "activation_checkpointing"))
    return Trained(
        name=name, config=config, weights=mixed if cast and mixed else spec.model.dtype, autocast=mixed,
        device=_device(bool(args.use_cpu)), checkpointing=checkpointing, freeze=spec.model.freeze,
        clip=bool(args.max_grad_norm),
    )  # fmt: skip


def of_path(path: str, weight_bytes: int, checkpointing: bool) -> Trained:
    """A folder's or a hub id's model, trained in bf16, or in fp32 with weights of 4 bytes. Raises RecipeError."""
    from hf_offload import models

    config = models.pretrained_config(path, "--model")
    weights = "bfloat16" if weight_bytes == 2 else "float32"
    return Trained(path, config, weights, None, _device(False), checkpointing)


def _device(use_cpu: bool) -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"


def calibrate(
    trained: Trained, offload: OffloadConfig, work: Workload, file: Path | None, say: Callable[[str], None]
) -> tuple[Calibration, Path]:
    """Measure this machine with a model, and store it; where it was stored.

    Raises:
        ConfigError: the machine is busy (nothing is stored), the model does not fit, or the file cannot be written.
        HostMemoryError: it does not fit.
    """
    import torch

    from hf_offload import measuring, models
    from hf_offload.subjects import ModelSubject, facts

    models.quiet()
    say("Building the model ...")
    model = trained.built()
    about = facts(trained.name, model, trained.device, offload)
    autocast = None if trained.autocast is None else getattr(torch, trained.autocast)
    few = max(1, work.batch // 2)
    subject = ModelSubject(model, work.seq_len, autocast)
    found = measuring.measure(subject, offload, (few, 2 * few), about, say=say)
    path = file or calibration.path_for(about, found.machine)
    calibration.save(found, path)
    return found, path


def find(trained: Trained, offload: OffloadConfig, file: Path | None) -> tuple[Calibration, Path] | None:
    """The stored calibration of a model on this machine; None where there is none.

    Raises:
        ConfigError: a damaged file, or one of another machine or model.
    """
    about, machine = trained.facts(offload), calibration.fingerprint()
    if file is not None:
        return calibration.load(file, machine, about), file
    found = calibration.find(about, machine)
    return None if found is None else (found, calibration.path_for(about, machine))


@dataclass(frozen=True)
class Told:
    """What a calibration says about a plan.

    Attributes:
        at: predictions for the plan's micro-batch.
        curves: for others.
        notes: what to keep in mind.
    """

    calibration: Calibration
    path: Path
    work: prediction.Work
    at: tuple[prediction.Prediction, ...]
    curves: tuple[prediction.Curve, ...]
    notes: tuple[str, ...]


def tell(found: Calibration, path: Path, offload: OffloadConfig, plan: Plan, clip: bool) -> Told:
    """Predictions of every schedule for a plan's micro-batch, and for smaller and larger ones."""
    step = plan.workload
    work = prediction.Work(
        tokens=step.tokens, accumulation=step.accumulation, clip=clip, resident=plan.resident / plan.counts.trainable
    )
    exponents = (k / (CURVE_POINTS - 1) * CURVE_OCTAVES - CURVE_OCTAVES / 2 for k in range(CURVE_POINTS))
    tokens = sorted({max(1, round(step.tokens * 2**e)) for e in exponents})
    notes = []
    if step.seq_len != found.seq_len:
        notes.append(
            f"Calibrated with rows of {found.seq_len:,} tokens: attention over {step.seq_len:,} takes other times."
        )
    return Told(
        found,
        path,
        work,
        tuple(prediction.predict(found, offload, work)),
        tuple(prediction.curves(found, offload, work, tokens)),
        tuple(notes),
    )


def as_json(told: Told) -> dict[str, Any]:
    """Plain data; seconds are of one step, tokens of a micro-batch."""
    found = told.calibration
    return {
        "schedules": prediction.as_json(told.at),
        "hidden_from_tokens": {curve.schedule: curve.vanishes_at for curve in told.curves},
        "curves": {c.schedule: {"tokens": list(c.tokens), "step_seconds": list(c.steps)} for c in told.curves},
        "calibration": {
            "path": str(told.path),
            "made": made(found),
            "rows": list(found.rows),
            "seq_len": found.seq_len,
            "host_gparams_per_s": 1e-9 / found.host.step if found.host.step else None,
            "spread": dict(found.spread),
        },
        "notes": list(told.notes),
    }


def made(found: Calibration) -> str:
    """When, as people write it."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(found.made))


def of_run(name: str, trainer: Any, spec: Recipe, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a calibration says about a run that has ended, for its summary: `seconds_per_step`, `error` against what was
    measured, and `calibration`, the file; or `missing`, why there is no prediction. Never raises for want of one."""
    from hf_offload.subjects import facts

    args, measured = trainer.args, summary["seconds_per_step"]
    if args.world_size > 1:
        return {"missing": f"{args.world_size} ranks add up their gradients, which was not measured"}
    device = "cuda" if summary["transport"] == "cuda" else "cpu"
    about, machine = facts(name, trainer.model, device, spec.offload), calibration.fingerprint()
    try:
        found = calibration.find(about, machine)
    except ConfigError as error:
        return {"missing": str(error)}
    if found is None:
        cause = "this model, with these settings, was not calibrated on this machine"
        return {"missing": f"{cause}: hf-offload plan --calibrate, with the recipe {name} and the same KEY=VALUE"}
    accumulation = args.gradient_accumulation_steps
    tokens = round((summary["tokens_per_second"] or 0.0) * (measured or 0.0) / accumulation)
    tokens = tokens or args.per_device_train_batch_size * spec.data.block_size
    resident = summary["device_bytes"]["optimizer"] / (planner.STATE_BYTES * summary["params"])
    work = prediction.Work(
        tokens=tokens, accumulation=accumulation, clip=bool(args.max_grad_norm), resident=resident
    )  # fmt: skip
    told = prediction.predict_as_trained(found, spec.offload, work, summary["schedule"])
    return {
        "seconds_per_step": told.step,
        "compute_seconds": told.compute,
        "exposed_seconds": told.exposed,
        "measured_seconds_per_step": measured,
        "error": told.step / measured - 1 if measured else None,
        "calibration": str(calibration.path_for(about, machine)),
    }


def for_plan(
    asked: Asked, plan: Plan, measure: bool, file: Path | None, say: Callable[[str], None]
) -> tuple[Told | None, str | None]:
    """What a calibration says about a plan, if there is one, and what hinders where one was not asked for.

    Args:
        asked: the options of `hf-offload plan`; plan: what they came to.
        measure: calibrate now.
        file: where the calibration is written to or read from; None: in the user's cache.

    Raises:
        ConfigError: as `calibrate` and `find`; a calibration is asked for and there is no model, or none is stored.
        HostMemoryError: as `calibrate`.
    """
    wanted = measure or file is not None
    a_number = asked.params is not None or asked.trainable is not None
    try:
        if not wanted and (a_number or not any(calibration.folder().glob("*.json"))):
            return None, None
        trained, offload = _asked_for(asked, plan.workload)
        found = calibrate(trained, offload, plan.workload, file, say) if measure else find(trained, offload, file)
    except ConfigError as error:
        if wanted:
            raise
        return None, str(error)
    return (None, None) if found is None else (tell(*found, offload, plan, trained.clip), None)


def _asked_for(asked: Asked, plan: Workload) -> tuple[Trained, OffloadConfig]:
    """The model of a plan, and its settings. Raises ConfigError."""
    if asked.params is not None or asked.trainable is not None:
        option, value = ("--params", asked.params) if asked.params is not None else ("--trainable", asked.trainable)
        cause = "a number of parameters has no forward that could be measured"
        raise ConfigError(
            explain(option, value, cause, "Calibrate with --model, or with a recipe and its model.freeze")
        )
    if asked.model is not None:
        trained, offload = of_path(asked.model, asked.weight_bytes or 2, plan.checkpointing), OffloadConfig()
    else:
        spec = recipe.load(str(asked.recipe), asked.overrides)
        args = recipe.training_arguments(spec, output_dir="outputs", **plannable(spec))
        trained, offload = of_recipe(spec, args, str(asked.recipe)), spec.offload
    if asked.state_dtype is not None:
        offload = replace(offload, state_dtype=asked.state_dtype)
    return replace(trained, checkpointing=plan.checkpointing), with_link(offload, asked.link_gb_s)


def with_link(offload: OffloadConfig, link_gb_s: float | None) -> OffloadConfig:
    """`--link-gb-s` is the emulated link's speed, too."""
    return offload if link_gb_s is None or offload.transport == "cuda" else replace(offload, link_gb_s=link_gb_s)
