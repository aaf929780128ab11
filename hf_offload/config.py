"""`OffloadConfig`: every setting of the offload engine, validated once. Stdlib only."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_offload.errors import ConfigError, explain, nearest

SCHEDULES = ("auto", "in_order", "overlapped", "delayed")
TRANSPORTS = ("auto", "host", "cuda")
SKIP_NONFINITE = ("when_clipping", "always", "never")
ACCUMULATE_DTYPES = ("wire", "float32")
STATE_DTYPES = ("float32", "bfloat16", "int8")
AUTO = "auto"
MIB = 1 << 20
LARGEST = 2**63 - 1
"""What counts and bytes may be: whatever is computed from them still is a number to C and to a float."""


def _doc(text: str, **kwargs: Any) -> Any:
    return field(metadata={"help": text}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of the offload engine.

    Raises:
        ConfigError: an unknown name (with the nearest valid one) or a value outside its range.
    """

    schedule: str = _doc(
        "auto | in_order | overlapped | delayed (inexact: one step stale); auto: overlapped on CUDA with a model, "
        "else in_order",
        default="auto",
    )
    transport: str = _doc("auto | host | cuda; auto: by the parameters' device", default="auto")
    link_gb_s: float | None = _doc("emulated link speed each way, 1e9 bytes/s; host transport only", default=None)
    link_latency_us: float = _doc("emulated latency of each copy, microseconds; host transport only", default=0.0)
    bucket_bytes: int = _doc("bytes of one bucket on the wire; any, down to one element", default=32 * MIB)
    ring_slots: int = _doc("slots of bucket_bytes in the pinned ring, each way", default=4)
    threads: int | None = _doc("Numba threads of the host step; None: this rank's share of the cores", default=None)
    max_host_bytes: int | None = _doc(
        "cap on all host memory this process takes (each rank its own), bytes; None: what the machine has", default=None
    )
    skip_nonfinite: str = _doc(
        "when_clipping | always | never: when a step whose gradient norm is not finite is skipped whole",
        default="when_clipping",
    )
    cast_fp32_weights: bool = _doc(
        "under bf16/fp16 training, fp32 weights become 16-bit and their fp32 values the masters", default=True
    )
    timeout_s: float = _doc("seconds a wait may take before it raises", default=600.0)
    stream_gradients: bool = _doc("gradients leave the device during backward, bucket by bucket", default=False)
    accumulate_dtype: str = _doc(
        "wire | float32: how micro-batches add up on the host; wire rounds to nearest even, as autograd does",
        default="wire",
    )
    shadow_bytes: int = _doc(
        "host memory in which buckets are stepped during backward on a guess, bytes, 14 a parameter; 0: none",
        default=0,
    )
    delay_warmup_steps: int = _doc("exact steps before schedule='delayed' begins to delay", default=10)
    state_dtype: str = _doc(
        "float32 | bfloat16 | int8 (not exact: rounded stochastically): how m and v are held; with the fp32 master "
        "12, 8 or 6.02 bytes a parameter",
        default="float32",
    )
    rounding_seed: int = _doc("seed of the stochastic rounding of bfloat16 and int8 state", default=0)
    device_state_bytes: int | str = _doc(
        "device memory for optimizer state that stays there and is stepped there, bytes, 12 a parameter; auto: what is "
        "free after the first micro-batches, given back when memory gets short",
        default=0,
    )
    timeline: str | None = _doc("a Chrome trace of the steps' phases is written to this file", default=None)
    poison: bool = _doc("debug: weights in flight are NaN, so that whoever reads them too early shows", default=False)

    def __new__(cls, **given: Any) -> OffloadConfig:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(explain(name, given[name], "unknown setting of OffloadConfig", nearest(name, known)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("skip_nonfinite", self.skip_nonfinite, SKIP_NONFINITE)
        _number("link_gb_s", self.link_gb_s, above=0.0, optional=True)
        _number("link_latency_us", self.link_latency_us, least=0.0)
        _integer("bucket_bytes", self.bucket_bytes)
        _integer("ring_slots", self.ring_slots)
        _integer("threads", self.threads, optional=True)
        _integer("max_host_bytes", self.max_host_bytes, optional=True)
        _number("timeout_s", self.timeout_s, above=0.0)
        _one_of("accumulate_dtype", self.accumulate_dtype, ACCUMULATE_DTYPES)
        _integer("shadow_bytes", self.shadow_bytes, least=0)
        _integer("delay_warmup_steps", self.delay_warmup_steps, least=0)
        _one_of("state_dtype", self.state_dtype, STATE_DTYPES)
        _integer("rounding_seed", self.rounding_seed, least=0)
        for name in ("cast_fp32_weights", "stream_gradients", "poison"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(explain(name, getattr(self, name), "not a bool", "Use true or false"))
        if self.timeline is not None and (not isinstance(self.timeline, str) or not self.timeline):
            raise ConfigError(explain("timeline", self.timeline, "not a path", "Give the name of a file, or None"))
        self._check_streaming()
        self._check_device_state()
        emulated = "link_gb_s" if self.link_gb_s is not None else "link_latency_us" if self.link_latency_us else None
        if self.transport == "cuda" and emulated:
            raise ConfigError(
                explain(
                    emulated,
                    getattr(self, emulated),
                    "a link can only be emulated over the host transport, and transport='cuda' is a real one",
                    "Leave it out, or use transport='host'",
                )
            )

    def _check_streaming(self) -> None:
        remedy = "Set stream_gradients=true, or leave it out"
        for name, default in (("accumulate_dtype", "wire"), ("shadow_bytes", 0)):
            if getattr(self, name) != default and not self.stream_gradients:
                raise ConfigError(explain(name, getattr(self, name), "gradients are not streamed", remedy))
        if self.stream_gradients and self.schedule == "delayed":
            cause = "the delayed host step still reads the gradients on the host while the next ones would arrive"
            remedy = "Leave stream_gradients out, or use schedule='overlapped', with shadow_bytes"
            raise ConfigError(explain("stream_gradients", True, f"with schedule='delayed', {cause}", remedy))

    def _check_device_state(self) -> None:
        value = self.device_state_bytes
        if value != AUTO:
            _integer("device_state_bytes", value, least=0, other=AUTO)
        if not value:
            return
        for name, given, usual in (
            ("accumulate_dtype", self.accumulate_dtype, "wire"),
            ("state_dtype", self.state_dtype, "float32"),
        ):
            if given != usual:
                cause = f"state on the device is float32 and steps the gradients of .grad, but {name}={given!r}"
                remedy = f"Leave {name} out, or set device_state_bytes=0"
                raise ConfigError(explain("device_state_bytes", value, cause, remedy))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> OffloadConfig:
        """A config from parsed YAML or JSON: names and types are checked, nothing is converted."""
        return cls(**{str(k): v for k, v in given.items()})

    @classmethod
    def from_strings(cls, given: Mapping[str, str]) -> OffloadConfig:
        """A config from `--optim_args` text, each value converted to its field's type.

        Raises:
            ConfigError: an unknown name, or text that does not read as the field's type.
        """
        known = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        return cls(**{name: _from_text(name, text, known.get(name, "str")) for name, text in given.items()})


# What help() and editors show: the fields, not the **given of __new__.
_init = inspect.signature(OffloadConfig.__init__)
OffloadConfig.__signature__ = _init.replace(  # type: ignore[attr-defined]
    parameters=[p for name, p in _init.parameters.items() if name != "self"]
)


def _from_text(name: str, text: str, kind: str) -> Any:
    if "None" in kind and text.lower() in ("none", "null", ""):
        return None
    if "str" in kind and text == AUTO:
        return text
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        raise ConfigError(explain(name, text, f"does not read as {kind}", f"Write {name}=<{kind}>")) from None
    return text


def _one_of(name: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(explain(name, value, f"not a valid {name}", nearest(str(value), valid)))


def _integer(name: str, value: Any, optional: bool = False, least: int = 1, other: str | None = None) -> None:
    """`other`: what may be given instead, for the message."""
    if optional and value is None:
        return
    remedy = f"Give a whole number of at least {least}" + (f", or {other!r}" if other else "")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(explain(name, value, "not an integer", remedy))
    if value < least:
        raise ConfigError(explain(name, value, f"below {least}", remedy))
    if value > LARGEST:
        raise ConfigError(explain(name, value, "above 2^63 - 1", "Give a smaller number"))


def _number(
    name: str, value: Any, above: float | None = None, least: float | None = None, optional: bool = False
) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
        raise ConfigError(explain(name, value, "not a finite number", "Give a finite number"))
    if above is not None and value <= above:
        raise ConfigError(explain(name, value, f"not above {above:g}", f"Give a number above {above:g}"))
    if least is not None and value < least:
        raise ConfigError(explain(name, value, f"below {least:g}", f"Give a number of at least {least:g}"))


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False
