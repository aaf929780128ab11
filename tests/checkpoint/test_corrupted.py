"""200 corrupted checkpoints: every one is refused by an error of ours, which names the file, and touches nothing."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_offload import compat
from hf_offload.checkpoint import manifest, torch_file
from hf_offload.errors import CheckpointError

compat.register()
KINDS = ("missing", "empty", "truncated", "longer", "flipped bit", "zeroed block", "another step's")


def corrupt(path: Path, kind: str, dice: random.Random, other: Path) -> None:
    """Do this to a file; it differs afterwards."""
    data = bytearray(path.read_bytes())
    path.unlink()
    if kind == "missing":
        return
    if kind == "empty":
        data = bytearray()
    elif kind == "truncated":
        data = data[: dice.randrange(1, len(data))]
    elif kind == "longer":
        data += bytes(dice.randrange(1, 100))
    elif kind == "flipped bit":
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "zeroed block":
        at = dice.randrange(len(data))
        data[at : at + 512] = bytes(b ^ 0x55 for b in data[at : at + 512])
    else:
        data = bytearray(other.read_bytes())
    path.write_bytes(data)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, dict[str, Any]]]:
    """A trainer, the folder with its checkpoints of steps 1 and 2, and what the second holds."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1))
    ids = torch.randint(0, 64, (8, 8))
    folder = tmp_path_factory.mktemp("saved")
    args = TrainingArguments(
        str(folder), optim="offload_adam", optim_args="threads=1", use_cpu=True, bf16=True, max_steps=2, save_steps=1,
        report_to=[], per_device_train_batch_size=2, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
    yield trainer, folder, torch.load(folder / "checkpoint-2" / "optimizer.pt", weights_only=True)
    trainer.optimizer.optimizer.close()


def everything(trainer: Any) -> dict[str, bytes]:
    """Every byte of the model and of the optimizer's state."""
    entries = trainer.optimizer.state_dict()["state"]
    state = {f"{i}.{k}": torch.as_tensor(t) for i, entry in entries.items() for k, t in entry.items()}
    tensors = state | dict(trainer.model.named_parameters())
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()
    }


def test_200_corrupted_checkpoints(saved: tuple[Any, Path, Any], tmp_path: Path) -> None:
    trainer, folder, _ = saved
    dice, before = random.Random(0), everything(trainer)
    names = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
    seen = set()
    for number in range(200):
        target = tmp_path / f"{number}" / "checkpoint-2"
        shutil.copytree(folder / "checkpoint-2", target)
        name, kind = names[number % len(names)], KINDS[number // len(names) % len(KINDS)]
        other = folder / "checkpoint-1" / name
        own = kind == "another step's" and other.read_bytes() == (target / name).read_bytes()
        if own or (name, kind) == (manifest.NAME, "missing"):  # then others wrote it, or nothing is changed
            kind = "flipped bit"
        corrupt(target / name, kind, dice, other)
        with pytest.raises(CheckpointError) as caught:
            trainer._load_from_checkpoint(str(target))
        if (name, kind) != (manifest.NAME, "another step's"):  # then it is whole, and the files are not its own
            assert name in str(caught.value), (name, kind)
        seen.add((name, kind))
        shutil.rmtree(target.parent)
    assert everything(trainer) == before
    assert len(seen) > 50


def read_checked(path: Path) -> Any:
    torch_file.check_zip(path)
    return torch_file.read(path)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("read", [read_checked, torch_file.read])
def test_optimizer_files_that_no_manifest_covers(
    saved: tuple[Any, Path, Any], tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    """With torch's CRC-32s: an error of ours or the same state (the flipped bit was in the padding). Without: ours."""
    _, folder, holds = saved
    dice, refused = random.Random(1), 0
    for number in range(200):
        path = tmp_path / "optimizer.pt"
        shutil.copy(folder / "checkpoint-2" / "optimizer.pt", path)
        corrupt(path, ("empty", "truncated", "flipped bit", "zeroed block")[number % 4], dice, path)
        try:
            found = read(path)
        except CheckpointError:
            refused += 1
            continue
        if read is read_checked:
            assert same(found, holds)
    assert refused > 60
