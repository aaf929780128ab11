"""Scripts that never heard of hf_offload, with `--optim offload_adam`: evaluation, saving, resume to the same bits."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = {
    "use_cpu": "true",
    "bf16": "true",
    "optim": "offload_adam",
    "optim_args": "schedule=overlapped,threads=1,bucket_bytes=16384",
    "max_steps": "6",
    "save_strategy": "steps",
    "save_steps": "3",
    "eval_strategy": "steps",
    "eval_steps": "2",
    "logging_steps": "1",
    "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "2",
    "learning_rate": "1e-2",
    "report_to": "none",
    "dataloader_pin_memory": "false",
    "disable_tqdm": "true",
}


def options(**other: str) -> list[str]:
    return [word for name, value in {**OPTIONS, **other}.items() if value for word in (f"--{name}", value)]


@pytest.fixture
def material(lab: Any, tmp_path: Path) -> dict[str, str]:
    """A model with its tokenizer, and data in the form each script wants, all local."""
    lab.model().save_pretrained(tmp_path / "model")
    lab.tokenizer().save_pretrained(tmp_path / "model")
    lines = lab.sentences(60)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    (tmp_path / "valid.txt").write_text("\n".join(lab.sentences(10, seed=9)))
    rows: dict[str, list[Any]] = {"sft": [{"text": line} for line in lines]}
    rows["dpo"] = [
        {"prompt": p, "chosen": c, "rejected": r}
        for p, c, r in zip(lines, lab.sentences(60, seed=3), lab.sentences(60, seed=4))
    ]
    for name, content in rows.items():
        (tmp_path / name).mkdir()
        for split, part in (("train", content), ("test", content[:8])):
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return {name: str(tmp_path / name) for name in ("model", "train.txt", "valid.txt", "sft", "dpo")}


def clm(material: dict[str, str]) -> list[str]:
    files = ["--train_file", material["train.txt"], "--validation_file", material["valid.txt"]]
    return ["--model_name_or_path", material["model"], *files, "--do_train", "--do_eval"]


def trl(material: dict[str, str], name: str) -> list[str]:
    return ["--model_name_or_path", material["model"], "--dataset_name", material[name], "--max_length", "24"]


def installed(script: str) -> str:
    """The path of a script in the installed TRL, without importing it."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("trl is not installed")
    return str(Path(next(iter(found.submodule_search_locations))) / "scripts" / script)


def compare(tools: Any, whole: Path, resumed: Path) -> None:
    a, b = (p / "checkpoint-6" for p in (whole, resumed))
    assert tools.same_bits(*(load_file(p / "model.safetensors") for p in (a, b)))
    assert tools.same_bits(*(load_file(p / "model.safetensors") for p in (whole, resumed)))
    left, right = (torch.load(p / "optimizer.pt", weights_only=True) for p in (a, b))
    assert left["param_groups"] == right["param_groups"] and left["state"].keys() == right["state"].keys()
    for number, entry in left["state"].items():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master"} and int(entry["step"]) == 6
        assert all(
            torch.equal(torch.as_tensor(t), torch.as_tensor(right["state"][number][k])) for k, t in entry.items()
        )
    logs = [json.loads((p / "trainer_state.json").read_text())["log_history"] for p in (a, b)]
    losses = [[(h["step"], h[k]) for h in log for k in ("loss", "eval_loss") if k in h] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 6 + 3
    assert load_file(a / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def train_and_resume(python: Any, site: dict[str, str], tmp_path: Path, tools: Any, *command: str) -> Any:
    """The command in full, then again from its checkpoint of the third of six steps, with the same end."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    env = {**site, "OMP_NUM_THREADS": "1"}
    done = python(*command, *options(output_dir=str(whole)), env=env)
    assert "24,736 fp32 weights are bfloat16 now" in done.stderr + done.stdout
    again = options(output_dir=str(resumed), resume_from_checkpoint=str(whole / "checkpoint-3"))
    python(*command, *again, env=env)
    compare(tools, whole, resumed)


def test_a_script_like_run_clm(python: Any, site: Any, material: Any, tmp_path: Path, tools: Any) -> None:
    train_and_resume(python, site, tmp_path, tools, str(SCRIPTS / "clm.py"), *clm(material))


@pytest.mark.slow
def test_a_script_like_run_clm_by_hf_offload_run(python: Any, material: Any, tmp_path: Path, tools: Any) -> None:
    pytest.importorskip("hf_offload.cli")
    off = {"HF_OFFLOAD_AUTOLOAD": "0"}
    command = ("-m", "hf_offload.cli", "run", str(SCRIPTS / "clm.py"), *clm(material))
    train_and_resume(python, off, tmp_path, tools, *command)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trls_own_scripts(python: Any, site: Any, material: Any, tmp_path: Path, tools: Any, name: str) -> None:
    train_and_resume(python, site, tmp_path, tools, installed(f"{name}.py"), *trl(material, name))


@pytest.mark.slow
def test_trl_sft_with_lora(python: Any, site: Any, material: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = ["--lora_target_modules", "q_proj", "v_proj", *options(use_peft="true", lora_r="4", output_dir="lora")]
    python(installed("sft.py"), *trl(material, "sft"), *lora, env=site)
    saved = torch.load(tmp_path / "lora" / "checkpoint-6" / "optimizer.pt", weights_only=True)
    assert len(saved["state"]) == 2 * 2 * 2  # layers, projections, A and B


@pytest.mark.slow
def test_the_trl_command(python: Any, site: Any, material: Any, tmp_path: Path, tools: Any) -> None:
    """It parses the arguments in its own process, then launches the script through accelerate in another."""
    command = shutil.which("trl", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("the trl command is not installed")
    train_and_resume(python, site, tmp_path, tools, command, "sft", *trl(material, "sft"))


@pytest.mark.slow
def test_accelerate_launch(python: Any, site: Any, material: Any, tmp_path: Path) -> None:
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "bf16", "--dynamo_backend", "no"]
    rest = options(bf16="", output_dir="out")  # the launcher alone asks for bf16
    done = python(*launch, str(SCRIPTS / "clm.py"), *clm(material), *rest, env=site)
    assert "fp32 weights are bfloat16 now" in done.stderr + done.stdout


def test_a_bad_entry_is_named(python: Any, site: Any, material: Any) -> None:
    bad = options(optim_args="overlapped", output_dir="out")
    done = python(str(SCRIPTS / "clm.py"), *clm(material), *bad, env=site, fails=True)
    assert "ConfigError: optim_args='overlapped'" in done.stderr and "schedule=overlapped" in done.stderr
