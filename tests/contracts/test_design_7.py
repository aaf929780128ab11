"""DESIGN, section 7: meeting Hugging Face. README.md has the table of items, tests and planted bugs.

The long way round (unmodified scripts, TRL, DDP, autoload) is in `tests/hf`, whose small models these tests borrow.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.checks import clip_target, refuse_unsupported
from hf_offload.errors import ConfigError, UnsupportedError
from support.contracts import Case, Duel, every_exact, every_schedule
from support.engine import TinyLM, batches, copies, late, settings

SCHEDULES = ("in_order", "overlapped")


def _borrowed() -> ModuleType:
    """`tests/hf/conftest.py`, which cannot be imported by name."""
    path = Path(__file__).parents[1] / "hf" / "conftest.py"
    spec = importlib.util.spec_from_file_location("contracts_hf_conftest", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hf = _borrowed()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Any]:
    hf._forget_accelerate()
    yield hf.Lab(tmp_path)
    hf._forget_accelerate()


def optim_args(schedule: str) -> str:
    """Overlapped: every copy is much later than a forward takes."""
    return "schedule=in_order,threads=1" if schedule == "in_order" else f"schedule=overlapped,{hf.SLOW}"


# ---- the flag and the classes


def test_offload_trainer_and_the_flag_give_the_same_bits(lab: Any) -> None:
    from hf_offload import OffloadTrainer

    flag = lab.trainer(optim_args=optim_args("in_order"), max_steps=2)
    kind = {"offload": OffloadConfig(schedule="in_order", threads=1)}
    by_class = lab.trainer(kind=OffloadTrainer, more=kind, optim="adamw_torch", max_steps=2)
    for trainer in (flag, by_class):
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, OffloadAdam)
        assert trainer.optimizer.optimizer.config == kind["offload"]
    assert hf.same_bits(hf.weights(flag.model), hf.weights(by_class.model))


def test_the_trainers_parameter_groups_are_not_replaced(lab: Any) -> None:
    """No decay for biases and norms; Trainer lets a keyword called `params` or `model` replace the groups."""
    found = []
    for optim in ("offload_adam", "adamw_torch"):
        optimizer = lab.trainer(optim=optim, weight_decay=0.1).create_optimizer()
        found.append([(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups])
    assert found[0] == found[1] and len(found[0]) == 2


def test_fp32_weights_are_the_masters_of_16_bit_ones_and_not_their_rounding(lab: Any) -> None:
    trainer = lab.trainer(bf16=True, optim_args=optim_args("in_order"), max_steps=1, learning_rate=0.0)
    before = hf.weights(trainer.model) if trainer.model.dtype == torch.float32 else hf.weights(lab.model())
    trainer.train()
    state = trainer.optimizer.optimizer.state
    for name, p in trainer.model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(state[p]["master"], before[name].reshape(p.shape)), name


def test_nothing_of_transformers_changes_unless_offload_adam_is_asked_for(lab: Any) -> None:
    assert OffloadAdam is not None  # imported, and so are our wrappers
    trainer = lab.trainer(optim="adamw_torch", bf16=True, max_steps=1)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW


def test_a_stock_trainer_takes_our_optimizer_by_hand(lab: Any) -> None:
    ends = []
    for schedule in SCHEDULES:
        model = lab.model()
        config = OffloadConfig(schedule=schedule, threads=1, bucket_bytes=32768, link_latency_us=60000)
        optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config, model=model)
        trainer = lab.trainer(model, more={"optimizers": (optimizer, None)}, optim="adamw_torch", max_steps=2)
        trainer.train()
        optimizer.synchronize()
        ends.append(hf.weights(model))
    assert hf.same_bits(*ends)


# ---- accelerate


def test_a_users_adamw_is_taken_over_and_its_scheduler_goes_on(lab: Any) -> None:
    from hf_offload import OffloadAccelerator, OffloadPlugin

    accelerator = OffloadAccelerator(cpu=True, offload_plugin=OffloadPlugin(config=OffloadConfig(threads=1)))
    model = nn.Linear(4, 2)
    own = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda t: 0.5**t)
    model, optimizer, schedule = accelerator.prepare(model, own, schedule)
    for expected in (0.1, 0.05, 0.025):
        assert optimizer.param_groups[0]["lr"] == expected
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert isinstance(optimizer.optimizer, OffloadAdam) and not own.state


def test_a_matrix_optimizer_is_refused_and_not_flattened(lab: Any) -> None:
    """18: tied weights are flattened away, and so is the shape that Muon needs."""
    from hf_offload.plugin import take_over

    model = nn.Linear(4, 4, bias=False)
    for kind in (getattr(torch.optim, "Muon", torch.optim.Adagrad), torch.optim.SGD):
        with pytest.raises(UnsupportedError, match=r"optimizer=.*AdamW"):
            take_over(kind(model.parameters(), lr=0.1), OffloadConfig())


def test_after_an_overflow_the_step_is_skipped_the_scale_backs_off_and_lr_waits(lab: Any) -> None:
    from hf_offload import OffloadAccelerator
    from hf_offload.compat import OffloadGradScaler

    accelerator = OffloadAccelerator(cpu=True)
    accelerator.scaler = OffloadGradScaler("cpu", init_scale=16.0, growth_interval=1)
    model = TinyLM(torch.float16)
    own = OffloadAdam(model.parameters(), lr=1e-2, config=settings("overlapped"), model=model)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda t: 0.5**t)
    model, optimizer, schedule = accelerator.prepare(model, own, schedule)
    data, seen = batches(), []
    for step in range(4):
        accelerator.backward(model(next(data)))
        if step == 1:
            next(model.parameters()).grad[0, 0] = float("inf")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen.append((optimizer.step_was_skipped, accelerator.scaler.get_scale(), own.param_groups[0]["lr"]))
        optimizer.zero_grad()
    assert seen == [(False, 32.0, 5e-3), (True, 16.0, 5e-3), (False, 32.0, 2.5e-3), (False, 64.0, 1.25e-3)]
    assert own.stats().steps == 3
    own.close()


ENGINES = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP", "distributed_type": "MEGATRON_LM"}


@pytest.mark.parametrize("setting", ENGINES)
def test_deepspeed_fsdp_and_megatron_are_refused_by_name(setting: str) -> None:
    accelerator = SimpleNamespace(distributed_type=ENGINES[setting], state=SimpleNamespace())
    with pytest.raises(UnsupportedError, match=f"{setting}=.*or choose another optim"):
        refuse_unsupported(accelerator)


def test_data_parallel_is_refused() -> None:
    accelerator = SimpleNamespace(distributed_type="NO", state=SimpleNamespace())
    with pytest.raises(UnsupportedError, match="n_gpu=2"):
        refuse_unsupported(accelerator, SimpleNamespace(n_gpu=2))


@pytest.mark.parametrize("schedule", ["overlapped", "streamed"])
def test_several_processes_may_train_in_order_only(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients would leave, or weights be awaited, before the ranks have averaged them."""
    monkeypatch.setattr("hf_offload.engine.engine.several_ranks", lambda: True)
    with Duel(Case(schedule)) as duel, pytest.raises(ConfigError, match="in_order"):
        duel.train([0])
    with Duel(Case("in_order")) as duel:
        duel.train([0])
        duel.agree()


def test_clipping_a_subset_of_the_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with OffloadAdam(model.parameters(), config=OffloadConfig(threads=1)) as optimizer:
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(UnsupportedError, match="left out"):
            clip_target([optimizer], list(model[0].parameters()), 2.0)
        assert clip_target([optimizer], list(model.parameters()), 2.0) is optimizer


# ---- whoever reads weights reads the new ones


def test_evaluation_and_saving_see_the_weights_of_the_last_step(lab: Any) -> None:
    found = []
    for schedule in SCHEDULES:
        trainer = lab.trainer(
            optim_args=optim_args(schedule), max_steps=3, eval_strategy="steps", eval_steps=1, eval_delay=3,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        trainer.train()
        folder = Path(trainer.args.output_dir) / "checkpoint-2"
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        saved = {str(i): e["master"] for i, e in state.items()} | load_file(folder / "model.safetensors")
        found.append((hf.history(trainer, "eval_loss"), saved))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 1
    assert hf.same_bits(found[0][1], found[1][1])


def test_the_end_of_training_leaves_the_weights_of_the_last_step(lab: Any) -> None:
    ends = []
    for schedule in SCHEDULES:
        trainer = lab.trainer(optim_args=optim_args(schedule), max_steps=2)
        trainer.train()
        ends.append(hf.weights(trainer.model))
    assert hf.same_bits(*ends)


def test_a_foreign_callback_reads_the_weights_of_the_last_step(lab: Any) -> None:
    from transformers import TrainerCallback

    class Reads(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[dict[str, torch.Tensor]] = []

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(hf.weights(kwargs["model"]))

    readers = []
    for schedule in SCHEDULES:
        readers.append(Reads())
        lab.trainer(optim_args=optim_args(schedule), more={"callbacks": [readers[-1]]}, max_steps=2).train()
    assert len(readers[0].seen) == 2
    assert all(map(hf.same_bits, readers[0].seen, readers[1].seen))


def test_peft_merges_the_weights_of_the_last_step(lab: Any) -> None:
    peft = pytest.importorskip("peft")
    from accelerate import Accelerator

    merged = []
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        model = peft.get_peft_model(lab.model(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        with copies(late("h2d", 0.02)):
            own = OffloadAdam(
                [p for p in model.parameters() if p.requires_grad], lr=0.1, config=settings(schedule), model=model
            )
        optimizer = Accelerator(cpu=True).prepare(own)
        row = lab.data()[0]
        for _ in range(2):
            model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.merge_adapter()
        merged.append(hf.weights(model))
        own.close()
    assert hf.same_bits(*merged)


@every_exact
def test_a_head_that_is_read_without_being_called_is_not_read_too_early(case: Case) -> None:
    """TRL's fused head."""
    found = []
    for schedule in ("in_order", case.schedule):
        with copies(late("h2d", 3e-3)):
            model = TinyLM(torch.bfloat16, fused_head=True)
            optimizer = OffloadAdam(model.parameters(), lr=1e-2, model=model, config=settings(schedule))
        data, losses = batches(), []
        for _ in range(3):
            loss = model(next(data))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        optimizer.close()
    assert found[0] == found[1]


@every_schedule
def test_a_backward_through_a_retained_graph_raises_instead_of_using_new_weights(case: Case) -> None:
    model = TinyLM()
    config = settings(case.schedule, **({"delay_warmup_steps": 10} if case.schedule == "delayed" else {}))
    with OffloadAdam(model.parameters(), lr=1e-2, model=model, config=config) as optimizer:
        loss = model(next(batches()))
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ---- figures

KEYS = {"params", "wire_dtype", "schedule", "device_bytes", "host_bytes", "d2h_bytes", "h2d_bytes", "seconds",
        "exposed_seconds", "hidden_fraction", "steps", "skipped_steps", "speculation_hits",
        "speculation_misses"}  # fmt: skip


@every_schedule
def test_the_figures_are_those_of_the_design_and_add_up(case: Case) -> None:
    with Duel(case) as duel:
        duel.train([0, 1, 2])
        stats = duel.optimizer.stats()
        assert set(vars(stats)) >= KEYS
        numel = sum(p.numel() for p in duel.model.parameters())
        held = {k: stats.host_bytes[k] for k in ("master", "exp_avg", "exp_avg_sq")}
        blocks = sum(-(-p.numel() // 128) for p in duel.model.parameters())
        moment = {"float32": 4 * numel, "bfloat16": 2 * numel, "int8": numel + blocks}[case.state_dtype]
        assert stats.params == numel and held == {"master": 4 * numel, "exp_avg": moment, "exp_avg_sq": moment}
        assert set(stats.seconds) == {"compute", "d2h", "host_step", "h2d", "wait"}
        assert set(stats.device_bytes) == {"weights", "gradients", "optimizer"}
        assert set(stats.host_bytes) == {*held, "pinned", "store", "shadow"}
        assert 0.0 <= stats.hidden_fraction <= 1.0 and stats.steps == 3
        assert stats.host_bytes["store"] == (2 * numel if duel.optimizer.config.stream_gradients else 0)
        assert (stats.host_bytes["shadow"] > 0) == (case.schedule in ("speculative", "small shadow"))
