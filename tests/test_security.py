"""What SECURITY.md promises: a promise there names its test here, in tests/input/ or in tests/hf/test_autoload.py."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_offload import models, recipe, strict_yaml, timeline, training
from hf_offload.errors import RecipeError
from hf_offload.recipe import ModelSpec, TokenizerSpec

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    p for folder in ("hf_offload", "kernels", "callbacks", "recipes") for p in (ROOT / folder).rglob("*.py")
)

# ---- the sources: nothing that runs what it reads


PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ERRORS = {"UnpicklingError", "PicklingError"}
CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "compile": "makes code of text",
    "__import__": "imports what a text names",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "torch.hub.load": "runs what it fetches",
    "torch.package.PackageImporter": "runs what it reads",
    "torch.jit.load": "runs what it reads",
    "yaml.unsafe_load": "makes any object",
    "yaml.full_load": "makes many objects",
    "yaml.load_all": "needs a loader that is looked at here",
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Whatever may run code that is read from a file, as `line: what`."""
    for node in ast.walk(tree):
        yield from (f"{getattr(node, 'lineno', 0)}: {what}" for what in _danger(node))


def _danger(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES | {"runpy"}:
        yield from (f"{node.module}.{a.name}" for a in node.names if a.name not in ERRORS)
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.split(".")[0] in PICKLES - {"pickle"})
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"pickle", "runpy"} and node.attr not in ERRORS:
        yield ast.unparse(node)
    if isinstance(node, ast.arguments):
        pairs = [
            *zip(node.args[len(node.args) - len(node.defaults) :], node.defaults),
            *zip(node.kwonlyargs, node.kw_defaults),
        ]
        yield from (f"{a.arg}=True" for a, d in pairs if a.arg == "trust_remote_code" and _is_true(d))
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "trust_remote_code" and _is_true(node.value):
        yield "trust_remote_code=True"
    if isinstance(node, ast.Call):
        yield from _dangerous_call(ast.unparse(node.func), {k.arg: k.value for k in node.keywords}, node)


def _dangerous_call(name: str, keywords: dict[str | None, ast.expr], node: ast.Call) -> Iterator[str]:
    if name in CALLS:
        yield f"{name} {CALLS[name]}"
    if name in ("torch.load", "torch.serialization.load") and not _is_true(keywords.get("weights_only")):
        yield "torch.load without weights_only=True"
    if name == "yaml.load" and ast.unparse(keywords.get("Loader", ast.Constant(None))) != "_Loader":
        yield "yaml.load without our loader"
    for setting in ("shell", "trust_remote_code", "allow_pickle"):
        if _is_true(keywords.get(setting)):
            yield f"{setting}=True"
    if name.split(".")[-1] == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield "import_module of a name that is computed"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


ALLOWED = {
    ("hf_offload/__init__.py", "import_module of a name that is computed"): "from a table in the same file",
    ("hf_offload/launch.py", "runpy.run_path"): "`hf-offload run SCRIPT` is asked to",
    ("hf_offload/launch.py", "runpy.run_module"): "`hf-offload run -m MODULE` is asked to",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_in_the_sources_runs_what_it_reads(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    found = list(dangers(ast.parse(path.read_text(encoding="utf-8"))))
    assert [d for d in found if (name, d.partition(": ")[2]) not in ALLOWED] == []


PLANTED = (
    "torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)", "pickle.load(f)",
    "pickle.loads(b)",
    "pickle.Unpickler(f).load()", "from pickle import loads", "from pickle import *", "import dill",
    "import joblib as j",
    "from cloudpickle import load", "import marshal", "eval(text)", "exec(text)", "os.system('x')",
    "subprocess.run(c, shell=True)",
    "yaml.load(text)", "yaml.load(text, Loader=yaml.Loader)", "yaml.load(text, yaml.UnsafeLoader)",
    "yaml.unsafe_load(t)",
    "AutoModel.from_pretrained(p, trust_remote_code=True)", "def f(trust_remote_code=True): pass",
    "def f(*, trust_remote_code=True): pass",
    "class A:\n    trust_remote_code: bool = True", "np.load(f, allow_pickle=True)",
    "importlib.import_module(name)", "__import__(name)",
    "runpy.run_path(p)", "torch.hub.load(r, m)", "torch.jit.load(f)",
)  # fmt: skip


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_danger_is_seen(code: str) -> None:
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["torch.load(f, weights_only=True)", "except_(pickle.UnpicklingError)", "yaml.load(t, Loader=_Loader)",
    "model.eval()",
     "re.compile(p)", "f(trust_remote_code=spec.trust_remote_code)", "import_module('a.b')", "np.load(f)"],
)  # fmt: skip
def test_what_is_harmless_is_not(code: str) -> None:
    assert not list(dangers(ast.parse(code)))


def test_the_loader_of_recipes_makes_plain_values_only() -> None:
    assert issubclass(strict_yaml._Loader, yaml.SafeLoader)
    plain = {"null", "bool", "int", "float", "binary", "timestamp", "omap", "pairs", "set", "str", "seq", "map"}
    tags = {tag.rpartition(":")[2] for tag in strict_yaml._Loader.yaml_constructors if tag}
    assert tags <= plain and not strict_yaml._Loader.yaml_multi_constructors


# ---- code that comes with a model


CONFIG = {
    "model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import {base}
class Foreign({base}):
    model_type = "foreign"
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder whose config.json and tokenizer name code that lies beside them; `ran` appears when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    models._announce.cache_clear()
    folder = tmp_path / "model"
    folder.mkdir()
    marker = str(tmp_path / "ran")
    for name, base in (
        ("configuration_foreign", "PretrainedConfig"),
        ("tokenization_foreign", "PreTrainedTokenizerFast"),
    ):
        (folder / f"{name}.py").write_text(CODE.format(marker=marker, base=base))
    written = {**CONFIG, "model_type": "foreign", "auto_map": {"AutoConfig": "configuration_foreign.Foreign"}}
    (folder / "config.json").write_text(json.dumps(written))
    named = {"auto_map": {"AutoTokenizer": [None, "tokenization_foreign.Foreign"]}, "tokenizer_class": "Foreign"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def build(spec: ModelSpec) -> None:
    models.build_model(spec, models.byte_level_tokenizer())


def test_a_models_code_does_not_run_unless_the_recipe_says_so(foreign: Path) -> None:
    spec = ModelSpec(path=str(foreign))
    with pytest.raises(RecipeError, match=r"model.path='.*': the folder cannot be used"):
        build(spec)
    with pytest.raises(RecipeError):
        models.build_tokenizer(TokenizerSpec(), spec)
    assert not (foreign.parent / "ran").exists()


def test_a_line_says_that_a_models_code_runs_before_it_does(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[bool] = []
    caplog.handler.addFilter(lambda record: said.append((foreign.parent / "ran").exists()) or True)
    with caplog.at_level(logging.WARNING, logger="hf_offload.models"):
        models.pretrained_config(str(foreign), "model.path", trust_remote_code=True)
    assert (foreign.parent / "ran").exists() and said[0] is False
    assert f"trust_remote_code=true: code that comes with '{foreign}' runs on this machine" in caplog.messages[0]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation", "inner"])
def test_a_kernel_that_a_config_names_is_not_fetched(key: str, tmp_path: Path) -> None:
    """transformers would download it and run it, if `kernels` is installed: trust_remote_code does not ask for that."""
    named: dict[str, Any] = {**CONFIG, key: "owner/kernel"}
    if key == "inner":
        named = {"model_type": "llava", "attn_implementation": {"text_config": "owner/kernel"}}
    (tmp_path / "config.json").write_text(json.dumps(named))
    with pytest.raises(
        RecipeError, match=r"names 'owner/kernel', a repository of compiled code, for .*_implementation"
    ):
        models.pretrained_config(str(tmp_path), "model.path")


def test_a_kernel_that_a_recipe_names_needs_trust() -> None:
    with pytest.raises(RecipeError, match=r"model.attn_implementation='owner/kernel': names a repository"):
        ModelSpec(path="x", attn_implementation="owner/kernel")
    assert ModelSpec(path="x", attn_implementation="owner/kernel", trust_remote_code=True)
    assert ModelSpec(path="x", attn_implementation="sdpa")


@pytest.mark.parametrize("field", ["auto_map", "attn_implementation", "_attn_implementation", "use_kernels"])
def test_a_configuration_in_a_recipe_cannot_name_code(field: str) -> None:
    with pytest.raises(RecipeError, match=f"model.config.{field}=.*not a field of llama"):
        models.scratch_config({**CONFIG, field: "owner/name"}, "model.config")


# ---- where files are written


def a_recipe(folder: Path, data: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "theirs.yaml"
    path.write_text(f"trainer: causal_lm\nmodel: {{path: x}}\ndata: {{kind: jsonl, path: {data}}}\n")
    return str(path)


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())


def test_a_copied_recipe_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("{}")
    name = a_recipe(tmp_path / "theirs", "../secret.jsonl")
    (tmp_path / "a").mkdir()
    with pytest.raises(RecipeError, match=r"data.path='../secret.jsonl': leads out of the recipe's folder"):
        recipe.copy(name, tmp_path / "a" / "b")
    assert files(tmp_path) == ["secret.jsonl", "theirs/theirs.yaml"]


@pytest.mark.parametrize("link", ["theirs.yaml", "data.jsonl", "sub"])
@pytest.mark.parametrize("force", [False, True])
def test_a_copy_does_not_follow_a_link_that_lies_there(link: str, force: bool, tmp_path: Path) -> None:
    name = a_recipe(tmp_path / "theirs", "sub/data.jsonl" if link == "sub" else "data.jsonl")
    (tmp_path / "theirs" / "sub").mkdir()
    for place in ("data.jsonl", "sub/data.jsonl"):
        (tmp_path / "theirs" / place).write_text("{}")
    mine, outside = tmp_path / "mine", tmp_path / "outside"
    mine.mkdir()
    outside.mkdir()
    (mine / link).symlink_to(outside if link == "sub" else outside / "new")
    with pytest.raises(RecipeError, match="DEST="):
        recipe.copy(name, mine, force=force)
    assert files(outside) == []


def test_a_copy_that_fits_is_whole(tmp_path: Path) -> None:
    name = a_recipe(tmp_path / "theirs", "data.jsonl")
    (tmp_path / "theirs" / "data.jsonl").write_text("{}")
    recipe.copy(name, tmp_path / "mine" / "new")
    assert files(tmp_path / "mine") == ["new/data.jsonl", "new/theirs.yaml"]


def test_the_summary_and_the_timeline_are_not_written_through_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    for name in ("offload_summary.json", "offload_summary.json.part", f".trace.json.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(victim)
    training._write(tmp_path / training.SUMMARY, {"a": 1})
    record = timeline.open_timeline(str(tmp_path / "trace.json"))
    record.add("compute", "x", 0.0, 1.0, 1)
    record.write()
    assert victim.read_text() == "years of work"
    assert json.loads((tmp_path / training.SUMMARY).read_text()) == {"a": 1}
    assert timeline.load_spans(tmp_path / "trace.json")


# ---- the document


def test_each_promise_names_a_test_that_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) >= 8
    for path, test in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (path, test)
    promises = text.split("## What is promised")[1].split("\n## ")[0]
    for promise in re.split(r"\n(?=- )", promises)[1:]:
        assert "`tests/" in promise, promise
