"""Does a run whose m and v are held in fewer bytes end where the exact one ends?

    python -m hf_offload.bench.convergence quickstart --seeds 3 --out FILE
    python -m hf_offload.bench.convergence smollm2_135m_sft model.path=DIR training.max_steps=60 --seeds 3 --out FILE

For each seed, the recipe is trained once with each `state_dtype`: the same weights at first, the same rows in the same
order. A run ends with the mean of its last tenth of losses, and its evaluation loss. Beside each `state_dtype` stands
how far its runs end from the exact run of the same seed, and how far the exact runs of different seeds end from each
other, which is what else decides where a run ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_offload import environment, recipe, training
from hf_offload.config import STATE_DTYPES


def train(source: str, overrides: Sequence[str], state_dtype: str, seed: int) -> dict[str, float]:
    """The losses with which one run ends, `final` and `eval`, and its first."""
    with tempfile.TemporaryDirectory() as folder:
        spec = recipe.load(
            source,
            [*overrides, f"offload.state_dtype={state_dtype}", f"training.seed={seed}", f"offload.rounding_seed={seed}",
             f"training.output_dir={folder}", "training.logging_steps=1", "training.save_strategy=no"],
        )  # fmt: skip
        outcome = training.run(spec, training.arguments(spec), Console(quiet=True))
    losses = outcome.summary["losses"]
    values = losses["values"]
    last = values[-max(1, len(values) // 10) :]
    found = {"first": values[0], "final": mean(last)}
    return found | ({"eval": losses["eval_values"][-1]} if losses["eval_values"] else {})


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Each state_dtype against the exact runs.

    Returns:
        For each, and each kind of loss: its `mean`, and `largest_difference` from the exact run of the same seed;
        and `seed_spread`, the range of the exact runs.
    """
    exact = runs["float32"]
    table = {}
    for name, found in runs.items():
        row: dict[str, float] = {}
        for kind in (k for k in ("final", "eval") if k in exact[0]):
            mine, theirs = [r[kind] for r in found], [r[kind] for r in exact]
            row[f"{kind}_mean"] = mean(mine)
            row[f"{kind}_largest_difference"] = max(abs(a - b) for a, b in zip(mine, theirs))
            row[f"{kind}_seed_spread"] = max(theirs) - min(theirs)
        table[name] = row
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, as for hf-offload train")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_intermixed_args()
    if given.seeds < 1:
        parser.error("--seeds: at least 1")
    if given.out and not given.out.parent.is_dir():
        parser.error(f"--out: there is no folder {str(given.out.parent)!r}")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in STATE_DTYPES}
    for seed in range(given.seeds):
        for name in STATE_DTYPES:
            runs[name].append(train(given.recipe, given.overrides, name, seed))
            print(f"seed {seed} {name:9s} {runs[name][-1]}", flush=True)
    shown = Table("state_dtype", "final loss", "differs by", "eval loss", "differs by", "seeds differ by")
    table = compare(runs)
    for name, row in table.items():
        evaluation = (
            (f"{row['eval_mean']:.4f}", f"{row['eval_largest_difference']:.4f}") if "eval_mean" in row else ("", "")
        )
        shown.add_row(name, f"{row['final_mean']:.4f}", f"{row['final_largest_difference']:.4f}", *evaluation,
                      f"{row['final_seed_spread']:.4f}")  # fmt: skip
    Console().print(shown)
    if given.out:
        result: dict[str, Any] = {
            "recipe": given.recipe, "overrides": [o for o in given.overrides if not o.startswith("model.path=")],
            "runs": runs, "compared": table, "versions": environment.versions(), "hardware": environment.hardware(),
        }  # fmt: skip
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
