"""Tiny models, data and trainers for the tests of the meeting with transformers, accelerate, TRL and PEFT."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Several buckets, and every copy much later than a forward takes: whoever reads a weight too early reads an old one.
SLOW = "bucket_bytes=16384,link_latency_us=20000,threads=1"
ROOT = Path(__file__).resolve().parents[2]

torch.set_num_threads(1)  # models this small only lose by more


class Lab:
    """Makes the small things that the tests train, always from the same seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def model(self, dtype: torch.dtype = torch.float32, layers: int = 2, **config: Any) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        shape |= {"max_position_embeddings": 64, "num_hidden_layers": layers, "attn_implementation": "eager"}
        return LlamaForCausalLM(LlamaConfig(**{**shape, **config})).to(dtype)

    def data(self, rows: int = 48, length: int = 12) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 96, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, 0] = -100  # never a target; whether the mean counts it depends on the version of transformers
        return [{"input_ids": row, "labels": target} for row, target in zip(ids, labels)]

    def tokenizer(self) -> Any:
        """Words w0 to w89, and what a chat template needs."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        special = ["<pad>", "<unk>", "<s>", "</s>", "<user>", "<assistant>"]
        vocabulary = {word: i for i, word in enumerate(special + [f"w{i}" for i in range(90)])}
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
        made.chat_template = (
            "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
        )
        return made

    def sentences(self, rows: int, seed: int = 2) -> list[str]:
        numbers = torch.randint(0, 90, (rows, 8), generator=torch.Generator().manual_seed(seed))
        return [" ".join(f"w{n}" for n in row.tolist()) for row in numbers]

    def args(self, kind: Any = None, **given: Any) -> Any:
        from transformers import TrainingArguments

        self.runs += 1
        chosen = {
            "output_dir": str(self.folder / f"run{self.runs}"),
            "use_cpu": True,
            "optim": "offload_adam",
            "per_device_train_batch_size": 4,
            "max_steps": 5,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        return (kind or TrainingArguments)(**{**chosen, **given})

    def trainer(self, model: Any = None, kind: Any = None, more: dict[str, Any] | None = None, **args: Any) -> Any:
        """A Trainer (or `kind`) over the data; `more` are its own keyword arguments, the rest TrainingArguments'."""
        from transformers import Trainer

        data = self.data()
        chosen: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:8], **(more or {})}
        return (kind or Trainer)(self.model() if model is None else model, self.args(**args), **chosen)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the parameters, read without any hook."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def history(trainer: Any, *keys: str) -> list[tuple[float, ...]]:
    """The logged values of `keys`, for every log entry that has them all."""
    return [tuple(h[k] for k in keys) for h in trainer.state.log_history if all(k in h for k in keys)]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def state_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizer's state, copied."""
    saved = optimizer.state_dict()["state"]
    return {f"{i}.{name}": torch.as_tensor(t).clone() for i, entry in saved.items() for name, t in entry.items()}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def tools() -> Any:
    """The functions above: conftest.py cannot be imported under --import-mode=importlib."""
    return sys.modules[__name__]


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its settings in process-wide state, and TrainingArguments in the environment."""
    _forget_accelerate()
    yield
    _forget_accelerate()


def _forget_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python on a piece of code or on arguments, from an empty folder, with this checkout importable."""

    def run(*command: str, code: str | None = None, env: dict[str, str] | None = None, fails: bool = False) -> Any:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {**os.environ, **quiet, "PYTHONPATH": path, **(env or {})}
        arguments = ["-c", code] if code is not None else list(command)
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert fails == (done.returncode != 0), f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done

    return run


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which this checkout counts as installed: its entry points are found.

    `pip install` writes a folder NAME-VERSION.dist-info; torch reads entry_points.txt in it. This one is made from
    the table in pyproject.toml.
    """
    folder = tmp_path / "site" / "hf_offload-0.1.0.dist-info"
    folder.mkdir(parents=True)
    table = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."torch.backends"]\n')[1].split("\n\n")[0]
    (folder / "entry_points.txt").write_text("[torch.backends]\n" + table.replace('"', "") + "\n")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hf-offload\nVersion: 0.1.0\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(ROOT)])}
