"""Saving and loading make no second copy of the state: not by themselves, and not through a Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_offload.bench import checkpoint

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")]

TRAINER = """
import sys, threading, time
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from hf_offload import compat
from hf_offload.bench.checkpoint import rss_anon
compat.register()

def watched(method):
    def call(self, *args, **kwargs):
        before, peak, ended = rss_anon(), 0, threading.Event()
        def watch():
            nonlocal peak
            while not ended.wait(0.001):
                peak = max(peak, rss_anon())
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            return method(self, *args, **kwargs)
        finally:
            ended.set()
            thread.join()
            print("PEAK", method.__name__, before, peak)
    return call

class Watched(Trainer):
    def _save_checkpoint(self, *args, **kwargs):
        return watched(super()._save_checkpoint.__func__)(self, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args, **kwargs):
        return watched(super()._load_optimizer_and_scheduler.__func__)(self, *args, **kwargs)

def trainer(folder, steps):
    shape = dict(vocab_size=2000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    args = TrainingArguments(folder, optim="offload_adam", bf16=True, use_cpu=True, max_steps=steps, save_steps=1,
        per_device_train_batch_size=1, report_to=[], logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False)
    ids = torch.randint(0, 2000, (8, 8))
    return Watched(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])

first = trainer(sys.argv[1], 2)
print("PARAMS", sum(p.numel() for p in first.model.parameters()))
first.train()
first.optimizer.optimizer.close()
del first
trainer(sys.argv[1], 3).train(resume_from_checkpoint=str(Path(sys.argv[1]) / "checkpoint-2"))
"""


def test_by_itself(tmp_path: Path) -> None:
    found = checkpoint.run(60_000_000, tmp_path)
    allowed = 1.03 * found["rss_anon_bytes"]["before"]
    assert all(found["rss_anon_bytes"][f"peak_{name}"] < allowed for name in ("save", "verify", "load"))


@pytest.mark.timeout(600)
def test_through_a_trainer(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    params = next(int(line[1]) for line in lines if line[:1] == ["PARAMS"])
    peaks = [(line[1], int(line[3]) - int(line[2])) for line in lines if line[:1] == ["PEAK"]]
    assert [name for name, _ in peaks] == ["_save_checkpoint"] * 2 + [
        "_load_optimizer_and_scheduler",
        "_save_checkpoint",
    ]
    for name, grown in peaks:
        # Loading makes the state, 12 bytes a parameter; beside that some MB are torch's and transformers' own.
        state = 12 * params if name.startswith("_load") else 0
        assert grown < state + 0.05 * 12 * params, (name, grown / params)
