"""Converted checkpoints resume in the Trainer: AdamW's in OffloadAdam and back, and DeepSpeed's in OffloadAdam."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM, TrainerCallback

from hf_offload import compat
from hf_offload.checkpoint import adam_state, convert, deepspeed, verify
from hf_offload.checkpoint_model import TransformersModel
from hf_offload.engine.moments import in_floats

compat.register()

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1, "max_steps": 2}
OFFLOAD = {"optim": "offload_adam", "optim_args": "threads=1,bucket_bytes=4096"}


def converted(trainer: Any, step: int, to: str) -> Path:
    """The checkpoint of a step as one of another optimizer, in a folder beside it."""
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    output = Path(trainer.args.output_dir) / to / f"checkpoint-{step}"
    convert.convert(folder, to, output, model=TransformersModel(folder))
    assert verify.verify(output).whole
    return output


class AtTheStart(TrainerCallback):
    """Copies what training begins with, after a resume has loaded it, and ends the run there."""

    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    rates: tuple[int, list[float]]
    """Steps that the scheduler has taken, and the learning rate of each group."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inner = kwargs["optimizer"].optimizer
        self.rates = kwargs["lr_scheduler"].last_epoch, [group["lr"] for group in inner.param_groups]
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.state = {
            name: {key: torch.as_tensor(t).clone() for key, t in inner.state[p].items()}
            for name, p in model.named_parameters()
        }
        raise KeyboardInterrupt


def loaded(lab: Any, model: Any, folder: Path, **args: Any) -> AtTheStart:
    """What a Trainer begins with when it resumes from a folder."""
    seen = AtTheStart()
    trainer = lab.trainer(model, more={"callbacks": [seen]}, **args)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(folder))
    return seen


def named(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The state in a checkpoint's optimizer.pt, by the names that the model gives."""
    groups = TransformersModel(folder).groups()
    assert groups is not None
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return dict(zip((name for group in groups for name in group), state.values()))


def same_state(tools: Any, a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(tools.same_bits(a[name], b[name]) for name in a)


def test_adamw_resumes_as_offload_adam_and_again_as_adamw(lab: Any, tools: Any) -> None:
    """What is loaded is what was saved, bit for bit; and a step taken in between is carried back."""
    plain = lab.trainer(optim="adamw_torch", **EVERY_STEP)
    plain.train()
    start = Path(plain.args.output_dir) / "checkpoint-1"
    there = converted(plain, 1, "offload_adam")
    weights = load_file(start / "model.safetensors")
    expected = {name: {**entry, "master": weights[name]} for name, entry in named(start).items()}
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        seen = loaded(lab, None, there, bf16=bf16, **OFFLOAD, **EVERY_STEP)
        assert seen.weights.keys() == weights.keys()
        assert all(tools.same_bits({"": seen.weights[name]}, {"": t.to(dtype)}) for name, t in weights.items())
        assert same_state(tools, dict(sorted(seen.state.items())), dict(sorted(expected.items())))

    onward = lab.trainer(**OFFLOAD, **EVERY_STEP)
    onward.train(resume_from_checkpoint=str(there))
    assert onward.state.global_step == 2
    back = converted(onward, 2, "adamw")
    seen = loaded(lab, None, back, optim="adamw_torch", **EVERY_STEP)
    final = tools.weights(onward.model)
    assert all(torch.equal(seen.weights[name], t) for name, t in final.items())
    assert same_state(tools, dict(sorted(seen.state.items())), dict(sorted(named(back).items())))
    assert {float(entry["step"]) for entry in seen.state.values()} == {2.0}


def test_masters_of_a_bf16_run_go_on_in_fp32(lab: Any, tools: Any) -> None:
    offloaded = lab.trainer(bf16=True, **OFFLOAD, **EVERY_STEP)
    offloaded.train()
    plain = converted(offloaded, 2, "adamw")
    seen = loaded(lab, lab.model(torch.float32), plain, optim="adamw_torch", **EVERY_STEP)
    optimizer = offloaded.optimizer.optimizer
    for name, p in offloaded.model.named_parameters():
        entry = dict(optimizer.state[p].items())
        assert torch.equal(seen.weights[name], entry.pop("master")) and p.dtype == torch.bfloat16
        assert tools.same_bits(seen.state[name], entry)


@pytest.mark.parametrize("name", ["zero1_fp32_grads", "zero2_round_robin"])
def test_deepspeeds_state_is_what_offload_adam_has_after_a_resume(lab: Any, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint-3"
    convert.convert(DATA / name, "offload_adam", folder, model=TransformersModel(DATA / name))
    model = LlamaForCausalLM(AutoConfig.from_pretrained(DATA / name)).float()
    seen = loaded(lab, model, folder, bf16=True, **OFFLOAD, **{**EVERY_STEP, "max_steps": 4})
    for p in deepspeed.read(DATA / name).state.parameters():
        assert p.name is not None
        for what in ("step", *adam_state.MOMENTS, "master"):
            assert torch.equal(seen.state[p.name][what], p.entry[what])
        assert torch.equal(seen.weights[p.name], p.entry["master"].to(torch.bfloat16))


def test_a_checkpoint_of_deepspeeds_own_scheduler_goes_on_at_its_step(lab: Any, tmp_path: Path) -> None:
    name = "zero2_round_robin"
    source = Path(shutil.copytree(DATA / name, tmp_path / "source"))
    (source / "scheduler.pt").unlink()
    done = convert.convert(source, "offload_adam", tmp_path / "checkpoint-3", model=TransformersModel(source))
    assert any("sets the Trainer's to step 3" in said for said in done.said)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(DATA / name)).float()
    args = {**EVERY_STEP, "max_steps": 4}
    seen = loaded(lab, model, tmp_path / "checkpoint-3", bf16=True, **OFFLOAD, **args)
    assert seen.rates == (3, [0.0025, 0.0025])
    data = {"train_dataset": [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64, "eval_dataset": None}
    args |= {"learning_rate": 0.02, "max_steps": 5}
    trainer = lab.trainer(model, more=data, bf16=True, **OFFLOAD, **args)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    # the step after the resume has DeepSpeed's rate, the next the Trainer's: 1/5 of its 0.02 is left
    logged = [h["learning_rate"] for h in trainer.state.log_history if "learning_rate" in h and h["step"] > 3]
    assert logged == pytest.approx([0.0025, 0.004])


# ---- state held in fewer bytes


def args_of(state_dtype: str) -> dict[str, Any]:
    return {"optim": "offload_adam", "optim_args": f"{OFFLOAD['optim_args']},state_dtype={state_dtype}"}


def floats(entry: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"step": entry["step"], **{name: t.float() for name, t in in_floats(entry).items()}}


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ("adamw_torch", "int8"),
        ("float32", "int8"),
        pytest.param("int8", "float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", marks=pytest.mark.slow),
        pytest.param("adamw_torch", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_resume_that_holds_state_in_another_way_converts_it_and_says_so(
    lab: Any, saved: str, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain AdamW's checkpoint, too; and training goes on."""
    before = {"optim": saved} if saved == "adamw_torch" else args_of(saved)
    first = lab.trainer(**before, **EVERY_STEP)
    first.train()
    folder = Path(first.args.output_dir) / "checkpoint-1"
    seen = loaded(lab, None, folder, **args_of(here), **EVERY_STEP)
    count = len(seen.state)
    was = "float32" if saved == "adamw_torch" else saved
    assert f"exp_avg of {count} parameters was {was} in the loaded state and is {here} here" in caplog.text
    for name, entry in named(folder).items():
        mine, theirs = floats(seen.state[name]), floats(entry)
        assert torch.equal(mine["step"], theirs["step"])
        half = {"float32": 0.0, "bfloat16": 2**-8, "int8": 2**-4}[here]
        for moment in adam_state.MOMENTS:
            least = theirs[moment].abs().max().item() * 2**-17
            torch.testing.assert_close(mine[moment], theirs[moment], rtol=half, atol=least if here == "int8" else 0.0)
    onward = lab.trainer(**args_of(here), **EVERY_STEP)
    onward.train(resume_from_checkpoint=str(folder))
    assert onward.state.global_step == 2 and onward.optimizer.optimizer.config.state_dtype == here
    onward.optimizer.optimizer.close()


@pytest.mark.parametrize("state_dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_compact_state_goes_through_adamw_and_back(lab: Any, tools: Any, state_dtype: str) -> None:
    """To AdamW as fp32, to OffloadAdam, and into a Trainer that holds it as before: the values are the same."""
    first = lab.trainer(bf16=True, **args_of(state_dtype), **EVERY_STEP)
    first.train()
    start = Path(first.args.output_dir) / "checkpoint-2"
    plain = converted(first, 2, "adamw")
    fp32 = loaded(lab, lab.model(torch.float32), plain, optim="adamw_torch", **EVERY_STEP)
    back = Path(first.args.output_dir) / "back" / "checkpoint-2"
    convert.convert(plain, "offload_adam", back, model=TransformersModel(plain))
    more = {**EVERY_STEP, "max_steps": 3}
    seen = loaded(lab, None, back, **args_of(state_dtype), **more)
    for name, entry in named(start).items():
        expected = floats(entry)
        assert tools.same_bits(floats(fp32.state[name]), expected)
        assert tools.same_bits(floats(seen.state[name]), expected)
        assert torch.equal(seen.state[name]["master"], entry["master"])
