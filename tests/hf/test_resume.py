"""A resumed run has the bits of one that never stopped; checkpoints are plain, and interchange with AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from hf_offload import OffloadConfig, OffloadTrainer, compat

compat.register()


def checkpoint(trainer: Any, step: int) -> str:
    return str(Path(trainer.args.output_dir) / f"checkpoint-{step}")


def saved(trainer: Any, step: int) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors and the groups in a checkpoint."""
    folder = Path(checkpoint(trainer, step))
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    tensors = {f"{i}.{k}": torch.as_tensor(t) for i, entry in optimizer["state"].items() for k, t in entry.items()}
    return tensors | load_file(folder / "model.safetensors"), optimizer["param_groups"]


def ends_alike(tools: Any, a: Any, b: Any, step: int) -> bool:
    """Weights, optimizer state and the saved files of the last checkpoint, bit for bit."""
    (left, groups), (right, other_groups) = saved(a, step), saved(b, step)
    return (
        tools.same_bits(tools.weights(a.model), tools.weights(b.model))
        and tools.same_bits(tools.state_of(a.optimizer), tools.state_of(b.optimizer))
        and tools.same_bits(left, right)
        and groups == other_groups
    )


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    lab: Any, tools: Any, schedule: str, bf16: bool, tmp_path: Path
) -> None:
    args = {
        "optim_args": f"schedule={schedule},threads=1,bucket_bytes=8192",
        "bf16": bf16,  # the model is loaded in fp32 each time, and cast
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "weight_decay": 0.1,
    }
    whole = lab.trainer(lab.model(attention_dropout=0.1), **args)
    whole.train()
    other = lab.model(attention_dropout=0.1)
    torch.nn.init.normal_(other.lm_head.weight)  # what the checkpoint must overwrite, masters included
    resumed = lab.trainer(other, **args)
    resumed.train(resume_from_checkpoint=checkpoint(whole, 3))
    assert resumed.state.global_step == 6 and resumed.optimizer.optimizer.stats().steps == 3
    assert ends_alike(tools, whole, resumed, 6)
    assert tools.history(whole, "loss", "grad_norm") == tools.history(resumed, "loss", "grad_norm")


def test_adapters_resume(lab: Any, tools: Any) -> None:
    peft = pytest.importorskip("peft")

    def trainer() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(lab.model(torch.bfloat16), config)
        return lab.trainer(model, bf16=True, max_steps=4, save_strategy="steps", save_steps=2, optim_args="threads=1")

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=checkpoint(whole, 2))
    assert tools.same_bits(tools.weights(whole.model), tools.weights(resumed.model))
    assert tools.same_bits(tools.state_of(whole.optimizer), tools.state_of(resumed.optimizer))


def test_saved_state_is_fp32_on_the_host_and_loads_into_adamw(lab: Any) -> None:
    trainer = lab.trainer(bf16=True, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    file = torch.load(Path(checkpoint(trainer, 2)) / "optimizer.pt", weights_only=True)
    for entry in file["state"].values():
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert entry[name].dtype == torch.float32 and entry[name].device.type == "cpu"
    adamw = torch.optim.AdamW([{"params": g["params"]} for g in trainer.optimizer.param_groups])
    adamw.load_state_dict(file)
    assert adamw.state_dict()["state"].keys() == file["state"].keys()


def test_a_run_of_adamw_torch_is_taken_up(lab: Any, tools: Any) -> None:
    """fp32: its optimizer.pt has no masters, they are the weights."""
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    theirs = lab.trainer(optim="adamw_torch", **args)
    theirs.train()
    ours = lab.trainer(**args)
    ours.train(resume_from_checkpoint=checkpoint(theirs, 2))
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_weights_loaded_after_the_optimizer_was_made_are_kept(lab: Any, tools: Any) -> None:
    """Stale masters would overwrite them at the first step."""
    trainer = lab.trainer(bf16=True, max_steps=1, learning_rate=0.0, weight_decay=0.0)
    trainer.create_optimizer()
    new = {name: torch.randn_like(p) for name, p in trainer.model.named_parameters()}
    trainer.model.load_state_dict(new, strict=False)
    trainer.train()
    assert all(torch.equal(p, new[name]) for name, p in trainer.model.named_parameters())


def test_a_class_resumes_what_the_flag_saved(lab: Any, tools: Any) -> None:
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    flag = lab.trainer(optim_args="threads=1", **args)
    flag.train()
    config = OffloadConfig(schedule="overlapped", threads=1, bucket_bytes=4096)
    by_class = lab.trainer(kind=OffloadTrainer, more={"offload": config}, **args)
    by_class.train(resume_from_checkpoint=checkpoint(flag, 2))
    assert ends_alike(tools, flag, by_class, 4)


def test_save_only_model_saves_no_optimizer(lab: Any) -> None:
    trainer: Trainer = lab.trainer(max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True)
    trainer.train()
    assert not (Path(checkpoint(trainer, 1)) / "optimizer.pt").exists()
