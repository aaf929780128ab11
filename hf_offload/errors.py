"""The one exception tree of hf_offload. Stdlib only.

Every message gives four things: the setting, its value, the cause and the remedy.
"""

from __future__ import annotations

import difflib
import re
import reprlib
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


class CheckpointError(StateError):
    """A checkpoint that is damaged, does not fit what it is loaded into, or cannot be written."""


class TransportError(OffloadError, RuntimeError):
    """A copy, a worker thread or a wait failed."""


class WaitTimeout(TransportError, TimeoutError):
    """A wait took longer than `timeout_s`."""


class _Short(reprlib.Repr):
    """A few YAML aliases can stand for 2^60 items, and Python refuses to write an int of 5,000 digits: a message about
    such a value must not fail, nor take the memory of the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 12
        self.maxstring = self.maxother = self.maxlong = 400

    def repr_int(self, x: int, level: int) -> str:
        return f"<a whole number of {x.bit_length()} bits>" if x.bit_length() > 1000 else repr(x)


_SHORT, _LONGEST = _Short(), 800


def shown(value: object) -> str:
    """`repr(value)` for a message: of at most a few hundred characters, whatever the value; never raises."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # somebody's own __repr__, __len__ or __iter__
        return f"<{type(value).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    """`text` for a message, somebody else's and maybe endless: its first few hundred characters."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def said_by(error: BaseException) -> str:
    """What somebody else's error says, on one line."""
    return cut(" ".join(str(error).split()))


def explain(setting: str, value: object, cause: str, remedy: str) -> str:
    """The house form of an error message: `setting=value: cause. Remedy.`"""
    return f"{cut(setting)}={shown(value)}: {cause.rstrip('.')}. {remedy.rstrip('.')}."


def _alike(name: str, valid: list[str]) -> list[str]:
    """The one with the same letters in another case, or the only one with the same number in it (`fp8`: `int8`)."""
    digits = re.findall(r"\d+", name)
    numbered = [v for v in valid if digits and re.findall(r"\d+", v) == digits]
    return [v for v in valid if v.lower() == name.lower()] or (numbered if len(numbered) == 1 else [])


def nearest(name: str, valid: Iterable[str]) -> str:
    """`Did you mean 'x'? Valid: a, b, c` for an unknown name."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1) or _alike(name, valid)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid)}"
