"""Dividing a model into units: what FSDP would wrap, plus the embeddings and the tail.

A unit is the grain of waiting: before a unit runs, its weights must have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Unit:
    """One unit: its name for messages, the parameters it owns, and whether it is a block of a stack."""

    name: str
    params: tuple[Tensor, ...]
    is_block: bool


@dataclass(frozen=True)
class Guard:
    """A module before whose forward some units' weights must have arrived."""

    module: nn.Module
    units: frozenset[int]
    block: int | None
    """The unit number if the module is a block, else None."""


@dataclass(frozen=True)
class UnitMap:
    """Units in the order in which forward is expected to need them, and the modules that guard them."""

    units: tuple[Unit, ...]
    guards: tuple[Guard, ...]
    tail: int | None
    """The unit awaited after the last block too, since its weights may be read without calling their module."""
    head: int | None
    """The guard of the model's output embeddings: fused losses read its weight after the last block."""


def find_units(model: nn.Module) -> UnitMap:
    """Divide `model`'s parameters into embeddings (all before the first block), one unit per block, and the tail.

    Blocks are the modules named in `_no_split_modules`; without these the children of every ModuleList of two or more
    modules of one class, else those of every Sequential. A parameter shared between units belongs to the first.
    """
    blocks = {id(m): name for name, m in find_blocks(model)}
    names: list[str] = []
    members: list[list[Tensor]] = []
    head_params: list[Tensor] = []
    tail_params: list[Tensor] = []
    owned: set[int] = set()
    for name, module in _walk(model, blocks):
        whole = id(module) in blocks
        fresh: list[Tensor] = [p for p in module.parameters(recurse=whole) if id(p) not in owned]
        owned.update(map(id, fresh))
        if whole:
            names.append(name)
            members.append(fresh)
        elif not names:
            head_params.extend(fresh)
        else:
            tail_params.extend(fresh)
    units = [Unit("embeddings", tuple(head_params), False)]
    units += [Unit(n, tuple(ps), True) for n, ps in zip(names, members)]
    tail = None
    if tail_params:
        tail = len(units)
        units.append(Unit("tail", tuple(tail_params), False))
    guards = tuple(_guards(model, blocks, units))
    head = _output_embeddings(model)
    return UnitMap(tuple(units), guards, tail, next((n for n, g in enumerate(guards) if g.module is head), None))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """transformers' name for the head."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # a model without one
        return None


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of `model`, by name, in registration order; some may lie inside others."""
    classes = {c for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    named = [(n, m) for n, m in model.named_modules() if type(m).__name__ in classes]
    for kind in (nn.ModuleList, nn.Sequential):
        if not named:
            named = [(f"{n}.{k}".lstrip("."), c) for n, m in model.named_modules() for k, c in _children(m, kind)]
    return named


def _children(module: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, kind):
        return
    counts = Counter(type(c) for c in module.children())
    repeated = [k for k, n in counts.items() if n >= 2]
    yield from ((name, c) for name, c in module.named_children() if type(c) in repeated)


def _walk(model: nn.Module, blocks: dict[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules in registration order, each once, without going inside blocks."""
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        if id(module) not in blocks:
            for child_name, child in module.named_children():
                yield from visit(f"{name}.{child_name}".lstrip("."), child)

    return visit("", model)


def _called(block: nn.Module) -> Iterator[nn.Module]:
    """What is called where a block runs: the block, or, since a mere list cannot be called, what it holds."""
    if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
        for child in block.children():
            yield from _called(child)
    else:
        yield block


def _guards(model: nn.Module, blocks: dict[int, str], units: list[Unit]) -> Iterator[Guard]:
    """Every block, and every module outside blocks that owns parameters directly; each once."""
    unit_of = {id(p): u for u, unit in enumerate(units) for p in unit.params}
    number = {unit.name: u for u, unit in enumerate(units) if unit.is_block}
    for name, module in _walk(model, blocks):
        whole = id(module) in blocks
        for part in _called(module) if whole else (module,):
            needs = frozenset(unit_of[id(p)] for p in part.parameters(recurse=whole))
            if needs:
                yield Guard(part, needs, number[name] if whole else None)
