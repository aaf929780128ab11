"""Kills a training that saves at every step, again and again, and looks at what is left. Prints a JSON table.

    python tests/checkpoint/killed.py 200 [SEED]

One process imports everything and forks a child for each kill. Half of them are killed at a random time, half just
before a random operation on the file system (an audit event of Python) while they save. Every child resumes from what
the one before left; some from the checkpoint before that, so that they save over one that is there.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_offload import compat
from hf_offload.checkpoint import manifest, staging
from hf_offload.errors import OffloadError

compat.register()
torch.set_num_threads(1)
STEPS, LIMIT, LONG_S = 24, 3, 60.0
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree", "ctypes.dlsym",
          "ctypes.call_function", "fcntl.flock")  # fmt: skip


class Reports(TrainerCallback):
    """One byte to the parent when training begins, and one for each checkpoint once it is there."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b"\0")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        os.write(self.pipe, bytes([state.global_step]))


def trainer_into(folder: Path, limit: int | None) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1))
    ids = torch.randint(0, 64, (32, 8), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        str(folder), optim="offload_adam", optim_args="schedule=overlapped,threads=1,bucket_bytes=2048", use_cpu=True,
        bf16=True, per_device_train_batch_size=2, max_steps=STEPS, save_steps=1, save_strategy="steps", report_to=[],
        save_total_limit=limit, logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])


def child(folder: Path, resume: str | None, pipe: int, die_at: int | None, limit: int | None = LIMIT) -> None:
    """Train to the end, or until killed; `die_at`: before which operation on files below `folder`."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and (event.startswith(("ctypes", "fcntl")) or str(folder) in str(arguments)):
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = trainer_into(folder, limit)
    trainer.add_callback(Reports(pipe))
    if die_at is not None:
        sys.addaudithook(hook)
    trainer.train(resume_from_checkpoint=resume)


def forked(*arguments: Any) -> tuple[int, int]:
    """Starts `child(folder, resume, pipe, ...)`. Returns its process id and the pipe to read from."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            child(*arguments[:2], write, *arguments[2:])
        except BaseException as error:
            os.write(write, b"\xff" + repr(error).encode())
        os._exit(0)
    os.close(write)
    return pid, read


def wait(pid: int, pipe: int, kill_after: float | None) -> tuple[list[int], bool]:
    """The steps whose checkpoints were there, and whether the child came to its end."""
    heard = b""
    end = time.monotonic() + LONG_S
    while True:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)  # its time has come, or it hangs: then nothing was heard for LONG_S
            break
        more = os.read(pipe, 4096)
        if not more:
            break
        if not heard and kill_after is not None:
            end = time.monotonic() + kill_after
        heard += more
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    assert b"\xff" not in heard, heard
    assert heard or os.WIFSIGNALED(status), "nothing was heard of a child"
    return list(heard[1:]), not os.WIFSIGNALED(status)


def digests(folder: Path) -> dict[str, str]:
    found = manifest.verify(folder)
    assert found is not None, f"{folder.name} has no manifest"
    return {name: found.files[name].sha256 for name in ("optimizer.pt", "model.safetensors", "scheduler.pt")}


def number(folder: str | Path | None) -> int:
    return 0 if folder is None else int(str(folder).rpartition("-")[2])


def main(kills: int, seed: int) -> dict[str, Any]:
    dice, table = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        reference = Path(name, "whole")
        steps, ended = wait(*forked(reference, None, None, None), None)
        assert ended and steps == list(range(1, STEPS + 1)), steps
        whole = {step: digests(reference / f"checkpoint-{step}") for step in steps}
        round_, had = 0, 0
        while table["kills"] < kills:
            folder = Path(name, f"killed-{round_}")
            last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
            over = last is not None and number(last) > 1 and dice.random() < 0.3
            resume = str(folder / f"checkpoint-{number(last) - 1}") if over else last
            by_time = dice.random() < 0.5
            die_at = None if by_time else dice.randrange(1, 160)
            kill_after = dice.uniform(0.0, 0.4) if by_time else None
            steps, ended = wait(*forked(folder, resume, die_at), kill_after)
            now = get_last_checkpoint(str(folder)) if folder.is_dir() else None
            had = max([had, *steps])
            try:
                assert number(now) >= had, f"checkpoint-{had} is gone"
                if now is not None:
                    assert digests(Path(now)) == whole[number(now)], f"{now} has other bits"
            except (AssertionError, OffloadError) as error:
                table["lost"] += 1
                print(error, file=sys.stderr)
            if not ended:
                table["kills"] += 1
                table["at a random time" if by_time else "before an operation on files"] += 1
                left = folder.is_dir() and any(folder.glob(f"{staging.PREFIX}*"))
                table["in the middle of a save" if left else "between saves"] += 1
                table["saving over a checkpoint"] += over
            if ended or number(now) == STEPS:
                round_, had = round_ + 1, 0
    return {**table, "lost": table["lost"], "trainings brought to their end": round_}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
