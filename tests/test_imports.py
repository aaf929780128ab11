"""What importing hf_offload pulls in; that a checkout, a wheel and an editable install are whole."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path, *paths: Path) -> str:
    """What `code` prints, run in a fresh interpreter that sees `paths` first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "accelerate", "numba", "numpy", "typer", "yaml", "rich")
    code = f"import sys, hf_offload, hf_offload.autoload; print([m for m in {heavy} if m in sys.modules])"
    assert python(code, tmp_path, ROOT) == "[]"


def test_every_public_name_is_there_and_unknown_ones_are_not(tmp_path: Path) -> None:
    code = """
import hf_offload
for name in hf_offload.__all__:
    assert getattr(hf_offload, name).__name__ == name
try:
    hf_offload.Nothing
except AttributeError as error:
    print(error)
"""
    assert "no attribute 'Nothing'" in python(code, tmp_path, ROOT)


PARTS = (
    "import hf_offload.kernels.cpu, hf_offload.callbacks, hf_offload.recipes; print(hf_offload.kernels.cpu.__file__)"
)


def test_a_raw_checkout_has_the_top_level_folders(tmp_path: Path) -> None:
    assert python(PARTS, tmp_path, ROOT) == str(ROOT / "kernels" / "cpu" / "__init__.py")


def test_hugging_faces_kernels_library_is_not_shadowed(tmp_path: Path) -> None:
    """With the checkout first on the path, `import kernels` must still find the library (here: a stand-in)."""
    stand_in = tmp_path / "site" / "kernels"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text("WHO = 'the library'\n__version__ = '0.0'\n")
    code = "import kernels; print(kernels.WHO); import hf_offload.kernels.cpu as cpu; print(cpu.__name__)"
    assert python(code, tmp_path, ROOT, tmp_path / "site").split() == ["the", "library", "hf_offload.kernels.cpu"]
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.slow
def test_trainer_imports_beside_hugging_faces_kernels_library(tmp_path: Path) -> None:
    stand_in = tmp_path / "site"
    (stand_in / "kernels").mkdir(parents=True)
    names = ("Device", "FuncRepository", "LayerRepository", "LocalLayerRepository", "Mode")
    body = "".join(f"class {n}:\n    def __init__(self, *a, **k): pass\n" for n in names)
    body += "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n"
    body += "    return lambda *a, **k: (lambda x: x)\n"
    (stand_in / "kernels" / "__init__.py").write_text(body)
    info = stand_in / "kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n")
    code = "from transformers import Trainer; import kernels; print(Trainer.__name__, kernels.__file__)"
    assert python(code, tmp_path, ROOT, stand_in).split() == ["Trainer", str(stand_in / "kernels" / "__init__.py")]


def without_isolation() -> list[str]:
    """pip's option that builds with the setuptools that is here, where it is new enough: needs no network."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if int(version.split(".")[0]) >= 77 else []


def copy_of_the_checkout(place: Path) -> None:
    for name in ("hf_offload", "kernels", "callbacks", "recipes"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    copy_of_the_checkout(place / "src")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *without_isolation(), "-w", str(place)]
    command.append(str(place / "src"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        archive.extractall(tmp_path / "site")
    for needed in (
        "hf_offload/py.typed",
        "hf_offload/recipes/quickstart.yaml",
        "hf_offload/recipes/data/instruct_small.jsonl",
    ):
        assert needed in names
    assert not any(n.startswith(("kernels/", "callbacks/", "recipes/", "tests/")) for n in names)
    assert "torch.backends" in entries and "hf-offload = hf_offload.cli:main" in entries
    found = python(PARTS, tmp_path, tmp_path / "site")
    assert found == str(tmp_path / "site" / "hf_offload" / "kernels" / "cpu" / "__init__.py")
    code = "from hf_offload import recipe; print(sorted(recipe.shipped()))"
    assert "quickstart" in python(code, tmp_path, tmp_path / "site")


@pytest.mark.slow
def test_every_package_folder_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if n.endswith(".py")}
    for folder, prefix in (
        ("hf_offload", "hf_offload"),
        ("kernels", "hf_offload/kernels"),
        ("callbacks", "hf_offload/callbacks"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}" in inside


@pytest.mark.slow
def test_an_editable_install_is_whole(tmp_path: Path) -> None:
    """In a throw-away environment that sees this one's packages; imported from another folder, and followed when the
    checkout is edited. torch finds the entry point there."""
    checkout, place = tmp_path / "checkout", tmp_path / "env"
    copy_of_the_checkout(checkout)
    venv.create(place, with_pip=False, symlinks=os.name != "nt")
    python_there = next(p for p in (place / "bin" / "python", place / "Scripts" / "python.exe") if p.exists())
    packages = next(place.rglob("site-packages"))
    (packages / "these.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))

    def run(*command: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        told = [python_there, *command]
        done = subprocess.run(told, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("-m", "pip", "install", "-q", "--no-deps", *without_isolation(), "-e", str(checkout))
    assert run("-c", PARTS) == str(checkout / "kernels" / "cpu" / "__init__.py")
    assert run("-c", "from hf_offload import recipe; print('quickstart' in recipe.shipped())") == "True"
    entry = "import importlib.metadata as m; print([e.value for e in m.entry_points(group='torch.backends')])"
    assert "hf_offload.autoload:install" in run("-c", entry)
    (checkout / "callbacks" / "new.py").write_text("HERE = 1\n")
    assert run("-c", "from hf_offload.callbacks import new; print(new.HERE)") == "1"
