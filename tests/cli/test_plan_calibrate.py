"""`hf-offload plan --calibrate`, and what plans and runs then say: on a tiny model, with as few measures as will do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hf_offload import calibrating, calibration, cli, measuring
from hf_offload.simulation import SCHEDULES

TINY = """
trainer: causal_lm
model:
  config:
    {model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
     num_attention_heads: 2, num_key_value_heads: 1}
  dtype: float32
tokenizer: {kind: byte_level}
data: {kind: pydoc_topics, block_size: 16}
training:
  {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, bf16: true, use_cpu: true,
   logging_steps: 1, save_strategy: "no"}
offload: {schedule: overlapped, bucket_bytes: 16384, ring_slots: 2}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe; a cache of its own; few and short measures, whatever else runs on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"WARM": 1, "REPEATS": 2, "LATENCIES": 2, "BESIDE_S": 0.005}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "_refuse_busy", lambda *given: None)
    monkeypatch.setattr(calibrating, "CURVE_POINTS", 3)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "80"})


def output(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "hf_offload" / "calibration").glob("*"))


def prediction(*arguments: object) -> dict[str, Any]:
    return json.loads(output("plan", *arguments, "--json"))["prediction"]


def test_calibrate_then_plan_then_train(tiny: Path, tmp_path: Path) -> None:
    """The way through: the same model is known again by other commands, on the device and in the dtype of training."""
    told = prediction(tiny, "--calibrate")
    assert set(told["schedules"]) == set(told["curves"]) == set(told["hidden_from_tokens"]) == set(SCHEDULES)
    for seconds in told["schedules"].values():
        assert seconds["step_seconds"] == pytest.approx(seconds["compute_seconds"] + seconds["exposed_seconds"])
        assert seconds["compute_seconds"] > 0
    assert [Path(told["calibration"]["path"])] == stored(tmp_path)

    again = prediction(tiny)
    assert again == told, "read, not measured again"
    text = output("plan", tiny, "--link-gb-s", 16)
    assert "One optimizer step, predicted from measurements" in text
    assert all(name in text for name in SCHEDULES)
    assert max(map(len, text.splitlines())) <= 80
    other = json.loads(output("plan", tiny, "--batch", 4, "--link-gb-s", 1e-5, "--json"))
    slow = other["prediction"]["schedules"]["in_order"]
    assert slow["compute_seconds"] >= told["schedules"]["in_order"]["compute_seconds"]
    assert slow["exposed_seconds"] > 2 * 2 * other["params"] / 1e4, "the emulated link's"

    run = output("train", tiny, "--output-dir", tmp_path / "out")
    figures = json.loads((tmp_path / "out" / "offload_summary.json").read_text())["prediction"]
    assert figures["calibration"] == told["calibration"]["path"]
    assert figures["measured_seconds_per_step"] > 0
    assert figures["error"] == pytest.approx(figures["seconds_per_step"] / figures["measured_seconds_per_step"] - 1)
    # tokens without padding: 2 rows of 16, 2 micro-batches, as the plan has it
    assert figures["compute_seconds"] == pytest.approx(told["schedules"]["overlapped"]["compute_seconds"], rel=0.02)
    assert f"off by {figures['error']:+.0%}" in " ".join(run.split())


@pytest.mark.slow
def test_a_run_without_a_calibration_says_how_to_get_one(tiny: Path, tmp_path: Path) -> None:
    run = output("train", tiny, "--output-dir", tmp_path / "out")
    assert "hf-offload plan --calibrate" in " ".join(run.split())
    figures = json.loads((tmp_path / "out" / "offload_summary.json").read_text())
    assert "was not calibrated on this machine" in figures["prediction"]["missing"]


@pytest.mark.parametrize(
    ("options", "field", "value"), [(["--state-dtype", "int8"], "state_dtype", "int8"), ([], "state_dtype", "float32")]
)
def test_the_state_of_the_options_is_what_is_measured(
    tiny: Path, tmp_path: Path, options: list[str], field: str, value: str
) -> None:
    prediction(tiny, "--calibrate", *options)
    (file,) = stored(tmp_path)
    assert json.loads(file.read_text())[field] == value


def test_state_that_the_options_keep_on_the_gpu_is_neither_copied_nor_stepped(tiny: Path) -> None:
    link = ("--link-gb-s", 1e-4, "--gpu-gb", 80)
    nothing = prediction(tiny, "--calibrate", *link)["schedules"]["in_order"]["exposed_seconds"]
    for held in ("1e12", "auto"):
        every = prediction(tiny, *link, "--device-state-bytes", held)["schedules"]["in_order"]["exposed_seconds"]
        assert every < nothing / 10, held


def test_a_file_of_ones_own_from_another_machine_or_damaged_or_of_another_model(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    assert prediction(tiny, "--calibrate", "--calibration", file)["calibration"]["path"] == str(file)
    assert not stored(tmp_path)
    assert prediction(tiny, "--calibration", file)["schedules"]
    assert "was made for" in refused("plan", tiny, "training.gradient_checkpointing=true", "--calibration", file)
    text = file.read_text()
    data = json.loads(text)
    data["machine"]["usable_cores"] = 4096
    file.write_text(json.dumps(data))
    assert "usable_cores 4096 there" in refused("plan", tiny, "--calibration", file)
    file.write_text(text[:100])
    assert "the file is damaged" in refused("plan", tiny, "--calibration", file)


@pytest.fixture
def damaged(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe, whose calibration in the cache is damaged."""
    (tmp_path / "cache" / "hf_offload" / "calibration").mkdir(parents=True)
    file = tmp_path / "cache" / "hf_offload" / "calibration" / "c.json"
    file.write_text("{")
    monkeypatch.setattr(calibration, "path_for", lambda *given: file)
    return tiny


def test_a_damaged_file_in_the_cache_hinders_no_plan(damaged: Path) -> None:
    text = " ".join(output("plan", damaged).split())
    assert "Note:" in text and "the file is damaged" in text and "predicted from measurements" not in text


@pytest.mark.slow
def test_a_damaged_file_in_the_cache_hinders_no_run(damaged: Path, tmp_path: Path) -> None:
    output("train", damaged, "--output-dir", tmp_path / "out")
    figures = json.loads((tmp_path / "out" / "offload_summary.json").read_text())
    assert "the file is damaged" in figures["prediction"]["missing"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "7e9", "--calibrate"], "--params='7e9': a number of parameters has no forward"),
        (["RECIPE", "--trainable", "100", "--calibrate"], "--trainable='100': a number of parameters"),
        (["RECIPE", "--calibration", "none.json"], "no such file"),
        (["RECIPE", "--plot", "x.png"], "was not calibrated on this machine. Add --calibrate"),
        (["--params", "7e9", "--plot", "x.png"], "Add --calibrate"),
        (["RECIPE", "--plot", "x.doc"], "'.doc' is no picture format"),
        (["RECIPE", "--plot", "nowhere/x.png"], "there is no folder 'nowhere'"),
    ],
)
def test_refusals(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("plan", *(str(tiny) if a == "RECIPE" else a for a in arguments))
    assert not stored(tmp_path)


def test_a_busy_machine_stores_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"WARM": 0, "REPEATS": 2, "LATENCIES": 2, "BESIDE_S": 0.005, "WIDEST": 0.0}.items():
        monkeypatch.setattr(measuring, name, value)
    assert "spread too widely" in refused("plan", tiny, "--calibrate")
    assert not stored(tmp_path)


def test_the_plot(tiny: Path, tmp_path: Path) -> None:
    from matplotlib import image

    picture = tmp_path / "steps.png"
    assert f"Wrote {picture}" in output("plan", tiny, "--calibrate", "--plot", picture).replace("\n", "")
    assert image.imread(picture).std() > 0.05
    svg = tmp_path / "steps.svg"
    output("plan", tiny, "--plot", svg)
    assert all(
        f"<!-- {words}" in svg.read_text() for words in ("overlapped", "compute alone", "tokens in a micro-batch")
    )


def test_without_matplotlib_the_error_gives_the_command_and_comes_before_a_minute_of_measuring(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'hf-offload[plot]'" in refused("plan", tiny, "--calibrate", "--plot", "x.png")
    assert not stored(tmp_path)
