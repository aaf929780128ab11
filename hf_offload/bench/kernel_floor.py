"""How fast the arithmetic of the step kernels is, and from where on memory decides:

    python -m hf_offload.bench.kernel_floor --json

Each kernel steps data that stay in one core's L2, so that no memory is waited for: that is its floor, in ns a
parameter. (The fastest of many rounds, in the thread's CPU time: a floor is what the core can do, not what other
programs left of it. The difference of two sizes, so that the call itself does not count. The weights begin off a cache
line, so that they are not written past the cache.) Its inner loop's instructions are counted in what the compiler made.

With B bytes a parameter and a core that gets G GB/s, a step takes the longer of floor and B / G a parameter, where both
overlap perfectly. So a compact format wins over float32 where G is below 28 / floor, and by its bytes alone where G is
below B / floor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_offload import environment
from hf_offload.bench.pipeline import BusyCores
from hf_offload.errors import ConfigError, explain
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import anatomy, codecs, dither

BYTES = {"float32": 28.0, "bfloat16": 20.0, "int8": 16 + 4 / codecs.BLOCK}
"""Memory traffic of a parameter with a 16-bit wire: state read and written, gradient read, weight written."""

L2_FILES = "/sys/devices/system/cpu/cpu0/cache/index2/size"
L2_BYTES = 512 << 10
"""What is assumed where the system does not tell; any server core has it."""

CALLS = 20
"""Calls that one figure is the mean of: long enough for the clock, short enough to fall between interruptions."""

Rounds = dict[str, tuple[list[float], list[float]]]
"""By kernel: seconds of a step of the smaller and of the larger size, one figure a round."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """One kernel.

    Attributes:
        ns_per_param: on L2-resident data, in the fastest rounds.
        spread: by how much the median round of the larger size was slower than its fastest, as a share.
        instructions_per_param: of the inner loop; None where the assembly is not x86-64's.
        bytes_per_param: memory traffic.
        memory_bound_below_gb_per_s: with less for a core, bandwidth bounds this kernel; with more, arithmetic.
        wins_below_gb_per_s: with less for a core, it is faster than float32 state. None for float32.
    """

    ns_per_param: float
    spread: float
    instructions_per_param: float | None
    bytes_per_param: float
    memory_bound_below_gb_per_s: float
    wins_below_gb_per_s: float | None


def l2_bytes() -> int:
    """Bytes of the first core's L2."""
    try:
        text = Path(L2_FILES).read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return L2_BYTES


def step_of(state: str, n: int) -> Callable[[], None]:
    """A step of n parameters in one thread, bfloat16 on the wire, with ordinary values."""
    theta = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    grad = (theta.view(np.uint32) >> 16).astype(np.uint16)
    weight = np.zeros(n + 64, np.uint16)
    off_a_line = (-weight.ctypes.data % 64) // 2 + 1
    weight = weight[off_a_line : off_a_line + n]
    bounds = np.array([0, n])
    coef = cpu.coefficients(
        lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3,
        grad_scale=1.0, decoupled=True, maximize=False,
    )[None]  # fmt: skip
    m, v = 0.1 * theta, theta**2
    if state == "float32":
        return lambda: cpu.adam_step(theta, m, v, grad, weight, bounds, coef, wire="bfloat16", threads=1)
    codec = cpu.CODECS[state]
    held = codecs.encode(m, v, codecs.half(n, codec), codec)
    place, noise = cpu.CompactState(theta, held), dither.rows(0, *np.array([[0], [0], [3]]))
    return lambda: cpu.compact_step(
        place, place, grad, weight, bounds, coef, noise, codec=codec, wire="bfloat16", threads=1
    )


def seconds(step: Callable[[], None]) -> float:
    """CPU seconds of one call, the mean of CALLS."""
    start = time.thread_time()
    for _ in range(CALLS):
        step()
    return (time.thread_time() - start) / CALLS


def measured(rounds: int, sizes: tuple[int, int]) -> Rounds:
    """The kernels take turns."""
    steps = {state: [step_of(state, n) for n in sizes] for state in BYTES}
    for pair in steps.values():
        for step in pair:
            seconds(step)  # compiles, and fills the cache
    found: Rounds = {state: ([], []) for state in BYTES}
    for _ in range(rounds):
        for state, pair in steps.items():
            for step, figures in zip(pair, found[state]):
                figures.append(seconds(step))
    return found


def derived(found: Rounds, sizes: tuple[int, int], instructions: dict[str, float | None]) -> dict[str, Floor]:
    """What follows from the rounds of each kernel, and from its instructions a parameter."""
    floors = {}
    for state, (small, large) in found.items():
        ns = (min(large) - min(small)) / (sizes[1] - sizes[0]) * 1e9
        floors[state] = Floor(
            ns_per_param=ns,
            spread=statistics.median(large) / min(large) - 1,
            instructions_per_param=instructions[state],
            bytes_per_param=BYTES[state],
            memory_bound_below_gb_per_s=BYTES[state] / ns,
            wins_below_gb_per_s=None if state == "float32" else BYTES["float32"] / ns,
        )
    return floors


def run(rounds: int) -> dict[str, Any]:
    """Measure and count: `kernels`, a Floor by name, and under which circumstances.

    Raises:
        ConfigError: fewer rounds than a spread needs.
    """
    if rounds < 3:
        raise ConfigError(explain("--rounds", rounds, "the fastest and its spread need 3", "Use 3 or more"))
    large = int(l2_bytes() * 0.6 / BYTES["float32"]) // codecs.BLOCK * codecs.BLOCK
    small = large // 4 // codecs.BLOCK * codecs.BLOCK
    busy = BusyCores()
    figures = measured(rounds, (small, large))
    others = busy.others()
    instructions = {state: anatomy.instructions_per_parameter(anatomy.assembly(state)) for state in BYTES}
    return {
        "kernels": derived(figures, (small, large), instructions),
        "params": [small, large],
        "rounds": rounds,
        "cores_others_kept_busy": others,
        "machine": environment.hardware(),
    }


def told(kernels: dict[str, Floor]) -> str:
    """A table for people."""
    lines = [f"{'state':10}{'ns/param':>10}{'spread':>8}{'instr.':>8}{'bytes':>7}{'memory binds':>15}{'wins':>13}"]
    for state, k in kernels.items():
        counted = "-" if k.instructions_per_param is None else f"{k.instructions_per_param:.2f}"
        binds = f"< {k.memory_bound_below_gb_per_s:.1f} GB/s"
        wins = "" if k.wins_below_gb_per_s is None else f"< {k.wins_below_gb_per_s:.1f} GB/s"
        figures = f"{k.ns_per_param:10.3f}{k.spread:8.0%}{counted:>8}{k.bytes_per_param:7.2f}"
        lines.append(f"{state:10}{figures}{binds:>15}{wins:>13}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hf_offload.bench.kernel_floor", description=(__doc__ or "")[:80])
    parser.add_argument("--rounds", type=int, default=101, help="of which the fastest counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    found = run(given.rounds)
    if given.json:
        kernels = {state: asdict(floor) for state, floor in found.pop("kernels").items()}
        print(json.dumps({"kernels": kernels, **found}, indent=2))
    else:
        print(told(found["kernels"]))


if __name__ == "__main__":
    main()
