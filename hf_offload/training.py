"""What `hf-offload train` does: a recipe becomes a model, data and an `OffloadTrainer`, and ends in a summary."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hf_offload import calibrating, data, environment, models, recipe
from hf_offload.errors import RecipeError, explain
from hf_offload.recipe import Recipe

if TYPE_CHECKING:
    from transformers import TrainingArguments

SUMMARY = "offload_summary.json"


@dataclass(frozen=True)
class Outcome:
    """What a training run leaves behind: the summary as data, where it was written, and where the model is."""

    summary: dict[str, Any]
    summary_path: Path
    model_dir: Path | None


def arguments(spec: Recipe) -> TrainingArguments:
    """The recipe's TrainingArguments; what it leaves open is set to fit this machine and this command.

    `bf16=True` without a GPU is refused by transformers unless `use_cpu` is set, so it is. Raises RecipeError.
    """
    import torch

    no_gpu = spec.training.get("use_cpu", not torch.cuda.is_available()) is True
    return recipe.training_arguments(
        spec,
        output_dir=str(Path("outputs") / (Path(spec.source).stem or "train")),
        use_cpu=no_gpu,
        dataloader_pin_memory=not no_gpu,
        report_to="none",
        include_num_input_tokens_seen="non_padding",
        disable_tqdm=True,
    )


def run(spec: Recipe, args: TrainingArguments, console: Console) -> Outcome:
    """Train a recipe to its end.

    Args:
        args: what `arguments(spec)` gives.

    Raises:
        OffloadError: the recipe, the data, the model or this machine does not fit; nothing was trained then.
        KeyboardInterrupt: Ctrl-C; threads are ended, checkpoints are whole.
    """
    models.quiet()
    output_dir = _output_dir(args)
    from transformers import set_seed

    set_seed(args.seed)
    tokenizer = models.build_tokenizer(spec.tokenizer, spec.model)
    rows = data.build(spec.data, tokenizer, args.seed)
    model = models.build_model(spec.model, tokenizer)
    _say_what(console, spec, args, rows, model)
    return _train(spec, args, tokenizer, rows, model, console, output_dir)


def _train(
    spec: Recipe, args: TrainingArguments, tokenizer: Any, rows: data.Rows, model: Any, console: Console, folder: Path
) -> Outcome:
    from transformers.trainer_callback import PrinterCallback
    from transformers.trainer_callback import ProgressCallback as TqdmCallback

    from hf_offload.callbacks.interrupt import InterruptCallback, say_on_stderr
    from hf_offload.callbacks.metrics import OffloadMetricsCallback
    from hf_offload.callbacks.progress import ProgressCallback
    from hf_offload.callbacks.summary import SummaryCallback, offload_optimizer
    from hf_offload.trainer import OffloadTrainer

    figures, progress, interrupt = SummaryCallback(), ProgressCallback(console), InterruptCallback()
    trainer = OffloadTrainer(
        model=model,
        args=args,
        train_dataset=rows.train,
        eval_dataset=rows.evaluation or None,
        data_collator=data.Collator(tokenizer.pad_token_id or 0),
        processing_class=tokenizer,
        offload=spec.offload,
        callbacks=[figures, progress, interrupt],
    )
    for theirs in (PrinterCallback, TqdmCallback):
        trainer.remove_callback(theirs)
    OffloadMetricsCallback().add_to(trainer)
    try:
        with interrupt.listening(say_on_stderr):
            trainer.train(resume_from_checkpoint=_resume(args))
            if rows.evaluation and args.eval_strategy == "no":
                trainer.evaluate()
            figures.finish()
            keep = args.save_strategy != "no"
            if keep:
                trainer.save_model()
    finally:
        progress.stop()
        optimizer = offload_optimizer(trainer.optimizer)
        if optimizer is not None:
            optimizer.close()
    if figures.last is None:
        skipped = optimizer.stats().skipped_steps if optimizer is not None else 0
        if skipped:
            cause = f"no step was taken: {skipped} were skipped, since gradients were not finite"
            remedy = "Look at the data and the model's weights for NaN, or lower training.learning_rate"
            raise RecipeError(explain("training", f"{skipped} steps", cause, remedy))
        cause = "no step was left to take"
        raise RecipeError(explain("training.max_steps", args.max_steps, cause, "Give more steps or another output_dir"))
    summary = {**figures.summary(), "versions": environment.versions(), "hardware": environment.hardware()}
    summary["prediction"] = calibrating.of_run(Path(spec.source).stem or "model", trainer, spec, summary)
    path = folder / SUMMARY
    if trainer.is_world_process_zero():
        _write(path, summary)
    return Outcome(summary=summary, summary_path=path, model_dir=folder if keep else None)


def _output_dir(args: TrainingArguments) -> Path:
    """The output folder, made now, so that a path that cannot be written is said before and not after training."""
    folder = Path(args.output_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        cause = f"cannot be made: {getattr(error, 'strerror', None) or error}"
        raise RecipeError(explain("output_dir", str(folder), cause, "Give a folder you may write to")) from None
    if not os.access(folder, os.W_OK):
        raise RecipeError(explain("output_dir", str(folder), "not writable", "Give a folder you may write to"))
    return folder


def _resume(args: TrainingArguments) -> str | bool | None:
    given = args.resume_from_checkpoint
    if given is None or given.lower() == "false":
        return None
    if given.lower() == "true":
        from transformers.trainer_utils import get_last_checkpoint

        if get_last_checkpoint(str(args.output_dir)) is None:
            cause = f"there is no checkpoint in {args.output_dir}"
            remedy = "Give the output_dir of a run that saved one"
            raise RecipeError(explain("training.resume_from_checkpoint", given, cause, remedy))
        return True
    if not os.path.isdir(given):
        cause, remedy = "no such folder", "Give a checkpoint folder, or true for the last one in output_dir"
        raise RecipeError(explain("training.resume_from_checkpoint", given, cause, remedy))
    return given


def _say_what(console: Console, spec: Recipe, args: TrainingArguments, rows: data.Rows, model: Any) -> None:
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = spec.model.path or f"a new {model.config.model_type}"
    evaluation = f", {len(rows.evaluation):,} for evaluation" if rows.evaluation else ""
    console.print(
        f"Training {name}: {params:,} parameters ({spec.model.dtype}), {len(rows.train):,} rows{evaluation}, "
        f"into {args.output_dir}",
        highlight=False,
    )
    for note in rows.notes:
        console.print(note, highlight=False)


def _write(path: Path, summary: dict[str, Any]) -> None:
    """Written beside and moved into place, so that a reader never sees half a file."""
    beside = path.with_suffix(".json.part")
    # A list of numbers on one line: a loss for each step would else take a line each.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(summary, indent=2))
    beside.unlink(missing_ok=True)  # a link there would be followed
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)
