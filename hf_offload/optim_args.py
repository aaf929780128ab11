"""The text of `--optim_args`: `name=value,...` of the settings of `OffloadConfig` and a few of Adam's. Stdlib only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, explain, nearest

# Adam's own settings. Betas, eps and lr come from TrainingArguments unless they are given here.
ADAM = ("lr", "beta1", "beta2", "eps", "decoupled_weight_decay", "maximize")


@dataclass(frozen=True)
class OptimArgs:
    """What `--optim_args` says.

    Attributes:
        config: the settings of the offload engine.
        adam: keyword arguments for `OffloadAdam`, on top of those that TrainingArguments gives.
    """

    config: OffloadConfig
    adam: dict[str, Any]


def parse(text: str | None, betas: tuple[float, float] = (0.9, 0.999)) -> OptimArgs:
    """Read `--optim_args`.

    Args:
        text: for example "schedule=overlapped,threads=8"; None or empty for the defaults.
        betas: what a beta that `text` does not give is.

    Raises:
        ConfigError: an entry without "=", a name given twice or unknown (with the nearest valid one), a bad value.
    """
    entries = _split(text)
    adam: dict[str, Any] = {}
    for name in ("lr", "eps"):
        if name in entries:
            adam[name] = _float(name, entries.pop(name))
    if "beta1" in entries or "beta2" in entries:
        given = [_float(n, entries.pop(n)) if n in entries else betas[i] for i, n in enumerate(("beta1", "beta2"))]
        adam["betas"] = (given[0], given[1])
    for name in ("decoupled_weight_decay", "maximize"):
        if name in entries:
            adam[name] = _bool(name, entries.pop(name))
    known = [f.name for f in dataclasses.fields(OffloadConfig)]
    for name, value in entries.items():
        if name == "weight_decay":
            cause = "the Trainer sets the weight decay of each parameter group itself"
            raise ConfigError(explain("optim_args weight_decay", value, cause, "Use --weight_decay"))
        if name not in known:
            cause = "optim='offload_adam' has no such setting"
            raise ConfigError(explain(f"optim_args {name}", value, cause, nearest(name, [*known, *ADAM])))
    return OptimArgs(OffloadConfig.from_strings(entries), adam)


def render(config: OffloadConfig, text: str | None = None) -> str | None:
    """The `--optim_args` text that says `config`, after the Adam settings that `text` already has.

    Raises:
        ConfigError: `text` has engine settings too, which would contradict `config`; `text` does not parse; or a path
            in `config` has letters that mean something in such a text.
    """
    entries = _split(text)
    both = [name for name in entries if name not in ADAM]
    if both:
        cause = "the offload engine's settings are given in optim_args and in offload= as well"
        raise ConfigError(explain("optim_args", text, cause, f"Give {', '.join(both)} in one place"))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value != f.default:
            entries[f.name] = _as_text(f.name, value)
    return ",".join(f"{name}={value}" for name, value in entries.items()) or None


def _as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        return str(value).lower()
    if any(letter in value for letter in ", =") or value.lower() in ("none", "null"):
        cause = "optim_args cannot carry it: a comma, a blank, '=' and the words none and null mean something there"
        raise ConfigError(explain(name, value, cause, "Give it another name"))
    return value


def _split(text: str | None) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry in (text or "").replace(" ", "").split(","):
        name, equals, value = entry.partition("=")
        if not entry and not text:
            continue
        if not name or not equals:
            cause = "an entry without a name and '='" if entry else "an empty entry"
            example = "optim_args is a list like schedule=overlapped,threads=8"
            raise ConfigError(explain("optim_args", entry or text, cause, example))
        if "=" in value:  # transformers, which reads the same text, takes one
            raise ConfigError(explain(f"optim_args {name}", value, "has a second '='", "Give a value without"))
        if name in entries:
            cause = f"already given as {entries[name]!r}"
            raise ConfigError(explain(f"optim_args {name}", value, cause, "Give it once"))
        entries[name] = value
    return entries


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(explain(f"optim_args {name}", text, "not a number", f"Write {name}=1e-8")) from None


def _bool(name: str, text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise ConfigError(explain(f"optim_args {name}", text, "not a bool", f"Write {name}=true or {name}=false"))
