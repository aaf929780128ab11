"""What cannot work is refused where it can first be seen, naming the setting, its value, the cause and the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

from hf_offload import OffloadAccelerator, OffloadAdam, OffloadConfig, OffloadTrainer, compat
from hf_offload.checks import refuse_unsupported
from hf_offload.errors import UnsupportedError

compat.register()

KINDS = {
    "DEEPSPEED": r"deepspeed='DEEPSPEED'.*own optimizer.*Leave DeepSpeed out",
    "FSDP": r"fsdp='FSDP.*shards.*DDP",
    "MEGATRON_LM": r"distributed_type='MEGATRON_LM'.*DDP",
    "XLA": r"distributed_type='XLA'.*DDP",
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every Accelerator say that it was launched with `kind`."""

    def launched(kind: str) -> None:
        monkeypatch.setattr(Accelerator, "distributed_type", getattr(DistributedType, kind))

    return launched


@pytest.mark.parametrize("kind", KINDS)
def test_engines_and_shards(lab: Any, pretend: Any, kind: str) -> None:
    pretend(kind)
    with pytest.raises(UnsupportedError, match=KINDS[kind]):
        lab.trainer()
    with pytest.raises(UnsupportedError, match=KINDS[kind]):
        lab.trainer(kind=OffloadTrainer)
    with pytest.raises(UnsupportedError, match=KINDS[kind]):
        OffloadAccelerator(cpu=True)
    model = lab.model()
    own = OffloadAdam(model.parameters(), config=OffloadConfig(threads=1))
    with pytest.raises(UnsupportedError, match=KINDS[kind]):
        Accelerator(cpu=True).prepare(model, own)
    with pytest.raises(UnsupportedError, match=KINDS[kind]):
        Accelerator(cpu=True).prepare_optimizer(own)


@pytest.mark.parametrize("version", [1, 2])
def test_both_fsdps_by_plugin(version: int) -> None:
    """accelerate ignores FSDP on a CPU, but for its plugin."""
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=version), deepspeed_plugin=None),
    )
    with pytest.raises(UnsupportedError, match=f"FSDP{version} replaces the parameters by shards"):
        refuse_unsupported(accelerator)


@pytest.mark.parametrize(("setting", "value"), [("fsdp", ["full_shard"]), ("deepspeed", "zero2.json")])
def test_settings_of_the_training_arguments(lab: Any, setting: str, value: Any) -> None:
    args = lab.args()
    setattr(args, setting, value)
    with pytest.raises(UnsupportedError, match=f"^{setting}="):
        refuse_unsupported(Accelerator(cpu=True), args)


def test_data_parallel(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(UnsupportedError, match=r"n_gpu=2.*DataParallel.*CUDA_VISIBLE_DEVICES"):
        lab.trainer()
    lab.trainer(optim="adamw_torch")


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_not_bothered(lab: Any, pretend: Any, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(2))
    pretend(kind)
    assert accelerator.prepare_optimizer(torch.optim.SGD([weight], lr=0.1)) is not None
    compat.asked(SimpleNamespace(optim="adamw_torch"))


def test_several_processes_want_in_order(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    model = lab.model()

    def step(schedule: str) -> str:
        config = OffloadConfig(schedule=schedule, threads=1)
        own = OffloadAdam(model.parameters(), config=config, model=model)
        ids = lab.data()[0]["input_ids"][None]
        model(input_ids=ids, labels=ids).loss.backward()
        own.step()
        return own.schedule

    assert step("auto") == "in_order"
    with pytest.raises(Exception, match=r"schedule='overlapped'.*in_order"):
        step("overlapped")


def test_sparse_embeddings(lab: Any) -> None:
    model = lab.model()
    model.model.embed_tokens.sparse = True
    trainer: Trainer = lab.trainer(model)
    with pytest.raises(UnsupportedError, match="sparse"):
        trainer.train()
