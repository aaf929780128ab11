"""Checkpoints whose moments are held as bfloat16 or int8: read, inspected, verified, and converted through AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.checkpoint import adam_state, convert, held, inspect, manifest, scratch, verify
from hf_offload.engine import moments
from hf_offload.errors import CheckpointError

COMPACT = ("bfloat16", "int8")
SHAPES = {"conv.weight": (5, 4, 3, 3), "a.weight": (3, 5), "norm.weight": (257,), "scalar": (), "empty": (0, 3)}


class Bag(nn.Module):
    """Parameters of less than a block, of some blocks and a rest; one whose elements lie in another order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.values = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
        self.values["conv.weight"] = self.values["conv.weight"].to(memory_format=torch.channels_last)
        for name, t in self.values.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(t.clone(memory_format=torch.preserve_format)))

    def optimizer(self, state_dtype: str) -> OffloadAdam:
        params = list(self.parameters())
        groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
        return OffloadAdam(groups, lr=1e-2, config=OffloadConfig(state_dtype=state_dtype, threads=1))

    def step(self, optimizer: OffloadAdam, steps: int = 3) -> None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for p in self.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
        optimizer.synchronize()


class Known:
    """A `Model` with the names above."""

    def groups(self) -> Any:
        names = list(SHAPES)
        return [names[:2], names[2:]]

    def split(self, names: Any) -> Any:
        return None


def checkpoint(folder: Path, state_dtype: str) -> Path:
    """As the Trainer writes them."""
    folder.mkdir(parents=True)
    bag = Bag()
    with bag.optimizer(state_dtype) as optimizer:
        bag.step(optimizer)
        weights = {name: p.detach().contiguous() for name, p in zip(SHAPES, bag.parameters())}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


def entries(folder: Path) -> dict[int, dict[str, Any]]:
    return torch.load(folder / "optimizer.pt", weights_only=True)["state"]


def floats(entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.float() for name, t in moments.in_floats(entry).items()}


def test_names_and_numbers_are_the_engines() -> None:
    """They stand here again, since looking at a checkpoint is not to import the kernels."""
    from hf_offload.kernels.cpu import BLOCK_OF_STATE, codecs

    assert (held.MOMENTS, held.CODES, held.SCALES, held.INT8_NAMES) == (
        moments.MOMENTS, moments.CODES, moments.SCALES, moments.INT8_NAMES)  # fmt: skip
    assert (held.BLOCK, held.LEAST_SCALE, held.NOT_FINITE) == (
        BLOCK_OF_STATE, codecs.LEAST_SCALE, codecs.NOT_FINITE)  # fmt: skip


# ---- inspect, verify


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_it_is_read_and_inspect_says_how_it_is_held(tmp_path: Path, state_dtype: str) -> None:
    folder = checkpoint(tmp_path / "start", state_dtype)
    state = adam_state.read(folder / "optimizer.pt")
    assert [p.shape for p in state.parameters()] == list(SHAPES.values())
    assert (state.kind, state.state_dtype) == ("OffloadAdam", state_dtype)
    found = inspect.contents(folder)
    assert found.kind == "OffloadAdam" and found.optimizer is not None
    assert found.optimizer.dtypes == {
        "exp_avg": {state_dtype: 5}, "exp_avg_sq": {state_dtype: 5}, "master": {"float32": 5}}  # fmt: skip
    assert [g.elements for g in found.optimizer.groups] == [195, 258]
    verdict = verify.verify(folder, model=Known())
    assert verdict.whole and "that every master rounds to its weight" in verdict.checked
    assert "that the state is finite" in verdict.checked and len(verdict.notes) == 1, "there is no manifest"


def test_inspecting_imports_no_kernels(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = checkpoint(tmp_path / "start", "int8")
    code = (
        "import sys; from pathlib import Path; from hf_offload.checkpoint import inspect, verify; "
        f"f = Path({str(folder)!r}); inspect.contents(f); verify.verify(f); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def edited(folder: Path, change: Callable[[dict[int, dict[str, Any]]], Any]) -> Path:
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    change(saved["state"])
    torch.save(saved, folder / "optimizer.pt")
    return folder


def test_blocks_that_are_not_finite_and_scales_that_are_never_made_are_counted(tmp_path: Path) -> None:
    def change(state: dict[int, dict[str, Any]]) -> None:
        state[0]["exp_avg_scale"][-1] = 255  # 180 elements: the last of two blocks has 52
        state[2]["exp_avg_sq_scale"][:2] = 255  # the first two of three
        state[2]["exp_avg_scale"][:] = torch.tensor([47, 48, 1])

    notes = " ".join(verify.verify(edited(checkpoint(tmp_path / "start", "int8"), change)).notes)
    assert "52 values of exp_avg are not finite" in notes and "256 values of exp_avg_sq are not finite" in notes
    assert "2 scales of int8 blocks are between 1 and 47" in notes


def test_bfloat16_values_that_are_not_finite_or_negative_are_counted(tmp_path: Path) -> None:
    def change(state: dict[int, dict[str, Any]]) -> None:
        state[1]["exp_avg"].view(-1)[:3] = float("nan")
        state[2]["exp_avg_sq"][:2] = -1

    notes = " ".join(verify.verify(edited(checkpoint(tmp_path / "start", "bfloat16"), change)).notes)
    assert "3 values of exp_avg are not finite" in notes and "2 values of exp_avg_sq are negative" in notes


def test_codes_are_offload_adams_even_without_masters(tmp_path: Path) -> None:
    def change(state: dict[int, dict[str, Any]]) -> None:
        for entry in state.values():
            del entry["master"]

    folder = edited(checkpoint(tmp_path / "start", "int8"), change)
    assert inspect.contents(folder).kind == "OffloadAdam"
    convert.convert(folder, "adamw", tmp_path / "plain", model=Known())
    assert inspect.contents(tmp_path / "plain").kind == "AdamW"


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a scale is missing": (lambda e: e.pop("exp_avg_scale"), r"state of parameter 2 has .*not Adam's \(step, exp_av"),
    "codes are missing": (lambda e: e.pop("exp_avg_sq_codes"), "state of parameter 2 has .*not Adam's"),
    "a scale too few": (lambda e: e.update(exp_avg_scale=e["exp_avg_scale"][:-1]),
                        r"exp_avg_scale in the state of parameter 2 has the shape \(2,\): 3 scales are wanted"),
    "scales of two dimensions": (lambda e: e.update(exp_avg_sq_scale=e["exp_avg_sq_scale"][None]), "3 scales are want"),
    "codes that are floats": (lambda e: e.update(exp_avg_codes=e["exp_avg_codes"].float()),
                              "exp_avg_codes in the state of parameter 2 is not a plain tensor of uint8"),
    "scales that are int8": (lambda e: e.update(exp_avg_scale=e["exp_avg_scale"].to(torch.int8)), "tensor of uint8"),
    "codes of another shape": (lambda e: e.update(exp_avg_codes=e["exp_avg_codes"][:-1]), "differ in shape"),
    "both kinds at once": (lambda e: e.update(exp_avg=torch.zeros(257)), "moments twice, as floats and as int8"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_damaged_entry_is_refused_by_name(tmp_path: Path, what: str) -> None:
    change, words = WRONG[what]
    folder = edited(checkpoint(tmp_path / "start", "int8"), lambda state: change(state[2]))
    with pytest.raises(CheckpointError, match=words) as caught:
        convert.convert(folder, "adamw", tmp_path / "new", model=Known())
    assert str(folder / "optimizer.pt") in str(caught.value) and str(caught.value).endswith("OffloadAdam.")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["start"]
    assert any("could be read but not checked" in note for note in verify.verify(folder).notes)


# ---- convert


@pytest.mark.parametrize("state_dtype", COMPACT)
def test_through_adamw_and_back_the_values_are_the_same(tmp_path: Path, state_dtype: str) -> None:
    start = checkpoint(tmp_path / "start", state_dtype)
    done = convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    assert any(f"were {state_dtype} and are float32: the same values" in said for said in done.said)
    for i, entry in entries(tmp_path / "plain").items():
        assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, expected in floats(entries(start)[i]).items():
            assert entry[name].dtype == torch.float32 and torch.equal(entry[name], expected)
    table = manifest.read(tmp_path / "plain")
    assert table is not None and table.optimizer is not None and table.optimizer["state_dtype"] == "float32"
    assert verify.verify(tmp_path / "plain").whole and not list(tmp_path.glob(".hf_offload*"))
    assert {p.name for p in (tmp_path / "plain").iterdir()} == {"model.safetensors", "optimizer.pt", manifest.NAME}

    convert.convert(tmp_path / "plain", "offload_adam", tmp_path / "back")
    saved = torch.load(tmp_path / "back" / "optimizer.pt", weights_only=True)
    for here in ("float32", state_dtype):
        bag = Bag()
        with bag.optimizer(here) as optimizer:
            optimizer.load_state_dict(saved)
            for i, p in enumerate(bag.parameters()):
                entry = dict(optimizer.state[p].items())
                assert torch.equal(entry["master"], entries(start)[i]["master"]) and float(entry["step"]) == 3
                for name, expected in floats(entries(start)[i]).items():
                    assert torch.equal(floats(entry)[name], expected)
            bag.step(optimizer, 1)


def test_plain_adamw_goes_on_with_what_was_int8(tmp_path: Path) -> None:
    start = checkpoint(tmp_path / "start", "int8")
    convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    params = [nn.Parameter(entry["master"].clone()) for entry in entries(start).values()]
    adam = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    adam.load_state_dict(torch.load(tmp_path / "plain" / "optimizer.pt", weights_only=True))
    for p, entry in zip(params, entries(start).values()):
        assert torch.equal(adam.state[p]["exp_avg_sq"], floats(entry)["exp_avg_sq"])
        p.grad = torch.ones_like(p)
    adam.step()


def test_one_parameter_at_a_time_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.save is given is mapped; when a parameter is decoded, nothing of an earlier one is in memory."""
    import weakref

    start, alive, most = checkpoint(tmp_path / "start", "int8"), [], 0
    original = held.in_float32

    def decode(entry: Any) -> Any:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        found = original(entry)
        alive.extend(weakref.ref(t) for t in found.values())
        return found

    monkeypatch.setattr(held, "in_float32", decode)
    convert.convert(start, "adamw", tmp_path / "plain", model=Known())
    assert len(alive) == 10 and most <= 2, "the one that was just written is let go when the next is there"


def test_what_waits_in_a_scratch_file_comes_back_as_it_was(tmp_path: Path) -> None:
    given = [torch.randn(3, 5).t(), torch.ones(7, dtype=torch.bfloat16), torch.randn(4, dtype=torch.float64),
             torch.tensor(2.0), torch.ones(0, 3)]  # fmt: skip
    found = scratch.mapped(iter(given), tmp_path)
    for a, b in zip(given, found):
        assert torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert b.untyped_storage().nbytes() == a.nbytes, "its storage is its own"
    assert not list(tmp_path.iterdir()) and scratch.mapped([], tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    start = checkpoint(tmp_path / "start", "int8")
    monkeypatch.setattr(scratch.tempfile, "TemporaryFile", full)
    with pytest.raises(CheckpointError, match="No space left"):
        convert.convert(start, "adamw", tmp_path / "new", model=Known())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["start"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_converting_takes_memory_for_one_parameter_and_not_for_the_state(tmp_path: Path) -> None:
    import threading

    from hf_offload.bench.checkpoint import rss_anon

    numel, count = 1 << 21, 16
    start = tmp_path / "start"
    start.mkdir()
    entry = {"step": torch.tensor(3.0), "master": torch.ones(numel)}
    for name, scale in zip(held.CODES, held.SCALES):
        entry |= {name: torch.full((numel,), 8, dtype=torch.uint8), scale: torch.full((numel // 128,), 99).byte()}
    state = {i: {name: t.clone() for name, t in entry.items()} for i in range(count)}
    torch.save({"state": state, "param_groups": [{"params": list(range(count))}]}, start / "optimizer.pt")
    del state
    moments.in_floats(entry)  # imported, and its own memory taken
    before, peak, ended = rss_anon(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, rss_anon())

    thread = threading.Thread(target=watch)
    thread.start()
    convert.convert(start, "adamw", tmp_path / "plain", fp32_weights=False)
    ended.set()
    thread.join()
    assert peak - before < count * 8 * numel / 2, "what NumPy needs for a million elements is some 60 MB of it"
