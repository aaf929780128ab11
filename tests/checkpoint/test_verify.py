"""`verify` names what is damaged, and says what it could not check; `inspect` tells what is there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_offload.checkpoint import convert, inspect, manifest, verify, weights
from hf_offload.errors import CheckpointError

DATA = Path(__file__).parent / "data"
DEEPSPEED = DATA / "zero1_fp32_grads"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint of OffloadAdam with a manifest, and a whole one beside it."""
    convert.convert(DEEPSPEED, "offload_adam", tmp_path / "checkpoint-3")
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-2")
    return tmp_path / "checkpoint-3"


def without_manifest(folder: Path) -> Path:
    (folder / manifest.NAME).unlink()
    return folder


def resaved(folder: Path, change: Callable[[Any], None], keep_manifest: bool = False) -> None:
    """optimizer.pt changed as a program would, with a manifest that fits or without one."""
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    change(saved)
    torch.save(saved, folder / "optimizer.pt")
    written = manifest.read(folder)
    assert written is not None
    without_manifest(folder)
    if keep_manifest:
        manifest.write(folder, {}, written.optimizer)


# ---- verify


def test_a_whole_checkpoint_is_whole_and_its_bytes_are_told(ours: Path) -> None:
    told: list[int] = []
    verdict = verify.verify(ours, told.append)
    assert verdict.whole and not verdict.notes and not verdict.siblings
    assert sum(told) == verify.bytes_to_read(ours) - (ours / manifest.NAME).stat().st_size
    assert "that every master rounds to its weight" in verdict.checked
    assert json.loads(json.dumps(verdict.as_json()))["whole"] is True


def spoiled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_damaged_file_is_named_and_a_whole_checkpoint_beside_it(ours: Path) -> None:
    spoiled(ours / "model.safetensors")
    os.truncate(ours / "optimizer.pt", 1000)
    (ours / "scheduler.pt").unlink()
    verdict = verify.verify(ours)
    found = {damage.file: damage.what for damage in verdict.damages}
    assert found.keys() == {"model.safetensors", "optimizer.pt", "scheduler.pt"}
    assert "SHA-256" in found["model.safetensors"] and "1000 bytes instead" in found["optimizer.pt"]
    assert found["scheduler.pt"] == "is missing" and verdict.siblings == ["checkpoint-2"]


def test_without_a_manifest_it_says_that_it_could_check_less(ours: Path) -> None:
    verdict = verify.verify(without_manifest(ours))
    assert verdict.whole and any("no manifest" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("optimizer.pt", lambda p: os.truncate(p, p.stat().st_size // 2)),
        ("scheduler.pt", lambda p: p.write_bytes(b"")),
        ("model.safetensors", lambda p: os.truncate(p, p.stat().st_size - 1)),
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes() + b"x")),
        ("trainer_state.json", lambda p: os.truncate(p, 40)),
        ("config.json", lambda p: p.write_text("[]")),
    ],
)
def test_without_a_manifest_files_that_contradict_themselves_are_named(ours: Path, name: str, spoil: Any) -> None:
    spoil(without_manifest(ours) / name)
    assert [damage.file for damage in verify.verify(ours).damages] == [name]


def test_a_missing_shard_is_named(ours: Path) -> None:
    without_manifest(ours)
    (ours / "model.safetensors").rename(ours / "model-00001-of-00002.safetensors")
    names = dict.fromkeys(load_file(ours / "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors")
    (ours / weights.INDEX).write_text(json.dumps({"weight_map": names | {"x": "model-00002-of-00002.safetensors"}}))
    assert [damage.file for damage in verify.verify(ours).damages] == ["model-00002-of-00002.safetensors"]


def test_masters_that_do_not_round_to_their_weights_are_counted(ours: Path) -> None:
    changed = load_file(ours / "model.safetensors")
    changed["model.norm.weight"][:4] += 1
    save_file(changed, ours / "model.safetensors", {"format": "pt"})
    written = manifest.read(ours)
    assert written is not None
    without_manifest(ours)
    manifest.write(ours, {}, written.optimizer)
    verdict = verify.verify(ours)
    assert verdict.whole and any(note.startswith("4 masters in 1 parameters do not round") for note in verdict.notes)


def test_values_that_are_not_finite_and_impossible_ones_are_counted(ours: Path) -> None:
    def change(saved: Any) -> None:
        saved["state"][1]["exp_avg"].view(-1)[:3] = float("nan")
        saved["state"][2]["exp_avg_sq"].view(-1)[:2] = -1

    resaved(ours, change)
    notes = " ".join(verify.verify(ours).notes)
    assert "3 values of exp_avg are not finite" in notes and "2 values of exp_avg_sq are negative" in notes


def test_state_of_another_shape_than_the_manifest_says_is_damage(ours: Path) -> None:
    def change(saved: Any) -> None:
        saved["state"][1] = {k: t.reshape(-1) for k, t in saved["state"][1].items()} | {"step": torch.tensor(3.0)}

    resaved(ours, change, keep_manifest=True)
    (damage,) = verify.verify(ours).damages
    assert "other parameters than" in damage.what


def test_a_damaged_manifest_is_damage(ours: Path) -> None:
    text = (ours / manifest.NAME).read_text()
    (ours / manifest.NAME).write_text(text.replace("bfloat16", "float16", 1))
    assert [damage.file for damage in verify.verify(ours).damages] == [manifest.NAME]


def test_files_that_came_later_are_noted(ours: Path) -> None:
    (ours / "README.md").write_text("mine")
    verdict = verify.verify(ours)
    assert verdict.whole and any("README.md" in note for note in verdict.notes)


def test_deepspeeds_checkpoint_is_verified_as_far_as_it_goes() -> None:
    verdict = verify.verify(DEEPSPEED)
    assert verdict.whole and "that every master rounds to its weight" in verdict.checked


def test_a_state_without_names_is_compared_if_the_model_fits(ours: Path) -> None:
    from hf_offload.checkpoint_model import TransformersModel

    without_manifest(ours)
    assert any("no names" in note for note in verify.verify(ours).notes)
    verdict = verify.verify(ours, model=TransformersModel(ours))
    assert "that every master rounds to its weight" in verdict.checked


def test_no_checkpoint_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No checkpoint"):
        verify.verify(tmp_path)
    with pytest.raises(FileNotFoundError, match="No such folder"):
        verify.verify(tmp_path / "x")


# ---- inspect


def test_contents_of_ours(ours: Path) -> None:
    found = inspect.contents(ours)
    assert (found.kind, found.weights, found.weight_tensors) == ("OffloadAdam", {"BF16": 1540}, 12)
    assert found.written_by is not None and found.trainer["global_step"] == 3
    assert found.files == {p.name: p.stat().st_size for p in ours.iterdir()}
    state = found.optimizer
    assert state is not None and state.steps == (3, 3) and state.without_state == 0
    assert [(g.tensors, g.elements, g.settings["weight_decay"]) for g in state.groups] == [(8, 1180, 0.1), (3, 30, 0.0)]
    assert state.dtypes == {name: {"float32": 11} for name in ("exp_avg", "exp_avg_sq", "master")}
    json.dumps(found.as_json())


def test_kinds(ours: Path) -> None:
    assert inspect.contents(DEEPSPEED).kind == "DeepSpeed ZeRO-1"
    convert.convert(ours, "adamw", ours.parent / "plain")
    assert inspect.contents(ours.parent / "plain").kind == "AdamW"
    torch.save({"scale": 512.0, "_growth_tracker": 3}, ours / "scaler.pt")
    assert inspect.contents(ours).scaler == {"scale": 512.0, "_growth_tracker": 3}
    torch.save({"state": {0: {"momentum_buffer": None}}, "param_groups": [{"params": [0]}]}, ours / "optimizer.pt")
    assert inspect.contents(ours).kind == "another optimizer"
    (ours / "optimizer.pt").unlink()
    assert inspect.contents(ours).kind == "weights only"


def test_accelerates_name_of_the_file_is_known(ours: Path) -> None:
    without_manifest(ours)
    (ours / "optimizer.pt").rename(ours / "optimizer.bin")
    assert inspect.contents(ours).kind == "OffloadAdam"
    assert "that the state is finite" in verify.verify(ours).checked
    convert.convert(ours, "adamw", ours.parent / "plain", False)
    assert (ours.parent / "plain" / "optimizer.bin").is_file() and not (ours.parent / "plain" / "optimizer.pt").exists()
    os.truncate(ours / "optimizer.bin", 3000)
    assert [damage.file for damage in verify.verify(ours).damages] == ["optimizer.bin"]


# ---- safetensors


def test_weights_are_read_as_safetensors_reads_them_and_written_so_that_it_can(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 4).to(torch.bfloat16), "f": torch.randn(5), "empty": torch.zeros(0, 3),
        "h": torch.ones(1).half(), "scalar": torch.tensor(3.0), "i": torch.arange(3),
        "bool": torch.tensor([True, False]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    read = {name: weight.read() for name, weight in weights.header(tmp_path / "a.safetensors").items()}
    rows = {name: (t.dtype, tuple(t.shape), lambda t=t: t) for name, t in read.items()}
    weights.write(tmp_path / "b.safetensors", rows)
    again = load_file(tmp_path / "b.safetensors")
    for found in (read, again):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in read.values()), "torch.save writes whole storages"


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    value = torch.randn(4)
    header = b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}} '  # 56 bytes, and one more to shift it
    path = tmp_path / "x.safetensors"
    path.write_bytes((len(header) + 1).to_bytes(8, "little") + header + b" " + value.numpy().tobytes())
    read = weights.header(path)["x"].read()
    assert torch.equal(read, value) and read.data_ptr() % 4 == 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_safetensors_give_our_error_or_the_same_tensors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "model.safetensors"
    whole = (DEEPSPEED / "model.safetensors").read_bytes()
    shapes = {name: weight.shape for name, weight in weights.header(DEEPSPEED / "model.safetensors").items()}
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(60):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(header if rng.random() < 0.9 else len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found = weights.header(path)
            for weight in found.values():
                weight.read()
        except CheckpointError:
            continue
        assert sum(w.numel for w in found.values()) == sum(torch.Size(s).numel() for s in shapes.values())


@pytest.mark.parametrize(
    "weight_map", [{"a": "../secret"}, {"a": "/etc/passwd"}, {"a": ".."}, {}, [], {"a": 3}, {"a": None}]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        weights.files(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_anywhere_give_a_verdict(ours: Path, seed: int) -> None:
    """Whatever the bytes: `verify` answers, `inspect` and `convert` answer or raise our error."""
    rng = random.Random(seed)
    if seed % 2:
        without_manifest(ours)
    files = sorted(p for p in ours.iterdir() if p.is_file())
    for n in range(8):
        path = rng.choice(files)
        whole = path.read_bytes()
        data = bytearray(whole)
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randint(1, 40)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        verdict = verify.verify(ours)
        assert verdict.whole is False or seed % 2 == 1 or bytes(data) == whole
        for act in (inspect.contents, lambda f, n=n: convert.convert(f, "adamw", f.parent / f"new{n}")):
            with contextlib.suppress(CheckpointError):
                act(ours)
        path.write_bytes(whole)
    assert not list(ours.parent.glob(".hf_offload*"))


def with_another_pickle(data: bytes, rng: random.Random) -> bytes:
    """A torch file whose pickle has other instructions, and CRC-32s that fit."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.infolist():
            content = bytearray(old.read(record))
            for _ in range(rng.randint(1, 6) if record.filename.endswith("data.pkl") else 0):
                at = rng.randrange(len(content))
                if rng.random() < 0.3:
                    del content[at : at + rng.randint(1, 4)]
                else:
                    content[at] = rng.choice((content[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
            new.writestr(record.filename, bytes(content))
    return out.getvalue()


@pytest.mark.parametrize("seed", range(6))
def test_pickles_with_other_instructions_give_an_answer_or_our_error(ours: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = without_manifest(ours) if seed % 2 else Path(shutil.copytree(DEEPSPEED, tmp_path / "deepspeed"))
    files = sorted(folder.rglob("*.pt"))
    for n in range(10):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(with_another_pickle(whole, rng))
        verify.verify(folder)
        for act in (inspect.contents, lambda f, n=n: convert.convert(f, "adamw", tmp_path / f"new{n}")):
            with contextlib.suppress(CheckpointError):
                act(folder)
        path.write_bytes(whole)
