"""Where compiled kernels are kept between processes.

Numba's own on-disk cache, in a folder of ours named by a hash of every source file of the kernels: by itself Numba
does not notice an edit in a helper or intrinsic of *another* file than the kernel's, and it raises at import where
no folder is writable (a read-only install with no home).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba

PACKAGE = Path(__file__).resolve().parent
PREFIX = "hf_offload-kernels-"


def source_hash(folder: Path = PACKAGE) -> str:
    """The first 16 hex digits of the SHA-256 of every source file in `folder`, names included."""
    digest = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_cache_dir(package: Path = PACKAGE) -> Path | None:
    """The first folder that can be made and written: NUMBA_CACHE_DIR, the package's __pycache__, the user's cache
    folder, the temporary folder. None where there is none: kernels are then compiled anew in each process."""
    name = PREFIX + source_hash(package)
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return _made(Path(chosen) / name)
    in_tree = _made(package / "__pycache__" / name)
    if in_tree:
        _drop_older(in_tree)
        return in_tree
    for base in (_user_cache(), _private_temporary()):
        folder = _made(base / name) if base else None
        if folder:
            return folder
    return None


@contextlib.contextmanager
def numba_caches_in(folder: Path) -> Iterator[None]:
    """Inside, functions decorated with `cache=True` are cached under `folder`; Numba reads it at decoration alone."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def _made(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


def _drop_older(current: Path) -> None:
    # Of other versions of these very sources, so nothing will ever read them again.
    for folder in current.parent.glob(PREFIX + "*"):
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)


def _user_cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    if base:
        return Path(base) / "hf_offload"
    try:
        return Path.home() / ".cache" / "hf_offload"
    except RuntimeError:  # a user id without an entry in the password file, as in some containers
        return None


def _private_temporary() -> Path | None:
    """A folder in the temporary one that only this user can write: what lies in it is unpickled and run."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    try:
        folder = Path(tempfile.gettempdir()) / f"hf_offload-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and (os.name == "nt" or (found.st_uid == user and not found.st_mode & 0o022))
    return folder if private else None
