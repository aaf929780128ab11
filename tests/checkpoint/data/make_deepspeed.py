"""Makes the DeepSpeed checkpoints in this folder, and beside each the state as DeepSpeed itself reports it.

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed
    pip install ninja hjson msgpack py-cpuinfo psutil einops pydantic
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 make_deepspeed.py zero1_fp32_grads OUT
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 make_deepspeed.py zero2_round_robin OUT

Written with deepspeed 0.19.8, transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 on CPUs (gloo). What lies here is
`OUT/checkpoint-3` without rng_state_*.pth, training_args.bin, zero_to_fp32.py and zero_to_torch.py, which nobody reads.
The other variants were compared with DeepSpeed's own answer as well, and are not kept.

With round_robin_gradients that answer is wrong (its masters do not round to the weights: DeepSpeed looks for parameters
in the optimizer's order where memory has another), so zero2_round_robin.expected.safetensors is the answer for `zero2`
on 3 ranks, which computes the same but for the last bit of some values.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

# variant -> stage, bf16, changes to zero_optimization, changes to the rest of the configuration
VARIANTS: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    # bf16 with fp32 gradients makes DeepSpeed take its BF16_Optimizer, whose files differ
    "zero1_fp32_grads": (1, True, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero1": (1, True, {}, {}),
    "zero1_fp32": (1, False, {"parameter_alignment": True}, {}),
    "zero1_elastic": (1, True, {"elastic_checkpoint": True}, {}),
    "zero2": (2, True, {}, {}),
    "zero2_aligned": (2, True, {"parameter_alignment": True}, {}),
    "zero2_round_robin": (2, True, {"round_robin_gradients": True}, {}),
    "zero2_own_optimizer": (
        2,
        True,
        {},
        {
            "optimizer": {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto") | {"torch_adam": True},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
            },
        },
    ),
}


class Oracle(TrainerCallback):
    """Asks DeepSpeed for each parameter's whole state at step 3."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.trainer: Any = None

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        optimizer = self.trainer.deepspeed.optimizer
        if hasattr(optimizer, "_hp_optimizer_states_linked"):  # linked before torch's Adam had any state: link again
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        found = {}
        for name, p in model.named_parameters():  # every rank must take part
            found[f"{name}:master"] = safe_get_full_fp32_param(p).clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}:{moment}"] = safe_get_full_optimizer_state(p, moment).clone()
        if args.process_index == 0 and state.global_step == 3:
            save_file(found, f"{self.folder}/expected.safetensors")


def main(variant: str, out: str) -> None:
    stage, bf16, zero, rest = VARIANTS[variant]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # odd sizes, so that parameters lie across ranks; tied, so that one weight has two names
    config = LlamaConfig(
        vocab_size=33, hidden_size=10, intermediate_size=15, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=10, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": bf16},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **rest,
    }
    ids = torch.randint(0, 33, (64, 8), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=out, max_steps=4, save_steps=3, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
        weight_decay=0.1, deepspeed=deepspeed, bf16=bf16, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    oracle = Oracle(out)
    oracle.trainer = Trainer(
        LlamaForCausalLM(config), args, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[oracle],
    )  # fmt: skip
    oracle.trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
