"""Recipes from somebody else: whatever is in the file, a recipe or an error of ours comes out, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_offload import recipe, strict_yaml
from hf_offload.errors import RecipeError
from support.fuzz import both_sizes, examples_of, little_memory, only_our_errors, texts, values

VALID: dict[str, Any] = {
    "trainer": "causal_lm",
    "model": {
        "config": {"model_type": "llama", "vocab_size": 260, "hidden_size": 32},
        "dtype": "float32",
        "trust_remote_code": False,
        "freeze": ["model.embed*"],
    },
    "tokenizer": {"kind": "byte_level"},
    "data": {"kind": "text", "path": "corpus", "pattern": "*.md", "block_size": 32, "eval_fraction": 0.1},
    "training": {
        "max_steps": 4, "learning_rate": 1e-3, "save_strategy": "no", "report_to": ["none"], "logging_steps": 2,
        "lr_scheduler_kwargs": {"a": 1}, "bf16": False, "warmup_steps": 0.1, "seed": 3,
    },
    "offload": {"bucket_bytes": 4096, "timeout_s": 1e2, "schedule": "auto", "timeline": "trace.json"},
}  # fmt: skip
PLACES = [(top,) for top in VALID] + [
    (top, key) for top, inner in VALID.items() if isinstance(inner, dict) for key in inner
]


def with_edits(edits: list[tuple[tuple[str, ...], Any]]) -> dict[Any, Any]:
    """VALID with values replaced: a place that is no longer there is left out."""
    changed: dict[Any, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in VALID.items()}
    for place, value in edits:
        inner = changed if len(place) == 1 else changed.get(place[0])
        if isinstance(inner, dict):
            inner[place[-1]] = value
    return changed


edits = st.lists(
    st.tuples(st.sampled_from(PLACES) | st.tuples(st.sampled_from(list(VALID)), texts), values), max_size=3
)


@both_sizes
def test_a_recipe_with_any_values(examples: int) -> None:
    @examples_of(examples)
    @given(edits)
    def check(changes: list[Any]) -> None:
        with only_our_errors():
            recipe.from_mapping(with_edits(changes))

    check()


@both_sizes
def test_a_file_with_any_values(examples: int, tmp_path: Path) -> None:
    """As PyYAML writes it: with tags for what is neither number nor text, and anchors for what occurs twice."""
    path = tmp_path / "r.yaml"

    @examples_of(examples)
    @given(edits, texts)
    def check(changes: list[Any], override: str) -> None:
        try:
            text = yaml.safe_dump(with_edits(changes), allow_unicode=True)
        except ValueError:  # an int too long to be written
            return
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with only_our_errors():
            recipe.load(str(path), ["training.run_name=" + override, override])

    check()


FRAGMENTS = (
    "{", "}", "[", "]", ": ", ", ", "\n", "\n  ", "- ", "? ", "&a ", "*a", "<<: ", "<<: *a", "<<: [*a, *a]",
    "!!int ", "!!float ",
    "!!bool ", "!!null ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!pairs ", "!!map ", "!!seq ",
    "!!str ", "!x ",
    "!!python/object/apply:os.system ", "!!python/name:os.system", "%YAML 1.1\n", "%TAG ! x\n", "---\n", "...",
    "|\n", ">-\n",
    "'", '"', "#", "\0", "\t", "\ufeff", "\x85", "0x" + "f" * 80, "1" * 80, "1:59:59", "1e400", ".nan",
    "-.inf", "0b", "0o9",
    "2001-13-40", "2001-01-01 25:61:61", "y", "~", "trainer", "causal_lm", "model", "config", "data",
    "training", "a", "b", '""',
)  # fmt: skip


@both_sizes
def test_any_text(examples: int) -> None:
    @examples_of(4 * examples)
    @given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join))
    def check(text: str) -> None:
        with only_our_errors():
            strict_yaml.parse(text, "fuzz")

    check()


@both_sizes
def test_any_override(examples: int) -> None:
    @examples_of(examples)
    @given(
        st.lists(st.sampled_from((*FRAGMENTS, "=", ".", "model.config", "data.path=")) | texts, max_size=6).map("".join)
    )
    def check(text: str) -> None:
        with only_our_errors():
            recipe.from_mapping(recipe.apply_override(VALID, text))

    check()


LONG = "x" * 12_000
ENDLESS = (
    LONG, f"{LONG}=1", f"{LONG}=[", f"{LONG}.y=1", f"model.{LONG}=1", f"model.{LONG}=[", f"a=*{LONG}", f"a=!!{LONG}",
    "a." * 8000 + "b=1", f"a.b.{'.'.join('c' * 41)}=1",
)  # fmt: skip


@pytest.mark.parametrize("override", ENDLESS, ids=range(len(ENDLESS)))
def test_an_override_without_end_is_refused_in_a_few_words(override: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        recipe.from_mapping(recipe.apply_override(VALID, override))
    assert len(str(refusal.value)) < 2500


@pytest.mark.parametrize("given", [None, [], {}, 3, "no\nsuch"], ids=repr)
def test_a_model_type_that_is_none_is_refused(given: Any) -> None:
    from hf_offload import models

    with pytest.raises(RecipeError, match=r"model\.config\.model_type=.*: not known to transformers"):
        models.scratch_config({"model_type": given}, "model.config")


def doubled(levels: int, join: str) -> str:
    lines = [f"a0: &a0 {join.format('x, y').replace('<<: [x, y]', 'x: 1')}"]
    lines += [f"a{i}: &a{i} {join.format(f'*a{i - 1}, *a{i - 1}')}" for i in range(1, levels)]
    return "\n".join([*lines, f"data: *a{levels - 1}"])


ATTACKS = {
    "a billion laughs": (doubled(60, "[{}]"), "stands for more than 20,000 values"),
    "of merges": (doubled(60, "{{<<: [{}]}}"), "stands for more than 20,000 values"),
    "as a key": (doubled(60, "[{}]") + "\n? *a59\n: 1", "stands for more than 20,000 values"),
    "a list in itself": ("data: &a [*a]", "holds itself"),
    "a mapping in itself": ("data: &a {x: *a}", "holds itself"),
    "merged into itself": ("data: &a {<<: *a}", "holds itself"),
    "lists in lists": ("[" * 5000 + "]" * 5000, "nested too deeply"),
    "mappings in mappings": ("{a: " * 5000 + "}" * 5000, "nested too deeply"),
    "sequences in sequences": ("- " * 5000, "nested too deeply"),
    "keys of keys": ("? " * 5000, "nested too deeply"),
    "open lists": ("[" * 100_000, "nested too deeply"),
    "a long number": ("data: " + "9" * 100_000, "a whole number of 100000 characters"),
    "a long hexadecimal number": ("data: 0x" + "f" * 100_000, "a whole number of 100002 characters"),
    "a long number of base 60": ("data: 1" + ":59" * 30_000, "a whole number of 90001 characters"),
    "too long": ("# " + "x" * (1 << 18), "a recipe has 262,144 at most"),
    "an object": ("data: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "a name": ("data: !!python/name:os.system", "could not determine a constructor"),
    "a module": ("data: !!python/module:os", "could not determine a constructor"),
    "two documents": ("a: 1\n---\nb: 2", "but found another document"),
    "an empty int": ('data: !!int ""', "not of the type its tag"),
    "an empty float": ('data: !!float ""', "not of the type its tag"),
    "a bool that is none": ("data: !!bool maybe", "not of the type its tag"),
    "a time that is none": ("data: !!timestamp yesterday", "not of the type its tag"),
    "a day that is none": ("data: 2001-13-40", "month must be in 1..12"),
    "NUL": ("data: \0", "special characters are not allowed"),
    "a key that is a list": ("? [a]\n: 1", "unhashable key"),
    "a key twice": ("a: 1\n'a': 2", "given twice"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str) -> None:
    text, said = ATTACKS[attack]
    with little_memory(), pytest.raises(RecipeError, match=said) as caught:
        strict_yaml.parse(text, "r.yaml")
    assert len(str(caught.value)) < 500


def test_aliases_and_merges_as_people_use_them_are_taken() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: &b {<<: *a, x: 2}\nc: {<<: [*a, *b]}\nd: [*a, *a, *b]"
    assert strict_yaml.parse(text, "r.yaml")["c"] == {"x": 1, "y": [1, 2]}


@pytest.mark.parametrize(
    ("given_as", "said"),
    [
        ("\0", "no such file"),
        ("x" * 5000, "no such file"),
        ("~nosuchuser/r.yaml", "no such file"),
        ("/dev/zero", "no such file"),
        ("/dev/stdin", "no such file"),
        ("", "is a folder"),
    ],
)
def test_odd_paths_of_a_recipe(given_as: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.load(given_as)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecipeError, match="no such file"):
        recipe.load(str(tmp_path / "pipe"))


def test_a_file_too_long_or_not_text_or_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # no disk is taken
    with little_memory(), pytest.raises(RecipeError, match="longer than the 262,144 bytes"):
        recipe.load(str(path))
    path.write_bytes(b"trainer: \xff")
    for use in (recipe.load, lambda name: recipe.copy(name, tmp_path / "copy")):
        with pytest.raises(RecipeError, match="not UTF-8"):
            use(str(path))
    path.write_text("trainer: causal_lm")
    path.chmod(0)
    if not os.access(path, os.R_OK):
        with pytest.raises(RecipeError, match="cannot be read"):
            recipe.load(str(path))


@pytest.mark.parametrize("where", ["data", "model", "tokenizer"])
@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 5000, "a\0b", "", "/", "~", "\ud800"])
def test_odd_paths_in_a_recipe(where: str, path: str, tmp_path: Path) -> None:
    changed = with_edits([((where, "path"), path)])
    if where == "model":
        del changed["model"]["config"]
    if where == "tokenizer":
        changed["tokenizer"]["kind"] = "pretrained"
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(changed), encoding="utf-8")
    with only_our_errors():
        recipe.load(str(file))


# ---- the training section, which transformers checks


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """TrainingArguments write into the environment, and accelerate keeps what it saw."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@both_sizes
@pytest.mark.usefixtures("as_it_was")
def test_training_arguments_with_any_values(examples: int) -> None:
    """Every field of TrainingArguments, but for those that would start something."""
    import dataclasses

    from transformers import TrainingArguments

    left_out = {"deepspeed", "fsdp", "fsdp_config", "parallelism_config", "full_determinism", "log_level", "tf32"}
    names = sorted(f.name for f in dataclasses.fields(TrainingArguments) if f.init and f.name not in left_out)

    @examples_of(examples)
    @given(st.dictionaries(st.sampled_from(names), values, max_size=2))
    def check(training: dict[str, Any]) -> None:
        with only_our_errors():
            recipe.training_arguments(
                recipe.from_mapping({**VALID, "training": training}), output_dir="x", use_cpu=True
            )

    check()


@both_sizes
def test_a_model_configuration_with_any_values(examples: int) -> None:
    from hf_offload import models

    fields = st.sampled_from(
        ("vocab_size", "hidden_size", "rope_theta", "torch_dtype", "tie_word_embeddings", "hidden_act", "model_type")
    )

    @examples_of(examples)
    @given(st.dictionaries(fields | texts | st.integers(), values, max_size=2))
    def check(given_fields: dict[Any, Any]) -> None:
        with only_our_errors():
            models.scratch_config({"model_type": "llama", **given_fields}, "model.config")

    check()
