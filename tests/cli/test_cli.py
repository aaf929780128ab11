"""The command line: what each command prints, its exit codes, and that no error shows a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_offload import cli

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "hf_offload.cli"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def in_a_process(*arguments: object, cwd: Path | None = None, **more: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_offload import models

    monkeypatch.setattr(models, "hub_reachable", lambda: False)


# ------------------------------------------------------------------------------------------------ help and start


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = invoke("--help").output
    for word in ("train", "run", "plan", "recipes", "env", "install-completion", "130 interrupted"):
        assert word in text
    assert invoke("--version").output.startswith("hf-offload 0.")


@pytest.mark.parametrize("command", ["train", "run", "plan", "env", "recipes", "recipes copy"])
def test_every_command_has_a_help_that_fits_80_columns(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("arguments", ["['--help']", "['plan', '--params', '7e9', '--json']", "['recipes', 'list']"])
def test_help_and_plans_import_nothing_heavy(arguments: str) -> None:
    code = (
        "import sys\nfrom hf_offload import cli\n"
        f"try: cli.app({arguments})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_shell_completes_recipe_names() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_HF_OFFLOAD_COMPLETE": "complete_bash",
        "COMP_WORDS": "hf-offload train qu",
        "COMP_CWORD": "2",
    }
    code = "import sys; sys.argv = ['hf-offload']; from hf_offload import cli; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split() == ["quickstart"], done.stderr


# ------------------------------------------------------------------------------------------------ plan


def test_plan_prints_the_design_numbers_as_json() -> None:
    figures = json.loads(invoke("plan", "--params", "7e9", "--link-gb-s", "16", "--json").output)
    assert figures["params"] == 7_000_000_000
    assert figures["bytes"]["gpu_without"] == 112_000_000_000
    assert figures["bytes"]["gpu_with"] == 28_000_000_000
    assert figures["bytes"]["host"] == 84_000_000_000
    assert figures["bytes"]["link_per_step"] == 28_000_000_000
    assert figures["seconds"]["link"] == 1.75


@pytest.mark.parametrize("count", ["7e9", "7B", "7_000_000_000", "7000M", "7.0e9"])
def test_plan_reads_counts_as_people_write_them(count: str) -> None:
    assert json.loads(invoke("plan", "--params", count, "--json").output)["params"] == 7_000_000_000


def test_plan_tables_fit_80_columns_and_say_what_they_mean() -> None:
    output = invoke("plan", "qwen2.5_7b_sft", "--gpu-gb", 40, "--host-gb", 64, "--link-gb-s", 16).output
    assert max(map(len, output.splitlines())) <= 80
    text = " ".join(output.split())
    for sentence in (
        "7,615,616,512 trainable parameters",
        "The GPU needs 36.1 GB and has 40.0 GB: it fits.",
        "The host needs 91.9 GB and has 64.0 GB: it does not fit.",
        "activations",
        "logits and loss",
        "CUDA context",
        "stay exposed",
        "Without checkpointing the activations would take",
    ):
        assert sentence in text


def test_plan_options_win_over_the_recipe_and_overrides_change_it() -> None:
    asked = ("plan", "qwen2.5_7b_sft", "training.gradient_accumulation_steps=3", "--batch", 5, "--json")
    work = json.loads(invoke(*asked).output)["workload"]
    assert (work["batch"], work["accumulation"], work["seq_len"], work["checkpointing"]) == (5, 3, 2048, True)


def test_plan_shows_how_the_step_is_split_where_state_stays_on_the_gpu() -> None:
    asked = ("plan", "--params", "7e9", "--gpu-gb", 80, "--host-gb", 80, "--device-state-bytes")
    assert json.loads(invoke(*asked, "42e9", "--json").output)["device_state"]["fraction"] == 0.5
    output = invoke(*asked, "auto").output
    assert max(map(len, output.splitlines())) <= 80
    text = " ".join(output.split())
    assert "(56%, 47.0 GB) stays on the GPU" in text and "The state begins on the host" in text
    assert "The host needs 84.3 GB and has 80.0 GB: it does not fit" in text
    for value, least in ((12 * 10**9, 12 * 10**9), ("auto", 1)):
        recipe = invoke("plan", "qwen2.5_7b_sft", f"offload.device_state_bytes={value}", "--gpu-gb", 200, "--json")
        assert json.loads(recipe.output)["device_state"]["bytes"] >= least


def test_plan_of_auto_needs_to_know_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload.environment.gpus", list)
    result = invoke("plan", "--params", "7e9", "--device-state-bytes", "auto")
    assert result.exit_code == 2 and "--gpu-gb" in result.output + (result.stderr or "")


def test_plan_of_several_ranks_on_a_node_adds_up_their_host_memory() -> None:
    asked = ("plan", "--params", "7e9", "--host-gb", 500, "--ranks-per-node")
    figures = json.loads(invoke(*asked, 8, "--json").output)
    one = 84 * 10**9 + 256 * 2**20
    assert figures["bytes"]["host_total"] == one and figures["bytes"]["host_total_node"] == 8 * one
    assert figures["ranks_per_node"] == 8 and figures["fits"]["host"] is False
    text = invoke(*asked, 8).output
    assert "8 ranks on a node take 674 GB of its host memory together." in text
    assert "The host needs 674 GB and has 500 GB: it does not fit." in text
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(invoke(*asked, 5, "--json").output)["fits"]["host"] is True
    assert "ranks" not in invoke(*asked, 1).output
    assert invoke(*asked, 0).exit_code == 2


def test_plan_of_a_model_folder_needs_its_config_alone(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    figures = json.loads(invoke("plan", "--model", tmp_path, "--json").output)
    attention = 16 * 16 * 2 + 16 * 8 * 2
    assert figures["params"] == 100 * 16 + 2 * (attention + 3 * 16 * 32 + 2 * 16) + 16, "tied weights count once"
    assert figures["bytes"]["activations"] > 0


def test_plan_of_adapters_counts_the_base_apart() -> None:
    figures = json.loads(invoke("plan", "--params", "7e9", "--trainable", "20M", "--weight-bytes", 4, "--json").output)
    assert (figures["params"], figures["frozen_params"]) == (20_000_000, 6_980_000_000)
    assert figures["bytes"]["frozen_weights"] == 2 * 6_980_000_000
    assert figures["bytes"]["gpu_with"] == 8 * 20_000_000


@pytest.mark.parametrize(
    ("dtype", "bf16", "cast", "per_parameter"),
    [("bfloat16", True, True, 4), ("float32", True, True, 4), ("float32", True, False, 8), ("float32", False, True, 8)],
)
def test_plan_knows_what_is_cast(dtype: str, bf16: bool, cast: bool, per_parameter: int) -> None:
    overrides = (f"model.dtype={dtype}", f"training.bf16={bf16}", f"offload.cast_fp32_weights={cast}")
    figures = json.loads(invoke("plan", "quickstart", *overrides, "--json").output)
    assert figures["bytes"]["gpu_with"] == per_parameter * figures["params"]
    assert figures["bytes"]["host"] == 12 * figures["params"]


# ------------------------------------------------------------------------------------------------ recipes, env


def test_recipes_are_listed_shown_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "quickstart" in invoke("recipes", "list").output
    assert "pydoc_topics" in invoke("recipes", "show", "quickstart").output
    assert invoke("recipes", "copy", "smollm2_135m_sft").exit_code == 0
    assert (tmp_path / "data" / "instruct_small.jsonl").is_file()
    again = invoke("recipes", "copy", "smollm2_135m_sft")
    assert again.exit_code == 2
    assert "--force" in again.output
    assert invoke("recipes", "copy", "smollm2_135m_sft", "--force").exit_code == 0


def test_env_is_plain_text_to_copy() -> None:
    result = invoke("env")
    assert result.exit_code == 0
    for name in (
        "hf_offload:",
        "torch:",
        "GPU:",
        "host memory:",
        "numba threads:",
        "numba layer:",
        "cores:",
        "host step threads:",
    ):
        assert name in result.output
    for name, value in (("locked memory:", r"(\d+ bytes|no limit) \(ulimit -l\)"), ("ranks on this node:", "1$")):
        assert re.search(rf"^{name} +{value}", result.output, re.MULTILINE), name


# ------------------------------------------------------------------------------------------------ bad input

BAD = [
    ("train nosuch", 2, "no such file"),
    ("train quickstat", 2, "Did you mean 'quickstart'"),
    ("train quickstart training.max_stepz=3", 2, "'max_steps'"),
    ("train quickstart training.max_steps=abc", 2, "is text, not a whole number"),
    ("train quickstart offload.schedule=fast", 2, "not a valid schedule"),
    ("train quickstart model.dtype=bf16", 2, "not a valid value"),
    ("train quickstart model.config.hidden_sise=3", 2, "Did you mean 'hidden_size'"),
    ("train quickstart model.config.model_type=lama", 2, "'llama'"),
    ("train quickstart model.config.vocab_size=100", 2, "the tokenizer has 260 tokens"),
    ("train quickstart model.freeze=['*']", 2, "no trainable parameter is left"),
    ("train quickstart model.freeze=['nope*']", 2, "matches no parameter"),
    ("train quickstart training.resume_from_checkpoint=nowhere", 2, "no such folder"),
    ("train quickstart training.resume_from_checkpoint=true", 2, "there is no checkpoint in"),
    ("train quickstart offload.max_host_bytes=1000", 2, "max_host_bytes=1000"),
    ("train smollm2_135m_sft model.path=./nowhere", 2, "model.path='./nowhere': no such folder"),
    ("train smollm2_135m_sft", 2, "the hub cannot be reached"),
    ("train smollm2_135m_sft model.path=.", 2, "cannot be used"),
    ("plan --model owner/name", 2, "the hub cannot be reached"),
    ("plan --model .", 2, "has no config.json"),
    ("plan --params many", 2, "not a number of parameters"),
    ("plan --params 0", 2, "not from 1"),
    ("plan --params 7e9 --link-gb-s 0", 2, "--link-gb-s=0.0"),
    ("plan --params 7e9 --trainable 8e9", 2, "more than the model's"),
    ("plan --params 7e9 --model x", 2, "given twice"),
    ("plan --params 7e9 --weight-bytes 3", 2, "neither 2 nor 4"),
    ("plan --params 7e9 --device-state-bytes lots", 2, "--device-state-bytes='lots'"),
    ("plan --params 7e9 --device-state-bytes -1", 2, "not a number of bytes"),
    ("plan", 2, "no model is given"),
    ("run nowhere.py", 2, "no such file"),
    ("run -m no.where", 2, "no such module"),
    ("run --optim x", 2, "not an option"),
    ("nothing", 2, "No such command"),
]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("arguments", "code", "said"), BAD)
def test_bad_input_is_one_message_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments.split())
    assert result.exit_code == code, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_transport_cuda_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    result = invoke("train", "quickstart", "offload.transport=cuda")
    assert result.exit_code == 2, result.output
    assert "transport='cuda'" in result.output


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("train", "quickstart", "--output-dir", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "output_dir" in result.output


def test_an_unexpected_error_is_one_message_and_debug_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_offload import planning

    def broken(asked: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(planning, "answer", broken)
    result = invoke("plan", "--params", "7e9")
    assert result.exit_code == 1
    assert "ZeroDivisionError: a bug of ours" in result.output
    assert "--debug" in result.output
    assert isinstance(invoke("plan", "--params", "7e9", "--debug").exception, ZeroDivisionError)


# ------------------------------------------------------------------------------------------------ run

SCRIPT = """
import json, sys
from transformers import TrainingArguments
args = TrainingArguments(output_dir="x", optim="offload_adam", use_cpu=True, report_to="none")
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "optim": args.optim}))
sys.exit(7)
"""


@pytest.mark.parametrize("module", [False, True])
def test_run_is_as_python_with_the_optimizer_known_and_arguments_untouched(tmp_path: Path, module: bool) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(SCRIPT)
    target = ("-m", "sub.script") if module else ("sub/script.py",)
    arguments = ("--help", "--a=1", "-m", "x", "--", "--debug")
    done = in_a_process("run", *target, *arguments, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["argv"][1:] == list(arguments)
    assert said["argv"][0] == (str(tmp_path / "sub" / "script.py") if module else "sub/script.py")
    assert said["path"] == str(tmp_path if module else tmp_path / "sub")
    assert (said["name"], said["optim"]) == ("__main__", "offload_adam")


def test_an_error_of_the_script_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from hf_offload.errors import ConfigError\nraise ConfigError('mine')\n")
    done = in_a_process("run", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "script.py" in done.stderr
