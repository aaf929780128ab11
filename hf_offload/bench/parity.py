"""Does a real fine-tune with OffloadAdam follow one with fp32 masters stepped by `torch.optim.AdamW`?

    python -m hf_offload.bench.parity recipes/smollm2_135m_sft.yaml model.path=DIR --steps 20 --seeds 3 --out FILE

For each seed, the same rows in the same order, the same learning rates and the same clipping, with four optimizers:

- `reference`: fp32 masters by hand, clipped in fp32, stepped by torch.optim.AdamW, weights = rounded masters;
- `perturbed`: the same, every master moved by one unit in the last place at the start: how far rounding alone carries;
- `offload`: OffloadAdam;
- `adamw_bf16`: torch.optim.AdamW on the 16-bit weights themselves, as `--optim adamw_torch` does for a bf16 model.

Printed: each run's losses, and the largest difference of a loss from the reference's.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload import data, models, recipe
from hf_offload.optimizer import OffloadAdam

MAX_NORM = 1.0
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01

Step = Callable[[float], None]
"""`step(lr)`: clip the gradients to MAX_NORM, take one step, drop the gradients."""


def reference(model: nn.Module, perturb: bool = False) -> Step:
    """fp32 masters by hand."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in params]
    if perturb:
        masters = [torch.nextafter(m, torch.full_like(m, torch.inf)) for m in masters]
    optimizer = torch.optim.AdamW(masters, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    @torch.no_grad()
    def step(lr: float) -> None:
        grads = [p.grad.float() for p in params if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        for m, g in zip(masters, grads, strict=True):
            m.grad = g.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
        _set_lr(optimizer, lr)
        optimizer.step()
        for m, p in zip(masters, params):
            p.copy_(m)
        model.zero_grad()

    return step


def perturbed(model: nn.Module) -> Step:
    return reference(model, perturb=True)


def offload(model: nn.Module) -> Step:
    optimizer = OffloadAdam(model.parameters(), betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, model=model)

    def step(lr: float) -> None:
        optimizer.clip_grad_norm_(MAX_NORM)
        _set_lr(optimizer, lr)
        optimizer.step()
        model.zero_grad()

    return step


def adamw_bf16(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def step(lr: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        _set_lr(optimizer, lr)
        optimizer.step()
        model.zero_grad()

    return step


CONTENDERS: dict[str, Callable[[nn.Module], Step]] = {
    "reference": reference,
    "perturbed": perturbed,
    "offload": offload,
    "adamw_bf16": adamw_bf16,
}


def losses(model: nn.Module, step: Step, batches: Sequence[dict[str, Tensor]], lr: float) -> list[float]:
    """The training loss of each batch, with a learning rate that falls linearly to 0."""
    found = []
    model.train()
    for i, batch in enumerate(batches):
        loss = model(**batch).loss
        loss.backward()
        step(lr * (1 - i / len(batches)))
        found.append(loss.item())
    return found


def batches_of(rows: Sequence[dict[str, list[int]]], pad: int, size: int, count: int, seed: int) -> Iterator[Any]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    collate = data.Collator(pad)
    for i in range(count):
        yield collate([rows[order[(i * size + k) % len(rows)]] for k in range(size)])


def run(source: str, overrides: Sequence[str], steps: int, seeds: int, batch_size: int) -> dict[str, Any]:
    spec = recipe.load(source, overrides)
    tokenizer = models.build_tokenizer(spec.tokenizer, spec.model)
    lr = float(spec.training["learning_rate"])
    table: dict[str, dict[str, Any]] = {name: {"losses": [], "largest_difference": []} for name in CONTENDERS}
    for seed in range(seeds):
        rows = data.build(spec.data, tokenizer, seed)
        batches = list(batches_of(rows.train, tokenizer.pad_token_id or 0, batch_size, steps, seed))
        for name, make in CONTENDERS.items():
            torch.manual_seed(seed)
            model = models.build_model(spec.model, tokenizer)
            found = losses(model, make(model), batches, lr)
            base = table["reference"]["losses"][seed] if name != "reference" else found
            table[name]["losses"].append(found)
            table[name]["largest_difference"].append(max(abs(a - b) for a, b in zip(found, base)))
            print(f"seed {seed} {name:10s} first {found[0]:.5f} last {found[-1]:.5f} "
                  f"largest difference {table[name]['largest_difference'][-1]:.3g}", flush=True)  # fmt: skip
    return {
        "recipe": Path(source).name,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": lr,
        "runs": table,
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
    }


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, as for hf-offload train")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_intermixed_args()
    result = run(given.recipe, given.overrides, given.steps, given.seeds, given.batch_size)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
