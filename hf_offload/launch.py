"""`hf-offload run`: a script or module in this process, as `python` would run it, with the optimizer registered."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_offload.errors import ConfigError, explain

_started = False


def started() -> bool:
    """Whether the script itself has begun: errors are its own from there on."""
    return _started


def run(arguments: Sequence[str]) -> None:
    """Run `SCRIPT ARGS...` or `-m MODULE ARGS...`; sys.argv and sys.path[0] are what `python` would make them.

    Raises:
        ConfigError: there is no such script or module.
        Whatever the script raises, SystemExit included.
    """
    if not arguments:
        raise ConfigError("run: no script is given. Give a Python script, or -m and a module.")
    if arguments[0] == "-m" and len(arguments) > 1:
        _run_module(arguments[1], list(arguments[2:]))
    elif arguments[0].startswith("-m") and len(arguments[0]) > 2:
        _run_module(arguments[0][2:], list(arguments[1:]))
    elif arguments[0].startswith("-"):
        cause = "not an option of `hf-offload run`"
        raise ConfigError(explain("option", arguments[0], cause, "Give a script, or -m and a module, first"))
    else:
        _run_script(arguments[0], list(arguments[1:]))


def _run_script(script: str, arguments: list[str]) -> None:
    path = Path(script)
    if not path.exists():
        raise ConfigError(explain("script", script, "no such file", "Give a Python script, or -m and a module"))
    _prepare(str(path.resolve().parent) if path.is_file() else str(path), [script, *arguments])
    runpy.run_path(script, run_name="__main__")


def _run_module(module: str, arguments: list[str]) -> None:
    _set_first_path(os.getcwd())
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(explain("module", module, "no such module", "Install it, or check its name"))
    _prepare(os.getcwd(), [module, *arguments])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _prepare(first_path: str, argv: list[str]) -> None:
    global _started
    from hf_offload import compat

    compat.register()
    _set_first_path(first_path)
    sys.argv[:] = argv
    _started = True


def _set_first_path(folder: str) -> None:
    """What Python puts first for a script or module, in place of what it put there for this command itself."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
