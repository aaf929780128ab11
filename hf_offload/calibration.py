"""What `hf-offload plan --calibrate` measured of one machine and one model, and the file it is kept in. Stdlib only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_offload import environment
from hf_offload.cpus import find_cpus
from hf_offload.errors import ConfigError, explain, shown
from hf_offload.simulation import HostCost, LinkCost

FORMAT = 2
AGAIN = "Measure this machine: hf-offload plan --calibrate"
FIT_VERSIONS = ("hf_offload", "torch", "numba", "numpy", "cupy-cuda12x", "cupy-cuda13x")
"""Distributions whose versions a calibration depends on: another one's kernels may be faster or slower."""


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One unit of the model.

    Attributes:
        params: trainable parameters; wire: their dtype on the wire.
        forward, backward: seconds of a micro-batch, (fixed, per token).
    """

    params: int
    wire: str
    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Link:
    """The copies through the transport.

    Attributes:
        transport: host or cuda.
        emulates: whether a speed can be set on top of it: then a copy takes what that speed or the host's cores say,
            whichever is longer.
        down, up: each direction.
        emulation_s: seconds that a copy takes more once a speed is set: the system wakes its thread up late.
    """

    transport: str
    emulates: bool
    down: LinkCost
    up: LinkCost
    emulation_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What the engine's own code takes, seconds.

    Attributes:
        step_s: the training thread's, a step: without the kernels and the copies it may wait for.
        bucket_s, fetch_s: the step's thread's, a bucket that is there when its turn comes: to send its weights up, and
            to have its gradients come down.
        idle_s: what a bucket takes more where the thread waited for it.
    """

    step_s: float
    bucket_s: float
    fetch_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Figures of one machine and one model, all measured. Seconds, if not said otherwise.

    Attributes:
        machine: what they hold for, see `fingerprint`.
        model: name and digest of the model and of what of its training the figures depend on.
        seq_len: tokens of a row; rows: of the two micro-batches that were measured.
        threads: of the host step; state_dtype: how it holds m and v.
        rates: `"a beside b"`: the part of its speed at which work of kind a goes on beside work of kind b.
        spread: of the repeated measures behind each figure: interquartile range over median.
        made: when, seconds since 1970.
    """

    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    units: tuple[UnitCost, ...]
    seq_len: int
    rows: tuple[int, int]
    threads: int
    state_dtype: str
    host: HostCost
    link: Link
    engine: Engine
    rates: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    made: float = field(default_factory=time.time)

    @property
    def params(self) -> int:
        return sum(unit.params for unit in self.units)


def fingerprint() -> dict[str, Any]:
    """What must be the same for a calibration to hold: processor, cores this process may use and its quota of them,
    the GPU that is trained on, versions. Other GPUs do not count: a run is often shown one of those that a plan sees.
    """
    found = environment.versions()
    return {
        "processor": environment.processor(),
        "usable_cores": environment.usable_cores(),
        "cpu_quota": find_cpus().quota,
        "gpu": next((name for name, _ in environment.gpus()), None),
        "versions": {name: found[name] for name in FIT_VERSIONS if name in found},
    }


def digest(facts: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of plain data."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


# ---- the file


def folder() -> Path:
    """Where calibrations are kept: `$XDG_CACHE_HOME/hf_offload/calibration`, else below `~/.cache`.

    Raises ConfigError where there is no home: a user that the system does not know, and no HOME.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # the standard: ignore relative ones
    except RuntimeError:
        cause, remedy = "not set, and this user has no home folder", "Set HOME or XDG_CACHE_HOME, or give --calibration"
        raise ConfigError(explain("HOME", None, cause, remedy)) from None
    return base / "hf_offload" / "calibration"


def path_for(model: Mapping[str, Any], machine: Mapping[str, Any]) -> Path:
    """The file of one model on one machine."""
    return folder() / f"{model['digest']}-{digest(machine)}.json"


def save(found: Calibration, path: Path) -> None:
    """Written beside and moved into place, so that a reader never sees half a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(found)}, indent=1)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        cause = f"cannot be written: {error.strerror or error}"
        raise ConfigError(explain("calibration", str(path), cause, "Give --calibration FILE")) from None


def load(path: Path, machine: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Calibration:
    """The calibration in a file.

    Args:
        machine: `fingerprint()` of this machine.
        model: what it is to be used for; None: whatever it was made for.

    Raises:
        ConfigError: no such file, a damaged one, or one of another machine or model.
    """
    found = _read(path)
    differing = differences(found.machine, machine)
    if differing:
        cause = f"it was made on another machine: {'; '.join(differing)}"
        raise ConfigError(explain("calibration", str(path), cause, AGAIN))
    if model is not None and found.model.get("digest") != model.get("digest"):
        cause = (
            f"it was made for {found.model.get('name')!r}, or for other settings of it, not for {model.get('name')!r}"
        )
        raise ConfigError(explain("calibration", str(path), cause, AGAIN))
    return found


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, each as `usable_cores 2 there, 8 here`."""
    found = []
    for name in sorted({*there, *here} - {"versions"}):
        if there.get(name) != here.get(name):
            found.append(f"{name} {shown(there.get(name))} there, {shown(here.get(name))} here")
    theirs, ours = (given.get("versions") for given in (there, here))
    theirs, ours = (given if isinstance(given, Mapping) else {} for given in (theirs, ours))
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            found.append(f"{name} {theirs.get(name)} there, {ours.get(name)} here")
    return found


def find(model: Mapping[str, Any], machine: Mapping[str, Any]) -> Calibration | None:
    """The stored calibration of this model on this machine; None where there is none at all.

    Raises:
        ConfigError: the file is damaged or not to be read, or there are only files of this model from other machines.
    """
    path = path_for(model, machine)
    try:
        found = [path] if path.is_file() else sorted(path.parent.glob(f"{model['digest']}-*.json"))
    except OSError as error:  # another user's folder
        raise ConfigError(explain("calibration", str(path), f"cannot be read: {error.strerror}", AGAIN)) from None
    return load(found[-1], machine, model) if found else None


def _read(path: Path) -> Calibration:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        cause = "no such file" if missing else f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(explain("calibration", str(path), cause, AGAIN)) from None
    try:
        given = json.loads(text)
        if (theirs := given["format"]) == FORMAT:
            return _built(given)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        remedy = f"Delete it. {AGAIN}"
        raise ConfigError(explain("calibration", str(path), f"the file is damaged ({what})", remedy)) from None
    cause = f"another version of hf_offload wrote it (format {shown(theirs)}, this one has {FORMAT})"
    raise ConfigError(explain("calibration", str(path), cause, AGAIN))


def _built(given: Mapping[str, Any]) -> Calibration:
    """Raises KeyError, TypeError or ValueError where something is missing or is not what it should be."""
    link = given["link"]
    return Calibration(
        machine=_mapping(given["machine"]),
        model=_mapping(given["model"]),
        units=tuple(_unit(u) for u in _sequence(given["units"])),
        seq_len=_count(given["seq_len"]),
        rows=(_count(given["rows"][0]), _count(given["rows"][1])),
        threads=_count(given["threads"]),
        state_dtype=str(given["state_dtype"]),
        host=HostCost(**_numbers(given["host"])),
        link=Link(
            transport=str(link["transport"]),
            emulates=bool(link["emulates"]),
            down=LinkCost(**_numbers(link["down"])),
            up=LinkCost(**_numbers(link["up"])),
            emulation_s=_number(link["emulation_s"]),
        ),
        engine=Engine(**_numbers(given["engine"])),
        rates=_numbers(given["rates"]),
        spread=_numbers(given["spread"]),
        made=_number(given["made"]),
    )


def _unit(given: Mapping[str, Any]) -> UnitCost:
    forward, backward = ((_number(given[name][0]), _number(given[name][1])) for name in ("forward", "backward"))
    return UnitCost(params=_count(given["params"], 0), wire=str(given["wire"]), forward=forward, backward=backward)


def _mapping(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise TypeError(f"{shown(given)} is not an object")
    return given


def _sequence(given: Any) -> Sequence[Any]:
    if not isinstance(given, list) or not given:
        raise TypeError(f"{shown(given)} is not a list with something in it")
    return given


def _numbers(given: Any) -> dict[str, float]:
    return {str(name): _number(value) for name, value in _mapping(given).items()}


def _number(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf:
        raise ValueError(f"{shown(given)} is not a number of at least 0")
    return float(given)


def _count(given: Any, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{shown(given)} is not a whole number of at least {least}")
    return given
