"""Trains the tests' tiny model with `optim="offload_adam"` in one or several processes; writes what came out.

python train_tiny.py OUT_FILE per_device_batch accumulation optim_args [CHECKPOINT]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_offload  # makes the flag known


def main(out: str, batch: str, accumulation: str, optim_args: str, resume: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, attn_implementation="eager"))
    ids = torch.randint(0, 96, (48, 12), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=f"{out}-trainer",
        use_cpu=True,
        optim="offload_adam",
        optim_args=optim_args,
        per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=int(accumulation),
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train(resume_from_checkpoint=resume)
    result = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save(
        {
            "weights": result,
            "norms": [h["grad_norm"] for h in trainer.state.log_history if "grad_norm" in h],
            "losses": [h["loss"] for h in trainer.state.log_history if "loss" in h],
            "schedule": trainer.optimizer.optimizer.schedule,
            "wrapped": type(trainer.model_wrapped).__name__,
            "version": hf_offload.__version__,
        },
        f"{out}-{args.process_index}.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # as torch asks; left to the end of the process it may abort
