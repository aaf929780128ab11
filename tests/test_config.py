"""`OffloadConfig`: DESIGN section 5's table, refusals by name, copies, and conversion from text."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_offload import OffloadConfig, errors
from hf_offload.errors import ConfigError

DEFAULTS = {
    "schedule": "auto",
    "transport": "auto",
    "link_gb_s": None,
    "link_latency_us": 0.0,
    "bucket_bytes": 32 * 1024 * 1024,
    "ring_slots": 4,
    "threads": None,
    "max_host_bytes": None,
    "skip_nonfinite": "when_clipping",
    "cast_fp32_weights": True,
    "timeout_s": 600.0,
    "stream_gradients": False,
    "accumulate_dtype": "wire",
    "shadow_bytes": 0,
    "delay_warmup_steps": 10,
    "state_dtype": "float32",
    "rounding_seed": 0,
    "device_state_bytes": 0,
    "timeline": None,
    "poison": False,
}
OTHERS: dict[str, list[Any]] = {
    "schedule": ["in_order", "overlapped", "delayed"],
    "transport": ["host", "cuda"],
    "link_gb_s": [16, 0.5],
    "link_latency_us": [0, 10, 2.5],
    "bucket_bytes": [1, 3, 1 << 40],
    "ring_slots": [1, 100],
    "threads": [1, 64],
    "max_host_bytes": [1, 10**15],
    "skip_nonfinite": ["always", "never"],
    "cast_fp32_weights": [False],
    "timeout_s": [1, 0.25],
    "stream_gradients": [True],
    "accumulate_dtype": [],
    "shadow_bytes": [0],
    "delay_warmup_steps": [0, 1, 1000],
    "state_dtype": ["bfloat16", "int8"],
    "rounding_seed": [1, (1 << 63) - 1],
    "device_state_bytes": [0, 1, 1 << 40, "auto"],
    "timeline": ["trace.json", "a/b c.json"],
    "poison": [True],
}
NAN, INF = math.nan, math.inf
BAD: dict[str, list[Any]] = {
    "schedule": ["late", "Overlapped", "", None, 1, ["auto"]],
    "transport": ["gpu", "HOST", None, True],
    "link_gb_s": [0, -1.0, NAN, INF, "16", True, [1]],
    "link_latency_us": [-1, NAN, INF, None, "0", False],
    "bucket_bytes": [0, -1, 1.0, 1e6, NAN, "32", None, True],
    "ring_slots": [0, -4, 2.5, None, "4", True],
    "threads": [0, -1, 2.0, "8", False],
    "max_host_bytes": [0, -1, 1e9, "1GB", True],
    "skip_nonfinite": ["sometimes", None, True, False],
    "cast_fp32_weights": [None, 0, 1, "true", "false"],
    "timeout_s": [0, -1, NAN, INF, None, "600", True],
    "stream_gradients": [None, 0, "true"],
    "accumulate_dtype": ["bfloat16", None, "float32"],
    "shadow_bytes": [-1, None, 1e9, True, 14],
    "delay_warmup_steps": [-1, None, 0.5, False],
    "state_dtype": ["fp8", "int4", "float16", "INT8", 8, None, ["int8"]],
    "rounding_seed": [-1, None, 0.5, True, "1"],
    "device_state_bytes": [-1, 1e9, "all", "1000", "Auto", None, True],
    "timeline": ["", 1, True],
    "poison": [None, 1, "yes"],
}


def every(table: dict[str, list[Any]]) -> Any:
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


def test_fields_and_defaults_are_those_of_the_design() -> None:
    assert dataclasses.asdict(OffloadConfig()) == DEFAULTS
    assert [f.name for f in dataclasses.fields(OffloadConfig)] == list(DEFAULTS)
    assert all(f.metadata["help"] and f.kw_only for f in dataclasses.fields(OffloadConfig))
    assert OTHERS.keys() == BAD.keys() == DEFAULTS.keys()


@pytest.mark.parametrize(("name", "value"), every(OTHERS))
def test_good_values(name: str, value: Any) -> None:
    assert getattr(OffloadConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), every(BAD))
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r}: ") and message.endswith(".")
    with pytest.raises(ConfigError):
        OffloadConfig.from_mapping({name: value})
    with pytest.raises(ConfigError):
        dataclasses.replace(OffloadConfig(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("schedule", "overlaped", "overlapped"),
        ("schedule", "inorder", "in_order"),
        ("transport", "hosts", "host"),
        ("skip_nonfinite", "allways", "always"),
        ("state_dtype", "bf16", "bfloat16"),
        ("state_dtype", "fp8", "int8"),
        ("state_dtype", "8", "int8"),
        ("state_dtype", "FP32", "float32"),
        ("state_dtype", "BFLOAT16", "bfloat16"),
    ],
)
def test_a_mistyped_value_is_answered_with_the_nearest(name: str, value: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}='{value}': not a valid {name}\. Did you mean '{nearest}'\? Valid: "
    ):
        OffloadConfig(**{name: value})


@pytest.mark.parametrize(("name", "nearest"), [("bucket_byte", "bucket_bytes"), ("thread", "threads"), ("xyz", None)])
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str | None) -> None:
    hint = f"Did you mean '{nearest}'\\? " if nearest else ""
    for make in (lambda: OffloadConfig(**{name: 1}), lambda: OffloadConfig.from_strings({name: "1"})):
        with pytest.raises(
            ConfigError, match=f"^{name}=.*unknown setting of OffloadConfig. {hint}Valid: accumulate_dtype, bucket"
        ):
            make()
    with pytest.raises(ConfigError, match="unknown setting"):
        dataclasses.replace(OffloadConfig(), **{name: 1})
    with pytest.raises(ConfigError, match="unknown setting"):
        OffloadConfig.from_mapping({name: 1})


@pytest.mark.parametrize("later", ["shard_state"])
def test_fields_that_come_later_are_not_there_yet(later: str) -> None:
    with pytest.raises(ConfigError, match=f"{later}=.*unknown setting"):
        OffloadConfig(**{later: 1})


@pytest.mark.parametrize(("name", "value"), [("accumulate_dtype", "float32"), ("shadow_bytes", 1 << 20)])
def test_what_belongs_to_streaming_needs_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r}: gradients are not streamed. Set stream_gradients=true"):
        OffloadConfig(**{name: value})
    assert getattr(OffloadConfig(stream_gradients=True, **{name: value}), name) == value


def test_state_on_the_device_is_stepped_with_the_gradients_of_grad() -> None:
    streamed = {"stream_gradients": True, "accumulate_dtype": "float32"}
    for value in (1 << 30, "auto"):
        with pytest.raises(ConfigError, match=rf"device_state_bytes={value!r}: .*accumulate_dtype='float32'. Leave"):
            OffloadConfig(device_state_bytes=value, **streamed)
    OffloadConfig(device_state_bytes=0, **streamed)
    with pytest.raises(ConfigError, match=r"device_state_bytes='all': not an integer.*at least 0, or 'auto'"):
        OffloadConfig(device_state_bytes="all")


def test_delayed_and_streamed_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"stream_gradients=True: with schedule='delayed'.*schedule='overlapped'"):
        OffloadConfig(schedule="delayed", stream_gradients=True)


@pytest.mark.parametrize("name", ["link_gb_s", "link_latency_us"])
def test_a_real_link_is_not_emulated(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=5.*transport='cuda' is a real one.*transport='host'"):
        OffloadConfig(transport="cuda", **{name: 5.0})
    OffloadConfig(transport="cuda", link_latency_us=0.0)


def test_keyword_only_frozen_equal_and_hashable() -> None:
    config = OffloadConfig(threads=3)
    with pytest.raises(TypeError):
        OffloadConfig("in_order")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 4  # type: ignore[misc]
    assert config == OffloadConfig(threads=3) != OffloadConfig()
    assert len({config, OffloadConfig(threads=3), OffloadConfig()}) == 2
    parameters = inspect.signature(OffloadConfig).parameters
    assert {n: p.default for n, p in parameters.items()} == DEFAULTS
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


def test_copies() -> None:
    config = OffloadConfig(schedule="overlapped", bucket_bytes=7, link_gb_s=2.0)
    assert dataclasses.replace(config, bucket_bytes=9) == OffloadConfig(
        schedule="overlapped", bucket_bytes=9, link_gb_s=2.0
    )
    for made in (
        copy.copy(config),
        copy.deepcopy(config),
        *(pickle.loads(pickle.dumps(config, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        OffloadConfig.from_mapping(dataclasses.asdict(config)),
        OffloadConfig.from_mapping(json.loads(json.dumps(dataclasses.asdict(config)))),
    ):
        assert made == config and type(made) is OffloadConfig


# ---- from text

TEXTS: list[tuple[str, str, Any]] = [
    ("schedule", "in_order", "in_order"),
    ("transport", "host", "host"),
    ("link_gb_s", "16", 16.0),
    ("link_gb_s", "1.5e1", 15.0),
    ("link_gb_s", "none", None),
    ("link_gb_s", "null", None),
    ("link_gb_s", "", None),
    ("link_latency_us", "2.5", 2.5),
    ("bucket_bytes", "4096", 4096),
    ("ring_slots", "2", 2),
    ("threads", "8", 8),
    ("threads", "None", None),
    ("max_host_bytes", "1000", 1000),
    ("skip_nonfinite", "never", "never"),
    *(("cast_fp32_weights", text, True) for text in ("true", "True", "TRUE", "1", "yes")),
    *(("cast_fp32_weights", text, False) for text in ("false", "False", "0", "no")),
    ("timeout_s", "30", 30.0),
    ("device_state_bytes", "1000", 1000),
    ("device_state_bytes", "auto", "auto"),
]


@pytest.mark.parametrize(("name", "text", "value"), TEXTS)
def test_from_strings(name: str, text: str, value: Any) -> None:
    found = getattr(OffloadConfig.from_strings({name: text}), name)
    assert found == value and type(found) is type(value)


def test_every_value_survives_a_round_trip_through_text() -> None:
    for name, values in OTHERS.items():
        for value in values:
            assert getattr(OffloadConfig.from_strings({name: str(value)}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("bucket_bytes", "32MiB", "int"),
        ("bucket_bytes", "1e6", "int"),
        ("bucket_bytes", "none", "int"),
        ("device_state_bytes", "40GB", "int"),
        ("threads", "all", "int"),
        ("threads", "2.0", "int"),
        ("link_gb_s", "fast", "float"),
        ("timeout_s", "", "float"),
        ("timeout_s", "none", "float"),
        ("cast_fp32_weights", "maybe", "bool"),
        ("cast_fp32_weights", "", "bool"),
        ("cast_fp32_weights", "none", "bool"),
    ],
)
def test_text_of_the_wrong_kind(name: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{text}': does not read as {kind}.*Write {name}="):
        OffloadConfig.from_strings({name: text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("threads", "0"),
        ("threads", "-1"),
        ("link_gb_s", "nan"),
        ("timeout_s", "inf"),
        ("schedule", "x"),
        ("schedule", ""),
    ],
)
def test_text_that_reads_but_is_out_of_range(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        OffloadConfig.from_strings({name: text})


# ---- errors


def test_one_exception_tree() -> None:
    """Callers may catch all of ours, or Python's own kind."""
    tree = {
        errors.ConfigError: ValueError,
        errors.RecipeError: ValueError,
        errors.UnsupportedError: RuntimeError,
        errors.HostMemoryError: RuntimeError,
        errors.StateError: RuntimeError,
        errors.CheckpointError: errors.StateError,
        errors.TransportError: RuntimeError,
        errors.WaitTimeout: TimeoutError,
    }
    for kind, standard in tree.items():
        assert issubclass(kind, errors.OffloadError) and issubclass(kind, standard), kind
    named = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)}
    assert named == {*tree, errors.OffloadError}


def test_the_house_form_of_a_message() -> None:
    assert errors.explain("x", 3, "too small", "Give 4") == "x=3: too small. Give 4."
    assert errors.explain("x", "a", "too small.", "Give 4.") == "x='a': too small. Give 4."
    assert errors.nearest("bear", ["beer", "ale"]) == "Did you mean 'beer'? Valid: ale, beer"
    assert errors.nearest("zzz", ["b", "a"]) == "Valid: a, b"


def test_config_and_errors_are_stdlib_only() -> None:
    heavy = ("torch", "numpy", "numba", "transformers")
    code = f"import sys, hf_offload.config, hf_offload.errors; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
