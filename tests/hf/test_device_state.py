"""`--optim_args device_state_bytes=...` in the Trainer: the same run, and checkpoints that any share goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_offload.compat import register
from hf_offload.optimizer import OffloadAdam

register()


def trainer_of(lab: Any, **given: Any) -> Any:
    args = "schedule=overlapped,bucket_bytes=16384,threads=1"
    share = given.pop("share", None)
    if share is not None:
        args += f",device_state_bytes={share}"
    return lab.trainer(optim_args=args, bf16=True, max_steps=4, **given)


def share_of(trainer: Any) -> int:
    optimizer = trainer.optimizer
    while not isinstance(optimizer, OffloadAdam):
        optimizer = optimizer.optimizer
    return optimizer.stats().device_bytes["optimizer"]


def test_a_run_resumed_with_another_share_is_the_run_without_one(lab: Any, tools: Any) -> None:
    plain = trainer_of(lab)
    plain.train()
    half = 6 * sum(p.numel() for p in plain.model.parameters())
    first = trainer_of(lab, share=half, save_strategy="steps", save_steps=2)
    first.train()
    assert 0.8 * half < share_of(first) <= half and share_of(plain) == 0
    assert tools.same_bits(tools.weights(first.model), tools.weights(plain.model))
    assert tools.history(first, "loss") == tools.history(plain, "loss")
    for share in (None, "auto", 2 * half):
        then = trainer_of(lab, share=share)
        then.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
        assert share_of(then) == (2 * half if share == 2 * half else 0)
        assert tools.same_bits(tools.weights(then.model), tools.weights(plain.model))
