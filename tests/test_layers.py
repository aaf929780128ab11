"""The layers of the design, as a check of every import in the package:

    kernels <- transport <- engine <- optimizer <- checkpoint <- {trainer, plugin, callbacks, compat} <- cli

A module imports only from its own layer and those to its left, each layer knows one third-party world, and internals of
transformers and accelerate are touched in `hf_offload/compat.py` and `compat_saving.py` alone. Imports inside functions
count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"hf_offload": "hf_offload", "kernels": "hf_offload.kernels", "callbacks": "hf_offload.callbacks"}

# layer -> (its modules, the third-party packages it may import); every layer may import the leaves and those above it
LEAVES = ("errors", "config", "planner", "procfs", "hostmem", "cpus", "numa", "ranks", "preflight", "autoload",
          "optim_args", "timeline", "fluid", "simulation")  # fmt: skip
LAYERS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "kernels": (("kernels",), frozenset({"numpy", "numba", "llvmlite"})),
    "transport": (("transport",), frozenset({"numpy"})),
    "engine": (("engine",), frozenset({"numpy", "torch"})),
    "optimizer": (("optimizer", "state"), frozenset({"torch"})),
    "checkpoint": (("checkpoint",), frozenset({"torch"})),
    "integration": (
        ("trainer", "plugin", "callbacks", "compat", "compat_saving", "checks"),
        frozenset({"torch", "transformers", "accelerate", "rich"}),
    ),
    "cli": (
        ("cli", "launch", "recipe", "recipes", "strict_yaml", "models", "model_shapes", "data", "training", "planning",
         "report", "environment", "bench", "timeline_plot", "command", "checkpoint_cli", "checkpoint_model",
         "checkpoint_report", "bench_cli", "calibration", "measuring", "measuring_host", "measuring_queue",
         "prediction", "predict_cli", "prediction_plot", "calibrating", "subjects", "stopwatch"),
        frozenset({"numpy", "torch", "transformers", "accelerate", "datasets", "tokenizers", "huggingface_hub", "yaml",
                   "rich", "typer", "click"}),
    ),
}  # fmt: skip
# modules with a world of their own
WORLDS = {
    "hf_offload.transport.cuda": frozenset({"numpy", "cupy"}),
    "hf_offload.kernels.cuda": frozenset({"numpy", "cupy"}),
    "hf_offload.timeline_plot": frozenset({"matplotlib"}),
    "hf_offload.bench.step_peers": frozenset({"torch", "deepspeed", "torchao"}),
    "hf_offload.prediction_plot": frozenset({"matplotlib"}),
}
# what a leaf reaches for by name, late: (module, import) -> why
LATE = {
    ("hf_offload.autoload", "hf_offload.compat"): "once transformers has been imported by somebody else",
    ("hf_offload.hostmem", "psutil"): "on systems without /proc, where it happens to be installed",
}
# underscored names of other libraries (neither transformers nor accelerate) that our own modules may touch: why
FOREIGN_INTERNALS = {
    "_version": "a tensor's version counter; torch documents it and has no other name for it",
    "_opt_called": "torch's schedulers warn unless it says that the optimizer stepped",
    "_wrapped_by_lr_sched": "torch's schedulers wrap the step of the optimizer they are built on",
    "_optimizer_load_state_dict_pre_hooks": "torch.optim.Optimizer's own, called by our load_state_dict as by its",
    "_optimizer_load_state_dict_post_hooks": "the same",
    "_no_split_modules": "transformers' public promise to FSDP and device_map, read by name",
}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(p for p in parts if p != "__init__")])] = path
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported; `from a import b` gives a.b; constant names for import_module, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def rank(module: str) -> int:
    """Leaves -1, then the layers from left to right; the package itself (`__version__`) may be imported by anyone."""
    if module == "hf_offload":
        return -2
    part = module.removeprefix("hf_offload.").split(".")[0]
    if part in LEAVES:
        return -1
    for number, (members, _) in enumerate(LAYERS.values()):
        if part in members:
            return number
    raise AssertionError(f"{module} is in no layer: put it into the table of tests/test_layers.py")


def home_of(name: str, known: dict[str, Path]) -> str:
    """The module that an imported dotted name belongs to."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name


def broken_layers(module: str, tree: ast.AST, known: dict[str, Path]) -> list[str]:
    mine = rank(module)
    found = []
    for name in imports(tree):
        top = name.split(".")[0]
        if (module, name) in LATE:
            continue
        if top == "hf_offload":
            other = home_of(name, known)
            if rank(other) > mine:
                found.append(f"{module} imports {other}, which lies to its right")
        elif top not in sys.stdlib_module_names and top not in world(module):
            found.append(f"{module} imports {name}")
    return found


def world(module: str) -> frozenset[str]:
    for prefix, allowed in WORLDS.items():
        if module == prefix or module.startswith(prefix + "."):
            return allowed
    number = rank(module)
    return list(LAYERS.values())[number][1] if number >= 0 else frozenset()


def foreign_internals(tree: ast.AST) -> list[str]:
    """Underscored attributes of something that is not `self` or `cls`, and underscored names imported from others."""
    ours = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, name = node.value, node.attr
            if isinstance(base, ast.Name) and base.id in ("self", "cls"):
                continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hf_offload"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            name = next((p for p in parts if p.startswith("_") and p != "__future__"), "")
        else:
            continue
        if name.startswith("_") and not name.endswith("__") and name not in FOREIGN_INTERNALS and name not in ours:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


KNOWN = modules()


@pytest.mark.parametrize("module", [m for m in KNOWN if m != "hf_offload"])
def test_imports_follow_the_layers(module: str) -> None:
    tree = ast.parse(KNOWN[module].read_text(encoding="utf-8"))
    assert broken_layers(module, tree, KNOWN) == []


def test_the_package_itself_imports_nothing_heavy() -> None:
    tree = ast.parse(KNOWN["hf_offload"].read_text(encoding="utf-8"))
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in checked:
        tree.body.remove(node)
    names = set(imports(tree))
    assert {n for n in names if n.split(".")[0] not in sys.stdlib_module_names} == {"hf_offload.autoload"}


AFTER = list(LAYERS).index("integration")


@pytest.mark.parametrize("module", [m for m in KNOWN if rank(m) >= AFTER and not m.startswith("hf_offload.compat")])
def test_internals_of_transformers_and_accelerate_are_touched_in_compat_alone(module: str) -> None:
    """As far as it can be seen: in the modules that may import them, no underscored name but our own."""
    assert foreign_internals(ast.parse(KNOWN[module].read_text(encoding="utf-8"))) == []


def test_the_tables_name_only_what_there_is() -> None:
    parts = {m.removeprefix("hf_offload.").split(".")[0] for m in KNOWN} | {"recipes"}
    listed = [p for members, _ in LAYERS.values() for p in members] + list(LEAVES)
    assert len(listed) == len(set(listed))
    assert set(listed) <= parts, "a module that is gone"


# ---- the checks themselves can fail


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("hf_offload.kernels.cpu.adam", "import torch"),
        ("hf_offload.kernels.cpu.adam", "from hf_offload.transport import Event"),
        ("hf_offload.transport.host", "import torch"),
        ("hf_offload.transport.host", "import cupy"),
        ("hf_offload.transport.base", "def f():\n    from hf_offload.engine.plan import Bucket"),
        ("hf_offload.engine.plan", "import numba"),
        ("hf_offload.engine.engine", "from hf_offload.optimizer import OffloadAdam"),
        ("hf_offload.engine.units", "from transformers import PreTrainedModel"),
        ("hf_offload.engine.units", "import importlib\nimportlib.import_module('transformers')"),
        ("hf_offload.optimizer", "import transformers"),
        ("hf_offload.optimizer", "from hf_offload import trainer"),
        ("hf_offload.trainer", "from hf_offload.cli import main"),
        ("hf_offload.trainer", "import numba"),
        ("hf_offload.errors", "import torch"),
        ("hf_offload.config", "from hf_offload.engine import Engine"),
        ("hf_offload.cli", "import numba"),
        ("hf_offload.cli", "import cupy"),
        ("hf_offload.cli", "import matplotlib"),
        ("hf_offload.timeline", "import torch"),
    ],
)
def test_a_wrong_import_is_seen(module: str, code: str) -> None:
    assert broken_layers(module, ast.parse(code), KNOWN)


@pytest.mark.parametrize(
    "code",
    [
        "trainer._inner_training_loop()",
        "getattr(accelerator, '_optimizers')",
        "from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS",
        "from transformers._private import x",
        "module.Trainer._x = 1",
    ],
)
def test_a_touched_internal_is_seen(code: str) -> None:
    assert foreign_internals(ast.parse(code))


def test_right_imports_are_let_through() -> None:
    code = "import numpy\nimport torch\nfrom hf_offload.kernels import cpu\nfrom hf_offload.errors import explain"
    assert not broken_layers("hf_offload.engine.engine", ast.parse(code), KNOWN)
    assert not broken_layers("hf_offload.transport.cuda", ast.parse("import cupy"), KNOWN)
    assert not broken_layers("hf_offload.cli", ast.parse("from hf_offload import __version__"), KNOWN)
    assert not foreign_internals(ast.parse("self._x = cls._y = model.__class__"))
