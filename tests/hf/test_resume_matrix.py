"""Resuming, in every mode and across changes of mode: the bits of the run that never stopped, to the last file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_offload import compat
from hf_offload.checkpoint import manifest

compat.register()

MODES = {
    "in_order": "schedule=in_order",
    "overlapped": "schedule=overlapped",
    "streamed": "schedule=overlapped,stream_gradients=true",
    "streamed in order": "schedule=in_order,stream_gradients=true",
    "speculative": "schedule=overlapped,stream_gradients=true,shadow_bytes=1000000",
    "delayed": "schedule=delayed,delay_warmup_steps=2",
}
COMPACT = ("bfloat16", "int8")
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {}}
SMALL, LARGE = "bucket_bytes=2048,threads=1", "bucket_bytes=100000,threads=2,ring_slots=1"
COMPARED = ("optimizer.pt", "model.safetensors", "scheduler.pt", "scaler.pt", "rng_state.pth")


def trainer(lab: Any, mode: str, layout: str, precision: str, accumulation: int, state_dtype: str) -> Any:
    """Dropout, weight decay, clipping, a schedule of learning rates, evaluation; an epoch is 12 micro-batches."""
    return lab.trainer(
        lab.model(torch.float16 if precision == "fp16" else torch.float32, attention_dropout=0.1),
        optim_args=f"{MODES[mode]},{layout},state_dtype={state_dtype}", **PRECISIONS[precision],
        gradient_accumulation_steps=accumulation, max_steps=6, save_strategy="steps", save_steps=2, weight_decay=0.1,
        lr_scheduler_type="cosine", max_grad_norm=0.5, eval_strategy="steps", eval_steps=3,
        kind=Scaled if precision == "fp16" else Trainer,
    )  # fmt: skip


def files(trainer: Any, step: int) -> dict[str, str]:
    found = manifest.verify(Path(trainer.args.output_dir) / f"checkpoint-{step}")
    assert found is not None and found.optimizer is not None
    assert found.optimizer["state_dtype"] == trainer.optimizer.optimizer.config.state_dtype
    return {name: found.files[name].sha256 for name in COMPARED if name in found.files}


class Scaled(Trainer):
    """With a scaler, which accelerate does not make on a CPU: it overflows at first, backs off, and grows."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)


def check(
    lab: Any, tools: Any, before: str, after: str, precision: str, accumulation: int, at: int,
    state_dtype: str = "float32",
) -> None:  # fmt: skip
    whole = trainer(lab, before, SMALL, precision, accumulation, state_dtype)
    whole.train()
    resumed = trainer(lab, after, LARGE, precision, accumulation, state_dtype)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{at}"))
    assert tools.same_bits(tools.weights(whole.model), tools.weights(resumed.model))
    assert tools.same_bits(tools.state_of(whole.optimizer), tools.state_of(resumed.optimizer))
    assert files(whole, 6) == files(resumed, 6)
    assert ("scaler.pt" in files(whole, 6)) == (precision == "fp16")
    logs = [str(tools.history(run, "loss", "grad_norm", "learning_rate")) for run in (whole, resumed)]
    assert logs[0] == logs[1]  # as text: nan is not nan
    for run in (whole, resumed):
        run.optimizer.optimizer.close()


EXACT = [mode for mode in MODES if mode != "delayed"]


QUICK = [
    ("in_order", "overlapped", "fp32", 1),
    ("overlapped", "speculative", "bf16", 2),
    ("speculative", "in_order", "bf16", 2),
    ("streamed", "in_order", "fp16", 1),
    ("in_order", "streamed", "fp16", 2),
    ("delayed", "delayed", "bf16", 1),
    ("delayed", "delayed", "fp16", 2),
]


@pytest.mark.parametrize(
    ("before", "after", "precision", "accumulation", "state_dtype"),
    [
        *((*cell, "float32") for cell in QUICK),
        ("speculative", "in_order", "bf16", 2, "int8"),
        ("in_order", "streamed", "fp16", 1, "bfloat16"),
    ],
)
def test_a_resumed_run_ends_in_the_same_files(
    lab: Any, tools: Any, before: str, after: str, precision: str, accumulation: int, state_dtype: str
) -> None:
    check(lab, tools, before, after, precision, accumulation, 2, state_dtype)


PAIRS = [*((a, b) for a in EXACT for b in EXACT if a != b), ("delayed", "delayed")]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_mode_into_every_other(lab: Any, tools: Any, before: str, after: str, precision: str) -> None:
    """Both accumulations and both checkpoints come with every precision, by turns."""
    number = PAIRS.index((before, after)) + list(PRECISIONS).index(precision)
    check(lab, tools, before, after, precision, accumulation=1 + number % 2, at=2 + 2 * (number // 2 % 2))


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", COMPACT)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_every_mode_into_every_other_with_compact_state(
    lab: Any, tools: Any, before: str, after: str, state_dtype: str
) -> None:
    """Precisions, accumulations and checkpoints come by turns."""
    number = PAIRS.index((before, after)) + 2 * COMPACT.index(state_dtype)
    precision = list(PRECISIONS)[number % 3]
    check(lab, tools, before, after, precision, 1 + number % 2, 2 + 2 * (number // 2 % 2), state_dtype)
