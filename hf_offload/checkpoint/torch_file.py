"""Torch's files: written as a stream straight from the memory that holds the state, read by mapping them."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_offload.checkpoint.digest import Digest, HashingFile
from hf_offload.checkpoint.manifest import remedy_for
from hf_offload.errors import CheckpointError, OffloadError, explain


def write(obj: Any, path: str | os.PathLike[str], save: Callable[..., Any] = torch.save, **options: Any) -> Digest:
    """`torch.save`, hashed while it is written and brought to the disk.

    Tensors in host memory are written from where they are: no copy of the state is made.

    Args:
        save: torch's own function, where `torch.save` has been wrapped.

    Raises:
        CheckpointError: the disk is full or refuses; what there is of the file is incomplete.
    """
    with hashed(path) as file:
        save(obj, file, **options)
    return file.digest


@contextmanager
def hashed(path: str | os.PathLike[str]) -> Iterator[HashingFile]:
    """A new file whose `digest` is known when the context has ended. Raises as `write`."""
    with writing(path):
        file = HashingFile(path)
        try:
            yield file
        except BaseException as error:
            file.abandon()
            if file.error is not None and file.error is not error:
                raise file.error from error
            raise
        file.close()


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the disk refuses in here becomes a CheckpointError that tells of `path`; our own errors stay as they are."""
    try:
        yield
    except OffloadError:  # a WaitTimeout is an OSError, too
        raise
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """The error for a file that the disk would not take."""
    free = _free(Path(path))
    room = "" if free is None else f"; {free / 1e9:.2f} GB are free there"
    cause = f"cannot be written: {error.strerror or error}{room}. Checkpoints saved before are whole"
    remedy = "Make room (save_total_limit keeps fewer), or give another output_dir, and resume from the last one"
    return CheckpointError(explain("checkpoint", str(path), cause, remedy))


def read(path: str | os.PathLike[str], load: Callable[..., Any] = torch.load) -> Any:
    """`torch.load` of a file on the host that holds tensors and plain types only; nothing in it is executed.

    The tensors are views of the mapped file: reading them takes page cache, which the kernel takes back at need, and
    no memory of this process.

    Args:
        load: torch's own function, where `torch.load` has been wrapped.

    Raises:
        CheckpointError: it is missing, truncated, damaged or holds other things.
    """
    path = Path(path)
    try:
        mapped = zipfile.is_zipfile(path)  # not before torch 1.6
        return load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise CheckpointError(explain("file", str(path), "it is missing", remedy_for(path.parent))) from None
    except pickle.UnpicklingError as error:
        cause = f"it holds more than tensors and plain types, or is damaged, and is not loaded: {_first_line(error)}"
        raise CheckpointError(explain("file", str(path), cause, remedy_for(path.parent))) from None
    except MemoryError:
        raise
    except Exception as error:  # what torch's readers raise on damaged files has no common base
        cause = f"it cannot be read: {_first_line(error)}"
        raise CheckpointError(explain("file", str(path), cause, remedy_for(path.parent))) from None


def check_zip(path: str | os.PathLike[str]) -> None:
    """Compare every record of a torch file with its CRC-32, which torch writes and does not read.

    For files that no manifest covers. Files of before torch 1.6 have none.

    Raises:
        CheckpointError: a record is damaged, or the file is truncated.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except FileNotFoundError:
        raise CheckpointError(explain("file", str(path), "it is missing", remedy_for(path.parent))) from None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        cause = f"it is truncated or damaged: {_first_line(error)}"
        raise CheckpointError(explain("file", str(path), cause, remedy_for(path.parent))) from None
    if damaged is not None:
        cause = f"the record {damaged} is damaged (CRC-32)"
        raise CheckpointError(explain("file", str(path), cause, remedy_for(path.parent)))


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _free(path: Path) -> int | None:
    try:
        found = os.statvfs(path.parent)
    except (OSError, AttributeError):
        return None
    return found.f_bavail * found.f_frsize
