"""`hf-offload timeline`: what it prints, its exit codes, and that no error shows a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_offload import cli
from hf_offload.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["timeline", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    recorded = Timeline(str(tmp_path / "trace.json"))
    for step in range(1, 9):
        recorded.add("compute", "forward", step, step + 0.8, step)
        recorded.add("wait", "bucket 0", step + 0.8, step + 1.0, step)
        recorded.add("host_step", "bucket 0", step + 0.6, step + 1.0, step)
    recorded.write()
    return tmp_path / "trace.json"


def test_it_draws_and_says_what(trace: Path) -> None:
    picture = trace.with_name("out.png")
    result = invoke(trace, "-o", picture)
    assert result.exit_code == 0, result.output
    assert result.output.replace("\n", "") == f"Wrote {picture}: steps 4 to 6, 50 % hidden"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_lies_beside_the_file_unless_told(trace: Path) -> None:
    assert "step 5, " in invoke(trace, "--steps", "5").output
    assert trace.with_suffix(".png").is_file()


def test_its_help_fits_80_columns_and_the_root_help_names_it() -> None:
    help_of_it = invoke("--help")
    assert help_of_it.exit_code == 0 and max(map(len, help_of_it.output.splitlines())) <= 80
    assert "timeline" in CliRunner().invoke(cli.app, ["--help"]).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.json"], "FILE='missing.json': no such file"),
        (["TRACE", "-o", "out.doc"], "--output='out.doc': '.doc' is no picture format of matplotlib's"),
        (["TRACE", "-o", "out"], "its name has no suffix"),
        (["TRACE", "-o", "TRACE"], "'.json' is no picture format"),
        (["TRACE", "-o", "nowhere/out.png"], "there is no folder 'nowhere'"),
        (["TRACE", "--steps", "20:30"], "--steps='20:30': the file holds steps 1 to 8"),
        (["TRACE", "--steps", "6:5"], "no step lies between them"),
        (["TRACE", "--steps", "x"], "--steps='x': not two numbers"),
        (["TRACE", "--ms", "9000:9001"], "--ms='9000:9001': the steps shown take 3,000.0 milliseconds"),
        (["TRACE", "--width", "10"], "--width=10"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    trace: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trace.parent)
    before = trace.read_bytes()
    result = invoke(*[str(trace) if argument == "TRACE" else argument for argument in arguments])
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output
    assert os.listdir(trace.parent) == ["trace.json"] and trace.read_bytes() == before


def test_without_matplotlib_the_error_gives_the_command(trace: Path) -> None:
    (trace.parent / "matplotlib").mkdir()
    (trace.parent / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(trace.parent), str(ROOT)])}
    command = [sys.executable, "-m", "hf_offload.cli", "timeline", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert "pip install 'hf-offload[plot]'" in done.stderr and "Traceback" not in done.stderr


def test_drawing_imports_nothing_heavy(trace: Path) -> None:
    code = (
        "import sys\nfrom hf_offload import cli\n"
        f"try: cli.app(['timeline', {str(trace)!r}])\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
