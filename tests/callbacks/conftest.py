"""A Trainer over a tiny model, for the tests of the callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_offload import compat

compat.register()
torch.set_num_threads(1)  # models this small only lose by more


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """make_trainer(callbacks=[...], **training arguments): five logged steps with `offload_adam` on the CPU."""

    def make(callbacks: list[Any] | None = None, kind: Any = Trainer, **given: Any) -> Any:
        torch.manual_seed(0)
        shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, attn_implementation="eager"))
        ids = torch.randint(0, 64, (40, 8), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in ids]
        chosen = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "optim": "offload_adam",
            "optim_args": "threads=1,bucket_bytes=4096",
            "per_device_train_batch_size": 2,
            "max_steps": 5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        args = TrainingArguments(**{**chosen, **given})
        return kind(model, args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)

    return make


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its settings in process-wide state, and TrainingArguments in the environment."""
    _forget_accelerate()
    yield
    _forget_accelerate()


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
