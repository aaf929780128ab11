"""`--optim_args`: what it accepts, what it refuses, and that an OffloadConfig survives it."""

from __future__ import annotations

import pytest

from hf_offload import OffloadConfig
from hf_offload.errors import ConfigError
from hf_offload.optim_args import parse, render


def test_settings_of_the_engine_and_of_adam_are_told_apart() -> None:
    given = parse("schedule=overlapped, threads=8,beta2=0.95,eps=1e-6,link_gb_s=none", betas=(0.8, 0.999))
    assert given.config == OffloadConfig(schedule="overlapped", threads=8)
    assert given.adam == {"betas": (0.8, 0.95), "eps": 1e-6}


@pytest.mark.parametrize("text", [None, ""])
def test_nothing_gives_the_defaults(text: str | None) -> None:
    assert parse(text) == parse("schedule=auto")
    assert parse(text).adam == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("overlapped", ["'overlapped'", "without", "schedule=overlapped"]),
        ("threads=2,overlapped", ["'overlapped'"]),
        ("threads=2,", ["empty entry"]),
        ("=2", ["'=2'"]),
        ("shedule=overlapped", ["shedule", "Did you mean 'schedule'"]),
        ("schedule=overlaped", ["schedule", "'overlaped'", "Did you mean 'overlapped'"]),
        ("threads=many", ["threads", "'many'"]),
        ("threads=1,threads=2", ["threads", "already given"]),
        ("weight_decay=0.1", ["--weight_decay"]),
        ("eps=small", ["eps", "not a number"]),
        ("maximize=perhaps", ["maximize", "not a bool"]),
    ],
)
def test_refusals_name_the_entry_and_the_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(),
        OffloadConfig(schedule="overlapped", bucket_bytes=4096, link_gb_s=1.5, cast_fp32_weights=False, threads=3),
        OffloadConfig(skip_nonfinite="always", timeout_s=1e-3, link_latency_us=2.5e-7, max_host_bytes=1 << 40),
    ],
)
def test_a_config_survives_the_round_trip(config: OffloadConfig) -> None:
    text = render(config)
    assert parse(text).config == config
    assert text is None or " " not in text


def test_adam_settings_stay_beside_a_config() -> None:
    assert parse(render(OffloadConfig(threads=2), "beta2=0.9")).adam == {"betas": (0.9, 0.9)}


def test_engine_settings_in_both_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="schedule"):
        render(OffloadConfig(threads=2), "schedule=in_order")
