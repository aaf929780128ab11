"""`hf-offload bench predict`, tiny: what is calibrated, predicted, measured and printed. No timing is asserted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_offload import cli, measuring, predict_cli
from hf_offload.bench import pipeline, predict
from hf_offload.bench.predict import Cell, EmulatedSubject, Setting
from hf_offload.config import OffloadConfig
from hf_offload.simulation import SCHEDULES

TINY = Setting(
    blocks=2, params_per_block=3000, links=(0.5, 1.0), rows=(1,), fixed_ms=0.1, row_ms=0.1, steps=1, rounds=1
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WARM": 1, "REPEATS": 2, "LATENCIES": 2, "BESIDE_S": 0.005}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(predict, "SETTLED_STEPS", 2)


def test_a_cell_is_what_bench_pipeline_would_run() -> None:
    setting = Setting(fixed_ms=0.5, row_ms=0.25)
    cell = setting.cell(6.0, 16)
    assert (cell.forward_ms, cell.backward_ms, cell.edge_ms, cell.link_gb_s) == (4.5, 9.0, 2.25, 6.0)
    assert setting.config(6.0) == OffloadConfig(
        transport="host", link_gb_s=6.0, bucket_bytes=cell.bucket_bytes, ring_slots=cell.ring_slots,
        threads=cell.step_threads,
    )  # fmt: skip


def test_no_cell_has_a_batch_size_that_was_calibrated() -> None:
    assert not set(Setting().rows) & set(predict.CALIBRATED)
    assert len(Setting().links) >= 3 and len(Setting().rows) >= 2


def test_the_emulated_model_takes_a_fixed_part_and_one_for_each_row() -> None:
    cell = TINY.cell(1.0, 1)
    memory = cell.memory()
    lab = pipeline.Lab(cell, memory, 1, 1.0)
    subject = EmulatedSubject(TINY, cell.model(memory), lab.cores)
    subject.forward(3)
    block, edge = subject.model.blocks[0], subject.model.head
    assert (block.forward_s, block.backward_s) == pytest.approx((0.4e-3, 0.8e-3))
    assert (edge.forward_s, edge.backward_s) == pytest.approx((0.2e-3, 0.4e-3))
    assert subject.between(1.0, 3.5) == 2.5


def test_a_run_predicts_and_measures_every_schedule_in_every_cell(quick: None) -> None:
    result = predict.run(TINY, widest=1e9)
    assert [(c.link_gb_s, c.rows, c.schedule) for c in result.cells] == [
        (x, 1, s) for x in (0.5, 1.0) for s in SCHEDULES
    ]
    assert all(c.measured > 0 and c.predicted > 0 and len(c.rounds) == 1 for c in result.cells)
    # the device's own time is known: calibrated with other batch sizes
    compute = (2 + 2 / 2) * 3 * (TINY.fixed_ms + TINY.row_ms) * 1e-3
    assert all(c.predicted > compute * 0.9 for c in result.cells)
    data = predict.as_json(result)
    assert json.loads(json.dumps(data))["worst_error"] == max(abs(c["error"]) for c in data["cells"])


def test_the_table_tells_what_is_within_ten_percent() -> None:
    cells = (Cell("overlapped", 2.0, 4, 0.109, 0.1, (0.1,)), Cell("delayed", 2.0, 4, 0.085, 0.1, (0.1,)))
    result: Any = predict.Result(TINY, None, cells, 0.0)  # type: ignore[arg-type]
    console = Console(width=80, record=True, file=io.StringIO())
    predict_cli.print_result(console, result)
    text = " ".join(console.export_text().split())
    assert "+9.0%" in text and "-15.0%" in text
    assert "1 of 2 predictions are within 10 %; the worst is off by 15.0%." in text


def test_the_command(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Setting] = []

    def run(setting: Setting, **more: Any) -> Any:
        seen.append(setting)
        return predict.Result(setting, _NOTHING, (Cell("overlapped", 2.0, 4, 0.1, 0.1, (0.1,)),), None)

    monkeypatch.setattr(predict, "run", run)
    out = tmp_path / "table.json"
    arguments = ["bench", "predict", "--links", "1,2.5", "--rows", "8", "--rounds", "2", "--json", "--out", str(out)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert (seen[0].links, seen[0].rows, seen[0].rounds) == ((1.0, 2.5), (8,), 2)
    assert json.loads(out.read_text()) == json.loads(result.stdout)
    assert json.loads(result.stdout)["cells"][0]["error"] == 0


_NOTHING: Any = Cell("any dataclass", 0.0, 0, 0.0, 0.0, ())


@pytest.mark.parametrize(
    ("option", "value"), [("--links", "fast"), ("--rows", "0"), ("--rows", "0.3"), ("--links", ""), ("--rows", "4,")]
)
def test_numbers_that_are_none_are_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "predict", option, value])
    assert result.exit_code == 2
    whole = "whole " if option == "--rows" else ""
    assert f"{option}={value!r}: not {whole}numbers above 0" in " ".join(result.output.split())
