"""The hooks on the model: before a unit runs, its weights must have arrived.

Hooks hold the engine weakly, so the model can outlive it; their copies and pickles are inert, so the model can be
copied and pickled.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from hf_offload.engine.units import Guard, UnitMap


class Gatekeeper(Protocol):
    """What the hooks call: the engine."""

    def before_root(self) -> None: ...
    def before_guard(self, guard: int) -> None: ...
    def after_block(self, unit: int) -> None: ...
    def before_state_read(self) -> None: ...
    def before_state_load(self) -> None: ...
    def after_state_load(self) -> None: ...


class _Inert:
    """What is left of a hook in a copied or unpickled model."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Hook:
    """Calls `method(*values)` of a gatekeeper that may be gone by then."""

    def __init__(self, keeper: weakref.ref[Any], method: str, *values: int) -> None:
        self._keeper, self._method, self._values = keeper, method, values

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        keeper = self._keeper()
        if keeper is not None:
            getattr(keeper, self._method)(*self._values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class Gates:
    """The hooks of one attached model, and what the last forward showed of them.

    Attributes:
        unit_of: the unit of each parameter of the model, by the parameter's id.
        fired: units whose guards ran since the last step.
        order: units in the order in which the first recorded forward needed them.
        at_root: units whose weights are read without their guard running; they are awaited at the first hook of all.
    """

    def __init__(self, model: nn.Module, units: UnitMap, keeper: Gatekeeper) -> None:
        self.units = units
        self.unit_of = {id(p): u for u, unit in enumerate(units.units) for p in unit.params}
        self.fired: set[int] = set()
        self.order: list[int] = []
        self.at_root: set[int] = set()
        self._unguarded: set[int] = set()
        self.last_block = max((g.block for g in units.guards if g.block is not None), default=None)
        self._recording = True
        self._handles = _install(model, units, weakref.ref(keeper))

    def needs_of(self, number: int) -> list[int]:
        """The units guard `number` waits for, noted as fired and, in the first forward, as next in order."""
        guard: Guard = self.units.guards[number]
        needs = sorted(guard.units)
        self.fired.update(needs)
        if self._recording:
            self.order.extend(u for u in needs if u not in self.order)
            if guard.block is not None:
                self.last_block = guard.block
        return needs

    def end_of_step(self, with_gradients: set[int]) -> None:
        """At `step()`: units that got gradients though no guard of theirs ran are from now on awaited at the root.

        Where no guard at all ran (attached after the forward, gradients made by hand), nothing was learnt: then all
        are, this once.
        """
        if self.order:
            self._recording = False
        if self.fired:
            self._unguarded |= with_gradients - self.fired
            self.at_root = set(self._unguarded)
        else:
            self.at_root = set(range(len(self.units.units)))
        self.fired.clear()

    def rank(self) -> list[int]:
        """rank[unit]: its place in the order in which forward needs units; those at the root first."""
        first = sorted(self.at_root)
        seen = first + [u for u in self.order if u not in self.at_root]
        seen += [u for u in range(len(self.units.units)) if u not in seen]
        ranks = [0] * len(seen)
        for place, unit in enumerate(seen):
            ranks[unit] = place
        return ranks

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _install(model: nn.Module, units: UnitMap, keeper: weakref.ref[Any]) -> list[Any]:
    handles: list[Any] = [model.register_forward_pre_hook(_Hook(keeper, "before_root"), prepend=True)]
    readers: dict[int, nn.Module] = {id(model): model}
    for number, guard in enumerate(units.guards):
        handles.append(guard.module.register_forward_pre_hook(_Hook(keeper, "before_guard", number), prepend=True))
        readers[id(guard.module)] = guard.module
        if guard.block is not None:
            handles.append(guard.module.register_forward_hook(_Hook(keeper, "after_block", guard.block)))
    for module in readers.values():
        handles.append(module.register_state_dict_pre_hook(_Hook(keeper, "before_state_read")))
    handles.append(model.register_load_state_dict_pre_hook(_Hook(keeper, "before_state_load")))
    handles.append(model.register_load_state_dict_post_hook(_Hook(keeper, "after_state_load")))
    return handles
