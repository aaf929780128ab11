"""What the compiler made of the step kernels: how many instructions their inner loops take per parameter."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numba
from numba.core import types

from hf_offload.kernels.cpu import adam, compact, jit
from hf_offload.kernels.cpu.codecs import CODECS

LABEL = re.compile(r"^([.\w]\S*):")
JUMP = re.compile(r"^\t(j\w+)\s+(\.\S+)")
ROOT = re.compile(r"^\tv?sqrtps\s.*%([xyz])mm")
LANES = {"x": 4, "y": 8, "z": 16}


def assembly(state: str) -> str:
    """Numba's code for this machine of the kernel that steps `state` (float32 or a codec) with a bfloat16 wire."""
    body, signature = _kernel(state)
    fresh = numba.njit(**jit.OPTIONS)(body.py_func)
    fresh.compile(signature)
    (text,) = fresh.inspect_asm().values()
    return str(text)


def instructions_per_parameter(text: str) -> float | None:
    """Of the loop that steps most parameters at once, on its shortest way round; None where no loop has packed roots.

    Each parameter takes one square root: so the roots on the way, times their lanes, are its parameters. The shortest
    way is that of decoupled decay, whole blocks and finite values; what is spilled and what is prefetched counts.

    Args:
        text: x86-64 assembly in AT&T syntax. In another there are no such roots.
    """
    blocks = _blocks(text)
    ways = [way for start in blocks.values() if start.roots and (way := _shortest_way_round(start, blocks))]
    if not ways:
        return None
    parameters, instructions = max(ways, key=lambda way: (way[0], -way[1]))
    return instructions / parameters


def _kernel(state: str) -> tuple[Any, tuple[Any, ...]]:
    f32, wire, bounds, coef = types.float32[::1], types.uint16[::1], types.int64[::1], types.float32[:, ::1]
    if state == "float32":
        return adam._step_range, (f32, f32, f32, wire, wire, bounds, coef, types.int64, types.int64)
    held = numba.from_dtype(CODECS[state].dtype)[::1]
    moments = (f32, held, held, types.uint8[::1], types.uint8[::1])
    rest = (bounds, bounds, coef, types.uint32[:, ::1], types.boolean, types.int64, types.int64)
    return compact._compact_range, (*moments, *moments, wire, wire, *rest)


@dataclass
class _Straight:
    """A run of instructions that is entered at its first and left at its last."""

    name: str
    instructions: int = 0
    roots: int = 0
    goes_on_at: list[str] = field(default_factory=list)


def _blocks(text: str) -> dict[str, _Straight]:
    blocks: dict[str, _Straight] = {}
    for block in _split(text):
        blocks[block.name] = block
    return blocks


def _split(text: str) -> Iterator[_Straight]:
    now, count = _Straight("start"), 0
    for line in text.splitlines():
        label, jump = LABEL.match(line), JUMP.match(line)
        if label:
            now.goes_on_at.append(label[1])
            yield now
            now = _Straight(label[1])
        elif line.startswith("\t") and not line.startswith("\t."):
            now.instructions += 1
            if root := ROOT.match(line):
                now.roots += LANES[root[1]]
            if jump or line.startswith("\tret"):
                count += 1
                if jump:
                    now.goes_on_at.append(jump[2])
                if jump is None or jump[1] == "jmp":
                    following = _Straight(f"unreachable {count}")
                else:
                    following = _Straight(f"after jump {count}")
                    now.goes_on_at.append(following.name)
                yield now
                now = following
    yield now


def _shortest_way_round(start: _Straight, blocks: dict[str, _Straight]) -> tuple[int, int] | None:
    """Roots times lanes, and instructions, of the shortest way from a block to itself; None where there is none."""
    reached: set[str] = set()
    queue = [(start.instructions, start.roots, name) for name in start.goes_on_at]
    heapq.heapify(queue)
    while queue:
        instructions, roots, name = heapq.heappop(queue)
        if name == start.name:
            return roots, instructions
        if name in reached or name not in blocks:
            continue
        reached.add(name)
        block = blocks[name]
        for following in block.goes_on_at:
            heapq.heappush(queue, (instructions + block.instructions, roots + block.roots, following))
    return None
