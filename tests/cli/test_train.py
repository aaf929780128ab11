"""`hf-offload train` for real, on a tiny model: the summary's arithmetic, resuming, Ctrl-C."""

from __future__ import annotations

import json
import math
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hf_offload import cli

TINY = """
trainer: causal_lm
model:
  config:
    {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
     num_attention_heads: 2, num_key_value_heads: 1}
tokenizer: {kind: byte_level}
data: {kind: pydoc_topics, block_size: 32, eval_fraction: 0.002}
training:
  {max_steps: 6, per_device_train_batch_size: 2, bf16: true, use_cpu: true, logging_steps: 1, save_strategy: "no"}
offload: {schedule: overlapped, bucket_bytes: 16384, ring_slots: 2}
"""
PHASES = ("compute", "d2h", "host_step", "h2d", "wait")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def train(recipe: Path, folder: Path, *overrides: str) -> Result:
    return CliRunner().invoke(cli.app, ["train", str(recipe), *overrides, "--output-dir", str(folder)])


def summary(recipe: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    result = train(recipe, folder, *overrides)
    assert result.exit_code == 0, result.output
    return json.loads((folder / "offload_summary.json").read_text())


def test_the_summary_is_measured_and_is_the_design_arithmetic(tiny: Path, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    figures = summary(tiny, tmp_path / "out")
    psi = figures["params"]
    assert figures["device_bytes"] == {"weights": 2 * psi, "gradients": 2 * psi, "optimizer": 0}
    host = figures["host_bytes"]
    assert host["master"] == host["exp_avg"] == host["exp_avg_sq"] == 4 * psi
    assert host["pinned"] == 2 * 2 * 16384
    assert (host["store"], host["shadow"]) == (0, 0)
    step = figures["per_step"]
    assert step["d2h_bytes"] == step["h2d_bytes"] == 2 * psi
    assert set(step) == {"d2h_bytes", "h2d_bytes", "exposed_seconds", "hidden_fraction"} | {
        f"{phase}_seconds" for phase in PHASES
    }
    assert all(step[f"{phase}_seconds"] >= 0 for phase in PHASES)
    assert 0 <= step["hidden_fraction"] <= 1
    assert (figures["schedule"], figures["transport"], figures["wire_dtype"]) == ("overlapped", "host", "bfloat16")
    assert (figures["steps"], figures["skipped_steps"], figures["measured_steps"]) == (6, 0, 4)
    assert figures["losses"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert figures["losses"]["first"] == pytest.approx(math.log(260), rel=0.05)
    assert figures["losses"]["eval_values"]
    assert figures["tokens_per_second"] > 0
    assert {"torch", "transformers", "numba", "python"} <= set(figures["versions"])
    assert figures["hardware"]["usable_cores"] >= 1
    assert set(threading.enumerate()) <= threads, "the optimizer's threads have ended"


def test_bf16_on_a_cpu_needs_no_setting(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hf_offload import recipe, training

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = training.arguments(recipe.load(str(tiny), ["training.use_cpu=null"]))
    assert (args.bf16, args.use_cpu, args.dataloader_pin_memory) == (True, True, False)


def test_the_link_carries_the_same_whatever_the_batch(tiny: Path, tmp_path: Path) -> None:
    doubled = ("training.per_device_train_batch_size=4", "training.gradient_accumulation_steps=2")
    one, two = summary(tiny, tmp_path / "a"), summary(tiny, tmp_path / "b", *doubled)
    for key in ("d2h_bytes", "h2d_bytes"):
        assert one["per_step"][key] == two["per_step"][key] == 2 * one["params"]
    assert one["host_bytes"] == two["host_bytes"]


def test_what_is_printed_is_the_loss_and_one_table(tiny: Path, tmp_path: Path) -> None:
    output = train(tiny, tmp_path / "out").output
    assert output.count("step 3/6  loss ") == 1
    assert "{'loss'" not in output
    assert "What it took, measured" in output
    assert "bounded by the ring" in output
    assert str(tmp_path / "out" / "offload_summary.json") in output.replace("\n", "")
    assert "Warning" not in output


def test_chats_train_on_their_answers(tiny: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 9}]}
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 12))
    path = str(tmp_path / "chats.jsonl")
    figures = summary(tiny, tmp_path / "out", f"data={{kind: jsonl, path: {path}, block_size: 64}}")
    assert figures["steps"] == 6


def test_a_run_on_a_saved_folder_starts_from_its_weights(tiny: Path, tmp_path: Path) -> None:
    first = summary(tiny, tmp_path / "a", "training.save_strategy=steps", "training.learning_rate=1e-2")
    assert (tmp_path / "a" / "model.safetensors").is_file()
    folder = tmp_path / "a"
    second = summary(tiny, tmp_path / "b", "model.config=null", f"model.path={folder}", "tokenizer=null")
    assert second["losses"]["first"] < first["losses"]["first"] - 0.3


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_offload.callbacks.progress import ProgressCallback

    before = ProgressCallback.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        before(self, args, state, control, **kwargs)
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressCallback, "on_step_end", on_step_end)


def test_ctrl_c_leaves_the_last_checkpoint_whole_and_a_resumed_run_ends_as_if_nothing_happened(
    tiny: Path, tmp_path: Path
) -> None:
    saving = ("training.save_strategy=steps", "training.save_steps=2")
    whole = summary(tiny, tmp_path / "whole", *saving)
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(4, patch)  # at the end of the step after which a checkpoint is written
        result = train(tiny, tmp_path / "out", *saving)
    assert result.exit_code == 130, result.output
    assert "Interrupted" in result.output
    assert "Traceback" not in result.output
    assert set(threading.enumerate()) <= threads
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "out" / "offload_summary.json").exists()
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    resumed = summary(tiny, tmp_path / "out", *saving, "training.resume_from_checkpoint=true")
    assert resumed["losses"]["values"] == whole["losses"]["values"][4:]


def test_a_failure_in_training_is_exit_code_1_and_ends_the_threads(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_offload.callbacks.progress import ProgressCallback

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("the data loader died")

    monkeypatch.setattr(ProgressCallback, "on_step_end", on_step_end)
    threads = set(threading.enumerate())
    result = train(tiny, tmp_path / "out")
    assert result.exit_code == 1
    assert "RuntimeError: the data loader died" in result.output
    assert "Traceback" not in result.output
    assert set(threading.enumerate()) <= threads


@pytest.mark.slow
@pytest.mark.timeout(1500)  # bf16 without AVX-512 takes several times as long
def test_the_quickstart_as_it_ships(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["train", "quickstart", "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "offload_summary.json").read_text())
    losses = figures["losses"]["values"]
    assert sum(losses[-10:]) / 10 <= 0.7 * losses[0], "the loss falls by at least 30 %"
    psi = figures["params"]
    assert sum(figures["device_bytes"].values()) == 4 * psi
    host = figures["host_bytes"]
    assert host["master"] + host["exp_avg"] + host["exp_avg_sq"] == 12 * psi
    assert host["pinned"] == 2 * 4 * (1 << 20)
    assert figures["per_step"]["d2h_bytes"] == figures["per_step"]["h2d_bytes"] == 2 * psi


@pytest.mark.parametrize("bad", [{2, 3}, set(range(6))])
def test_skipped_steps_are_seen(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """In the lines, the summary and the last sentence; where all are skipped that is the error."""
    from hf_offload.trainer import OffloadTrainer

    real = OffloadTrainer.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = real(self, *args, **kwargs)
        return loss * math.nan if self.state.global_step in bad and self.model.training else loss

    monkeypatch.setattr(OffloadTrainer, "compute_loss", compute_loss)
    result = train(tiny, tmp_path / "out")
    assert f"skipped {len(bad)}" in result.output
    if len(bad) == 6:
        assert result.exit_code != 0
        assert "no step was taken: 6 were skipped, since gradients were not finite" in " ".join(result.output.split())
    else:
        figures = json.loads((tmp_path / "out" / "offload_summary.json").read_text())
        assert (figures["steps"], figures["skipped_steps"]) == (4, 2)
        assert "4 steps overlapped over the host transport, and 2 skipped." in " ".join(result.output.split())
