"""Checkpoints of a Trainer: whole or not there, verified before anything is loaded, refused with a remedy."""

from __future__ import annotations

import errno
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_offload import OffloadAccelerator, OffloadAdam, OffloadConfig, OffloadPlugin, compat
from hf_offload.checkpoint import digest, manifest
from hf_offload.errors import CheckpointError

compat.register()

EVERY_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def folders(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir())


def checkpoint(trainer: Any, step: int) -> Path:
    return Path(trainer.args.output_dir) / f"checkpoint-{step}"


@pytest.fixture
def trained(lab: Any) -> Any:
    trainer = lab.trainer(bf16=True, **EVERY_STEP)
    trainer.train()
    return trainer


# ---- what is saved


def test_a_checkpoint_has_a_digest_of_every_file_and_a_table_of_its_parameters(trained: Any) -> None:
    assert folders(trained) == ["checkpoint-1", "checkpoint-2"]
    folder = checkpoint(trained, 2)
    found = manifest.verify(folder)
    assert found is not None and set(found.files) == {p.name for p in folder.iterdir()} - {manifest.NAME}
    assert {"optimizer.pt", "scheduler.pt", "trainer_state.json", "model.safetensors"} <= set(found.files)
    assert found.optimizer is not None and found.optimizer["state_dtype"] == "float32"
    rows = [row for group in found.optimizer["groups"] for row in group["parameters"]]
    names = {name: (list(p.shape), "bfloat16") for name, p in trained.model.named_parameters()}
    assert {row["name"]: (row["shape"], row["dtype"]) for row in rows} == names
    file = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(file["state"]) == len(rows)


def test_the_name_appears_only_when_all_is_written(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = manifest.write

    def write(folder: Path, *args: Any) -> Any:
        result = real(folder, *args)
        seen.append((folders(trainer), get_last_checkpoint(trainer.args.output_dir)))
        return result

    monkeypatch.setattr(manifest, "write", write)
    trainer = lab.trainer(**EVERY_STEP)
    trainer.train()
    one, two = "_hf_offload-saving-checkpoint-1", "_hf_offload-saving-checkpoint-2"
    assert seen == [([one], None), ([two, "checkpoint-1"], str(checkpoint(trainer, 1)))]


def test_best_model_and_rotation_are_as_ever(lab: Any, tools: Any) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    kept = {}
    for optim in ("offload_adam", "adamw_torch"):
        trainer = lab.trainer(optim=optim, learning_rate=0.3, **{**EVERY_STEP, **more, "max_steps": 5})
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        last = json.loads((Path(get_last_checkpoint(trainer.args.output_dir)) / "trainer_state.json").read_text())
        assert Path(last["best_model_checkpoint"]).parent == Path(trainer.args.output_dir)
        kept[optim] = (folders(trainer), best.name, Path(last["best_model_checkpoint"]).name)
        assert best.is_dir()
    assert kept["offload_adam"] == kept["adamw_torch"]


def test_a_best_model_that_was_damaged_is_not_loaded(lab: Any) -> None:
    class Damage(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            file = Path(state.best_model_checkpoint) / "model.safetensors"
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)

    more = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = lab.trainer(more={"callbacks": [Damage()]}, **{**EVERY_STEP, **more, "max_steps": 1})
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        trainer.train()


def test_saving_again_replaces_and_keeps_what_others_put_there(lab: Any, trained: Any) -> None:
    folder = checkpoint(trained, 2)
    (folder / "notes.txt").write_text("mine")
    before = manifest.read(folder)
    again = lab.trainer(bf16=True, **{**EVERY_STEP, "output_dir": trained.args.output_dir})
    again.train(resume_from_checkpoint=str(checkpoint(trained, 1)))
    assert (folder / "notes.txt").read_text() == "mine"
    after = manifest.verify(folder)
    assert before is not None and after is not None
    assert before.files["model.safetensors"] == after.files["model.safetensors"]


def test_what_is_pushed_to_the_hub_is_the_folder_that_is_there(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    monkeypatch.setattr(
        "transformers.Trainer._push_from_checkpoint", lambda self, folder: pushed.append((folder, folders(self)))
    )
    trainer = lab.trainer(**EVERY_STEP)
    trainer.args.push_to_hub = True
    trainer.create_optimizer_and_scheduler(2)
    trainer._save_checkpoint(trainer.model, trial=None)
    assert pushed == [(str(checkpoint(trainer, 0)), ["checkpoint-0"])]


def test_other_optimizers_save_as_ever(lab: Any) -> None:
    trainer = lab.trainer(optim="adamw_torch", **EVERY_STEP)
    trainer.train()
    assert not (checkpoint(trainer, 2) / manifest.NAME).exists()
    again = lab.trainer(optim="adamw_torch", **{**EVERY_STEP, "max_steps": 3})
    (checkpoint(trainer, 2) / "optimizer.pt").unlink()  # transformers begins anew, and says nothing
    again.train(resume_from_checkpoint=str(checkpoint(trainer, 2)))


# ---- a disk that refuses


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def rust_says_full(*args: Any, **kwargs: Any) -> Any:
    raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("where", ["optimizer", "weights", "manifest", "rename"])
def test_a_full_disk_leaves_the_checkpoint_before(
    lab: Any, monkeypatch: pytest.MonkeyPatch, where: str, tools: Any
) -> None:
    trainer = lab.trainer(**EVERY_STEP)

    class Fill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != 1:
                return
            if where == "optimizer":
                monkeypatch.setattr(digest.HashingFile, "_write", lambda self, part: setattr(self, "error", ERROR))
            elif where == "weights":
                monkeypatch.setattr("transformers.modeling_utils.safe_save_file", rust_says_full)
            elif where == "manifest":
                monkeypatch.setattr(manifest, "write", full)
            else:
                monkeypatch.setattr(Path, "rename", full)

    trainer.add_callback(Fill())
    with pytest.raises(CheckpointError, match=r"No space left.*GB are free.*save_total_limit"):
        trainer.train()
    monkeypatch.undo()
    assert folders(trainer) == ["checkpoint-1"]
    assert manifest.verify(checkpoint(trainer, 1)) is not None
    again = lab.trainer(**{**EVERY_STEP, "output_dir": trainer.args.output_dir})
    again.train(resume_from_checkpoint=True)
    assert folders(again) == ["checkpoint-1", "checkpoint-2"]


ERROR = OSError(errno.ENOSPC, "No space left on device")


# ---- what is refused, before anything is touched


DAMAGED = ["optimizer.pt", "model.safetensors", "scheduler.pt", "trainer_state.json", "rng_state.pth", manifest.NAME]


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_refused(lab: Any, tools: Any, trained: Any, name: str, how: str) -> None:
    if (name, how) == (manifest.NAME, "missing"):
        pytest.skip("then it is a checkpoint as others write them")
    file = checkpoint(trained, 2) / name
    data = bytearray(file.read_bytes())
    file.unlink()
    if how != "missing":
        data[len(data) // 2] ^= 1
        file.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    fresh = lab.trainer(bf16=True, **{**EVERY_STEP, "max_steps": 4})
    before = tools.weights(fresh.model)
    with pytest.raises(CheckpointError) as caught:
        fresh.train(resume_from_checkpoint=str(file.parent))
    assert name in str(caught.value) and "checkpoint-1" in str(caught.value)
    assert tools.same_bits(before, tools.weights(fresh.model)) and fresh.optimizer is None
    fresh.train(resume_from_checkpoint=str(checkpoint(trained, 1)))
    assert fresh.state.global_step == 4


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_without_a_manifest_torchs_own_checksums_are_looked_at(lab: Any, trained: Any, name: str, how: str) -> None:
    folder = checkpoint(trained, 2)
    (folder / manifest.NAME).unlink()
    lab.trainer(bf16=True, **{**EVERY_STEP, "max_steps": 3}).train(resume_from_checkpoint=str(folder))
    data = bytearray((folder / name).read_bytes())
    (folder / name).unlink()
    if how != "missing":
        data[data.index(b"param_groups" if name == "optimizer.pt" else b"last_epoch")] ^= 1  # not the padding
        (folder / name).write_bytes(data if how == "flipped" else data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=name):
        lab.trainer(bf16=True, **{**EVERY_STEP, "max_steps": 4}).train(resume_from_checkpoint=str(folder))


def test_no_such_checkpoint(lab: Any) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        lab.trainer().train(resume_from_checkpoint="/nowhere/checkpoint-1")


@pytest.mark.parametrize("other", [{"hidden_size": 16}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_another_model_is_refused(lab: Any, trained: Any, other: dict[str, Any], tools: Any) -> None:
    fresh = lab.trainer(lab.model(**other), bf16=True, **EVERY_STEP)
    before = tools.weights(fresh.model)
    with pytest.raises(CheckpointError, match=r"another model|groups of"):
        fresh.train(resume_from_checkpoint=str(checkpoint(trained, 1)))
    if other.get("num_hidden_layers") != 3:  # a larger one is seen when its optimizer is there
        assert tools.same_bits(before, tools.weights(fresh.model))


def test_16_bit_weights_do_not_become_fp32_masters(lab: Any, trained: Any) -> None:
    """The masters, finer than they, would be lost."""
    with pytest.raises(CheckpointError, match="--bf16"):
        lab.trainer(**EVERY_STEP).train(resume_from_checkpoint=str(checkpoint(trained, 1)))
    with pytest.raises(CheckpointError, match="bfloat16"):
        lab.trainer(fp16=True, **EVERY_STEP).train(resume_from_checkpoint=str(checkpoint(trained, 1)))


def test_fp32_weights_go_on_in_16_bit_and_it_is_said(lab: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = lab.trainer(**{**EVERY_STEP, "max_steps": 1})
    whole.train()
    before: dict[str, torch.Tensor] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            before.update(tools.state_of(kwargs["optimizer"]))

    resumed = lab.trainer(bf16=True, more={"callbacks": [Look()]}, **{**EVERY_STEP, "max_steps": 2})
    with caplog.at_level(logging.WARNING, "hf_offload"):
        resumed.train(resume_from_checkpoint=str(checkpoint(whole, 1)))
    assert "weights that were float32 are bfloat16 here" in caplog.text
    assert tools.same_bits(before, tools.state_of(whole.optimizer)), "masters and moments"


def test_frozen_here_and_trained_there_is_refused(lab: Any, trained: Any) -> None:
    model = lab.model()
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .*frozen here"):
        lab.trainer(model, bf16=True, **EVERY_STEP).train(resume_from_checkpoint=str(checkpoint(trained, 1)))


def test_another_number_of_groups_is_refused_by_checkpoint(lab: Any, trained: Any) -> None:
    fresh = lab.trainer(bf16=True, **EVERY_STEP)
    one = OffloadAdam(fresh.model.parameters(), model=fresh.model)
    fresh.optimizer = one
    with pytest.raises(CheckpointError, match=r"checkpoint-1.*groups of"):
        fresh.train(resume_from_checkpoint=str(checkpoint(trained, 1)))
    assert not one.state


def test_a_checkpoint_without_optimizer_state_does_not_begin_anew_silently(lab: Any) -> None:
    trainer = lab.trainer(save_only_model=True, **EVERY_STEP)
    trainer.train()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing.*save_only_model"):
        lab.trainer(**EVERY_STEP).train(resume_from_checkpoint=str(checkpoint(trainer, 1)))
    (checkpoint(trainer, 1) / "latest").write_text("global_step1")
    with pytest.raises(CheckpointError, match="hf-offload checkpoint convert"):
        lab.trainer(**EVERY_STEP).train(resume_from_checkpoint=str(checkpoint(trainer, 1)))


# ---- accelerate


def loop(lab: Any, folder: Path | None, steps: int, save_at: int = -1, **settings: Any) -> Any:
    """A loop of accelerate alone: from the start, or from `folder`; saved there after `save_at` steps."""
    compat_state()
    config = OffloadConfig(**{"schedule": "overlapped", "bucket_bytes": 4096, "threads": 1, **settings})
    accelerator = OffloadAccelerator(cpu=True, mixed_precision="bf16", offload_plugin=OffloadPlugin(config=config))
    model = lab.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    begin = 0
    if folder is not None and save_at < 0:
        accelerator.load_state(str(folder))
        begin = steps // 2
    data = lab.data()
    for step in range(begin, steps):
        batch = {k: torch.stack([row[k] for row in data[4 * step : 4 * step + 4]]) for k in data[0]}
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == save_at:
            accelerator.save_state(str(folder))
    accelerator.synchronize()
    return accelerator, model, optimizer


def compat_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("state_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
def test_accelerates_state_is_saved_whole_and_resumes_bit_for_bit(
    lab: Any, tools: Any, tmp_path: Path, state_dtype: str
) -> None:
    folder = tmp_path / "state"
    _, model, optimizer = loop(lab, folder, 6, save_at=3, state_dtype=state_dtype)
    found = manifest.verify(folder)
    assert found is not None and "optimizer.bin" in found.files and found.optimizer is not None
    assert found.optimizer["state_dtype"] == state_dtype
    _, other, resumed = loop(lab, folder, 6, state_dtype=state_dtype)
    assert tools.same_bits(tools.weights(model), tools.weights(other))
    assert tools.same_bits(tools.state_of(optimizer), tools.state_of(resumed))
    file = folder / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"optimizer\.bin has"):
        loop(lab, folder, 6)


def test_an_unfinished_folder_that_accelerate_named_is_not_loaded(lab: Any, tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    compat_state()
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = OffloadAccelerator(cpu=True, project_config=project)
    model = lab.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.save_state()
    accelerator.load_state()
    assert manifest.verify(tmp_path / "checkpoints" / "checkpoint_1") is not None
    (tmp_path / "checkpoints" / "checkpoint_1" / manifest.NAME).unlink()
    with pytest.raises(CheckpointError, match=r"no manifest.*checkpoint_0"):
        accelerator.load_state()
    optimizer.optimizer.close()


def test_a_folder_with_other_things_in_it_is_not_replaced(lab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "train.log").write_text("mine")
    inode = folder.stat().st_ino
    for _ in range(2):
        loop(lab, folder, 4, save_at=2)
        (folder / "train.log").write_text("mine, and growing")
        found = manifest.verify(folder)
        assert found is not None and "optimizer.bin" in found.files and "train.log" not in found.files
    assert folder.stat().st_ino == inode and (folder / "train.log").exists()
    loop(lab, folder, 4)


def test_what_was_frozen_all_along_resumes(lab: Any, tools: Any, tmp_path: Path) -> None:
    def trainer() -> Any:
        model = lab.model()
        model.model.embed_tokens.requires_grad_(False)
        made = OffloadAdam(model.parameters(), lr=1e-2, model=model)  # the frozen ones are in its groups as well
        return lab.trainer(model, more={"optimizers": (made, None)}, **{**EVERY_STEP, "max_steps": 4})

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(checkpoint(whole, 2)))
    assert tools.same_bits(tools.weights(whole.model), tools.weights(resumed.model))


def test_a_model_that_the_trainer_does_not_move_resumes(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is cast only when the optimizer is made, after the checkpoint is looked at."""
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "place_model_on_device", False)
    whole = lab.trainer(bf16=True, **EVERY_STEP)
    whole.train()
    lab.trainer(bf16=True, **{**EVERY_STEP, "max_steps": 3}).train(resume_from_checkpoint=str(checkpoint(whole, 1)))


def test_torchs_functions_can_still_be_pickled() -> None:
    for function in (torch.save, torch.load):
        assert pickle.loads(pickle.dumps(function)) is function
