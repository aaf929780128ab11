"""A folder that appears under its name whole or not at all, whenever the process may be killed. Stdlib only."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO

from hf_offload.checkpoint import manifest
from hf_offload.errors import CheckpointError

PREFIX = "_hf_offload-saving-"
"""Names of folders that are being written. transformers' `get_last_checkpoint` and its rotation look for
`checkpoint-N`, and see none of these; what it uploads to the hub leaves out `_*`."""
_LOCK, _OLD = ".lock", ".old"
_AT_CWD, _EXCHANGE = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h


class Staged:
    """Write into `path`, a folder of the same name as `target` inside a temporary one; `commit()` renames it.

    Whatever was in `target` is replaced; files in it that no checkpoint of ours put there are kept. Without `commit()`
    all that was written goes.

    Args:
        target: where the folder is to appear.
        owner: whether this process makes, renames and removes it; others only write into it.
    """

    def __init__(self, target: Path, owner: bool = True) -> None:
        self.target = Path(os.path.realpath(target))  # a link stays a link to the folder that is replaced
        self.root = self.target.parent / f"{PREFIX}{self.target.name}"
        self.path = self.root / self.target.name
        self._owner = owner
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Staged:
        if self._owner:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            for left in self.target.parent.glob(f"{PREFIX}*"):
                _remove_if_dead(left)
            if self.path.exists():  # nothing tells who is at work where there are no locks: the name is ours
                shutil.rmtree(self.root, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_of(self.root)
        return self

    def commit(self) -> None:
        """`target` is the new folder from here on.

        Raises:
            OSError: it could not be renamed; the old `target`, if any, is there.
        """
        manifest.sync_folder(self.path)
        if self.target.exists():
            _exchange(self.path, self.target, self.root / _OLD)
            manifest.sync_folder(self.target.parent)
            _keep_strangers(self.root, self.target)
        else:
            self.path.rename(self.target)
        manifest.sync_folder(self.target.parent)

    def take_over(self) -> None:
        """After the owner's commit, on a node that shares no disk with it: what was written here goes to `target`."""
        if not self._owner and self.path.is_dir():
            self.target.mkdir(exist_ok=True)
            for entry in self.path.iterdir():
                entry.replace(self.target / entry.name)
            shutil.rmtree(self.root, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            _bring_back(self.root / _OLD, self.target)
            shutil.rmtree(self.root, ignore_errors=True)
            self._lock.close()
            self._lock = None


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Both names change places at once where the system can (renameat2, Linux 3.15); else one after the other."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        rename = None
    if rename is not None and rename(_AT_CWD, os.fsencode(new), _AT_CWD, os.fsencode(old), _EXCHANGE) == 0:
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        _bring_back(aside, old)
        raise


def _keep_strangers(root: Path, target: Path) -> None:
    """What others had put into the folder that was replaced goes into the new one."""
    for old in (root / target.name, root / _OLD):
        if not old.is_dir():
            continue
        try:
            known = manifest.read(old)
        except CheckpointError:
            known = None
        ours = {name.split("/")[0] for name in known.files} | {manifest.NAME} if known else {manifest.NAME}
        for entry in list(old.iterdir()):
            if entry.name not in ours and not (target / entry.name).exists():
                entry.rename(target / entry.name)


def _remove_if_dead(root: Path) -> None:
    """Remove what a process left behind that was killed while it wrote. One that lives holds the lock."""
    try:
        lock = _locked(root)
    except OSError:
        return
    _bring_back(root / _OLD, root.parent / root.name.removeprefix(PREFIX))
    shutil.rmtree(root, ignore_errors=True)
    lock.close()


def _bring_back(aside: Path, target: Path) -> None:
    """The folder that was put aside, if its successor never came to its place."""
    if aside.is_dir() and not target.exists():
        aside.rename(target)


def _lock_of(root: Path) -> IO[bytes]:
    """As `_locked`, and a mere file where the disk has no locks (some network disks)."""
    try:
        return _locked(root)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise
        return open(root / _LOCK, "ab")


def _locked(root: Path) -> IO[bytes]:
    """The lock of a temporary folder.

    Raises:
        OSError: somebody else has it.
    """
    file = open(root / _LOCK, "ab")  # noqa: SIM115  (held until the folder goes)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows
        pass
    except OSError:
        file.close()
        raise
    return file
