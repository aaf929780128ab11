"""`hf-offload checkpoint inspect | verify | convert`: what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_offload.cli import app

DEEPSPEED = Path(__file__).parents[1] / "checkpoint" / "data" / "zero2_round_robin"


@pytest.fixture
def hf_offload(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])

    return run


@pytest.fixture
def ours(hf_offload: Any, tmp_path: Path) -> Path:
    assert hf_offload("convert", DEEPSPEED, "--to", "offload_adam", "-o", tmp_path / "checkpoint-3").exit_code == 0
    return tmp_path / "checkpoint-3"


def test_inspect_prints_what_is_inside(hf_offload: Any, ours: Path) -> None:
    done = hf_offload("inspect", ours)
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "OffloadAdam, step 3" in text and "1,540 BF16" in text and "1,180" in text and "optimizer.pt" in text
    assert "exp_avg float32, exp_avg_sq float32, master float32; 3 steps taken" in text
    assert max(map(len, hf_offload("inspect", DEEPSPEED).stdout.splitlines())) <= 80


def test_json_is_json(hf_offload: Any, ours: Path) -> None:
    assert json.loads(hf_offload("inspect", ours, "--json").stdout)["kind"] == "OffloadAdam"
    assert json.loads(hf_offload("verify", ours, "--json").stdout)["whole"] is True
    done = hf_offload("convert", ours, "--to", "adamw", "-o", ours.parent / "plain", "--json")
    assert json.loads(done.stdout)["from"] == "OffloadAdam"


def test_verify_ends_with_0_1_or_2(hf_offload: Any, ours: Path) -> None:
    whole = hf_offload("verify", ours)
    assert whole.exit_code == 0 and "Whole:" in whole.stdout
    path = ours / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (ours / "scheduler.pt").unlink()
    damaged = hf_offload("verify", ours)
    assert damaged.exit_code == 1
    lines = damaged.stdout.splitlines()
    assert any(line.startswith("model.safetensors: has ") for line in lines)
    assert "scheduler.pt: is missing" in lines
    assert hf_offload("verify", ours.parent / "nowhere").exit_code == 2
    assert hf_offload("verify", ours.parent).exit_code == 2


def test_verify_points_to_a_whole_checkpoint_beside_a_damaged_one(hf_offload: Any, ours: Path) -> None:
    hf_offload("convert", DEEPSPEED, "--to", "offload_adam", "-o", ours.parent / "checkpoint-2")
    (ours / "optimizer.pt").write_bytes(b"")
    done = hf_offload("verify", ours)
    assert done.exit_code == 1 and "Resume from checkpoint-2" in " ".join(done.stdout.split())


def test_convert_says_what_it_did_and_refuses_what_it_cannot(hf_offload: Any, ours: Path) -> None:
    plain = ours.parent / "plain"
    done = hf_offload("convert", ours, "--to", "adamw", "--output", plain)
    assert done.exit_code == 0 and "in float32 before you resume" in " ".join(done.stdout.split())
    assert json.loads(hf_offload("inspect", plain, "--json").stdout)["weights"] == {"F32": 1540}
    for arguments, words in (
        (("--to", "adamw", "-o", plain), "is there already"),
        (("--to", "sgd", "-o", plain.parent / "x"), "Valid: adamw, offload_adam"),
        (("--to", "offload_adam", "-o", plain.parent / "x"), "is one already"),
    ):
        refused = hf_offload("convert", ours, *arguments)
        assert refused.exit_code == 2 and words in refused.stderr
    kept = hf_offload("convert", ours, "--to", "adamw", "--no-fp32-weights", "-o", plain.parent / "kept")
    assert (
        kept.exit_code == 0
        and (plain.parent / "kept" / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    )


def test_help_gives_an_example(hf_offload: Any) -> None:
    for command in ("inspect", "verify", "convert"):
        assert f"hf-offload checkpoint {command} outputs/checkpoint-100" in " ".join(
            hf_offload(command, "--help").stdout.split()
        )
