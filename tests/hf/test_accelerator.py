"""Loops that use accelerate alone: `OffloadPlugin`, `OffloadAccelerator`, and the stock Accelerator."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_offload import OffloadAccelerator, OffloadAdam, OffloadConfig, OffloadPlugin
from hf_offload.errors import ConfigError, StateError, UnsupportedError

SCHEDULES = ("in_order", "overlapped")


def plugin(schedule: str = "overlapped", **settings: Any) -> OffloadPlugin:
    slow = {} if schedule == "in_order" else {"bucket_bytes": 16384, "link_latency_us": 20000}
    return OffloadPlugin(config=OffloadConfig(**{"schedule": schedule, "threads": 1, **slow, **settings}))


def loop(
    lab: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    updates: int = 5,
    clip: float | None = 0.5,
    accumulate: int = 1,
    together: bool = True,
) -> tuple[list[float], list[float], list[float], Any, Any]:
    """An ordinary training loop: losses, norms, learning rates, and what prepare() returned."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
    batches = torch.stack([row["input_ids"] for row in lab.data()]).split(4)
    loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
    if together:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        loader, scheduler = accelerator.prepare(loader, scheduler)
    losses, norms, rates = [], [], []
    for number, ids in enumerate(loader):
        if number == updates * accumulate:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, rates, model, optimizer


def fresh() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def adamw(model: Any, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]
    return kind(groups, lr=1e-2, **settings)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_the_users_adam_is_replaced_and_its_scheduler_goes_on(
    lab: Any, kind: Any, together: bool, accumulate: int
) -> None:
    settings = {"accumulate": accumulate, "together": together}
    model = lab.model()
    stock = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    expected = loop(lab, stock, adamw(model, kind), model, **settings)
    fresh()
    model = lab.model()
    ours = OffloadAccelerator(cpu=True, gradient_accumulation_steps=accumulate, offload_plugin=plugin())
    old = adamw(model, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = loop(lab, ours, old, model, **settings)
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(expected[0]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(expected[1]), rtol=1e-5, atol=1e-6)
    assert got[2] == expected[2] and len(set(got[2])) >= 5 // accumulate
    optimizer = got[4].optimizer
    assert isinstance(optimizer, OffloadAdam) and optimizer.schedule == "overlapped"
    assert old.param_groups is optimizer.param_groups and not old.state
    with pytest.raises(StateError, match=r"prepare\(\) put an OffloadAdam in its place"):
        old.step()


def test_a_trained_adamw_hands_its_state_over(lab: Any) -> None:
    def warm(kind: Any) -> tuple[Any, Any]:
        model = lab.model()
        optimizer = adamw(model)
        for row in lab.data()[40:43]:
            model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = warm(None)
    expected = loop(lab, Accelerator(cpu=True), optimizer, model)
    fresh()
    model, optimizer = warm(None)
    got = loop(lab, OffloadAccelerator(cpu=True, offload_plugin=plugin("in_order")), optimizer, model)
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(expected[0]), rtol=1e-6, atol=1e-6)
    assert got[4].state_dict()["state"][0]["step"] == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_offload_adam_is_kept_and_attached(lab: Any, schedule: str) -> None:
    model = lab.model()
    own = OffloadAdam(model.parameters(), lr=1e-2, config=OffloadConfig(schedule=schedule, threads=1))
    accelerator = OffloadAccelerator(cpu=True)
    *_, optimizer = loop(lab, accelerator, own, model)
    assert optimizer.optimizer is own and own.schedule == schedule and optimizer.device_placement is False
    assert own.engine.gates is not None
    assert own.stats().steps == 5


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_schedules_give_the_same_bits_through_everything(
    lab: Any, tools: Any, precision: str, tmp_path: Path
) -> None:
    ends = []
    for schedule in SCHEDULES:
        fresh()
        model = lab.model()
        accelerator = OffloadAccelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, offload_plugin=plugin(schedule)
        )
        losses, norms, _, model, optimizer = loop(lab, accelerator, adamw(model), model, accumulate=2)
        folder = str(tmp_path / schedule)
        accelerator.save_state(folder)
        accelerator.save_model(model, f"{folder}-model")
        accelerator.wait_for_everyone()
        wire = torch.bfloat16 if precision == "bf16" else torch.float32
        assert {p.dtype for p in model.parameters()} == {wire}
        saved = {
            f"file.{k}": v for k, v in torch.load(f"{folder}/optimizer.bin", weights_only=True)["state"][0].items()
        }
        ends.append((losses, norms, tools.weights(model) | tools.state_of(optimizer) | saved))
    assert ends[0][:2] == ends[1][:2]
    assert tools.same_bits(ends[0][2], ends[1][2])


def test_weights_are_final_where_scripts_read_them(lab: Any, tools: Any) -> None:
    for finish in ("wait_for_everyone", "end_training", "synchronize"):
        ends = []
        for schedule in SCHEDULES:
            fresh()
            model = lab.model()
            accelerator = OffloadAccelerator(cpu=True, offload_plugin=plugin(schedule))
            *_, prepared, optimizer = loop(lab, accelerator, adamw(model), model)
            getattr(accelerator, finish)()
            ends.append(tools.weights(prepared))
            optimizer.optimizer.close()
        assert tools.same_bits(*ends), finish


def test_a_saved_state_is_loaded_and_gives_the_same_bits(lab: Any, tools: Any, tmp_path: Path) -> None:
    def begin() -> tuple[Any, Any, Any]:
        fresh()
        model = lab.model()
        accelerator = OffloadAccelerator(cpu=True, mixed_precision="bf16", offload_plugin=plugin())
        return accelerator, *accelerator.prepare(model, adamw(model))

    def go(accelerator: Any, model: Any, optimizer: Any, rows: Any) -> None:
        for row in rows:
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    whole = begin()
    go(*whole, lab.data()[:3])
    whole[0].save_state(str(tmp_path / "three"))
    go(*whole, lab.data()[3:6])
    resumed = begin()
    go(*resumed, lab.data()[20:21])
    resumed[0].load_state(str(tmp_path / "three"))
    go(*resumed, lab.data()[3:6])
    for accelerator, _, _ in (whole, resumed):
        accelerator.synchronize()
    assert tools.same_bits(tools.weights(whole[1]), tools.weights(resumed[1]))
    assert tools.same_bits(tools.state_of(whole[2]), tools.state_of(resumed[2]))


def test_the_cast_can_be_turned_off(lab: Any) -> None:
    model = lab.model()
    accelerator = OffloadAccelerator(
        cpu=True, mixed_precision="bf16", offload_plugin=plugin("in_order", cast_fp32_weights=False)
    )
    model, _ = accelerator.prepare(model, adamw(model))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_stock_accelerator_takes_an_offload_adam(lab: Any) -> None:
    model = lab.model(torch.bfloat16)
    config = OffloadConfig(schedule="overlapped", threads=1)
    own = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
    _, norms, _, _, optimizer = loop(lab, Accelerator(cpu=True, mixed_precision="bf16"), own, model)
    assert optimizer.optimizer is own and optimizer.device_placement is False
    assert any(n != torch.tensor(n).bfloat16().item() for n in norms)


def test_a_stock_accelerator_without_ours_is_as_ever(lab: Any) -> None:
    model = lab.model()
    *_, optimizer = loop(lab, Accelerator(cpu=True), adamw(model), model)
    assert type(optimizer.optimizer) is torch.optim.AdamW and optimizer.device_placement is True


class Mine(torch.optim.AdamW):
    """Somebody's own optimizer."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, Mine])
def test_other_optimizers_are_refused(lab: Any, kind: Any) -> None:
    model = lab.model()
    with pytest.raises(UnsupportedError, match=rf"optimizer='{kind.__name__}'.*AdamW"):
        OffloadAccelerator(cpu=True).prepare(model, adamw(model, kind))


def test_amsgrad_is_refused(lab: Any) -> None:
    model = lab.model()
    with pytest.raises(UnsupportedError, match="amsgrad"):
        OffloadAccelerator(cpu=True).prepare(model, adamw(model, amsgrad=True))


def test_an_optimizer_of_another_model_is_refused(lab: Any) -> None:
    with pytest.raises(StateError, match="none of the models"):
        OffloadAccelerator(cpu=True).prepare(lab.model(), adamw(lab.model()))


def test_a_config_is_not_a_plugin(lab: Any) -> None:
    with pytest.raises(ConfigError, match=r"OffloadPlugin\(config="):
        OffloadAccelerator(cpu=True, offload_plugin=OffloadConfig())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- clipping


@pytest.fixture
def prepared(lab: Any) -> Any:
    accelerator = OffloadAccelerator(cpu=True, offload_plugin=plugin("in_order"))
    model = lab.model()
    model, optimizer = accelerator.prepare(model, adamw(model))
    row = lab.data()[0]
    accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
    return accelerator, model, optimizer


def test_a_subset_is_refused(prepared: Any) -> None:
    accelerator, model, _ = prepared
    with pytest.raises(UnsupportedError, match="parameters of the optimizer have gradients but are left out"):
        accelerator.clip_grad_norm_(model.lm_head.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="left out"):
        accelerator.clip_grad_norm_(model.lm_head.weight, 1.0)


def test_more_than_the_optimizers_parameters_is_refused(prepared: Any) -> None:
    accelerator, model, _ = prepared
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    with pytest.raises(UnsupportedError, match="1 parameters with gradients belong to no OffloadAdam"):
        accelerator.clip_grad_norm_([*model.parameters(), other], 1.0)


def test_parameters_of_nobody_are_clipped_by_accelerate(prepared: Any) -> None:
    accelerator, _, _ = prepared
    other = torch.nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    assert accelerator.clip_grad_norm_([other], 1.0).item() == pytest.approx(2.0)
    assert other.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_two_optimizers_are_clipped_one_at_a_time(lab: Any) -> None:
    accelerator = OffloadAccelerator(cpu=True, offload_plugin=plugin("in_order"))
    models = [lab.model(), lab.model()]
    models[0], models[1], *_ = accelerator.prepare(*models, *(adamw(m) for m in models))
    row = lab.data()[0]
    for m in models:
        accelerator.backward(m(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
    norms = [accelerator.clip_grad_norm_(m.parameters(), 1.0).item() for m in models]
    assert norms[0] == norms[1] > 0
    with pytest.raises(UnsupportedError, match="belong to 2 optimizers"):
        accelerator.clip_grad_norm_([*models[0].parameters(), *models[1].parameters()], 1.0)


def test_values_are_clipped_in_place(prepared: Any) -> None:
    accelerator, model, _ = prepared
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 1e-4
