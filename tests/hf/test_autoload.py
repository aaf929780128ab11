"""How the flag becomes known: `import hf_offload`, torch's entry point, half-initialised modules, the opt-out."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_offload import autoload

ASK = "from transformers import TrainingArguments; print(TrainingArguments('x', optim='offload_adam').optim.value)"


def test_import_hf_offload_is_enough_and_imports_nothing_heavy(python: Any) -> None:
    code = """
import sys
import hf_offload
heavy = {"torch", "transformers", "accelerate", "numba", "numpy", "yaml", "typer"} & set(sys.modules)
assert not heavy, heavy
"""
    assert "offload_adam" in python(code=code + ASK).stdout


@pytest.mark.slow
def test_transformers_first_is_as_good(python: Any) -> None:
    assert "offload_adam" in python(code=f"import transformers.trainer, hf_offload; {ASK}").stdout


def test_the_opt_out_leaves_only_what_is_asked_for_by_name(python: Any) -> None:
    code = f"""
import hf_offload, transformers.trainer
try:
    {ASK}
except ValueError as error:
    assert "offload_adam is not a valid OptimizerNames" in str(error)
else:
    raise SystemExit("the opt-out has no effect")
from hf_offload import compat
compat.register()
{ASK}
"""
    assert "offload_adam" in python(code=code, env={autoload.SWITCH: "0"}).stdout


# From here on the processes find the entry point as they would after `pip install`, and nobody imports hf_offload.


@pytest.mark.parametrize(
    "first",
    [
        # Before transformers; in the middle of that very module; and as most scripts begin.
        pytest.param("import torch", marks=pytest.mark.slow),
        "from transformers.training_args import OptimizerNames",
        pytest.param("from transformers import HfArgumentParser, Trainer", marks=pytest.mark.slow),
    ],
)
def test_the_entry_point_works_at_whatever_moment_torch_is_imported(python: Any, site: Any, first: str) -> None:
    assert "offload_adam" in python(code=f"{first}\n{ASK}", env=site).stdout


def test_the_entry_point_alone_imports_nothing_heavy(python: Any, site: Any) -> None:
    code = """
import sys, torch
assert "hf_offload.autoload" in sys.modules
print([m for m in ("transformers", "accelerate", "numba", "hf_offload.compat") if m in sys.modules])
"""
    assert python(code=code, env=site).stdout.strip() == "[]"


def test_the_entry_point_does_nothing_but_watch(python: Any, site: Any) -> None:
    """An audit hook sees what it does: no import, no file, no process, no socket; no thread; one variable is read."""
    code = """
import os, sys, threading
from hf_offload import autoload

seen, read, calls = [], [], []
on = False
sys.addaudithook(lambda event, args: seen.append((event, args)) if on else None)
real, get = autoload.install, os.environ.get

def watched():
    global on
    before, calls[len(calls):] = set(sys.modules), [1]
    os.environ.get = lambda name, default=None: (read.append(name), get(name, default))[1]
    threads, on = threading.active_count(), True
    real()
    on = False
    del os.environ.get
    assert set(sys.modules) == before and threading.active_count() == threads

autoload.install = watched
import torch
assert calls == [1], "torch has called the entry point"
assert seen == [], seen
assert read == ["HF_OFFLOAD_AUTOLOAD"], read
print(sorted(m for m in sys.modules if m.startswith("hf_offload")))
"""
    assert python(code=code, env=site).stdout.strip() == "['hf_offload', 'hf_offload.autoload']"


@pytest.mark.slow
def test_the_entry_point_can_be_turned_off(python: Any, site: Any) -> None:
    assert "not a valid OptimizerNames" in python(code=ASK, env={**site, autoload.SWITCH: "0"}, fails=True).stderr


def test_the_installed_distribution_has_the_entry_point(python: Any) -> None:
    points = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.name == "hf_offload"]
    if not points:
        pytest.skip("the distribution hf-offload is not installed here (pip install -e .)")
    assert points[0].value == "hf_offload.autoload:install"
    assert "offload_adam" in python(code=ASK).stdout


# ---------------------------------------------------------------- the mechanism, on modules of our own


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module, watches it, and gives the list of what the action saw."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, body: str) -> str:
        (tmp_path / f"{name}.py").write_text(body)
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)
        autoload._watched.pop(name, None)


def test_the_action_comes_once_when_the_import_has_ended(package: Any) -> None:
    seen: list[Any] = []
    name = package("watched_a", "early = 1\nlate = 2\n")

    def action(module: ModuleType) -> None:
        seen.append(module.late)

    autoload.watch([name], action)
    autoload.watch([name], action)
    assert seen == []
    importlib.import_module(name)
    importlib.import_module(name)
    autoload.watch([name], action)
    assert seen == [2]


def test_a_loaded_module_is_acted_on_at_once(package: Any) -> None:
    seen: list[str] = []
    name = package("watched_b", "x = 1\n")
    importlib.import_module(name)
    autoload.watch([name], lambda module: seen.append(module.__name__))
    assert seen == [name]


def test_a_half_initialised_module_is_waited_for(package: Any) -> None:
    """As transformers does it: the body imports torch, whose last act is to call us."""
    body = "hook()\nlate = 2\n"
    seen: list[Any] = []
    name = package("watched_c", body)

    def action(module: ModuleType) -> None:
        seen.append(module.late)

    def hook() -> None:
        assert not hasattr(sys.modules[name], "late")
        autoload.watch([name], action)
        assert seen == []

    import builtins

    builtins.hook = hook  # type: ignore[attr-defined]
    try:
        importlib.import_module(name)
    finally:
        del builtins.hook  # type: ignore[attr-defined]
    assert seen == [2]


def test_a_failed_import_is_not_acted_on_and_a_second_try_is(package: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    name = package("watched_d", "raise ValueError('at first')\n")
    autoload.watch([name], lambda module: seen.append(module.x))
    with pytest.raises(ValueError, match="at first"):
        importlib.import_module(name)
    assert seen == []
    (tmp_path / f"{name}.py").write_text("x = 5  # long enough to be another size\n")
    importlib.invalidate_caches()
    importlib.import_module(name)
    assert seen == [5]


def test_an_action_that_fails_is_a_warning(package: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = package("watched_e", "x = 1\n")

    def action(module: ModuleType) -> None:
        raise KeyError("gone")

    autoload.watch([name], action)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        assert importlib.import_module(name).x == 1
    assert "watched_e" in caplog.text and "gone" in caplog.text


def test_a_watched_module_looks_as_ever(package: Any) -> None:
    name = package("watched_f", "def f():\n    return 1\n")
    autoload.watch([name], lambda module: None)
    module = importlib.import_module(name)
    spec = module.__spec__
    assert spec is not None and spec.name == name and spec.origin == module.__file__ and module.f() == 1
    assert type(module) is ModuleType and importlib.reload(module) is module


def test_install_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(autoload, "watch", broken)
    autoload.install()
    assert "compat.register()" in caplog.text
