"""`offload_manifest.json`: size and SHA-256 of every file of a checkpoint, and which parameters its optimizer has.

    {"format": 1, "writer": "hf_offload 0.1.0",
     "staged": true, "files": {"optimizer.pt": {"bytes": 1614181023, "sha256": "..."}, ...},
     "optimizer": {"state_dtype": "float32",
                   "groups": [{"parameters": [{"name": "...", "shape": [49152, 576], "dtype": "bfloat16",
                                               "trained": true}, ...]}]},
     "sha256": "... of the rest, as canonical JSON"}

Stdlib only, so that `hf-offload checkpoint verify` needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hf_offload import __version__
from hf_offload.checkpoint.digest import Digest, of_file
from hf_offload.errors import CheckpointError, explain

NAME = "offload_manifest.json"
FORMAT = 1

Wanted = Callable[[str], bool]
"""Whether to look at the file of this name."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        files: digest of each file, by its path below the folder ("/" between the parts); the manifest left out.
        optimizer: `state_dtype` and `groups` as above; None where there is no optimizer.
        writer: which version wrote it.
        staged: whether the whole folder was put in its place at once, so that all of it is the checkpoint's.
    """

    files: dict[str, Digest]
    optimizer: dict[str, Any] | None
    writer: str
    staged: bool = True


@dataclass(frozen=True)
class Damage:
    """A file that is not as it was written, and in what way."""

    file: str
    what: str


def write(
    folder: Path, known: Mapping[str, Digest], optimizer: dict[str, Any] | None, only: Container[str] | None = None
) -> Manifest:
    """Hash every file of `folder`, bring them to the disk, and write the manifest last.

    Args:
        known: digests of files that were hashed and synced while they were written, by path below the folder.
        optimizer: see `Manifest`.
        only: the files that are the checkpoint's, where others' lie beside them; None: all.
    """
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME):
        name = path.relative_to(folder).as_posix()
        if only is not None and name not in only:
            continue
        if name in known and known[name].bytes == path.stat().st_size:
            files[name] = known[name]
        else:
            _sync(path)
            files[name] = of_file(path)
    manifest = Manifest(files, optimizer, f"hf_offload {__version__}", staged=only is None)
    text = _text(manifest)
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for directory in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_folder(directory)
    return manifest


def read(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it has none (another program wrote it).

    Raises:
        CheckpointError: it is damaged.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(folder, [Damage(NAME, f"cannot be read: {error.strerror or error}")]) from None
    try:
        whole = json.loads(text.decode("utf-8"))
        rest = {key: value for key, value in whole.items() if key != "sha256"}
        if whole["sha256"] != _hash(rest):
            raise ValueError("its own checksum does not fit")
        files = {_name_of(name): Digest(int(d["bytes"]), str(d["sha256"])) for name, d in rest["files"].items()}
        manifest = Manifest(files, rest["optimizer"], str(rest["writer"]), rest["staged"] is True)
        number = rest["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, [Damage(NAME, f"is damaged: {error or type(error).__name__}")]) from None
    if number != FORMAT:
        cause = f"written by a newer version ({manifest.writer}) in a format that this one does not know"
        raise CheckpointError(explain("checkpoint", str(folder), cause, "Upgrade hf-offload"))
    return manifest


def damages(
    folder: Path, manifest: Manifest, wanted: Wanted = lambda name: True, told: Callable[[int], None] | None = None
) -> list[Damage]:
    """Compare the files with the manifest. Sizes first: a truncated file is seen at once.

    Args:
        wanted: which files to look at.
        told: called with a number of bytes whenever so many more have been read.
    """
    found, same_size = [], []
    for name, digest in manifest.files.items():
        if not wanted(name):
            continue
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            found.append(Damage(name, "is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"))
            continue
        if size != digest.bytes:
            found.append(Damage(name, f"has {size} bytes instead of {digest.bytes}"))
        else:
            same_size.append((name, path, digest))
    for name, path, digest in same_size:
        try:
            changed = of_file(path, told) != digest
        except OSError as error:
            found.append(Damage(name, f"cannot be read: {error.strerror or error}"))
            continue
        if changed:
            found.append(Damage(name, "has other bytes than were written (SHA-256)"))
    return found


def verify(folder: Path, wanted: Wanted = lambda name: True) -> Manifest | None:
    """The manifest, if every file is as it was written; None where there is no manifest.

    Raises:
        CheckpointError: it names every missing, truncated or changed file.
    """
    manifest = read(folder)
    if manifest is not None and (found := damages(folder, manifest, wanted)):
        raise _damaged(folder, found)
    return manifest


def whole_siblings(folder: Path) -> list[str]:
    """Other folders beside `folder`, newest first, whose manifest and file sizes are right; not hashed."""
    found = []
    for path in folder.resolve().parent.glob("checkpoint*"):
        if path.resolve() == folder.resolve() or not (path / NAME).is_file():
            continue
        try:
            manifest = read(path)
        except CheckpointError:
            continue
        if manifest is not None and all(_size(path / name) == d.bytes for name, d in manifest.files.items()):
            found.append(path)
    return [path.name for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # not on Windows
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def remedy_for(folder: Path) -> str:
    """What to do about a damaged checkpoint."""
    whole = whole_siblings(folder)
    if whole:
        return f"Resume from {whole[0]}, beside it, which has all its files; or copy this one again from where it was"
    return "Copy it again from where it was, or resume from another checkpoint"


def _damaged(folder: Path, found: list[Damage]) -> CheckpointError:
    cause = "damaged: " + "; ".join(f"{d.file} {d.what}" for d in found)
    edited = f". If you changed it on purpose, delete {NAME}: then only torch's own checksums are looked at"
    missing = all("missing" in d.what for d in found)
    return CheckpointError(explain("checkpoint", str(folder), cause, remedy_for(folder) + ("" if missing else edited)))


def _name_of(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"it names {name!r}, which does not lie in the checkpoint")
    return name


def _text(manifest: Manifest) -> str:
    files = {name: asdict(digest) for name, digest in manifest.files.items()}
    rest = {"format": FORMAT, "writer": manifest.writer, "staged": manifest.staged, "files": files,
            "optimizer": manifest.optimizer}  # fmt: skip
    return json.dumps({**rest, "sha256": _hash(rest)}, indent=1) + "\n"


def _hash(rest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
