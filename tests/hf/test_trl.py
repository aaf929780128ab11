"""TRL's trainers, by the mixin and by the flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_offload import OffloadConfig, OffloadTrainerMixin, compat

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
compat.register()


def sft_rows(lab: Any) -> Any:
    return datasets.Dataset.from_dict({"text": lab.sentences(24)})


def dpo_rows(lab: Any) -> Any:
    columns = {name: lab.sentences(24, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
    return datasets.Dataset.from_dict(columns)


def sft(
    lab: Any, kind: Any = trl.SFTTrainer, more: dict[str, Any] | None = None, model: Any = None, **args: Any
) -> Any:
    made = lab.args(kind=trl.SFTConfig, max_length=16, bf16=True, **args)
    given = {"train_dataset": sft_rows(lab), "eval_dataset": sft_rows(lab), "processing_class": lab.tokenizer()}
    return kind(model=model or lab.model(), args=made, **given, **(more or {}))


def dpo(lab: Any, kind: Any = trl.DPOTrainer, more: dict[str, Any] | None = None, **args: Any) -> Any:
    made = lab.args(kind=trl.DPOConfig, max_length=32, bf16=True, per_device_train_batch_size=2, **args)
    given = {"train_dataset": dpo_rows(lab), "processing_class": lab.tokenizer()}
    return kind(model=lab.model(), ref_model=lab.model(), args=made, **given, **(more or {}))


@pytest.mark.parametrize(("make", "base"), [(sft, trl.SFTTrainer), (dpo, trl.DPOTrainer)], ids=["sft", "dpo"])
def test_the_mixin_the_flag_and_both_schedules_agree(lab: Any, tools: Any, make: Any, base: Any) -> None:
    class Offloaded(OffloadTrainerMixin, base):
        pass

    slow = OffloadConfig(schedule="overlapped", threads=1, bucket_bytes=16384, link_latency_us=20000)
    args = {"max_steps": 4, "gradient_accumulation_steps": 2}
    flag = make(lab, optim_args="threads=1", **args)
    mixin = make(lab, kind=Offloaded, more={"offload": slow}, optim="adamw_torch", **args)
    for trainer in (flag, mixin):
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert flag.optimizer.optimizer.schedule == "in_order" and mixin.optimizer.optimizer.schedule == "overlapped"
    assert tools.history(flag, "loss", "grad_norm") == tools.history(mixin, "loss", "grad_norm")
    assert tools.same_bits(tools.weights(flag.model), tools.weights(mixin.model))
    assert tools.same_bits(tools.state_of(flag.optimizer), tools.state_of(mixin.optimizer))


def test_a_head_read_without_calling_its_module(lab: Any, tools: Any) -> None:
    """TRL's loss multiplies by lm_head.weight itself, chunk by chunk: no hook of that module runs."""
    ends, called = [], []
    for settings in ("threads=1", f"schedule=overlapped,{tools.SLOW}"):
        model = lab.model()
        model.lm_head.register_forward_pre_hook(lambda *args: called.append(1))
        trainer = sft(lab, model=model, optim_args=settings)
        trainer.train()
        ends.append(tools.weights(trainer.model))
    assert not called
    assert tools.same_bits(*ends)


def test_sft_with_lora_and_evaluation(lab: Any, tools: Any) -> None:
    peft = pytest.importorskip("peft")
    ends = []
    for settings in ("threads=1", f"schedule=overlapped,{tools.SLOW}"):
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(0)
        trainer = sft(lab, more={"peft_config": config}, optim_args=settings, eval_strategy="steps", eval_steps=2)
        trainer.train()
        trainable = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
        assert trainable and all("lora" in name for name in trainable)
        ends.append((tools.history(trainer, "eval_loss"), tools.weights(trainer.model)))
    assert ends[0][0] == ends[1][0] and tools.same_bits(ends[0][1], ends[1][1])


def test_the_reference_model_follows_the_weights(lab: Any, tools: Any) -> None:
    """SyncRefModelCallback reads the policy's weights in on_step_end."""
    ends = []
    for settings in ("threads=1", f"schedule=overlapped,{tools.SLOW}"):
        args = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        trainer = dpo(lab, optim_args=settings, max_steps=3, **args)
        trainer.train()
        ends.append(tools.weights(trainer.ref_model) | {"policy": trainer.model.lm_head.weight.detach().clone()})
    assert tools.same_bits(*ends)


def grpo(lab: Any, **args: Any) -> Any:
    made = {"kind": trl.GRPOConfig, "num_generations": 2, "per_device_train_batch_size": 2, "num_iterations": 2}
    given = {"train_dataset": datasets.Dataset.from_dict({"prompt": lab.sentences(24)})}
    return trl.GRPOTrainer(
        model=lab.model(),
        reward_funcs=lambda completions, **kwargs: [float(len(c) % 5) for c in completions],
        args=lab.args(**made, max_completion_length=6, bf16=True, beta=0.0, **args),
        processing_class=lab.tokenizer(),
        **given,
    )


def reward(lab: Any, **args: Any) -> Any:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = lab.model().config
    config.num_labels, config.pad_token_id = 1, 0
    columns = {"chosen": lab.sentences(24, 1), "rejected": lab.sentences(24, 3)}
    return trl.RewardTrainer(
        model=LlamaForSequenceClassification(config),
        args=lab.args(kind=trl.RewardConfig, max_length=16, bf16=True, **args),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=lab.tokenizer(),
    )


def kto(lab: Any, **args: Any) -> Any:
    columns = {"prompt": lab.sentences(24, 1), "completion": lab.sentences(24, 3), "label": [True, False] * 12}
    return trl.KTOTrainer(
        model=lab.model(),
        ref_model=lab.model(),
        args=lab.args(kind=trl.KTOConfig, max_length=32, bf16=True, **args),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=lab.tokenizer(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [grpo, reward, kto])
def test_other_trainers_get_the_same_bits_from_both_schedules(lab: Any, tools: Any, make: Any) -> None:
    ends = []
    for settings in ("threads=1", f"schedule=overlapped,{tools.SLOW}"):
        trainer = make(lab, optim_args=settings, max_steps=4)
        trainer.train()
        ends.append((str(tools.history(trainer, "loss", "grad_norm")), tools.weights(trainer.model)))
    assert ends[0][0] == ends[1][0] and tools.same_bits(ends[0][1], ends[1][1])
