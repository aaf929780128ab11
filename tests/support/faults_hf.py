"""A Trainer over a model so small that the library's own work is all there is."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_offload import OffloadAdam, compat
from support.engine import VOCAB, TinyLM, state, weights
from support.faults import Bits

compat.register()

SETTINGS = {
    "in_order": "schedule=in_order",
    "overlapped": "schedule=overlapped",
    "streamed": "schedule=overlapped,stream_gradients=true",
    "speculative": "schedule=overlapped,stream_gradients=true,shadow_bytes=1000000",
    "delayed": "schedule=delayed,delay_warmup_steps=2",
}
"""`--optim_args` of each schedule."""
EXACT = ("in_order", "overlapped", "streamed", "speculative")
SMALL = ",bucket_bytes=96,ring_slots=2,threads=1"


class Model(nn.Module):
    """TinyLM as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.inner(ids), "logits": ids}


def rows(count: int = 48) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCAB, (count, 5), generator=torch.Generator().manual_seed(1))
    return [{"ids": row, "labels": row} for row in ids]


def trainer(
    mode: str, folder: Path, model: nn.Module | None = None, kind: type[Trainer] = Trainer, callbacks: Any = None,
    latency_us: int = 0, data: Any = None, collate: Any = None, **given: Any,
) -> Trainer:  # fmt: skip
    """A Trainer of `mode`. Its learning rate is constant: what a run ends with depends on the steps it took alone."""
    chosen: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "optim": "offload_adam", "lr_scheduler_type": "constant",
        "optim_args": SETTINGS[mode] + SMALL + f",link_latency_us={latency_us}", "per_device_train_batch_size": 4,
        "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(
        model or Model(), TrainingArguments(**{**chosen, **given}), train_dataset=data or rows(),
        eval_dataset=rows()[:8], callbacks=callbacks, data_collator=collate,
    )  # fmt: skip


def ours_of(made: Trainer) -> OffloadAdam:
    found = compat.offload_of(made.optimizer)
    assert found is not None
    return found


def bits_of(made: Trainer) -> Bits:
    optimizer = ours_of(made)
    optimizer.synchronize()
    return weights(made.model), state(optimizer)


@functools.cache
def stopped_after(steps: int, then: int, mode: str = "in_order", batch: int = 4, then_batch: int = 4) -> Bits:
    """What a Trainer ends with that took `steps` steps undisturbed and was then told to `train()` for `then` more."""
    made = trainer(mode, Path("/nowhere"), max_steps=steps or then, per_device_train_batch_size=batch)
    if steps:
        made.train()
        made.args.max_steps, made._train_batch_size = then, then_batch
        made.args.per_device_train_batch_size = then_batch
    made.train()
    found = bits_of(made)
    ours_of(made).close()
    return found


def forget_accelerate() -> None:
    """accelerate keeps its settings in process-wide state, and TrainingArguments in the environment."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
