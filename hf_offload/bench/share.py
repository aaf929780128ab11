"""What a share of the state on the device saves: `python -m hf_offload.bench.share --json`.

Three optimizers over equal models take equal steps in turn, in order, so that each phase is measured by itself: all
state on the host, half of it on the device, all of it on the device. The device is this machine's CPU, so what stays
there is stepped by the same kernel on the same cores: `step_seconds` shows that, and says nothing of a GPU, which does
it at the bandwidth of its own memory. What travels, and what the host steps, is counted and timed as in training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.bench.emulated import device_memory
from hf_offload.config import OffloadConfig
from hf_offload.environment import hardware, versions
from hf_offload.errors import ConfigError, OffloadError, explain
from hf_offload.optimizer import OffloadAdam
from hf_offload.planner import STATE_BYTES
from hf_offload.preflight import check_host_budget

SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}
PHASES = ("d2h", "host_step", "h2d")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured.

    Attributes:
        params: of each model, bf16, in tensors of `tensor_params`.
        steps, warmup_steps: measured steps of each optimizer, and those before.
        link_gb_s: of the emulated link; None: as fast as memory.

    Raises:
        ConfigError: a value outside its range.
    """

    params: int = 1 << 25
    tensor_params: int = 1 << 20
    steps: int = 10
    warmup_steps: int = 2
    threads: int | None = None
    link_gb_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("params", "tensor_params", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(explain(name, getattr(self, name), "below 1", "Give a whole number of at least 1"))

    @property
    def sizes(self) -> list[int]:
        whole, rest = divmod(self.params, self.tensor_params)
        return [self.tensor_params] * whole + ([rest] if rest else [])

    def check_memory(self) -> None:
        """Raises HostMemoryError where it would not fit."""
        count = len(SHARES)
        need = {"state": count * STATE_BYTES * self.params, "weights": 2 * count * self.params,
                "gradients": 2 * self.params}  # fmt: skip
        check_host_budget(need, None)


@dataclass
class Contender:
    """One share: its optimizer, its weights, and what its steps took."""

    optimizer: OffloadAdam
    params: list[nn.Parameter]
    walls: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def step(self, grads: Sequence[Tensor], measured: bool) -> None:
        for p, g in zip(self.params, grads):
            p.grad = g
        begin = time.perf_counter()
        self.optimizer.step()
        wall = time.perf_counter() - begin
        self.optimizer.zero_grad()
        if measured:
            self.walls.append(wall)
            for phase, seconds in self.seconds.items():
                seconds.append(self.optimizer.stats().seconds[phase])

    def digest(self) -> str:
        """Of every bit of weights and state."""
        found = hashlib.sha256()
        entries = self.optimizer.state_dict()["state"].values()
        for t in (*(p.detach() for p in self.params), *(t for entry in entries for t in entry.values())):
            found.update(t.reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def figures(self) -> dict[str, Any]:
        stats = self.optimizer.stats()
        return {
            "device_state_bytes": stats.device_bytes["optimizer"],
            "host_state_bytes": sum(stats.host_bytes[name] for name in ("master", "exp_avg", "exp_avg_sq")),
            "d2h_bytes": stats.d2h_bytes,
            "h2d_bytes": stats.h2d_bytes,
            "step_seconds": statistics.median(self.walls),
            **{f"{phase}_seconds": statistics.median(seconds) for phase, seconds in self.seconds.items()},
            "step_spread": _spread(self.walls),
            "host_step_spread": _spread(self.seconds["host_step"]),
        }


def run(setting: Setting) -> dict[str, Any]:
    """Seconds are of one step, medians; `ratios` are to the same run's share `none`; `*_spread` is the
    interquartile range over the median.

    Raises:
        HostMemoryError: it does not fit.
    """
    setting.check_memory()
    made = torch.Generator().manual_seed(setting.seed)
    weights = device_memory(setting.params).normal_(0.0, 0.02, generator=made)
    grads = device_memory(setting.params).normal_(0.0, 1e-3, generator=made).split(setting.sizes)
    contenders = {name: _contender(setting, share, weights) for name, share in SHARES.items()}
    del weights
    for step in range(setting.warmup_steps + setting.steps):
        for contender in contenders.values():
            contender.step(grads, step >= setting.warmup_steps)
    digests = {contender.digest() for contender in contenders.values()}
    figures = {name: contender.figures() for name, contender in contenders.items()}
    for contender in contenders.values():
        contender.optimizer.close()
    return {
        "shares": figures,
        "ratios": {name: _ratios(found, figures["none"]) for name, found in figures.items()},
        "same_bits": len(digests) == 1,
        "config": {**asdict(setting), "threads": contenders["none"].optimizer.engine.threads, "schedule": "in_order"},
        "machine": {**hardware(), "versions": versions()},
    }


def _contender(setting: Setting, share: float, weights: Tensor) -> Contender:
    params = [nn.Parameter(w) for w in device_memory(setting.params).copy_(weights).split(setting.sizes)]
    config = OffloadConfig(
        schedule="in_order", threads=setting.threads, link_gb_s=setting.link_gb_s,
        device_state_bytes=int(share * STATE_BYTES * setting.params),
    )  # fmt: skip
    return Contender(OffloadAdam(params, lr=1e-3, config=config), params)


def _ratios(found: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    link, base_link = (f["d2h_bytes"] + f["h2d_bytes"] for f in (found, base))
    return {
        "link_bytes": link / base_link,
        "host_step_seconds": found["host_step_seconds"] / base["host_step_seconds"],
        "host_state_bytes": found["host_state_bytes"] / base["host_state_bytes"],
        "step_seconds": found["step_seconds"] / base["step_seconds"],
    }


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle if middle else 0.0


def _text(found: dict[str, Any]) -> str:
    lines = [f"{'share':<6} {'link bytes':>14} {'host step':>12} {'step':>12}   of the step with none"]
    for name, ratios in found["ratios"].items():
        row = found["shares"][name]
        lines.append(
            f"{name:<6} {row['d2h_bytes'] + row['h2d_bytes']:>14,} {row['host_step_seconds'] * 1e3:>9.1f} ms "
            f"{row['step_seconds'] * 1e3:>9.1f} ms   link x {ratios['link_bytes']:.3f}, "
            f"host step x {ratios['host_step_seconds']:.3f}"
        )
    return "\n".join([*lines, f"The same bits: {found['same_bits']}."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where bits differ, 2 where a setting is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_offload.bench.share", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--params", type=float, default=Setting.params, help="parameters of each model")
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--threads", type=int, default=None, help="of the host step; default: all")
    parser.add_argument("--link-gb-s", type=float, default=None, help="emulated link, 1e9 bytes/s; default: none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        found = run(
            Setting(params=int(given.params), steps=given.steps, threads=given.threads, link_gb_s=given.link_gb_s)
        )
    except OffloadError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if given.json else _text(found))
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
