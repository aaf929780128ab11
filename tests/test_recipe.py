"""Recipes: what is read, what is refused and in which words, overrides, and the recipes that ship."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_offload import recipe, report
from hf_offload.errors import RecipeError

TINY = """
trainer: causal_lm
model:
  config: {model_type: llama, vocab_size: 260, hidden_size: 32, num_hidden_layers: 2}
tokenizer: {kind: byte_level}
data: {kind: text, path: corpus, block_size: 32}
training: {max_steps: 4, learning_rate: 1e-3, save_strategy: no}
offload: {bucket_bytes: 4096, timeout_s: 1e2}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


def refusal(tiny: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe.training_arguments(recipe.load(tiny, overrides))
    return str(caught.value)


def test_a_recipe_becomes_typed(tiny: str, tmp_path: Path) -> None:
    spec = recipe.load(tiny)
    assert isinstance(spec.data, recipe.TextFiles)
    assert spec.data.block_size == 32
    assert spec.model.dtype == "bfloat16"
    assert spec.offload.bucket_bytes == 4096
    assert spec.offload.timeout_s == 100.0, "YAML 1.1 reads 1e2 as text"


def test_training_arguments_are_transformers_own(tiny: str) -> None:
    args = recipe.training_arguments(recipe.load(tiny), output_dir="x", use_cpu=True, report_to="none")
    assert args.learning_rate == 1e-3, "YAML 1.1 reads 1e-3 as text"
    assert args.max_steps == 4
    assert args.save_strategy == "no", "YAML 1.1 reads no as false"


def test_paths_in_the_file_are_from_its_folder_and_those_of_overrides_from_here(tiny: str, tmp_path: Path) -> None:
    assert recipe.load(tiny).data.path == str(tmp_path / "corpus")  # type: ignore[attr-defined]
    assert recipe.load(tiny, ["data.path=mine"]).data.path == "mine"  # type: ignore[attr-defined]


def test_the_last_override_wins_and_output_dir_over_all(tiny: str) -> None:
    overrides = ["training.max_steps=5", "training.output_dir=a", "training.max_steps=7"]
    spec = recipe.load(tiny, overrides, output_dir="b")
    assert spec.training["max_steps"] == 7
    assert spec.training["output_dir"] == "b"


def test_overrides_take_yaml_values_and_make_sections(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TINY.split("training:")[0], encoding="utf-8")
    spec = recipe.load(str(path), ["training.bf16=true", "offload.link_gb_s=16", "model.freeze=['model.embed*']"])
    assert spec.training == {"bf16": True}
    assert spec.offload.link_gb_s == 16.0
    assert spec.model.freeze == ("model.embed*",)


def test_null_takes_a_key_out(tiny: str) -> None:
    spec = recipe.load(tiny, ["model.config=null", "model.path=owner/name", "tokenizer=null"])
    assert (spec.model.path, spec.model.config, spec.tokenizer.kind) == ("owner/name", None, "pretrained")


def test_another_model_path_drops_the_shape_of_the_first() -> None:
    assert recipe.load("qwen2.5_7b_sft").model.shape is not None
    assert recipe.load("qwen2.5_7b_sft", ["model.path=Qwen/Qwen2.5-0.5B"]).model.shape is None
    assert recipe.load("qwen2.5_7b_sft", ["training.max_steps=3"]).model.shape is not None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("modell.path=x", "modell={'path': 'x'}: unknown key in .*Did you mean 'model'"),
        ("model.dtyp=bfloat16", "model.dtyp='bfloat16': unknown key. Did you mean 'dtype'"),
        ("model.dtype=bf16", "model.dtype='bf16': not a valid value. .*bfloat16"),
        ("model.trust_remote_code=1", "model.trust_remote_code=1: is a whole number, not true or false"),
        ("tokenizer.kind=byte_leval", "Did you mean 'byte_level'"),
        ("tokenizer.path=x", "tokenizer.path='x': byte_level is built in"),
        ("data.kind=json", "data.kind='json': not a valid kind of data. Did you mean 'jsonl'"),
        ("data.block_sise=3", "data.block_sise=3: unknown key. Did you mean 'block_size'"),
        ("data.block_size=1.5", "data.block_size=1.5: is a number, not a whole number"),
        ("data.block_size=1", "data.block_size=1: below 2"),
        ("data.eval_fraction=1", "data.eval_fraction=1.0: not from 0 to below 1"),
        ("data.path=null", "data.path: missing"),
        ("training.max_step=3", "training.max_step=3: unknown key. Perhaps it is 'max_steps'"),
        ("training.max_steps=abc", "training.max_steps='abc': is text, not a whole number"),
        ("training.max_steps=true", "training.max_steps=True: is true or false, not a whole number"),
        ("training.bf16=3", "training.bf16=3: is a whole number, not true or false"),
        ("training.learning_rate=fast", "training.learning_rate='fast': is text, not a number"),
        ("training.run_name=yes", "training.run_name=True: is true or false, not text. Put it in quotes"),
        ("training.lr_scheduler_type=cosin", "transformers refuses these TrainingArguments: cosin"),
        ("training.optim=adamw_torch", "a recipe always trains with offload_adam"),
        ("training.optim_args=threads=3", "Write its settings under `offload:`"),
        ("training=3", "training=3: not a mapping"),
        ("offload.schedule=overlaped", "offload.schedule='overlaped': not a valid schedule. Did you mean 'overlapped'"),
        ("offload.bucket_byte=3", "offload.bucket_byte=3: unknown key. Did you mean 'bucket_bytes'"),
        ("offload.bucket_bytes=0", "offload.bucket_bytes=0: below 1"),
        ("trainer=sft", "trainer='sft': comes with a later version"),
        ("trainer=causal", "Did you mean 'causal_lm'"),
        ("max_steps", "override='max_steps': not of the form key=value"),
        ("training..x=3", "not of the form key=value"),
        ("training.max_steps.x=3", "'max_steps' holds 4, nothing below it"),
        ("training.max_steps=[1", "override training.max_steps:1:3: does not parse as YAML"),
        ("model.path=x", "model.path and model.config: both are given"),
        ("model.config=null", "model.path and model.config: neither is given"),
        ("model.config={hidden_size: 3}", "model.config.model_type: missing"),
    ],
)
def test_refusals_name_the_key_and_the_nearest(tiny: str, override: str, said: str) -> None:
    assert re.search(said, refusal(tiny, override))


@pytest.mark.parametrize("section", ["trainer", "model", "data"])
def test_a_missing_section_is_named(tiny: str, section: str) -> None:
    assert f"{section}: missing" in refusal(tiny, f"{section}=null")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("trainer: causal_lm\nmodel: {a: 1\ndata: 3\n", ":3:5: does not parse as YAML"),
        ("trainer: causal_lm\ntrainer: sft\n", ":2:1: .*the key 'trainer' is given twice"),
        ("a:\n\t- b\n", ":2:1: does not parse"),
        ("", "holds no recipe"),
        ("- a\n- b\n", "holds no recipe"),
        ("a: !!python/object:os.system {}\n", ":1:4: does not parse"),
        ("a: 2024-13-45\n", "does not parse"),
    ],
)
def test_a_file_that_does_not_parse_is_told_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=re.escape(str(path)) + ".*" + where.removeprefix(".*")):
        recipe.load(str(path))


def test_what_is_no_text_and_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        recipe.load(str(path))
    with pytest.raises(RecipeError, match="is a folder"):
        recipe.load(str(tmp_path))
    with pytest.raises(RecipeError, match="Did you mean 'quickstart'"):
        recipe.load("quickstrt")


def test_merge_keys_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text("base: &b {x: 1, y: 2}\nother: {<<: *b, x: 3}\n", encoding="utf-8")
    from hf_offload import strict_yaml

    assert strict_yaml.parse(path.read_text(), "m")["other"] == {"x": 3, "y": 2}


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_shipped_recipes_are_valid(name: str) -> None:
    spec = recipe.load(name)
    recipe.training_arguments(spec, use_cpu=True, report_to="none")
    if isinstance(spec.data, recipe.JsonlChat):
        assert Path(spec.data.path).is_file()


def test_three_recipes_ship() -> None:
    assert sorted(recipe.shipped()) == ["quickstart", "qwen2.5_7b_sft", "smollm2_135m_sft"]


@pytest.mark.parametrize("name", sorted(recipe.shipped()))
def test_headers_give_command_hardware_and_the_planned_peak(name: str) -> None:
    from hf_offload import planning

    header = " ".join(
        line.lstrip("# ") for line in recipe.shipped()[name].read_text().split("\ntrainer:")[0].splitlines()
    )
    assert f"hf-offload train {name}" in header
    assert "Hardware:" in header
    fit = planning.answer(planning.Asked(recipe=name)).plan.fit
    said = re.search(r"Expected peak memory \(planned\): GPU ([\d.]+ [kMG]?B), host ([\d.]+ [kMG]?B)", header)
    assert said is not None
    assert said.groups() == (report.size(fit.gpu_need), report.size(fit.host_need))


@pytest.mark.parametrize(("name", "params"), [("qwen2.5_7b_sft", 7_615_616_512), ("smollm2_135m_sft", 134_515_008)])
def test_true_sizes_without_the_hub_tied_weights_once(name: str, params: int) -> None:
    from hf_offload import planning

    answer = planning.answer(planning.Asked(recipe=name))
    assert answer.plan.counts.trainable == params
    assert answer.plan.shape is not None


def test_the_instruct_set_is_sound() -> None:
    spec = recipe.load("smollm2_135m_sft")
    lines = Path(spec.data.path).read_text(encoding="utf-8").splitlines()  # type: ignore[attr-defined]
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) >= 300
    assert len({json.dumps(chat) for chat in chats}) == len(chats)
    for chat in chats:
        roles = "".join(message["role"][0] for message in chat)
        assert re.fullmatch("s?(ua)+", roles)
        assert all(message["content"].strip() for message in chat)


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("owner/name", False),
        ("gpt2", False),
        ("./name", True),
        ("../a/b", True),
        ("~/m", True),
        ("/abs", True),
        ("a/b/c", True),
        ("name/", True),
    ],
)
def test_what_looks_like_a_folder(path: str, local: bool) -> None:
    assert recipe.looks_local(path) is local


def test_copy_takes_the_data_along_and_refuses_to_overwrite(tmp_path: Path) -> None:
    written = recipe.copy("smollm2_135m_sft", tmp_path / "mine.yaml")
    assert written == [tmp_path / "mine.yaml", tmp_path / "data" / "instruct_small.jsonl"]
    assert Path(recipe.load(str(written[0])).data.path) == written[1]  # type: ignore[attr-defined]
    written[0].write_text("changed")
    with pytest.raises(RecipeError, match="is there already"):
        recipe.copy("smollm2_135m_sft", tmp_path / "mine.yaml")
    assert written[0].read_text() == "changed"
    recipe.copy("smollm2_135m_sft", tmp_path / "mine.yaml", force=True)
    assert written[0].read_text() != "changed"
