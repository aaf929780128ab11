"""How m and v are held, by `state_dtype`: one object for each, which knows its arrays, its names and its kernel.

| `state_dtype` | bytes a parameter | `optimizer.state` beside `step` and `master` |
|---|---|---|
| float32 | 12 | `exp_avg`, `exp_avg_sq`: float32 |
| bfloat16 | 8 | `exp_avg`, `exp_avg_sq`: bfloat16 |
| int8 | 6 + 2/128 | `exp_avg_codes`, `exp_avg_scale`, `exp_avg_sq_codes`, `exp_avg_sq_scale`: uint8 |

int8's codes have the parameter's shape; its scales are one for each 128 elements in memory order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hf_offload.kernels import cpu

State = tuple[np.ndarray, ...]
"""Masters and moments of a run of elements: float32[n] first, then what the format has."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Task:
    """What one step of one bucket of n elements in p pieces takes beside its state.

    Attributes:
        grads: grad_wire[n]; weights: wire[n], written.
        bounds: int64[p + 1]; rows: float32[p, NUM_COEF]; noise: uint32[p, NUM_NOISE], of no use to float32 state.
        wire, grad_wire: as `kernels.cpu.adam_step` names them.
    """

    grads: np.ndarray
    weights: np.ndarray
    bounds: np.ndarray
    rows: np.ndarray
    noise: np.ndarray
    wire: str
    grad_wire: str | None
    threads: int


class StateFormat(Protocol):
    """One way to hold m and v.

    Attributes:
        name: the `state_dtype`.
        block: a parameter is cut into buckets at multiples of so many elements only.
        scaled: whether each block has a scale byte for m and one for v.
        moment_bytes: bytes an element of m, or of v, takes, scales left out.
    """

    name: str
    block: int
    scaled: bool
    moment_bytes: int

    def arrays(self, numel: int, blocks: int) -> list[tuple[int, np.dtype]]:
        """Elements and dtype of each array of a `State`. All-zero bytes are zero moments."""
        ...

    def step(self, state: State, task: Task) -> None:
        """Step a bucket in place."""
        ...

    def step_ahead(self, state: State, to: State, task: Task, part: tuple[int, int]) -> None:
        """What `step` would make of the elements `part` of a bucket goes to `to`; of all parts in turn, the bucket."""
        ...


class Float32:
    """m and v in full: the kernel's and torch's format."""

    name, block, scaled, moment_bytes = "float32", 1, False, 4

    def arrays(self, numel: int, blocks: int) -> list[tuple[int, np.dtype]]:
        del blocks
        return [(numel, _MASTER)] * 3

    def step(self, state: State, task: Task) -> None:
        master, m, v = state
        cpu.adam_step(
            master, m, v, task.grads, task.weights, task.bounds, task.rows,
            wire=task.wire, threads=task.threads, grad_wire=task.grad_wire,
        )  # fmt: skip

    def step_ahead(self, state: State, to: State, task: Task, part: tuple[int, int]) -> None:
        at, (low, high) = slice(*part), part
        (master, m, v), (to_master, to_m, to_v) = ([a[at] for a in arrays] for arrays in (state, to))
        cpu.adam_step_into(
            (master, m, v), (to_master, to_m, to_v), task.grads[at], task.weights[at],
            task.bounds.clip(low, high) - low, task.rows,
            wire=task.wire, threads=task.threads, grad_wire=task.grad_wire,
        )  # fmt: skip


class Compact:
    """m and v in fewer bytes, rounded stochastically."""

    block = cpu.BLOCK_OF_STATE

    def __init__(self, codec: cpu.Codec) -> None:
        self.codec = codec
        self.name, self.scaled, self.moment_bytes = codec.name, codec.scaled, codec.dtype.itemsize

    def arrays(self, numel: int, blocks: int) -> list[tuple[int, np.dtype]]:
        scales = (blocks if self.scaled else 0, np.dtype(np.uint8))
        return [(numel, _MASTER), (numel, self.codec.dtype), (numel, self.codec.dtype), scales, scales]

    def step(self, state: State, task: Task) -> None:
        self._step(state, state, task, None)

    def step_ahead(self, state: State, to: State, task: Task, part: tuple[int, int]) -> None:
        self._step(state, to, task, part)

    def _step(self, state: State, to: State, task: Task, part: tuple[int, int] | None) -> None:
        source, target = (cpu.CompactState(a[0], cpu.Held(*a[1:])) for a in (state, to))
        cpu.compact_step(
            source, target, task.grads, task.weights, task.bounds, task.rows, task.noise,
            codec=self.codec, wire=task.wire, threads=task.threads, grad_wire=task.grad_wire, part=part,
        )  # fmt: skip


FLOAT32 = Float32()
FORMATS: dict[str, StateFormat] = {"float32": FLOAT32, **{name: Compact(codec) for name, codec in cpu.CODECS.items()}}


def blocks_of(numel: int, block: int) -> int:
    """How many blocks a parameter, or a piece of one, is cut into."""
    return -(-numel // block)


def state_bytes(kind: StateFormat, numels: list[int]) -> dict[str, int]:
    """Bytes of master, exp_avg and exp_avg_sq of parameters of these sizes."""
    scales = sum(blocks_of(n, kind.block) for n in numels) if kind.scaled else 0
    moment = kind.moment_bytes * sum(numels) + scales
    return {"master": 4 * sum(numels), **dict.fromkeys(MOMENTS, moment)}
