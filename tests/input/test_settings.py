"""Settings given as text or as parsed values: `--optim_args`, `OffloadConfig`, the options of `hf-offload plan`."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from hf_offload import OffloadAdam, OffloadConfig, optim_args, planning
from hf_offload.cli import app
from hf_offload.errors import ConfigError, OffloadError, explain, shown
from support.fuzz import HUGE, both_sizes, examples_of, only_our_errors, texts, values

NAMES = [f.name for f in dataclasses.fields(OffloadConfig)]
names = st.sampled_from((*NAMES, *optim_args.ADAM, "weight_decay")) | texts


@both_sizes
def test_config_from_any_mapping(examples: int) -> None:
    @examples_of(examples)
    @given(st.dictionaries(st.sampled_from(NAMES) | texts | st.integers(), values, max_size=3))
    def check(mapping: dict[Any, Any]) -> None:
        with only_our_errors():
            OffloadConfig.from_mapping(mapping)

    check()


@both_sizes
def test_config_from_any_strings(examples: int) -> None:
    @examples_of(examples)
    @given(st.dictionaries(st.sampled_from(NAMES) | texts, texts, max_size=3))
    def check(strings: dict[str, str]) -> None:
        with only_our_errors():
            OffloadConfig.from_strings(strings)

    check()


@both_sizes
def test_any_optim_args(examples: int) -> None:
    """What is read is also what an optimizer takes, or refuses in our words."""
    entries = st.lists(st.tuples(names, st.sampled_from(("=", "", "==", " = ")), texts).map("".join), max_size=4)

    @examples_of(2 * examples)
    @given(entries.map(",".join) | texts)
    def check(text: str) -> None:
        with only_our_errors():
            found = optim_args.parse(text)
            config = dataclasses.replace(found.config, max_host_bytes=1 << 20, bucket_bytes=64, timeline=None)
            OffloadAdam([nn.Parameter(nn.Linear(2, 2).weight.detach())], config=config, **found.adam).close()

    check()


fitting: dict[str, st.SearchStrategy[Any]] = {
    "schedule": st.sampled_from(("auto", "in_order", "overlapped")),
    "link_gb_s": st.none() | st.floats(1e-300, 1e300),
    "link_latency_us": st.floats(0, 1e300),
    "bucket_bytes": st.integers(1, 2**63 - 1),
    "threads": st.none() | st.integers(1, 2**63 - 1),
    "max_host_bytes": st.none() | st.integers(1, 2**63 - 1),
    "timeout_s": st.floats(1e-300, 1e300),
    "cast_fp32_weights": st.booleans(),
    "stream_gradients": st.booleans(),
    "poison": st.booleans(),
    "timeline": st.none() | st.text(string.printable, min_size=1) | texts.filter(bool),
}


@both_sizes
def test_what_is_rendered_is_what_is_read(examples: int) -> None:
    """`OffloadTrainer(offload=...)` hands its settings over as the text of `--optim_args`: the same, or refused."""

    @examples_of(2 * examples)
    @given(st.fixed_dictionaries({}, optional=fitting))
    def check(given_settings: dict[str, Any]) -> None:
        config = OffloadConfig(**given_settings)
        with only_our_errors():
            assert optim_args.parse(optim_args.render(config)).config == config

    check()


@pytest.mark.parametrize("path", ["a,b.json", "a b.json", "none", "null", "it's.json", "a\\b.json", "a=b.json"])
def test_paths_in_optim_args(path: str) -> None:
    """A comma ends an entry, blanks are taken out, none is None: such a path is refused, any other arrives as it is."""
    config = OffloadConfig(timeline=path)
    if path in ("a,b.json", "a b.json", "none", "null", "a=b.json"):
        with pytest.raises(ConfigError, match=r"timeline='.*': optim_args cannot carry it"):
            optim_args.render(config)
    else:
        assert optim_args.parse(optim_args.render(config)).config.timeline == path


@pytest.mark.parametrize("number", HUGE, ids=lambda number: f"{number.bit_length()} bits")
def test_huge_whole_numbers(number: int) -> None:
    for name in ("timeout_s", "link_gb_s", "link_latency_us", "bucket_bytes", "ring_slots", "threads", "shadow_bytes"):
        with only_our_errors():
            OffloadConfig(**{name: number})
    for name in ("lr", "eps", "weight_decay"):
        with only_our_errors():
            OffloadAdam(nn.Linear(2, 2).parameters(), **{name: number}).close()
    with pytest.raises(ConfigError, match=r"betas\[0\]="):
        OffloadAdam(nn.Linear(2, 2).parameters(), betas=(number, 0.9))


# ---- messages


class Spiteful:
    def __repr__(self) -> str:
        raise KeyError("no")


def test_a_message_can_show_any_value() -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs, laughs]
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (
        laughs,
        itself,
        deep,
        1 << 100_000,
        Spiteful(),
        [Spiteful()],
        "x" * 10**7,
        {1: "a", "b": 2},
        [0] * 10**6,
    ):
        text = explain("setting", value, "cause", "Remedy")
        assert text.startswith("setting=") and text.endswith(": cause. Remedy.") and len(text) < 1000
    assert shown({"b": 1, "a": [2.5, "x", None]}) in (
        "{'b': 1, 'a': [2.5, 'x', None]}",
        "{'a': [2.5, 'x', None], 'b': 1}",
    )


@both_sizes
def test_short_values_are_shown_as_python_shows_them(examples: int) -> None:
    @examples_of(examples)
    @given(st.none() | st.booleans() | st.integers(-(2**900), 2**900) | st.floats() | st.text(max_size=100))
    def check(value: Any) -> None:
        assert shown(value) == repr(value)

    check()


# ---- the command line


OPTIONS = ("--params", "--model", "--trainable", "--weight-bytes", "--batch", "--seq-len", "--accumulation",
           "--link-gb-s", "--host-bw-gb-s", "--tflops", "--gpu-gb", "--host-gb")  # fmt: skip
counts = st.sampled_from(
    ("7e9", "135M", "1e400", "1e18", "9" * 5000, "1_", "1__0", "nan", "-1", "0", "1e-3", "٣", "7E9B")
)
sizes = st.sampled_from(("nan", "inf", "-1", "0", "1e400", "1e-320", "1", "9" * 400, "9" * 5000, "0x1", "1e11"))
options = st.dictionaries(st.sampled_from([o for o in OPTIONS if o != "--model"]), counts | sizes | texts, max_size=4)


@both_sizes
def test_plan_with_any_options(examples: int) -> None:
    runner = CliRunner()

    @examples_of(examples)
    @given(options, st.booleans())
    def check(given_options: dict[str, str], sensible: bool) -> None:
        if sensible:
            given_options["--params"] = "7e9"
        arguments = [part for option in given_options.items() for part in option]
        done = runner.invoke(app, ["plan", *arguments, "--json"], env={"COLUMNS": "200"})
        assert done.exit_code in (0, 2), (arguments, done.output, done.exception)
        assert done.exit_code or done.stdout.lstrip().startswith("{")

    check()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("value", ["nan", "1e400", "-1", "9" * 400, "", "\ud800", "a\0b", "~nosuchuser"])
def test_plan_with_one_odd_option(option: str, value: str) -> None:
    given_model = [] if option in ("--params", "--model") else ["--params", "7e9"]
    done = CliRunner().invoke(app, ["plan", *given_model, option, value])
    assert done.exit_code == 2, (done.output, done.exception)


@both_sizes
def test_any_count(examples: int) -> None:
    @examples_of(2 * examples)
    @given(texts | counts | st.from_regex(r"\A[0-9_.]{1,30}([eE]\+?[0-9]{1,30})? ?[kKmMbBgGtT]?\Z"))
    def check(text: str) -> None:
        with only_our_errors():
            assert 1 <= planning.parse_count("--params", text) < 10**18 + 1

    check()


def test_every_error_of_the_tree_is_an_offload_error() -> None:
    from hf_offload import errors

    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(found) >= 8 and all(issubclass(e, OffloadError) for e in found)
