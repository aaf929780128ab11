"""Compiled once, kept on disk, told once; and working where nothing can be written."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from hf_offload.kernels.cpu import cache, jit

ROOT = Path(__file__).resolve().parents[2]

WIDEN = """
import numpy as np
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import jit
assert "torch" not in __import__("sys").modules
dst = np.zeros(3, np.float32)
cpu.widen(np.array([0x3F80, 0x4000, 0x4040], np.uint16), dst, "bfloat16", 1)
print(dst.tolist(), jit.CACHE_DIR)
"""
NOTICE = "hf_offload: compiling CPU kernels (about"


def checkout(folder: Path) -> Path:
    """A copy of the package's sources, without any cache."""
    for name in ("hf_offload", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_second_process_loads_what_the_first_compiled(tmp_path, run_python):
    first = run_python(WIDEN, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout.startswith("[1.0, 2.0, 3.0] " + str(tmp_path))
    assert first.stderr.count(NOTICE) == 1 and str(tmp_path) in first.stderr
    assert list(tmp_path.rglob("*.nbc"))
    second = run_python(WIDEN, NUMBA_CACHE_DIR=str(tmp_path))
    assert second.stdout == first.stdout
    assert NOTICE not in second.stderr


def test_an_edit_in_another_file_than_the_kernels_is_noticed(tmp_path, run_python):
    """Numba alone would load the old code: it looks at the file of the kernel, not at those of its helpers."""
    root = checkout(tmp_path)
    run_python(WIDEN, root=root, NUMBA_CACHE_DIR=None)
    bits = root / "kernels" / "cpu" / "bits.py"
    bits.write_text(bits.read_text().replace("builder.zext(bits, I32), I32(16))", "builder.zext(bits, I32), I32(15))"))
    edited = run_python(WIDEN, root=root, NUMBA_CACHE_DIR=None)
    assert NOTICE in edited.stderr
    assert not edited.stdout.startswith("[1.0, 2.0, 3.0]")
    kept = list((root / "kernels" / "cpu" / "__pycache__").glob(cache.PREFIX + "*"))
    assert len(kept) == 1, "the folder of the older sources is dropped"


def read_only(folder: Path) -> Path:
    """A checkout whose kernels cannot write beside themselves. Permissions do not stop root; a file in the way does."""
    root = checkout(folder)
    (root / "kernels" / "cpu" / "__pycache__").write_text("")
    return root


def test_read_only_package_and_home_use_a_private_temporary_folder(tmp_path, run_python):
    root, temporary = read_only(tmp_path / "site"), tmp_path / "tmp"
    temporary.mkdir()
    env = {"HOME": "/proc/nonexistent", "XDG_CACHE_HOME": None, "NUMBA_CACHE_DIR": None, "TMPDIR": str(temporary)}
    first, second = (run_python(WIDEN, root=root, PYTHONDONTWRITEBYTECODE="1", **env) for _ in range(2))
    assert first.stdout.startswith("[1.0, 2.0, 3.0] " + str(temporary))
    assert NOTICE in first.stderr and NOTICE not in second.stderr
    (own,) = temporary.glob("hf_offload-*")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_nowhere_to_write_still_works(tmp_path, run_python):
    root = read_only(tmp_path)
    no_temporary = "import tempfile; tempfile.tempdir = '/proc/nonexistent'\n"
    env = {"HOME": "/proc/nonexistent", "XDG_CACHE_HOME": None, "NUMBA_CACHE_DIR": None}
    process = run_python(no_temporary + WIDEN, root=root, PYTHONDONTWRITEBYTECODE="1", **env)
    assert process.stdout.startswith("[1.0, 2.0, 3.0] None")
    assert "no folder to cache them in is writable: set NUMBA_CACHE_DIR" in process.stderr


IN_THREADS = """
import numpy as np
from hf_offload.kernels import cpu
src = np.full(100_000, 0x3F80, np.uint16); dst = np.zeros(src.size, np.float32)
cpu.widen(src, dst, "bfloat16", 2)
assert (dst == 1).all()
"""
IN_THE_WAY = """
import shutil
from hf_offload.kernels.cpu import jit
shutil.rmtree(jit.CACHE_DIR)
jit.CACHE_DIR.write_text("in the way")
"""
FULL_DISK = """
import errno
from numba.core import caching
def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")
caching.IndexDataCacheFile._save_data = full
"""


@pytest.mark.parametrize(("trouble", "first"), [(IN_THE_WAY, IN_THREADS), (FULL_DISK, WIDEN)], ids=["way", "disk"])
def test_a_cache_that_can_no_longer_be_written_is_no_error(first, trouble, tmp_path, run_python):
    """Seen only when a kernel is looked up or saved. A driver compiles and saves its body first."""
    process = run_python(trouble + first + IN_THREADS, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_NUM_THREADS="2")
    assert process.stderr.count("the cache of compiled kernels in") == 1


def test_a_broken_cache_file_is_no_error(tmp_path, run_python):
    run_python(WIDEN, NUMBA_CACHE_DIR=str(tmp_path))
    for file in tmp_path.rglob("*.nb?"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    process = run_python(WIDEN, NUMBA_CACHE_DIR=str(tmp_path))
    assert process.stdout.startswith("[1.0, 2.0, 3.0]")
    assert "the cache of compiled kernels in" in process.stderr


def test_importing_compiles_nothing(tmp_path, run_python):
    script = "import hf_offload.kernels.cpu"
    process = run_python(script, NUMBA_CACHE_DIR=str(tmp_path))
    assert process.stderr == "" and not list(tmp_path.rglob("*.nbc"))


def test_numba_disable_jit_is_refused_by_name(tmp_path, run_python):
    process = run_python(WIDEN, expect=1, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_DISABLE_JIT="1")
    assert "NUMBA_DISABLE_JIT=1: the kernels work on bits that only compiled code can reach" in process.stderr


def test_the_users_numba_settings_are_left_alone():
    import numba

    before = numba.config.CACHE_DIR
    with cache.numba_caches_in(Path("/somewhere")):
        assert numba.config.CACHE_DIR == "/somewhere"
    assert before == numba.config.CACHE_DIR
    assert jit.CACHE_DIR is None or str(jit.CACHE_DIR) != before


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of one source file, with every other place out of reach until a test opens it."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nonexistent")
    return folder


def test_order_of_places(package, tmp_path, monkeypatch):
    name = cache.PREFIX + cache.source_hash(package)
    assert cache.find_cache_dir(package) == package / "__pycache__" / name
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").write_text("")
    assert cache.find_cache_dir(package) is None
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert cache.find_cache_dir(package) == temporary / f"hf_offload-{os.getuid()}" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.find_cache_dir(package) == tmp_path / "xdg" / "hf_offload" / name
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.find_cache_dir(package) == tmp_path / "chosen" / name


def test_a_temporary_folder_that_others_can_write_is_not_used(package, tmp_path, monkeypatch):
    """Cached code is unpickled and run: somebody else's folder of that name must not be trusted."""
    (package / "__pycache__").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"hf_offload-{os.getuid()}"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    assert cache.find_cache_dir(package) is None
    own.rmdir()
    (tmp_path / "elsewhere").mkdir()
    own.symlink_to(tmp_path / "elsewhere")
    assert cache.find_cache_dir(package) is None


def test_source_hash_sees_names_and_contents(package):
    seen = {cache.source_hash(package)}
    (package / "a.py").write_text("x = 2\n")
    seen.add(cache.source_hash(package))
    (package / "a.py").rename(package / "b.py")
    seen.add(cache.source_hash(package))
    (package / "c.py").write_text("")
    seen.add(cache.source_hash(package))
    assert len(seen) == 4
