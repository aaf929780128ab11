"""The SHA-256 of files: of those on disk, and of one that is being written. Stdlib only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PART_BYTES = 1 << 24
"""What is read or written at once: files are larger than the memory that is left beside the state."""


@dataclass(frozen=True)
class Digest:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    bytes: int
    sha256: str


def of_file(path: Path, told: Callable[[int], None] | None = None) -> Digest:
    """Read a file from its start to its end. `told(n)` is called after every n bytes."""
    found, size = hashlib.sha256(), 0
    buffer = bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            found.update(memoryview(buffer)[:n])
            size += n
            if told is not None:
                told(n)
    return Digest(size, found.hexdigest())


class HashingFile:
    """A new file for a writer that never seeks, as torch.save: hashed while it is written, synced when it is closed.

    An error of the disk, or Ctrl-C, is kept and raised by `close()`, and what is written after it is dropped: torch's
    C++ writer, in the middle of which they come, would put an error of its own in their place.

    Attributes:
        error: what was kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115  (closed by close())
        self._hash = hashlib.sha256()
        self._size = 0
        self.error: BaseException | None = None
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="hf_offload-sha256")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            if self.error is not None:
                break
            try:
                self._write(view[start : start + PART_BYTES])
            except BaseException as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """There is no buffer; torch.save asks for it."""

    @property
    def digest(self) -> Digest:
        """Of what has been written so far."""
        return Digest(self._size, self._hash.hexdigest())

    def close(self) -> Digest:
        """Bring the file to the disk.

        Raises:
            OSError: it could not be written, whole or in part. KeyboardInterrupt: it came meanwhile.
        """
        self._hasher.shutdown()
        try:
            if self.error is not None:
                raise self.error
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return self.digest

    def abandon(self) -> None:
        """Close the file as it is."""
        self._hasher.shutdown()
        self._file.close()

    def _write(self, part: memoryview) -> None:
        hashed = self._hasher.submit(self._hash.update, part)
        try:
            while part:
                written = self._file.write(part) or 0
                self._size += written
                part = part[written:]
        finally:
            hashed.result()  # the memory is the writer's again when this returns
