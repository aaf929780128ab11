"""Conversion: the state is carried over bit for bit, the source is only read, what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_offload.checkpoint import adam_state, convert, deepspeed, inspect, manifest, torch_file, verify, weights
from hf_offload.checkpoint.names import UNKNOWN
from hf_offload.errors import CheckpointError, ConfigError

DATA = Path(__file__).parent / "data"
REAL = ["zero1_fp32_grads", "zero2_round_robin"]
NAMES = [["a.weight", "b.weight"], ["norm.weight"]]
SHAPES = {"a.weight": (3, 5), "b.weight": (7,), "norm.weight": (2, 2)}


class Known:
    """A `Model` with the names above."""

    def groups(self) -> Any:
        return NAMES

    def split(self, names: Iterable[str]) -> Any:
        names = list(names)
        return [[n for n in names if "norm" not in n], [n for n in names if "norm" in n]]


def checkpoint(folder: Path, masters: bool, dtype: torch.dtype, named: bool = False, seed: int = 0) -> Path:
    """A small checkpoint as the Trainer writes them, of AdamW or, with `masters`, of OffloadAdam."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file({name: t.to(dtype) for name, t in full.items()}, folder / "model.safetensors", {"format": "pt"})
    state, groups, number = {}, [], 0
    for of_group, decay in zip(NAMES, (0.1, 0.0)):
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, "decoupled_weight_decay": True,
                 "initial_lr": 2e-3, "params": []}  # fmt: skip
        if named:
            group["param_names"] = list(of_group)
        for name in of_group:
            entry = {"step": torch.tensor(7.0)} | {
                moment: torch.rand(SHAPES[name], generator=generator) for moment in adam_state.MOMENTS
            }
            state[number] = entry | ({"master": full[name]} if masters else {})
            group["params"].append(number)
            number += 1
        groups.append(group)
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    torch.save({"last_epoch": 7}, folder / "scheduler.pt")
    (folder / "config.json").write_text(json.dumps({"dtype": str(dtype).removeprefix("torch."), "x": 1}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.5}))
    (folder / "more").mkdir()
    (folder / "more" / "file.txt").write_text("kept")
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def state_of(folder: Path) -> Any:
    return torch.load(folder / "optimizer.pt", weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Equal structure, bits and dtypes."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# ---- there and back


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_to_offload_adam_and_back_is_bit_equal(tmp_path: Path, dtype: torch.dtype, named: bool) -> None:
    start = checkpoint(tmp_path / "start", False, dtype, named)
    before = bytes_of(start)
    there = convert.convert(start, "offload_adam", tmp_path / "there", model=Known())
    masters = {name: entry["master"] for name, entry in zip(SHAPES, state_of(tmp_path / "there")["state"].values())}
    assert same(masters, {name: t.float() for name, t in weights_of(start).items()})
    assert (there.kind, there.to) == ("AdamW", "offload_adam")
    back = convert.convert(tmp_path / "there", "adamw", tmp_path / "back", fp32_weights=False)
    assert (back.kind, back.to) == ("OffloadAdam", "adamw")
    assert same(state_of(tmp_path / "back")["state"], state_of(start)["state"])
    for new, old in zip(state_of(tmp_path / "back")["param_groups"], state_of(start)["param_groups"]):
        assert same({key: new[key] for key in old}, old)
    assert same(weights_of(tmp_path / "back"), weights_of(start))
    assert bytes_of(start) == before, "the source is only read"
    rest = {"scheduler.pt", "config.json", "trainer_state.json", "more/file.txt", "model.safetensors"}
    for folder in ("there", "back"):
        written = bytes_of(tmp_path / folder)
        assert {name: written[name] for name in rest} == {name: before[name] for name in rest}
        assert verify.verify(tmp_path / folder).whole
        assert not list(tmp_path.glob(".hf_offload*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_become_the_weights_of_a_plain_adamw(tmp_path: Path, dtype: torch.dtype) -> None:
    start = checkpoint(tmp_path / "start", True, dtype)
    done = convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    masters = dict(zip(SHAPES, (entry["master"] for entry in state_of(start)["state"].values())))
    assert same(weights_of(tmp_path / "plain"), masters)
    assert all("master" not in entry for entry in state_of(tmp_path / "plain")["state"].values())
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"dtype": "float32", "x": 1}
    assert any("in float32 before you resume" in said for said in done.said)
    written = manifest.read(tmp_path / "plain")
    assert written is not None and written.optimizer is not None
    rows = [row for group in written.optimizer["groups"] for row in group["parameters"]]
    assert [(row["name"], row["dtype"]) for row in rows] == [(name, "float32") for name in SHAPES]
    # and back: the fp32 weights are the masters again
    convert.convert(tmp_path / "plain", "offload_adam", tmp_path / "back")
    assert same(state_of(tmp_path / "back")["state"], state_of(start)["state"])


def test_weights_that_were_changed_after_training_are_kept(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    changed = weights_of(start)
    changed["b.weight"][2] = 42.0
    save_file(changed, start / "model.safetensors", {"format": "pt"})
    done = convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    expected = dict(zip(SHAPES, (entry["master"].clone() for entry in state_of(start)["state"].values())))
    expected["b.weight"][2] = 42.0
    assert same(weights_of(tmp_path / "plain"), expected)
    assert any(said.startswith("1 masters did not round") for said in done.said)


def test_a_tied_weight_that_is_in_the_file_twice_becomes_the_master_twice(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    doubled = weights_of(start)
    doubled |= {"head.weight": doubled["a.weight"].clone(), "frozen": torch.ones(3, 5, dtype=torch.bfloat16)}
    save_file(doubled, start / "model.safetensors", {"format": "pt"})
    convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    found = weights_of(tmp_path / "plain")
    assert found["head.weight"].dtype == torch.float32 and torch.equal(found["head.weight"], found["a.weight"])
    assert found["frozen"].dtype == torch.bfloat16


def test_an_adapters_weights_are_found_under_pefts_names(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    short = {"a.weight": "x.lora_A.weight", "b.weight": "x.lora_B.weight", "norm.weight": "head.weight"}
    save_file({short[name]: t for name, t in weights_of(start).items()}, start / weights.ADAPTER, {"format": "pt"})
    (start / "model.safetensors").unlink()
    long = [["x.lora_A.default.weight", "x.lora_B.default.weight"], ["head.modules_to_save.default.weight"]]

    class Adapter(Known):
        def groups(self) -> Any:
            return long

    convert.convert(start, "adamw", tmp_path / "plain", model=Adapter())
    masters = [entry["master"] for entry in state_of(start)["state"].values()]
    assert same(load_file(tmp_path / "plain" / weights.ADAPTER), dict(zip(short.values(), masters)))


def test_masters_without_weights_are_not_dropped_unasked(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16, named=True)
    (start / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="--no-fp32-weights"):
        convert.convert(start, "adamw", tmp_path / "plain")
    convert.convert(start, "adamw", tmp_path / "plain", False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux which memory is a file's")
@pytest.mark.parametrize(("masters", "to"), [(True, "adamw"), (False, "offload_adam")])
def test_what_is_written_is_the_mapped_source_and_no_copy(
    tmp_path: Path, monkeypatch: Any, masters: bool, to: str
) -> None:
    start = checkpoint(tmp_path / "start", masters, torch.float32)
    original, seen = torch_file.write, []

    def write(obj: Any, path: Any) -> Any:
        files = mapped_files()
        for entry in obj["state"].values():
            seen.extend(files(t.data_ptr()) for name, t in entry.items() if name != "step")
        return original(obj, path)

    monkeypatch.setattr(torch_file, "write", write)
    convert.convert(start, to, tmp_path / "new", model=Known())
    names = [Path(name).name for name in seen]
    assert names.count("optimizer.pt") == 6 and names.count("model.safetensors") == (0 if masters else 3)


def mapped_files() -> Callable[[int], str]:
    """Tells which file is mapped at an address; "" for memory of the process's own."""
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(*(int(end, 16) for end in row[0].split("-")), row[5] if len(row) > 5 else "") for row in rows]
    return lambda address: next((name for low, high, name in ranges if low <= address < high), "")


def test_sharded_weights_stay_sharded(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    whole = weights_of(start)
    files = {name: f"model-0000{i + 1}-of-00003.safetensors" for i, name in enumerate(SHAPES)}
    for name, file in files.items():
        save_file({name: whole[name]}, start / file, {"format": "pt"})
    (start / "model.safetensors").unlink()
    (start / weights.INDEX).write_text(json.dumps({"metadata": {"total_size": 52}, "weight_map": files}))
    convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    for name, file in files.items():
        assert load_file(tmp_path / "plain" / file)[name].dtype == torch.float32
    assert json.loads((tmp_path / "plain" / weights.INDEX).read_text())["metadata"]["total_size"] == 104


def test_without_names_masters_come_when_it_is_loaded_and_fp32_weights_are_refused(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", False, torch.bfloat16)
    done = convert.convert(start, "offload_adam", tmp_path / "there", model=UNKNOWN)
    assert any("takes them from the weights" in said for said in done.said)
    assert same(state_of(tmp_path / "there")["state"], state_of(start)["state"])
    other = checkpoint(tmp_path / "other", True, torch.bfloat16)
    with pytest.raises(CheckpointError, match="--no-fp32-weights"):
        convert.convert(other, "adamw", tmp_path / "plain", model=UNKNOWN)
    assert not (tmp_path / "plain").exists()
    convert.convert(other, "adamw", tmp_path / "plain", False, UNKNOWN)
    assert same(weights_of(tmp_path / "plain"), weights_of(other))


def test_names_of_another_model_are_not_believed(tmp_path: Path) -> None:
    class Other(Known):
        def groups(self) -> Any:
            return [["b.weight", "a.weight"], ["norm.weight"]]

    start = checkpoint(tmp_path / "start", False, torch.float32)
    convert.convert(start, "offload_adam", tmp_path / "there", model=Other())
    assert all("master" not in entry for entry in state_of(tmp_path / "there")["state"].values())


def test_both_kinds_load_into_their_optimizers(tmp_path: Path) -> None:
    from hf_offload import OffloadAdam

    start = checkpoint(tmp_path / "start", False, torch.float32)
    convert.convert(start, "offload_adam", tmp_path / "there", model=Known())
    convert.convert(tmp_path / "there", "adamw", tmp_path / "back")
    params = [torch.nn.Parameter(t) for t in (weights_of(start)[name] for name in SHAPES)]
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    for kind, folder in ((OffloadAdam, "there"), (torch.optim.AdamW, "back")):
        optimizer = kind(groups)
        optimizer.load_state_dict(state_of(tmp_path / folder))
        for p, entry in zip(params, state_of(start)["state"].values()):
            assert (
                torch.equal(optimizer.state[p]["exp_avg"], entry["exp_avg"]) and float(optimizer.state[p]["step"]) == 7
            )
        assert optimizer.param_groups[1]["lr"] == 1e-3
        if isinstance(optimizer, OffloadAdam):
            optimizer.close()


# ---- DeepSpeed


@pytest.mark.parametrize("to", ["adamw", "offload_adam"])
@pytest.mark.parametrize("name", REAL)
def test_deepspeed_becomes_either_kind(tmp_path: Path, name: str, to: str) -> None:
    before = bytes_of(DATA / name)
    convert.convert(DATA / name, to, tmp_path / "new")
    assert bytes_of(DATA / name) == before
    found, read = state_of(tmp_path / "new"), deepspeed.read(DATA / name)
    assert [len(group["params"]) for group in found["param_groups"]] == [8, 3]
    for p, entry in zip(read.state.parameters(), found["state"].values()):
        kept = ("step", *adam_state.MOMENTS, *(["master"] if to == "offload_adam" else []))
        assert same(entry, {what: p.entry[what] for what in kept})
    files = set(bytes_of(tmp_path / "new"))
    assert files == {"config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "scheduler.pt",
                     "trainer_state.json", manifest.NAME}  # fmt: skip
    contents = inspect.contents(tmp_path / "new")
    assert contents.kind == ("AdamW" if to == "adamw" else "OffloadAdam")
    assert contents.weights == ({"F32": 1540} if to == "adamw" else {"BF16": 1540})
    verdict = verify.verify(tmp_path / "new")
    assert verdict.whole and not verdict.notes


def test_deepspeeds_weights_are_written_where_the_trainer_left_none(tmp_path: Path) -> None:
    source = Path(shutil.copytree(DATA / REAL[0], tmp_path / "source"))
    (source / "model.safetensors").unlink()
    done = convert.convert(source, "offload_adam", tmp_path / "new")
    expected = weights_of(DATA / REAL[0])
    del expected["lm_head.weight"]  # tied, as the Trainer leaves it out
    assert same(weights_of(tmp_path / "new"), expected)
    assert any("was missing" in said for said in done.said)


def test_the_folder_inside_is_enough(tmp_path: Path) -> None:
    convert.convert(DATA / REAL[0] / "global_step3", "offload_adam", tmp_path / "new")
    assert set(bytes_of(tmp_path / "new")) == {"model.safetensors", "optimizer.pt", "scheduler.pt", manifest.NAME}
    convert.convert(DATA / REAL[0], "offload_adam", tmp_path / "whole")
    assert same(state_of(tmp_path / "new"), state_of(tmp_path / "whole"))


def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if DeepSpeed had made the optimizer: a single param group."""
    original = deepspeed.read

    def read(folder: Path) -> Any:
        found = original(folder)
        groups = found.state.groups
        joined = adam_state.Group(groups[0].settings, groups[0].parameters + groups[1].parameters)
        object.__setattr__(found, "state", adam_state.AdamState((joined,)))
        return found

    monkeypatch.setattr(deepspeed, "read", read)


def test_deepspeeds_single_group_is_split_as_the_trainer_does(tmp_path: Path, monkeypatch: Any) -> None:
    one_group(monkeypatch)
    done = convert.convert(DATA / REAL[0], "offload_adam", tmp_path / "new", model=Known())
    groups = state_of(tmp_path / "new")["param_groups"]
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(8, 0.1), (3, 0.1)]
    assert any("8 + 3 parameters" in said for said in done.said)
    done = convert.convert(DATA / REAL[0], "offload_adam", tmp_path / "one")
    assert [len(group["params"]) for group in state_of(tmp_path / "one")["param_groups"]] == [11]
    assert any("it stays one" in said for said in done.said)


def test_masters_that_do_not_round_to_the_weights_mean_that_the_layout_is_not_understood(
    tmp_path: Path, monkeypatch: Any
) -> None:
    original = deepspeed.read

    def read(folder: Path) -> Any:
        found = original(folder)
        next(found.state.parameters()).entry["master"].mul_(2)
        return found

    monkeypatch.setattr(deepspeed, "read", read)
    with pytest.raises(CheckpointError, match="layout is not understood"):
        convert.convert(DATA / REAL[0], "offload_adam", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ---- refused


def edit(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        saved = state_of(folder)
        change(saved)
        torch.save(saved, folder / "optimizer.pt")

    return spoil


def flip(folder: Path) -> None:
    """One bit of a tensor; zip files have gaps as well, where a bit does not matter."""
    path = folder / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[data.find(state_of(folder)["state"][0]["exp_avg"].numpy().tobytes())] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "optimizer.pt").unlink(), "no optimizer state"),
        (lambda f: (f / "optimizer.pt").write_bytes(b""), "optimizer.pt"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 9), "model.safetensors"),
        (edit(lambda s: s["state"][0].pop("exp_avg_sq")), "not Adam's"),
        (edit(lambda s: s["state"][0].update(max_exp_avg_sq=torch.ones(1))), "AMSGrad"),
        (edit(lambda s: s["state"][0].update(exp_avg=torch.ones(2))), "differ in shape"),
        (edit(lambda s: s["state"][0].update(exp_avg=[1.0])), "no?t? a? ?plain tensor of floats"),
        (edit(lambda s: s["state"][0].update(step=-1)), "not a count"),
        (edit(lambda s: s["state"].update({99: s["state"][0]})), "no group has"),
        (edit(lambda s: s["param_groups"][0].pop("params")), "no list 'params'"),
        (lambda f: (f / "trainer_state.json").write_text("{"), r"trainer_state\.json"),
        (lambda f: (f / "scheduler.pt").write_bytes(b""), r"scheduler\.pt"),
        (flip, r"optimizer\.pt.*CRC-32"),
    ],
)
def test_a_damaged_source_is_refused_and_nothing_is_written(tmp_path: Path, spoil: Any, words: str) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    spoil(start)
    with pytest.raises(CheckpointError, match=words):
        convert.convert(start, "adamw", tmp_path / "new", model=Known())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["start"]


def test_a_source_that_its_manifest_does_not_fit_is_refused(tmp_path: Path) -> None:
    convert.convert(
        checkpoint(tmp_path / "start", False, torch.float32), "offload_adam", tmp_path / "there", model=Known()
    )
    path = tmp_path / "there" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has other bytes"):
        convert.convert(tmp_path / "there", "adamw", tmp_path / "back")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    with pytest.raises(ConfigError, match="Did you mean 'adamw'"):
        convert.convert(start, "adam", tmp_path / "new")
    with pytest.raises(ConfigError, match="is one already"):
        convert.convert(start, "offload_adam", tmp_path / "new")
    with pytest.raises(ConfigError, match="inside the checkpoint"):
        convert.convert(start, "adamw", start / "new")
    with pytest.raises(ConfigError, match="--fp32-weights"):
        convert.convert(DATA / REAL[0], "offload_adam", tmp_path / "new", True)
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError):
        convert.convert(start, "adamw", tmp_path / "taken")
    with pytest.raises(FileNotFoundError, match="No such folder"):
        convert.convert(tmp_path / "nowhere", "adamw", tmp_path / "new")
    assert not (tmp_path / "new").exists() and not list((tmp_path / "taken").iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    from hf_offload.checkpoint.digest import HashingFile

    def full(self: Any, part: Any) -> None:
        self.error = OSError(28, "No space left on device")

    start = checkpoint(tmp_path / "start", True, torch.bfloat16)
    monkeypatch.setattr(HashingFile, "_write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert.convert(start, "adamw", tmp_path / "new", model=Known())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["start"]
