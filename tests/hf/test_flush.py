"""Whoever reads a weight in `overlapped` reads the new one: evaluation, saving, callbacks, the end, PEFT and TRL.

Copies are slow here (conftest.SLOW), so that a missing wait shows. Every test compares with `in_order`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from hf_offload import OffloadAdam, OffloadConfig, compat

compat.register()
SCHEDULES = ("in_order", "overlapped")


def settings(tools: Any, schedule: str) -> str:
    return "schedule=in_order,threads=1" if schedule == "in_order" else f"schedule=overlapped,{tools.SLOW}"


def run(lab: Any, tools: Any, schedule: str, more: dict[str, Any] | None = None, kind: Any = None, **args: Any) -> Any:
    trainer = lab.trainer(kind=kind, more=more, optim_args=settings(tools, schedule), **args)
    trainer.train()
    assert trainer.optimizer.optimizer.schedule == schedule
    return trainer


def files(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of every checkpoint under `folder`, by file and name."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        where = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found |= {f"{where}:{name}": t for name, t in load_file(path).items()}
        elif path.name == "optimizer.pt":
            for number, entry in torch.load(path, weights_only=True)["state"].items():
                found |= {f"{where}:{number}.{name}": torch.as_tensor(t) for name, t in entry.items()}
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_training_with_everything_gives_the_same_bits(lab: Any, tools: Any, bf16: bool) -> None:
    args = {
        "bf16": bf16,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the worst is the first: the reload then has something to change
        "learning_rate": 3e-2,
    }
    a, b = (run(lab, tools, schedule, **args) for schedule in SCHEDULES)
    assert a.state.best_model_checkpoint.rsplit("-", 1)[1] == b.state.best_model_checkpoint.rsplit("-", 1)[1]
    assert tools.history(a, "loss", "grad_norm") == tools.history(b, "loss", "grad_norm")
    assert tools.history(a, "eval_loss") == tools.history(b, "eval_loss")
    left, right = files(a.args.output_dir), files(b.args.output_dir)
    assert any("optimizer.pt" in name for name in left) and any("safetensors" in name for name in left)
    assert tools.same_bits(left, right)
    assert tools.same_bits(tools.weights(a.model), tools.weights(b.model))
    best = load_file(Path(b.state.best_model_checkpoint) / "model.safetensors")
    assert all(torch.equal(best[name], p) for name, p in b.model.named_parameters() if name in best)
    # The reload put other weights in; what was in flight must not have overwritten them, and the masters follow.
    for trainer in (a, b):
        trainer.train()
    assert tools.same_bits(tools.weights(a.model), tools.weights(b.model))
    assert tools.same_bits(tools.state_of(a.optimizer), tools.state_of(b.optimizer))


def test_the_end_of_training_leaves_final_weights(lab: Any, tools: Any) -> None:
    ends = []
    for schedule in SCHEDULES:
        trainer = run(lab, tools, schedule, logging_strategy="no")  # kept: an optimizer that is collected waits too
        ends.append(tools.weights(trainer.model))
    assert tools.same_bits(*ends)


def test_an_evaluation_between_steps_sees_new_weights(lab: Any, tools: Any) -> None:
    class Looking(Trainer):
        """Evaluates by reading parameters, as some metrics do, not by calling the model."""

        def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(torch.stack([p.detach().float().sum() for p in model.parameters()]).clone())
            return super().prediction_step(model, *args, **kwargs)

    looks = []
    for schedule in SCHEDULES:
        seen: list[torch.Tensor] = []
        run(lab, tools, schedule, kind=Looking, eval_strategy="steps", eval_steps=1)
        looks.append(torch.stack(seen))
    assert torch.equal(*looks)


EVENTS = ("on_step_begin", "on_substep_end", "on_optimizer_step", "on_step_end", "on_log", "on_train_end")


@pytest.mark.parametrize("event", EVENTS)
def test_a_foreign_callback_reads_new_weights(lab: Any, tools: Any, event: str) -> None:
    def read(self: Any, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    kind = type("Reader", (TrainerCallback,), {event: read})
    seen = []
    for schedule in SCHEDULES:
        callback = kind()
        callback.seen = []
        run(lab, tools, schedule, more={"callbacks": [callback]}, gradient_accumulation_steps=2)
        seen.append(callback.seen)
    assert seen[0] and len(seen[0]) == len(seen[1])
    assert all(tools.same_bits(x, y) for x, y in zip(*seen))


def test_a_callback_that_writes_weights_is_followed(lab: Any, tools: Any) -> None:
    class Halves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.lm_head.weight.data.mul_(0.5)

    a, b = (run(lab, tools, schedule, more={"callbacks": [Halves()]}) for schedule in SCHEDULES)
    assert tools.same_bits(tools.weights(a.model), tools.weights(b.model))
    ratio = a.model.lm_head.weight.norm() / lab.trainer().model.lm_head.weight.norm()
    assert ratio < 0.5


def test_transformers_own_callbacks_cost_no_wait(lab: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    original = OffloadAdam.synchronize
    monkeypatch.setattr(OffloadAdam, "synchronize", lambda self: (waits.append("wait"), original(self))[1])
    run(lab, tools, "overlapped")
    assert waits == ["wait"]  # the end of training
    waits.clear()
    run(lab, tools, "overlapped", more={"callbacks": [type("Idle", (TrainerCallback,), {})()]})
    assert waits == ["wait"]


def test_a_checkpoint_before_the_step_has_the_step_before(lab: Any, tools: Any) -> None:
    """As JIT checkpoints do: in on_pre_optimizer_step gradients are there and the step is not taken."""

    class Saves(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.saved.append(tools.state_of(kwargs["optimizer"]) | tools.weights(kwargs["model"]))

    saved = []
    for schedule in SCHEDULES:
        callback = Saves()
        callback.saved = []
        run(lab, tools, schedule, more={"callbacks": [callback]})
        saved.append(callback.saved)
    assert all(tools.same_bits(x, y) for x, y in zip(*saved))
    assert [int(s["0.step"]) for s in saved[1][1:]] == [1, 2, 3, 4]


class OutOfMemory(Trainer):
    """Runs out of memory in the middle of the third backward, once."""

    raised = False

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2 and not self.raised:
            self.raised = True
            weight = model.model.layers[0].mlp.up_proj.weight
            handle = weight.register_hook(self._fail)
            try:
                return super().training_step(model, *args, **kwargs)
            finally:
                handle.remove()
        return super().training_step(model, *args, **kwargs)

    def _fail(self, grad: torch.Tensor) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


def test_auto_find_batch_size_starts_again_from_a_settled_state(lab: Any, tools: Any) -> None:
    args = {"kind": OutOfMemory, "auto_find_batch_size": True, "per_device_train_batch_size": 6, "max_steps": 4}
    a, b = (run(lab, tools, schedule, **args) for schedule in SCHEDULES)
    assert a._train_batch_size == b._train_batch_size < 6
    assert b.optimizer.optimizer.stats().steps == 2 + 4
    assert tools.history(a, "loss", "grad_norm") == tools.history(b, "loss", "grad_norm")
    assert tools.same_bits(tools.weights(a.model), tools.weights(b.model))
    assert tools.same_bits(tools.state_of(a.optimizer), tools.state_of(b.optimizer))


def test_auto_find_batch_size_agrees_with_adamw_torch(lab: Any, tools: Any) -> None:
    args = {"kind": OutOfMemory, "auto_find_batch_size": True, "per_device_train_batch_size": 6, "max_steps": 4}
    theirs = lab.trainer(optim="adamw_torch", **args)
    theirs.train()
    ours = run(lab, tools, "overlapped", **args)
    a, b = (torch.tensor(tools.history(t, "loss", "grad_norm")) for t in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_interrupted_run_leaves_weights_and_checkpoint_whole(lab: Any, tools: Any) -> None:
    class Interrupts(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    ends = []
    for schedule in SCHEDULES:
        args = settings(tools, schedule)
        trainer = lab.trainer(kind=Interrupts, optim_args=args, save_strategy="steps", save_steps=2)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        ends.append(tools.weights(trainer.model) | files(trainer.args.output_dir))
    assert any("checkpoint-2" in name for name in ends[0])
    assert tools.same_bits(*ends)


# ------------------------------------------------------------------------- readers that no hook sees


@pytest.fixture
def in_flight(lab: Any, tools: Any) -> Any:
    """A LoRA model in the middle of training: the last step's weights are still under way."""
    peft = pytest.importorskip("peft")

    def make(schedule: str) -> Any:
        model = peft.get_peft_model(
            lab.model(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        config = OffloadConfig(schedule=schedule, bucket_bytes=4096, link_latency_us=20000)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = OffloadAdam(trainable, lr=0.1, config=config, model=model)
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(optimizer)
        for row in lab.data()[:2]:
            model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            prepared.step()
            prepared.zero_grad()
        return model, optimizer

    return make


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
def test_peft_merges_new_weights(in_flight: Any, tools: Any, way: str) -> None:
    merged = []
    for schedule in SCHEDULES:
        model, _optimizer = in_flight(schedule)
        result = getattr(model, way)() or model
        merged.append(tools.weights(result))
    assert tools.same_bits(*merged)


def test_trl_sends_new_weights_to_vllm(in_flight: Any, tools: Any) -> None:
    vllm = pytest.importorskip("trl.generation.vllm_generation")
    sent = []
    for schedule in SCHEDULES:
        model, _optimizer = in_flight(schedule)
        generation = object.__new__(vllm.VLLMGeneration)  # vLLM itself is not here
        with contextlib.suppress(AttributeError):  # sync_weights fails at vLLM, after the wait
            generation.sync_weights()
        sent.append(tools.weights(model))
    assert tools.same_bits(*sent)


def test_readers_are_left_alone_without_an_optimizer_of_ours(lab: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(lab.model(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert type(model.merge_and_unload()).__name__ == "LlamaForCausalLM"
