"""Weights changed from outside by the Hugging Face libraries and by callbacks: as with torch's AdamW, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_offload import OffloadAdam, OffloadConfig, compat
from hf_offload.errors import StateError

compat.register()
SCHEDULES = {
    "in order": "schedule=in_order",
    "overlapped": "schedule=overlapped",
    "speculative": "schedule=overlapped,stream_gradients=true,shadow_bytes=4000000",
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
LATE = "bucket_bytes=16384,link_latency_us=3000,threads=1"


def both(lab: Any, schedule: str, **args: Any) -> list[Any]:
    """A trainer with offload_adam whose copies are late, and one with torch's AdamW; fp32, so that they agree."""
    ours = lab.trainer(optim_args=f"{SCHEDULES[schedule]},{LATE}", **args)
    return [ours, lab.trainer(optim="adamw_torch", **args)]


def agree(tools: Any, trainers: list[Any]) -> None:
    losses = [torch.tensor(tools.history(t, "loss")) for t in trainers]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    ours, theirs = (tools.weights(t.model) for t in trainers)
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("schedule", ["overlapped", "speculative"])
def test_the_best_model_is_loaded_and_training_goes_on(lab: Any, tools: Any, schedule: str) -> None:
    args = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "learning_rate": 3e-2,
    }  # fmt: skip
    trainers = both(lab, schedule, **args)
    for trainer in trainers:
        trainer.train()
        assert not trainer.state.best_model_checkpoint.endswith("checkpoint-6"), "then nothing was put back"
        trainer.train()
    agree(tools, trainers)


class At(TrainerCallback):
    """Writes to weights at one event of one step, as somebody's callback would."""

    def __init__(self, event: str, write: Callable[[Any], None]) -> None:
        def handle(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 3:
                write(model)

        setattr(self, event, handle)


def shrink(model: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


@torch.no_grad()
def shrink_in_place(model: Any) -> None:
    for p in model.parameters():
        p.mul_(0.5)


def replace_data(model: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


WRITES = [
    (shrink, "on_step_end"),
    (shrink, "on_pre_optimizer_step"),
    (shrink, "on_epoch_end"),
    (shrink_in_place, "on_step_end"),
    (replace_data, "on_pre_optimizer_step"),
]


@every_schedule
@pytest.mark.parametrize(("write", "event"), WRITES, ids=lambda x: getattr(x, "__name__", x))
def test_a_callback_that_writes(lab: Any, tools: Any, schedule: str, event: str, write: Callable[[Any], None]) -> None:
    trainers = both(lab, schedule, max_steps=5, max_grad_norm=0.0)
    for trainer in trainers:
        if event == "on_epoch_end":
            trainer.train_dataset = trainer.train_dataset[:12]  # three steps
        trainer.add_callback(At(event, write))
        trainer.train()
    agree(tools, trainers)
    if event == "on_epoch_end":
        assert trainers[0].state.epoch > 1


def small(
    lab: Any, schedule: str = "overlapped", **model_config: Any
) -> tuple[Any, OffloadAdam, Callable[[], torch.Tensor]]:
    """A model, an OffloadAdam for a loop of one's own, and the model's loss."""
    model = lab.model(torch.bfloat16, **model_config)
    config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=4096, link_latency_us=2000)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
    row = lab.data()[0]
    return model, optimizer, lambda: model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss


def step(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "delayed"])
def test_a_resized_head_is_refused_with_the_remedy(lab: Any, schedule: str, steps: int) -> None:
    """transformers makes a new Parameter: torch would train neither the old one nor the new one, and say nothing."""
    model, optimizer, loss = small(lab, schedule)
    for _ in range(steps):
        step(optimizer, loss)
    model.resize_token_embeddings(104)
    with pytest.raises(StateError, match=r"lm_head\.weight.*Make the optimizer after that"):
        step(optimizer, loss)


@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "delayed"])
def test_tied_embeddings_keep_their_parameter_and_are_refused_for_their_new_shape(lab: Any, schedule: str) -> None:
    """Before the first step they may have any: there is no state yet."""
    model, optimizer, loss = small(lab, schedule, tie_word_embeddings=True)
    model.resize_token_embeddings(100)
    before = model.get_input_embeddings().weight.detach().clone()
    step(optimizer, loss)
    optimizer.synchronize()
    assert not torch.equal(before, model.get_input_embeddings().weight)
    model.resize_token_embeddings(104)
    with pytest.raises(StateError, match=r"shape.*changed after its state was made"):
        step(optimizer, loss)


def test_embeddings_resized_before_training_are_trained(lab: Any) -> None:
    trainer = lab.trainer(max_steps=2)
    trainer.model.resize_token_embeddings(104)
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.get_input_embeddings().weight)


def peft(lab: Any, **lora: Any) -> tuple[Any, Any, Callable[[], torch.Tensor]]:
    from peft import LoraConfig, get_peft_model

    base = lab.model()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.0, **lora))
    row = lab.data()[0]
    return model, base, lambda: model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss


@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "delayed"])
def test_an_adapters_state_dict(lab: Any, schedule: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model, _, loss = peft(lab)
    config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=256, link_latency_us=2000)
    optimizer = OffloadAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2, config=config, model=model)
    for _ in range(3):
        step(optimizer, loss)
    saved = {name: torch.full_like(t, 0.25) for name, t in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(model, saved)
    step(optimizer, loss)
    optimizer.synchronize()
    for name, t in get_peft_model_state_dict(model).items():
        assert (t - 0.25).abs().max() < 0.03, name
    set_peft_model_state_dict(model, saved, low_cpu_mem_usage=True)  # makes new parameters
    with pytest.raises(StateError, match="new parameters in their place"):
        step(optimizer, loss)


@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "delayed"])
def test_an_adapter_that_is_added(lab: Any, schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    from peft import LoraConfig

    model, _, loss = peft(lab)
    config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=256)
    optimizer = OffloadAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2, config=config, model=model)
    for _ in range(3):
        step(optimizer, loss)
    optimizer.synchronize()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("second")
    fresh = [p for name, p in model.named_parameters() if "second" in name]
    step(optimizer, loss)
    assert "no group of the optimizer has" in caplog.text and "second" in caplog.text
    optimizer.add_param_group({"params": fresh})
    before = [p.detach().clone() for p in fresh]
    for _ in range(2):
        step(optimizer, loss)
    optimizer.synchronize()
    assert any(not torch.equal(p, b) for p, b in zip(fresh, before))


@pytest.mark.parametrize("schedule", ["in_order", "overlapped", "delayed"])
def test_adapters_merged_and_unmerged_into_weights_that_are_trained(lab: Any, schedule: str) -> None:
    """In a loop of one's own, without any wait: the merge reads the new weights, and masters follow what it leaves."""
    model, base, loss = peft(lab)
    for p in base.parameters():
        p.requires_grad_(True)
    config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=4096, link_latency_us=2000)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
    for _ in range(3):
        step(optimizer, loss)
    model.base_model.merge_adapter()
    model.base_model.unmerge_adapter()
    merged = {id(p): p.detach().clone() for p in model.parameters()}
    optimizer.param_groups[0]["lr"] = 0.0
    step(optimizer, loss)
    optimizer.synchronize()
    for p in model.parameters():
        assert torch.equal(p, merged[id(p)]) and torch.equal(p, optimizer.state[p]["master"])


def test_accelerates_load_state(lab: Any, tools: Any, tmp_path: Any) -> None:
    from hf_offload import OffloadAccelerator

    accelerator = OffloadAccelerator(cpu=True)
    model, own, loss = small(lab)
    model, optimizer = accelerator.prepare(model, own)
    for _ in range(3):
        step(optimizer, loss)
    accelerator.save_state(tmp_path / "state")
    ends = []
    for _ in range(2):
        for _ in range(2):
            step(optimizer, loss)
        ends.append(tools.state_of(own) | tools.weights(model))
        accelerator.load_state(tmp_path / "state")
    assert tools.same_bits(*ends)


def test_torchs_average_waits_by_itself(lab: Any, tools: Any) -> None:
    """An EMA in a loop of one's own, without a `synchronize()`; its weights are then put into the model."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ends = []
    for schedule in ("in_order", "overlapped", "delayed"):
        model, optimizer, loss = small(lab, schedule)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            step(optimizer, loss)
            average.update_parameters(model)
        for p, a in zip(model.parameters(), average.module.parameters()):
            p.data.copy_(a.data)
        step(optimizer, loss)
        ends.append(tools.state_of(optimizer) | tools.weights(model) | {f"ema.{n}": p.detach().clone()
                    for n, p in average.module.named_parameters()})  # fmt: skip
    assert tools.same_bits(ends[0], ends[1])
    assert tools.same_bits(ends[0], ends[2]), "each average has delivered what was pending"


def test_diffusers_average_waits_by_itself(monkeypatch: pytest.MonkeyPatch, lab: Any) -> None:
    """diffusers is not installed here: a class of its shape, with what its methods do."""
    import sys
    import types

    class EMAModel:
        def step(self, parameters: Any) -> None:
            self.shadow = [p.detach().clone() for p in parameters]

        store = step

        def copy_to(self, parameters: Any) -> None:
            for p, s in zip(parameters, self.shadow):
                p.data.copy_(s)

        restore = copy_to

    module = types.ModuleType("diffusers.training_utils")
    module.EMAModel = EMAModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "diffusers.training_utils", module)
    compat._adapt_readers(module)
    model, optimizer, loss = small(lab)
    average = EMAModel()
    for _ in range(3):
        step(optimizer, loss)
        average.step(model.parameters())
        assert all(torch.equal(s, optimizer.state[p]["master"].bfloat16())
                   for p, s in zip(model.parameters(), average.shadow))  # fmt: skip
    for p in average.shadow:
        p.fill_(0.25)
    step(optimizer, loss)
    average.copy_to(model.parameters())
    step(optimizer, loss)
    optimizer.synchronize()
    assert all((p - 0.25).abs().max() < 0.05 for p in model.parameters())
