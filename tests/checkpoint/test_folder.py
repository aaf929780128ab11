"""A checkpoint folder appears whole or not at all; what changed in it since is told, file by file."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_offload.checkpoint import digest, manifest, staging, torch_file
from hf_offload.checkpoint.digest import Digest, HashingFile
from hf_offload.checkpoint.staging import Staged
from hf_offload.errors import CheckpointError, WaitTimeout


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "adapter").mkdir(exist_ok=True)
    (folder / "adapter" / "config.json").write_text("{}")


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- digests


@pytest.mark.parametrize("size", [0, 1, 1000, digest.PART_BYTES, digest.PART_BYTES + 3])
def test_a_file_is_hashed_while_it_is_written(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    file = HashingFile(tmp_path / "f")
    assert file.write(memoryview(data[: size // 3])) == size // 3
    file.write(data[size // 3 :])
    found = file.close()
    assert found == Digest(size, hashlib.sha256(data).hexdigest()) == digest.of_file(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == data


def test_a_disk_that_is_full_is_told_when_the_file_is_closed() -> None:
    """Not from inside write(): torch's C++ writer would end the process."""
    file = HashingFile("/dev/full")
    assert file.write(b"x" * 100) == 100
    with pytest.raises(OSError) as caught:
        file.close()
    assert caught.value.errno == errno.ENOSPC


def test_ctrl_c_while_torch_saves_is_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: HashingFile, part: memoryview) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HashingFile, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch_file.write({"a": torch.zeros(1000)}, tmp_path / "optimizer.pt")


def test_a_wait_that_took_too_long_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeout), torch_file.writing(tmp_path):
        raise WaitTimeout("an OSError, too")
    with pytest.raises(CheckpointError, match="No space left"), torch_file.writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


# ---- torch's files


def test_what_torch_saves_is_hashed_and_loads(tmp_path: Path) -> None:
    flat = torch.randn(100_000)
    obj = {"state": {i: {"exp_avg": flat[i * 10 : i * 10 + 10]} for i in range(5)}, "param_groups": [{"lr": 0.1}]}
    found = torch_file.write(obj, tmp_path / "optimizer.pt")
    assert found == digest.of_file(tmp_path / "optimizer.pt")
    assert found.bytes < 420_000, "views of one memory are stored once"
    torch_file.check_zip(tmp_path / "optimizer.pt")
    loaded = torch_file.read(tmp_path / "optimizer.pt")
    assert torch.equal(loaded["state"][3]["exp_avg"], flat[30:40]) and loaded["param_groups"] == [{"lr": 0.1}]


def test_a_full_disk_while_torch_saves_is_an_error_of_ours() -> None:
    with pytest.raises(CheckpointError, match="No space left"):
        torch_file.write({"a": torch.zeros(1000)}, "/dev/full")


def test_files_of_old_torch_load(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch_file.check_zip(tmp_path / "old.pt")
    assert torch.equal(torch_file.read(tmp_path / "old.pt")["a"], torch.ones(3))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "evil"))
    torch.save({"state": Evil()}, tmp_path / "optimizer.pt", _use_new_zipfile_serialization=zipped)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("optimizer.pt", "bare.pt"):
        with pytest.raises(CheckpointError, match=r"more than tensors|cannot be read"):
            torch_file.read(tmp_path / name)
    assert not (tmp_path / "evil").exists()


def test_a_missing_file(tmp_path: Path) -> None:
    for look in (torch_file.read, torch_file.check_zip):
        with pytest.raises(CheckpointError, match="is missing"):
            look(tmp_path / "optimizer.pt")


# ---- the manifest


def test_what_is_written_is_whole(tmp_path: Path) -> None:
    fill(tmp_path)
    known = digest.of_file(tmp_path / "model.bin")
    table = {"state_dtype": "float32", "groups": []}
    written = manifest.write(tmp_path, {"model.bin": known}, table)
    assert set(written.files) == {"model.bin", "adapter/config.json"}
    assert manifest.read(tmp_path) == written == manifest.verify(tmp_path)
    assert written.optimizer == table


def test_known_digests_of_files_that_changed_size_are_not_believed(tmp_path: Path) -> None:
    fill(tmp_path)
    written = manifest.write(tmp_path, {"model.bin": Digest(1, "0" * 64)}, None)
    assert written.files["model.bin"] == digest.of_file(tmp_path / "model.bin")


def test_without_a_manifest_there_is_nothing_to_verify(tmp_path: Path) -> None:
    fill(tmp_path)
    assert manifest.read(tmp_path) is None and manifest.verify(tmp_path) is None


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        data = data[:-1]
    elif how == "longer":
        data += b"\0"
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "flipped"])
def test_every_damage_is_told_by_file_and_what_to_do(tmp_path: Path, how: str) -> None:
    for name in ("checkpoint-10", "checkpoint-20"):
        fill(tmp_path / name)
        manifest.write(tmp_path / name, {}, None)
    folder = tmp_path / "checkpoint-20"
    damaged(folder / "model.bin", how)
    damaged(folder / "adapter" / "config.json", how)
    with pytest.raises(CheckpointError) as caught:
        manifest.verify(folder)
    text = str(caught.value)
    assert "model.bin" in text and "adapter/config.json" in text and str(folder) in text
    assert "Resume from checkpoint-10" in text
    assert manifest.verify(folder, lambda name: name == "nothing") is not None
    assert manifest.verify(tmp_path / "checkpoint-10") is not None


def test_every_flipped_bit_of_the_manifest_itself_is_seen(tmp_path: Path) -> None:
    fill(tmp_path)
    manifest.write(tmp_path, {}, {"state_dtype": "float32", "groups": [{"parameters": []}]})
    path = tmp_path / manifest.NAME
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 16):
            changed = bytearray(whole)
            changed[at] ^= bit
            path.write_bytes(changed)
            try:
                manifest.verify(tmp_path)
            except CheckpointError:
                continue
            assert json.loads(changed) == json.loads(whole), "only white space may change unseen"


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "a/../../b", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    fill(tmp_path)
    manifest.write(tmp_path, {}, None)
    found = json.loads((tmp_path / manifest.NAME).read_text())
    found["files"] = {name: {"bytes": 1, "sha256": "0" * 64}}
    del found["sha256"]
    text = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    found["sha256"] = hashlib.sha256(text).hexdigest()
    (tmp_path / manifest.NAME).write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="does not lie in the checkpoint"):
        manifest.verify(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr(manifest, "FORMAT", 2)
    manifest.write(tmp_path, {}, None)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="Upgrade"):
        manifest.read(tmp_path)


# ---- the folder


def test_nothing_is_seen_under_the_name_before_it_is_whole(tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    target = tmp_path / "checkpoint-20"
    with Staged(target) as staged:
        fill(staged.path)
        assert not target.exists() and get_last_checkpoint(str(tmp_path)) is None
        assert staged.path.name == target.name
        staged.commit()
        assert target.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-20"]
    assert "model.bin" in tree(target)


def test_the_trainers_upload_leaves_it_out(tmp_path: Path) -> None:
    """`ignore_patterns` of its upload_folder, matched against paths below output_dir."""
    root = Staged(tmp_path / "checkpoint-20").root
    assert fnmatch.fnmatch(f"{root.name}/checkpoint-20/optimizer.pt", "_*")


def test_without_commit_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Staged(tmp_path / "checkpoint-20") as staged:
        fill(staged.path)
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_that_is_there_is_replaced_and_strangers_in_it_are_kept(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_EXCHANGE", 1 << 30)  # the kernel refuses unknown flags
    target = tmp_path / "checkpoint-20"
    fill(target)
    (target / "model-00002.bin").write_bytes(b"a part that the new one has not")
    manifest.write(target, {}, None)
    (target / "notes.txt").write_text("mine")
    (target / "logs").mkdir()
    (target / "logs" / "a").write_text("also mine")
    with Staged(target) as staged:
        staged.path.mkdir(exist_ok=True)
        (staged.path / "model.bin").write_bytes(b"new")
        manifest.write(staged.path, {}, None)
        staged.commit()
    assert {k: v for k, v in tree(target).items() if k != manifest.NAME} == {
        "model.bin": b"new", "notes.txt": b"mine", "logs/a": b"also mine",
    }  # fmt: skip
    assert manifest.verify(target) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-20"]


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    dead = tmp_path / f"{staging.PREFIX}checkpoint-10"
    fill(dead / "checkpoint-10")
    with Staged(tmp_path / "checkpoint-20") as living:
        assert not dead.exists()
        fill(living.path)
        with Staged(tmp_path / "checkpoint-30") as other:
            assert living.path.is_dir()
            fill(other.path)
            other.commit()
        living.commit()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-30"]


def test_a_folder_that_was_put_aside_comes_back_where_the_process_was_killed_before_its_successor_came(
    tmp_path: Path,
) -> None:
    """On disks that cannot exchange two names."""
    left = tmp_path / f"{staging.PREFIX}checkpoint-10"
    fill(left / staging._OLD)
    fill(left / "checkpoint-10")
    with Staged(tmp_path / "checkpoint-20"):
        pass
    assert "model.bin" in tree(tmp_path / "checkpoint-10") and not left.exists()


def test_a_disk_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    for _ in range(2):
        with Staged(tmp_path / "checkpoint-20") as staged:
            fill(staged.path)
            staged.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-20"]


def test_a_link_stays_a_link_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    fill(tmp_path / "disk" / "ckpt")
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk" / "ckpt")
    with Staged(tmp_path / "ckpt") as staged:
        (staged.path / "new").write_text("")
        staged.commit()
    assert (tmp_path / "ckpt").is_symlink() and (tmp_path / "disk" / "ckpt" / "new").exists()


def test_what_another_node_wrote_on_a_disk_of_its_own_joins_its_folder(tmp_path: Path) -> None:
    other = Staged(tmp_path / "checkpoint-20", owner=False)
    with other:
        fill(other.path)
    other.take_over()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-20"] and "model.bin" in tree(tmp_path / "checkpoint-20")
