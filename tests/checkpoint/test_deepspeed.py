"""DeepSpeed's ZeRO-1/2 checkpoints are read as DeepSpeed itself reads them, and nothing in their files is executed."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
import shutil
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_offload.checkpoint import deepspeed
from hf_offload.errors import CheckpointError

DATA = Path(__file__).parent / "data"
REAL = ["zero1_fp32_grads", "zero2_round_robin"]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return copy


@contextmanager
def named_as_deepspeeds() -> Iterator[Any]:
    """Classes that pickle under DeepSpeed's names, to write changed files: (fragment_address, LossScaler, stage)."""

    class Fragment:
        def __init__(self, numel: Any, start: Any) -> None:
            self.numel, self.start = numel, start

    class Scaler:
        def __init__(self) -> None:
            self.cur_scale, self.dynamic = 1024.0, True

    modules = {
        "deepspeed.utils.tensor_fragment": {"fragment_address": Fragment},
        "deepspeed.runtime.fp16.loss_scaler": {"DynamicLossScaler": Scaler},
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, classes in modules.items():
            parts = module.split(".")
            for end in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            made = types.ModuleType(module)
            for name, cls in classes.items():
                cls.__module__, cls.__qualname__ = module, name
                setattr(made, name, cls)
            patch.setitem(sys.modules, module, made)
        yield Fragment, Scaler


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """Load a file of DeepSpeed's, change it, and save it again under DeepSpeed's names."""
    with torch.serialization.safe_globals(deepspeed.STUBS):
        whole = torch.load(path, weights_only=True)
    with named_as_deepspeeds() as (fragment, scaler):
        state = whole.get("optimizer_state_dict", {})
        for mapping in state.get("param_slice_mappings", []):
            for name, place in mapping.items():
                mapping[name] = fragment(place.numel, place.start)
        if "loss_scaler" in state:
            state["loss_scaler"] = scaler()
        change(whole)
        torch.save(whole, path)


def optimizer_files(folder: Path) -> list[Path]:
    return sorted((folder / "global_step3").glob("*_optim_states.pt"))


@pytest.mark.parametrize("name", REAL)
def test_a_real_checkpoint_is_read_as_deepspeed_reads_it(name: str) -> None:
    found = deepspeed.read(DATA / name)
    expected = load_file(DATA / f"{name}.expected.safetensors")
    read = {
        f"{p.name}:{what}": p.entry[what] for p in found.state.parameters() for what in ("master", *deepspeed.MOMENTS)
    }
    assert read.keys() == expected.keys()
    for key, value in expected.items():
        if name == REAL[0]:
            assert torch.equal(read[key], value)
        else:  # of the same training in another layout: vector code rounds some values otherwise
            torch.testing.assert_close(read[key], value, rtol=1e-6, atol=1e-9)
    assert {float(p.entry["step"]) for p in found.state.parameters()} == {3.0}
    assert (found.stage, found.ranks, found.global_step) == (int(name[4]), 2 if name == REAL[0] else 3, 3)
    assert found.version == "0.19.8" and found.shared == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("name", REAL)
def test_the_groups_are_the_trainers_in_its_order(name: str) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    model = LlamaForCausalLM(AutoConfig.from_pretrained(DATA / name))
    names = [n for n, _ in model.named_parameters()]
    decayed = [n for n in names if "norm" not in n]
    groups = deepspeed.read(DATA / name).state.groups
    assert [[p.name for p in group.parameters] for group in groups] == [decayed, [n for n in names if "norm" in n]]
    assert [group.settings["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(group.settings["betas"] == (0.9, 0.999) and group.settings["lr"] > 0 for group in groups)


@pytest.mark.parametrize("name", REAL)
def test_masters_round_to_the_saved_weights(name: str) -> None:
    found, weights = deepspeed.read(DATA / name), load_file(DATA / name / "model.safetensors")
    for p in found.state.parameters():
        assert p.name is not None
        assert torch.equal(p.entry["master"].to(torch.bfloat16), weights[p.name])
        assert torch.equal(found.weights[p.name], weights[p.name])


def test_moments_in_16_bit_are_widened_and_that_is_said(copied: Any) -> None:
    folder = copied(REAL[0])

    def narrow(whole: Any) -> None:
        for entry in whole["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry["exp_avg"] = entry["exp_avg"].to(torch.bfloat16)

    for path in optimizer_files(folder):
        rewritten(path, narrow)
    found, before = deepspeed.read(folder), deepspeed.read(DATA / REAL[0])
    assert found.said == ("exp_avg was bfloat16 and is float32 now (exact)",)
    for p, q in zip(found.state.parameters(), before.state.parameters()):
        assert p.entry["exp_avg"].dtype == torch.float32
        assert torch.equal(p.entry["exp_avg"], q.entry["exp_avg"].to(torch.bfloat16).float())


def test_tensors_saved_on_a_gpu_are_read_without_one(copied: Any) -> None:
    folder = copied(REAL[1])
    for path in (folder / "global_step3").iterdir():
        data = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(data, "w") as new:
            for record in old.infolist():
                pickled = old.read(record)
                if record.filename.endswith("data.pkl"):
                    moved = pickled.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
                    assert moved != pickled
                    pickled = moved
                new.writestr(record.filename, pickled)
        path.write_bytes(data.getvalue())
    for p, q in zip(deepspeed.read(folder).state.parameters(), deepspeed.read(DATA / REAL[1]).state.parameters()):
        assert p.name == q.name and all(torch.equal(p.entry[what], t) for what, t in q.entry.items())


def test_fp16s_loss_scale_and_a_step_kept_in_the_group_are_read(copied: Any) -> None:
    folder = copied(REAL[1])

    def older(whole: Any) -> None:
        base = whole["optimizer_state_dict"]["base_optimizer_state"]
        for group, entry in zip(base["param_groups"], base["state"].values()):
            group["step"] = int(entry.pop("step"))

    for path in optimizer_files(folder):
        rewritten(path, older)
    rewritten(folder / "global_step3" / deepspeed.MODEL_FILE, lambda w: w["ds_config"].update(fp16={"enabled": True}))
    found = deepspeed.read(folder)
    assert found.loss_scale == 1024.0
    assert {float(p.entry["step"]) for p in found.state.parameters()} == {3.0}
    assert all("step" not in group.settings for group in found.state.groups)


@pytest.mark.parametrize(
    ("config", "decoupled"),
    [
        ({"type": "AdamW", "params": {}}, True),
        ({"type": "Adam", "params": {}}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
    ],
)
def test_the_kind_of_decay_of_deepspeeds_own_adams_is_read_from_its_configuration(
    copied: Any, config: dict[str, Any], decoupled: bool
) -> None:
    folder = copied(REAL[0])

    def fused(whole: Any) -> None:
        for group in whole["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            del group["decoupled_weight_decay"]
            group["bias_correction"] = True

    for path in optimizer_files(folder):
        rewritten(path, fused)
    rewritten(folder / "global_step3" / deepspeed.MODEL_FILE, lambda w: w["ds_config"].update(optimizer=config))
    for group in deepspeed.read(folder).state.groups:
        assert group.settings["decoupled_weight_decay"] is decoupled and "bias_correction" not in group.settings


# ---- what cannot be read is refused, with the file and a remedy


def edit(key: str, value: Any) -> Callable[[Any], None]:
    return lambda whole: whole["optimizer_state_dict"].update({key: value})


def moved_fragment(whole: Any) -> None:
    place = next(iter(whole["optimizer_state_dict"]["param_slice_mappings"][0].values()))
    place.start += 1


def longer_fragment(whole: Any) -> None:
    place = list(whole["optimizer_state_dict"]["param_slice_mappings"][0].values())[-1]
    place.numel += 10**6


def swapped_names(whole: Any) -> None:
    mapping = whole["optimizer_state_dict"]["param_slice_mappings"][0]
    whole["optimizer_state_dict"]["param_slice_mappings"][0] = OrderedDict(reversed(mapping.items()))


def lions(whole: Any) -> None:
    for entry in whole["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        del entry["exp_avg_sq"]


def uncorrected(whole: Any) -> None:
    for group in whole["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["bias_correction"] = False


def another_step(whole: Any) -> None:
    for entry in whole["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        entry["step"] = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit("zero_stage", 3), "ZeRO stage 3"),
        (edit("partition_count", [4, 4]), "saved by 4 ranks, and the files of 2 are here"),
        (edit("partition_count", [2, 1]), "expert parallel"),
        (edit("base_optimizer_state", [{}, {}]), "elastic_checkpoint"),
        (edit("param_slice_mappings", None), "param_slice_mappings is missing"),
        (edit("single_partition_of_fp32_groups", [torch.zeros(3)] * 2), "the ranks hold 3"),
        (edit("param_alignment_paddings", [[0], [0]]), "param_alignment_paddings"),
        (edit("param_alignment_paddings", [[8] + [0] * 7, [0] * 3]), "is said to be at"),
        (moved_fragment, "is said to be at"),
        (longer_fragment, "is said to be at"),
        (swapped_names, "order of its parameters"),
        (lions, "not Adam's"),
        (another_step, "different steps"),
        (uncorrected, "bias_correction=false"),
    ],
)
def test_what_does_not_fit_is_refused(copied: Any, change: Callable[[Any], None], words: str) -> None:
    folder = copied(REAL[0])
    rewritten(optimizer_files(folder)[0], change)
    with pytest.raises(CheckpointError, match=words):
        deepspeed.read(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: optimizer_files(f)[0].unlink(), r"ranks \[0\] are missing"),
        (lambda f: optimizer_files(f)[-1].unlink(), "saved by 2 ranks, and the files of 1"),
        (lambda f: [p.unlink() for p in optimizer_files(f)], "no file"),
        (lambda f: (f / "global_step3" / deepspeed.MODEL_FILE).unlink(), "missing"),
        (lambda f: (f / "latest").write_text("../../etc"), "no folder beside it"),
        (lambda f: (f / "latest").write_text(".."), "no folder beside it"),
        (lambda f: (f / "latest").write_bytes(os.urandom(99)), "no folder beside it"),
        (lambda f: (f / "global_step3" / "mp_rank_01_model_states.pt").write_bytes(b""), "model, pipeline or expert"),
        (lambda f: (f / "global_step3" / "layer_00-model_states.pt").write_bytes(b""), "model, pipeline or expert"),
        (lambda f: (f / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b""), "stage 3"),
        (lambda f: (f / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b""), "rank 0"),
    ],
)
def test_missing_and_foreign_files_are_named(copied: Any, spoil: Callable[[Path], Any], words: str) -> None:
    folder = copied(REAL[0])
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        deepspeed.read(folder)


# ---- nothing is executed


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def evils(target: Path) -> dict[str, Any]:
    return {
        "os.system": Evil(os.system, f"touch {target}"),
        "builtins.eval": Evil(builtins.eval, f"open({str(target)!r}, 'w')"),
        "builtins.open": Evil(open, str(target), "w"),
        "a module": torch.nn.Linear(2, 2),
        "builtins.getattr": Evil(getattr, "", "join"),
    }


@pytest.mark.parametrize("what", list(evils(Path())))
@pytest.mark.parametrize("where", ["optimizer", "model"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    copied: Any, tmp_path: Path, what: str, where: str
) -> None:
    folder, target = copied(REAL[0]), tmp_path / "executed"
    evil = evils(target)[what]
    path = optimizer_files(folder)[0] if where == "optimizer" else folder / "global_step3" / deepspeed.MODEL_FILE
    rewritten(path, lambda whole: whole.update(evil=evil))
    with pytest.raises(CheckpointError, match=path.name):
        deepspeed.read(folder)
    assert not target.exists()


def test_that_pickle_would_have_run(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    pickle.loads(pickle.dumps(evils(target)["os.system"]))
    assert target.exists()


def test_a_stub_takes_nothing_but_what_it_stands_for(copied: Any) -> None:
    folder = copied(REAL[0])

    def numbers(whole: Any) -> None:
        next(iter(whole["optimizer_state_dict"]["param_slice_mappings"][0].values())).numel = "1"

    rewritten(optimizer_files(folder)[0], numbers)
    with pytest.raises(CheckpointError, match="not a pair of counts"):
        deepspeed.read(folder)


def test_deepspeeds_names_are_allowed_only_while_its_files_are_read() -> None:
    deepspeed.read(DATA / REAL[0])
    assert not any(isinstance(allowed, tuple) for allowed in torch.serialization.get_safe_globals())
    with pytest.raises(pickle.UnpicklingError, match=r"deepspeed\."):
        torch.load(optimizer_files(DATA / REAL[0])[0], weights_only=True)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One of: cut short, some bits flipped, a stretch of other bytes, nothing but other bytes."""
    way = rng.randrange(4)
    if way == 0:
        return data[: rng.randrange(len(data))]
    if way == 1:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    length = rng.randint(1, 300)
    if way == 2:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(length) + data[at + length :]
    return rng.randbytes(length)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_give_our_error_or_the_same_shapes(copied: Any, seed: int) -> None:
    """A flip inside a tensor's bytes cannot be seen here (`verify` compares the CRC-32); all else is refused."""
    folder, rng = copied(REAL[seed % 2]), random.Random(seed)
    shapes = [(p.name, p.shape) for p in deepspeed.read(folder).state.parameters()]
    files = [*optimizer_files(folder), folder / "global_step3" / deepspeed.MODEL_FILE, folder / "latest"]
    refused = 0
    for _ in range(12):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(damaged(whole, rng))
        try:
            found = deepspeed.read(folder)
            assert [(p.name, p.shape) for p in found.state.parameters()] == shapes
        except CheckpointError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 3
