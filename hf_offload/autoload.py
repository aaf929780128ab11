"""Makes `--optim offload_adam` known as soon as transformers is imported, and not before. Stdlib only.

Called by `import hf_offload` and, in every process, by torch at the end of `import torch` (the entry point
`torch.backends` in pyproject.toml), so that scripts which never heard of hf_offload know the flag. An exception there
would abort `import torch`: nothing here raises. HF_OFFLOAD_AUTOLOAD=0 turns it off.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "HF_OFFLOAD_AUTOLOAD"
OFF = ("0", "false", "no", "off")

Action = Callable[[ModuleType], None]

logger = logging.getLogger("hf_offload")


def install() -> None:
    """Watch for the modules that `hf_offload.compat` extends. Idempotent; imports nothing; never raises."""
    if os.environ.get(SWITCH, "1").strip().lower() in OFF:
        return
    try:
        watch(TARGETS, adapt)
    except Exception:
        logger.warning("hf_offload cannot watch for transformers; call hf_offload.compat.register()", exc_info=True)


def watch(names: Iterable[str], action: Action) -> None:
    """Call `action(module)` once for each named module: now where it is loaded, else when its import ends.

    A module may be half initialised: transformers imports torch in the middle of its own modules, and torch then calls
    `install()`. An exception of `action` becomes a logged warning.
    """
    if not any(finder is _FINDER for finder in sys.meta_path):
        sys.meta_path.insert(0, _FINDER)
    for name in names:
        if action in _watched.setdefault(name, []):
            continue
        _watched[name].append(action)
        module = sys.modules.get(name)
        if module is None:
            continue
        spec = getattr(module, "__spec__", None)
        if spec is not None and getattr(spec, "_initializing", False):
            spec.__class__ = _WatchedSpec
        else:
            _call(action, module)


def adapt(module: ModuleType) -> None:
    """The action for TARGETS: `hf_offload.compat` extends `module`."""
    importlib.import_module("hf_offload.compat").adapt(module)


def _call(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:
        logger.warning(
            "hf_offload does not fit the installed %s, so optim='offload_adam' will not work: %s",
            module.__name__.partition(".")[0],
            error,
        )


class _WatchedSpec(ModuleSpec):
    """The import system sets `spec._initializing` to False when a module's body has run: the moment to act.

    A loader or a module that is wrapped could be seen by others; a spec that is watched is an ordinary spec.
    """

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        ended = self.__dict__.get("_initializing", False) and not value
        self.__dict__["_initializing"] = value
        module = sys.modules.get(self.name)
        if ended and module is not None:  # it is gone from sys.modules when its import failed
            for action in _watched.get(self.name, ()):
                _call(action, module)


class _Finder:
    """Finds nothing by itself; it marks the specs of watched modules that the other finders find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _watched:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = _WatchedSpec
                return spec
        return None


TARGETS = (
    "transformers.training_args",
    "transformers.trainer_optimizer",
    "transformers.trainer",
    "hf_offload.optimizer",
)
_FINDER = _Finder()
_watched: dict[str, list[Action]] = {}
