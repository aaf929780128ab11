"""`python -m hf_offload.bench.gpu` with a tiny model on the CPU: all of it but CUDA's own calls."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hf_offload.bench import gpu, gpu_cells, gpu_model, gpu_variants
from hf_offload.bench.gpu_cells import Budget, OutOfTime
from hf_offload.bench.gpu_device import Cpu, Peak
from hf_offload.bench.gpu_variants import VARIANTS, OnDevice
from hf_offload.errors import ConfigError
from hf_offload.hostmem import HostMemory
from support.transport import needs_gpu

TINY = ["--device=cpu", "--params=6e4", "--vocab=64", "--seq-len=8", "--batch-sizes=2,1", "--steps=2"]
SHAPE = gpu_model.Llama(hidden=64, layers=2, vocab=64)


class CountingCpu(Cpu):
    """A CPU whose peak is made up: each reading is 1 GiB more."""

    def __init__(self) -> None:
        self.readings = 0

    def peak(self) -> Peak:
        self.readings += 1
        return Peak(self.readings << 30, 2 * self.readings << 30)


def make(tmp_path: Path, budget: Budget | None = None, **more: Any) -> gpu.Run:
    given = {"params": 60_000, "vocab": 64, "seq_len": 8, "batch_sizes": (2, 1), "steps": 2, "device": "cpu", **more}
    return gpu.Run(gpu.Setting(**given), CountingCpu(), gpu.Report(tmp_path / "out.json"), budget)


def written(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the small model: the cells alone."""
    monkeypatch.setattr(gpu_cells, "correctness", lambda *args: {"same_bits_as_in_order": {}})


# ---- the whole run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("gpu")
    yield gpu.main([*TINY, f"--out={folder / 'out.json'}"]), json.loads((folder / "out.json").read_text())
    assert [p.name for p in folder.iterdir()] == ["out.json"], "nothing half written is left"


def test_every_variant_at_every_batch_size_has_its_figures(done: tuple[int, dict[str, Any]]) -> None:
    code, data = done
    assert code == 0
    assert [(c["variant"], c["batch_size"]) for c in data["cells"]] == [(v, b) for v in VARIANTS for b in (1, 2)]
    for cell in data["cells"]:
        assert cell["status"] == "ok" and cell["steps"] == 2
        assert cell["tokens_per_second"] == pytest.approx(8 * cell["batch_size"] / cell["seconds_per_step"])
        assert cell["peak_allocated_gib"] is None and cell["peak_reserved_gib"] is None
        assert cell["losses"][0] == pytest.approx(math.log(64), rel=0.1)
        assert 0 < cell["grad_norms"][0] <= cell["grad_norms"][1]


def test_the_variants_are_what_they_are_called(done: tuple[int, dict[str, Any]]) -> None:
    engines = {c["variant"]: c["engine"] for c in done[1]["cells"]}
    assert engines.pop("no_offload") is None
    assert {name: e["schedule"] for name, e in engines.items()} == {
        "in_order": "in_order",
        "overlapped": "overlapped",
        "streamed": "overlapped+streamed",
        "speculative": "overlapped+streamed+speculative",
        "speculative_hit": "overlapped+streamed+speculative",
    }
    params = done[1]["model"]["params"]
    assert engines["speculative"]["host_bytes"]["shadow"] == 14 * params, "all of it is covered"
    assert engines["speculative_hit"]["speculation_hits"] > 0 == engines["speculative_hit"]["speculation_misses"]
    for name, engine in engines.items():
        need = sum(engine["host_bytes"].values())
        assert VARIANTS[name].host_bytes(params) == need
        # figures are read once a step, of the last one that has ended: two may end between two readings
        assert 1 <= engine["steps_seen"] <= 2 and 0 <= engine["hidden_fraction"] <= 1


def test_all_variants_train_the_same_model(done: tuple[int, dict[str, Any]]) -> None:
    losses = {c["variant"]: c["losses"] for c in done[1]["cells"] if c["batch_size"] == 1}
    assert losses["in_order"] == losses["overlapped"] == losses["streamed"] == losses["speculative"]
    assert losses["no_offload"] == pytest.approx(losses["in_order"], rel=1e-3)


def test_the_bits_were_compared(done: tuple[int, dict[str, Any]]) -> None:
    found = done[1]["correctness"]
    assert found["deterministic"] is True
    assert found["same_bits_as_in_order"] == {"overlapped": True, "streamed": True, "speculative": True}


def test_what_ran_and_where_can_be_read(done: tuple[int, dict[str, Any]]) -> None:
    data = done[1]
    assert data["command"] == f"python -m hf_offload.bench.gpu {' '.join(TINY)} --out=out.json"
    assert data["model"]["params"] == SHAPE.params and data["config"]["max_norm"] == 1.0
    machine = data["machine"]
    assert machine["copy_gb_s"]["pageable_d2h"] > 0 and "torch" in machine["versions"] and "driver" in machine["gpu"]


def test_the_table_fits_80_columns(done: tuple[int, dict[str, Any]]) -> None:
    states = ("out of memory", "skipped: time", "not tried: out of memory at batch 16", "failed: ValueError: x")
    cells = [
        *copy.deepcopy(done[1]["cells"]),
        *({"variant": "streamed", "batch_size": 64, "status": s} for s in states),
    ]
    cells[-5]["engine"].update(speculation_hits=752, speculation_misses=752)
    cells[-5].update(tokens_per_second=123456.7, peak_allocated_gib=139.9)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(gpu.table({**done[1], "cells": cells}))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("speculative_hit", "no memory", "skipped", "not tried", "failed", "752/752", "123457", "139.9"):
        assert word in text


# ---- what goes wrong


@pytest.mark.usefixtures("quick")
def test_out_of_memory_ends_a_variant_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OnDevice.step

    def step(self: OnDevice) -> Tensor:
        if len(run.cells) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return real(self)

    monkeypatch.setattr(OnDevice, "step", step)
    run = make(tmp_path, batch_sizes=(1, 2, 3), variants=("no_offload", "in_order"))
    run.all()
    states = [c["status"] for c in written(tmp_path)["cells"]]
    assert states == ["ok", "out of memory", "not tried: out of memory at batch 2", "ok", "ok", "ok"]


def test_our_own_out_of_memory_is_one_too() -> None:
    assert gpu_cells.out_of_memory(RuntimeError("CUDA out of memory. It ran out at 8 bytes for the gradient norm"))
    assert not gpu_cells.out_of_memory(RuntimeError("an illegal memory access was encountered"))


@pytest.mark.usefixtures("quick")
def test_a_failure_is_recorded_and_the_next_variant_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OnDevice, model: nn.Module, max_norm: float) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(OnDevice, "__init__", fail)
    run = make(tmp_path, variants=("no_offload", "in_order"))
    run.all()
    states = [c["status"] for c in run.cells]
    assert states == ["failed: ValueError: no such luck", "not tried: failed at batch 1", "ok", "ok"]


def test_different_bits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_cells._trained

    def trained(name: str, *args: Any) -> list[Tensor]:
        found = real(name, *args)
        if name == "streamed":
            found[-1] = found[-1] + 1
        return found

    monkeypatch.setattr(gpu_cells, "_trained", trained)
    code = gpu.main([*TINY, f"--out={tmp_path / 'out.json'}", "--variants=in_order", "--batch-sizes=1"])
    same = written(tmp_path)["correctness"]["same_bits_as_in_order"]
    assert code == 1 and same == {"overlapped": True, "streamed": False, "speculative": True}


def test_a_device_that_differs_from_run_to_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cells, "_trained", lambda *args: [torch.rand(3)])
    assert gpu_cells.correctness(SHAPE, Cpu())["deterministic"] is False


def test_a_loss_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    gpu.Report(tmp_path / "out.json", {"a": [math.nan, (1.0, math.inf)]}).save()
    assert written(tmp_path) == {"a": ["nan", [1.0, "inf"]]}


# ---- time


class Ticking(Budget):
    """A budget of which each look takes a second."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        super().__init__(seconds, self.tick)

    def tick(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.usefixtures("quick")
def test_cells_are_skipped_before_the_time_is_up(tmp_path: Path) -> None:
    run = make(tmp_path, Ticking(25.0), variants=("no_offload", "in_order", "overlapped"))
    run._expected = lambda name, batch: 5.0  # type: ignore[method-assign]
    run.all()
    states = [c["status"] for c in written(tmp_path)["cells"]]
    assert states[0] == "ok" and states[-1] == "skipped: time" and len(states) == 6
    assert states == sorted(states), "once time is up, it stays up"


def test_what_a_cell_will_take_is_read_from_those_before(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run._expected("in_order", 4) == 0.0
    for variant, batch, wall in (("no_offload", 4, 3.0), ("no_offload", 16, 9.0), ("in_order", 4, 5.0)):
        run.cells.append({"variant": variant, "batch_size": batch, "status": "ok", "wall_seconds": wall})
    run.cells.append({"variant": "no_offload", "batch_size": 64, "status": "skipped: time"})
    assert run._expected("in_order", 16) == 9.0
    assert run._expected("overlapped", 4) == 5.0
    assert run._expected("in_order", 64) == 16 * 5.0


def test_steps_of_a_cell() -> None:
    assert gpu_cells.steps_in(0.1, 8, 10.0, 300.0) == 8
    assert gpu_cells.steps_in(2.5, 8, 10.0, 300.0) == 4
    assert gpu_cells.steps_in(9.0, 8, 10.0, 300.0) == 2
    assert gpu_cells.steps_in(1.0, 8, 10.0, 3.5) == 3
    with pytest.raises(OutOfTime):
        gpu_cells.steps_in(2.0, 8, 10.0, 3.9)


# ---- the model


@pytest.mark.parametrize("params", [1_000_000_000, 1_500_000_000, 3_000_000_000])
def test_the_model_has_the_size_asked_for(params: int) -> None:
    shape = gpu_model.shape_for(params)
    assert shape.params == pytest.approx(params, rel=0.03)
    assert 32 <= shape.hidden / shape.layers <= 128


@pytest.mark.parametrize("shape", [SHAPE, gpu_model.Llama(hidden=2048, layers=2, vocab=100)])
def test_its_parameters_are_counted_right(shape: gpu_model.Llama) -> None:
    model = gpu_model.build(shape, 8, "meta")
    assert sum(p.numel() for p in model.parameters()) == shape.params
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.training


def test_the_same_weights_every_time() -> None:
    pairs = zip(*(gpu_model.build(SHAPE, 8, "cpu").parameters() for _ in range(2)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_checkpointing_where_the_activations_do_not_fit() -> None:
    shape = gpu_model.shape_for(1_500_000_000)
    assert [gpu_model.needs_checkpointing(shape, b, 1024, 150 * 10**9) for b in (4, 16, 64)] == [False, False, True]
    assert not gpu_model.needs_checkpointing(shape, 64, 1024, None)
    model = gpu_model.build(SHAPE, 8, "cpu")
    for on in (True, False):
        gpu_model.set_checkpointing(model, on)
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) is on


def test_a_host_too_small_for_the_state_gets_a_smaller_model() -> None:
    setting = gpu.Setting()
    assert setting.host_bytes_a_parameter == 28
    assert gpu.fitting(setting, HostMemory(128 * 10**9, 128 * 10**9, "test"))[1] == []
    shape, (note,) = gpu.fitting(setting, HostMemory(35 * 10**9, 128 * 10**9, "test"))
    assert shape.params == pytest.approx(1e9, rel=0.04)
    assert "28 bytes a parameter" in note and "35 GB" in note
    assert gpu.fitting(gpu.Setting(variants=("no_offload",)), HostMemory(1, 1, "test"))[1] == []


# ---- no offload


def bf16_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 20)).to(torch.bfloat16)


def adamw_by_hand(model: nn.Module, steps: int, max_norm: float) -> list[Tensor]:
    """fp32 masters, one AdamW over all."""
    params = list(model.parameters())
    masters = [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=gpu_variants.LR, weight_decay=gpu_variants.WEIGHT_DECAY, fused=True)
    for step in range(steps):
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        for p, m in zip(params, masters):
            assert p.grad is not None
            m.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(params, masters):
                p.copy_(m)
    return [p.detach() for p in params]


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    model(x).float().square().sum().backward()


@pytest.mark.parametrize("chunk", [1, 700, 1 << 26])
def test_no_offload_is_adamw_on_fp32_masters(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(gpu_variants, "LR", 1e-2)
    monkeypatch.setattr(gpu_variants, "CHUNK", chunk)
    model = bf16_model()
    stepper = OnDevice(model, 0.5)
    for step in range(4):
        backward(model, step)
        assert float(stepper.step()) > 0.5, "the bound bites"
        assert all(p.grad is None for p in model.parameters())
    expected = adamw_by_hand(bf16_model(), 4, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), bf16_model().parameters()))


# ---- the command line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--batch-sizes=0"], "batch_sizes=(0,)"),
        (["--minutes=0"], "minutes=0.0"),
        (["--variants=streamd"], "Did you mean 'streamed'"),
        (["--checkpointing=maybe"], "checkpointing='maybe'"),
    ],
)
def test_bad_arguments_are_refused(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main([*TINY, f"--out={tmp_path / 'out.json'}", *more]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder does not exist"):
        gpu.parse([*TINY, f"--out={tmp_path / 'no' / 'out.json'}"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([f"--out={tmp_path / 'out.json'}"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_a_small_model(self, tmp_path: Path) -> None:
        arguments = ["--params=1e6", "--vocab=500", "--seq-len=64", "--batch-sizes=1,2", "--steps=2"]
        assert gpu.main([*arguments, f"--out={tmp_path / 'out.json'}"]) == 0
        data = written(tmp_path)
        assert {c["status"] for c in data["cells"]} == {"ok"}
        assert all(c["peak_reserved_gib"] >= c["peak_allocated_gib"] > 0 for c in data["cells"])
        assert set(data["machine"]["copy_gb_s"]) == {
            "pinned_d2h", "pinned_h2d", "pinned_both", "pageable_d2h", "pageable_h2d",
        }  # fmt: skip
