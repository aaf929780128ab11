"""The one exception tree of hf_offload. Stdlib only.

Every message gives four things: the setting, its value, the cause and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffloadError(Exception):
    """Base of every error that hf_offload raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting that is unknown, malformed or in conflict with another."""


class RecipeError(ConfigError):
    """A recipe file that cannot be read or does not fit its types."""


class UnsupportedError(OffloadError, RuntimeError):
    """Something hf_offload cannot do (sparse gradients, FSDP1, DeepSpeed, an unknown device ...)."""


class HostMemoryError(OffloadError, RuntimeError):
    """The plan needs more host memory than a limit, `max_host_bytes` or other ranks leave, or than can be pinned."""


class StateError(OffloadError, RuntimeError):
    """The optimizer is not in a state in which the call makes sense, or a state dict does not fit it."""


class TransportError(OffloadError, RuntimeError):
    """A copy, a worker thread or a wait failed."""


class WaitTimeout(TransportError, TimeoutError):
    """A wait took longer than `timeout_s`."""


def explain(setting: str, value: object, cause: str, remedy: str) -> str:
    """The house form of an error message: `setting=value: cause. Remedy.`"""
    return f"{setting}={value!r}: {cause.rstrip('.')}. {remedy.rstrip('.')}."


def nearest(name: str, valid: Iterable[str]) -> str:
    """`Did you mean 'x'? Valid: a, b, c` for an unknown name."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}"
