"""`optim="offload_adam"` as transformers sees it: the name, the parsers, the handler."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

from hf_offload import OffloadAdam, compat
from hf_offload.errors import ConfigError, UnsupportedError

compat.register()


def test_the_name_is_a_full_member_once() -> None:
    compat.register()
    member = OptimizerNames("offload_adam")
    assert member == "offload_adam" and member.value == "offload_adam" and isinstance(member, OptimizerNames)
    assert member.name == "OFFLOAD_ADAM" and OptimizerNames["OFFLOAD_ADAM"] is member
    assert OptimizerNames.OFFLOAD_ADAM is member  # type: ignore[attr-defined]
    assert member in OptimizerNames and "offload_adam" in [str(o.value) for o in OptimizerNames]
    assert list(OptimizerNames).count(member) == 1 and len(OptimizerNames) == len(list(OptimizerNames))
    assert hash(member) == hash("offload_adam") and member in _OPTIMIZER_HANDLERS
    with pytest.raises(ValueError, match="offload_adam"):
        OptimizerNames("offload_adan")


@pytest.mark.parametrize("parser", ["transformers", "trl"])
def test_command_lines_and_dicts_parse(parser: str, tmp_path: Any) -> None:
    if parser == "trl":
        trl = pytest.importorskip("trl")
        made = trl.TrlParser(trl.SFTConfig)
    else:
        made = HfArgumentParser(TrainingArguments)
    line = ["--output_dir", str(tmp_path), "--optim", "offload_adam", "--use_cpu", "--optim_args", "threads=1"]
    (args,) = made.parse_args_into_dataclasses(line)
    assert args.optim == OptimizerNames("offload_adam") and args.optim_args == "threads=1"
    (args,) = made.parse_dict({"output_dir": str(tmp_path), "optim": "offload_adam", "use_cpu": True})
    assert args.optim == "offload_adam"
    with pytest.raises(SystemExit):
        made.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "offload_adan"])


def test_arguments_are_copied_and_written_as_ever(lab: Any) -> None:
    args = lab.args()
    for again in (copy.deepcopy(args), dataclasses.replace(args), args.set_optimizer("offload_adam")):
        assert again.optim == "offload_adam" and compat.asked(again)
    assert json.loads(args.to_json_string())["optim"] == "offload_adam"


def test_saved_arguments_are_plain(lab: Any) -> None:
    buffer = io.BytesIO()
    torch.save(lab.args(), buffer)
    assert b"hf_offload" not in buffer.getvalue()
    assert type(pickle.loads(pickle.dumps(OptimizerNames("offload_adam")))) is str


@pytest.mark.slow
def test_saved_arguments_load_without_hf_offload(lab: Any, tmp_path: Any, python: Any) -> None:
    buffer = io.BytesIO()
    torch.save(lab.args(), buffer)
    (tmp_path / "training_args.bin").write_bytes(buffer.getvalue())
    code = """
import sys
sys.modules["hf_offload"] = None  # as if it were not installed
import torch
args = torch.load("training_args.bin", weights_only=False)
print(args.optim)
"""
    assert python(code=code, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).stdout.strip() == "offload_adam"


def test_the_handler_gives_a_class_that_keeps_the_trainers_groups(lab: Any) -> None:
    trainer = lab.trainer(weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-7, optim_args="threads=1,lr=0.5")
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    assert issubclass(kind, OffloadAdam)
    assert not {"model", "params", "optimizer_dict"} & set(kwargs)  # Trainer would take these for the groups
    trainer.create_optimizer()
    assert type(trainer.optimizer) is kind
    decayed, plain = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.9, 0.95) and decayed["eps"] == 1e-7 and decayed["lr"] == 0.5
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    assert {names[id(p)] for p in plain["params"]} == {n for n in names.values() if "norm" in n}
    assert trainer.optimizer.config.threads == 1
    assert Trainer.get_optimizer_cls_and_kwargs(trainer.args)[0] is kind  # as some callers do, without a model


@pytest.mark.parametrize(
    ("text", "word"),
    [("overlapped", "without a name and '='"), ("shedule=auto", "Did you mean 'schedule'"), ("threads=0", "below 1")],
)
def test_bad_optim_args_are_refused_before_anything_is_built(lab: Any, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        lab.trainer(optim_args=text)
    with pytest.raises(ConfigError, match=word):
        Trainer.get_optimizer_cls_and_kwargs(lab.args(optim_args=text))


def test_other_optimizers_keep_transformers_own_parser(lab: Any) -> None:
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(lab.args(optim="sgd", optim_args="momentum=0.9"))
    assert kind is torch.optim.SGD
    with pytest.raises(ValueError, match="not enough values") as refused:
        Trainer.get_optimizer_cls_and_kwargs(lab.args(optim="sgd", optim_args="momentum"))
    assert not isinstance(refused.value, ConfigError)


def test_a_frozen_model_is_refused(lab: Any) -> None:
    model = lab.model()
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter of the model is frozen"):
        lab.trainer(model).create_optimizer()


def test_what_has_moved_is_told_once_and_clearly(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_misfits", [])

    elsewhere: Any = ModuleType("transformers.trainer")
    elsewhere._OPTIMIZER_HANDLERS = {}
    elsewhere.Trainer = type("Trainer", (), {"__module__": "transformers.trainer"})
    with pytest.raises(UnsupportedError, match=r"create_accelerator_and_postprocess.*not there.*pip install"):
        compat.adapt(elsewhere)
    with pytest.raises(UnsupportedError, match="create_accelerator_and_postprocess"):
        compat.register()
    with pytest.raises(UnsupportedError, match="create_accelerator_and_postprocess"):
        lab.trainer()
    lab.trainer(optim="adamw_torch")  # nobody else is bothered


def test_any_other_surprise_is_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_misfits", [])
    with pytest.raises(UnsupportedError, match=r"transformers='.*'.*training_args.*AttributeError.*pip install"):
        compat.adapt(ModuleType("transformers.training_args"))


def test_transformers_before_the_registry_is_told_to_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_misfits", [])
    with pytest.raises(UnsupportedError, match=r"transformers='.*'.*came with 5\.8.*pip install -U"):
        compat.adapt(ModuleType("transformers.trainer"))


def test_a_reader_that_has_moved_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("trl.generation.vllm_generation")
    compat._adapt_readers(module)
    module.VLLMGeneration = type("VLLMGeneration", (), {"__module__": module.__name__})
    compat._adapt_readers(module)
    assert caplog.text.count("synchronize() the optimizer before VLLMGeneration.sync_weights") == 2


def test_nothing_of_transformers_changes_where_it_is_not_asked_for(lab: Any) -> None:
    trainer = lab.trainer(optim="adamw_torch", bf16=True)
    trainer.train()
    assert compat.offload_of(trainer.optimizer) is None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
