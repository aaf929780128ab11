"""fp16: dynamic loss scaling with OffloadGradScaler is torch's, on fp32 masters.

accelerate makes no scaler on a CPU, so these tests install one built for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from hf_offload import OffloadAccelerator, OffloadAdam, OffloadConfig, compat
from hf_offload.compat import OffloadGradScaler
from hf_offload.errors import UnsupportedError

compat.register()
STEPS = 9
# Overflows at first, so that it backs off; grows every second step, so that it overflows again.
SCALING = {"init_scale": 2.0**20, "growth_interval": 2}


def reference(lab: Any, clip: float) -> dict[str, list[float]]:
    """torch's GradScaler over fp32 masters by hand: what fp16 training should do."""
    model = lab.model(torch.float16)
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    adam = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda t: 0.9**t)
    seen: dict[str, list[float]] = {"loss": [], "norm": [], "scale": [], "lr": []}
    for row in lab.data()[:STEPS]:
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        seen["loss"].append(loss.item())
        seen["scale"].append(scaler.get_scale())
        seen["lr"].append(adam.param_groups[0]["lr"])
        scaler.scale(loss).backward()
        for m, p in zip(masters, params):
            m.grad, p.grad = p.grad.float(), None
        scaler.unscale_(adam)
        seen["norm"].append(torch.nn.utils.clip_grad_norm_(masters, clip).item())
        before = scaler.get_scale()
        scaler.step(adam)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        for m, p in zip(masters, params):
            p.data = m.detach().half()
    return seen


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
@pytest.mark.parametrize("clip", [0.1, 1e9])
def test_an_accelerate_loop_scales_as_torch_does(lab: Any, schedule: str, clip: float) -> None:
    expected = reference(lab, clip)
    model = lab.model(torch.float16)
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.scaler = OffloadGradScaler("cpu", **SCALING)
    config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=4096)
    own = OffloadAdam(model.parameters(), lr=1e-3, weight_decay=0.0, config=config, model=model)
    schedule_lr = torch.optim.lr_scheduler.LambdaLR(own, lambda t: 0.9**t)
    model, optimizer, schedule_lr = accelerator.prepare(model, own, schedule_lr)
    seen: dict[str, list[float]] = {"loss": [], "norm": [], "scale": [], "lr": []}
    skipped = []
    for row in lab.data()[:STEPS]:
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        seen["loss"].append(loss.item())
        seen["scale"].append(accelerator.scaler.get_scale())
        seen["lr"].append(optimizer.param_groups[0]["lr"])
        accelerator.backward(loss)
        seen["norm"].append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        schedule_lr.step()
        model.zero_grad()  # as Trainer does: it is not the optimizer that is told
    assert skipped[0] and skipped.count(True) >= 2 and skipped.count(False) >= 4
    assert seen["scale"] == expected["scale"] and seen["lr"] == expected["lr"]
    torch.testing.assert_close(torch.tensor(seen["loss"]), torch.tensor(expected["loss"]), rtol=2e-3, atol=1e-3)
    norms = [(a, b) for a, b, s in zip(seen["norm"], expected["norm"], skipped) if not s]
    assert all(a == pytest.approx(b, rel=2e-2) for a, b in norms)
    assert own.stats().steps == skipped.count(False) and own.stats().skipped_steps == skipped.count(True)


def test_a_skipped_step_leaves_every_byte(lab: Any, tools: Any) -> None:
    model = lab.model(torch.float16)
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.scaler = OffloadGradScaler("cpu", init_scale=128.0)
    own = OffloadAdam(model.parameters(), lr=1e-2, config=OffloadConfig(threads=1), model=model)
    model, optimizer = accelerator.prepare(model, own)

    def step(poison: bool) -> None:
        ids = lab.data()[0]["input_ids"][None]
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        if poison:
            next(model.parameters()).grad.view(-1)[3] = float("nan")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    step(poison=False)
    before = tools.weights(model) | tools.state_of(optimizer)
    step(poison=True)
    assert optimizer.step_was_skipped and accelerator.scaler.get_scale() == 64.0
    assert tools.same_bits(before, tools.weights(model) | tools.state_of(optimizer))
    step(poison=False)
    assert not optimizer.step_was_skipped and int(tools.state_of(optimizer)["0.step"]) == 2


class Scaled(Trainer):
    """Installs the scaler that accelerate would make on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", **SCALING)


MODES = {
    "in order": "schedule=in_order",
    "overlapped": "schedule=overlapped",
    "streamed": "schedule=overlapped,stream_gradients=true",
    "speculative": "schedule=overlapped,stream_gradients=true,shadow_bytes=2000000",
    "delayed": "schedule=delayed,delay_warmup_steps=2",
}


@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_trainer_scales_skips_and_holds_the_learning_rate(lab: Any, tools: Any, schedule: str, clip: float) -> None:
    trainer = lab.trainer(
        lab.model(torch.float16),
        kind=Scaled,
        optim_args=f"{MODES[schedule]},threads=1",
        max_steps=STEPS,
        max_grad_norm=clip,
        learning_rate=1e-3,
        gradient_accumulation_steps=2,
    )
    scaler = trainer.accelerator.scaler
    trainer.train()
    assert trainer.accelerator.scaler is scaler and type(scaler) is OffloadGradScaler
    norms = [n for (n,) in tools.history(trainer, "grad_norm")]
    rates = [r for (r,) in tools.history(trainer, "learning_rate")]
    skipped = [not torch.isfinite(torch.tensor(n)).item() for n in norms]
    assert skipped[0] and 2 <= skipped.count(True) <= STEPS - 4
    assert all(n < 50 for n, s in zip(norms, skipped) if not s)  # unscaled
    for i in range(STEPS - 1):
        assert (rates[i + 1] == rates[i]) == skipped[i]
    own = trainer.optimizer.optimizer
    assert own.stats().steps == skipped.count(False) and own.stats().skipped_steps == skipped.count(True)


def test_the_schedules_give_the_same_bits(lab: Any, tools: Any) -> None:
    ends = []
    for schedule in list(MODES)[:4]:
        args = {"optim_args": f"{MODES[schedule]},{tools.SLOW}", "max_steps": STEPS, "learning_rate": 1e-3}
        trainer = lab.trainer(lab.model(torch.float16), kind=Scaled, **args)
        trainer.train()
        logged = str(tools.history(trainer, "loss", "grad_norm", "learning_rate"))  # nan != nan
        ends.append((logged, tools.weights(trainer.model) | tools.state_of(trainer.optimizer)))
    for end in ends[1:]:
        assert ends[0][0] == end[0]
        assert tools.same_bits(ends[0][1], end[1])


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(lab: Any, tools: Any) -> None:
    args = {"kind": Scaled, "max_steps": 8, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-3}
    whole, resumed = (lab.trainer(lab.model(torch.float16), **args) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-4")
    assert whole.accelerator.scaler.state_dict() == resumed.accelerator.scaler.state_dict()
    assert tools.same_bits(tools.weights(whole.model), tools.weights(resumed.model))
    assert tools.same_bits(tools.state_of(whole.optimizer), tools.state_of(resumed.optimizer))


def test_small_gradients_survive(lab: Any) -> None:
    """Unscaled in fp16 they would be 0: that is why torch refuses."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    own = OffloadAdam([weight], lr=1.0, eps=0.0, weight_decay=0.0, config=OffloadConfig(threads=1))
    scaler = OffloadGradScaler("cpu", init_scale=2.0**16)
    scaler.scale((weight.float() * 1e-9).sum()).backward()  # 6.5e-5 scaled; 1e-9 is below fp16's smallest
    scaler.step(own)
    scaler.update()
    assert torch.equal(weight, torch.zeros_like(weight))


def test_an_error_in_mid_step_does_not_lock_the_scaler(lab: Any, tools: Any) -> None:
    class Fails(Scaled):
        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 5 and not getattr(self, "failed", False):
                self.failed = True  # between unscale_ and update
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
            return super()._get_grad_norm(*args, **kwargs)

    trainer = lab.trainer(lab.model(torch.float16), kind=Fails, auto_find_batch_size=True, max_steps=6)
    trainer.train()
    assert trainer.failed and trainer.state.global_step == 6
    norms = [n for (n,) in tools.history(trainer, "grad_norm") if torch.isfinite(torch.tensor(n))]
    assert len(norms) >= 2 and max(norms) < 50  # those of unscaled gradients


def test_the_scaler_is_torchs_for_other_optimizers() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    sgd = torch.optim.SGD([weight], lr=1.0)
    scaler = OffloadGradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(sgd)
    assert torch.equal(weight.grad, torch.ones(4))


def test_clipping_twice_under_scaling_raises_as_torch_does(lab: Any) -> None:
    model = lab.model(torch.float16)
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.scaler = OffloadGradScaler("cpu", init_scale=8.0)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = lab.data()[0]["input_ids"][None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="already been called"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def test_one_optimizer_is_unscaled_once(lab: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    own = OffloadAdam([weight], config=OffloadConfig(threads=1))
    scaler = OffloadGradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(own)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(own)
    assert torch.equal(weight.grad, torch.full_like(weight, 8.0))  # folded into the step instead


def test_a_disabled_scaler_does_nothing(lab: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    own = OffloadAdam([weight], config=OffloadConfig(threads=1))
    scaler = OffloadGradScaler("cpu", enabled=False)
    scaler.scale(weight.sum()).backward()
    scaler.forget_step()
    scaler.step(own)
    scaler.update()
    assert own.stats().steps == 1


def test_value_clipping_is_refused_under_scaling(lab: Any) -> None:
    model = lab.model(torch.float16)
    accelerator = OffloadAccelerator(cpu=True)
    accelerator.scaler = OffloadGradScaler("cpu")
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(UnsupportedError, match=r"clip_value=1\.0"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_a_scaler_of_another_kind_is_refused(lab: Any) -> None:
    class Other(torch.amp.GradScaler):
        pass

    model = lab.model()
    for kind in (OffloadAccelerator, Accelerator):
        accelerator = kind(cpu=True)
        accelerator.scaler = Other("cpu")
        with pytest.raises(UnsupportedError, match=r"scaler='.*Other'"):
            accelerator.prepare(model, OffloadAdam(model.parameters(), config=OffloadConfig(threads=1)))
