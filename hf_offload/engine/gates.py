"""The hooks on the model: before a unit runs, its weights must have arrived.

Hooks hold the engine weakly, so the model can outlive it; their copies and pickles are inert, so the model can be
copied and pickled.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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
    """Calls `method(*values)` of a gatekeeper that may be gone by then.

    Copying or pickling the model copies its hooks: then, too, somebody reads the weights. Only parameters that belong
    to the root module itself are copied before its hooks are; `synchronize()` covers those.
    """

    def __init__(self, keeper: weakref.ref[Any], method: str, *values: int) -> None:
        self._keeper, self._method, self._values = keeper, method, values

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        keeper = self._keeper()
        if keeper is not None:
            getattr(keeper, self._method)(*self._values)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return self.__reduce__()[0]()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        keeper = self._keeper()
        if keeper is not None:
            keeper.before_state_read()
        return _Inert, ()


class Gates:
    """The hooks of one attached model, and what the last forward showed of them.

    Attributes:
        unit_of: the unit of each parameter of the model, by the parameter's id.
        fired: guards that ran since the last step, where gradients were recorded: evaluation may run others.
        order: units in the order in which the first recorded forward needed them.
        last_block: the block whose turn came last; recomputing blocks in backward does not change it.
        at_root: units with a weight that is read without a guard of it running; they are awaited at the first hook of
            all.
    """

    def __init__(self, model: nn.Module, units: UnitMap, keeper: Gatekeeper) -> None:
        self.units = units
        self.unit_of = {id(p): u for u, unit in enumerate(units.units) for p in unit.params}
        self._guards_of = _guards_of(units)
        self._needs = [sorted(guard.units) for guard in units.guards]
        self.fired: set[int] = set()
        self.order: list[int] = []
        self.at_root: set[int] = set()
        self._unguarded: set[int] = set()
        self._blocks_run: set[int] = set()
        self.last_block = max((g.block for g in units.guards if g.block is not None), default=None)
        self._recording = True
        self._handles = _install(model, units, weakref.ref(keeper))

    def needs_of(self, number: int) -> list[int]:
        """The units guard `number` waits for, noted as fired and, in the first forward, as next in order."""
        needs = self._needs[number]
        if torch.is_grad_enabled():
            self.fired.add(number)
        if self._recording:
            guard: Guard = self.units.guards[number]
            if guard.block is not None and guard.block not in self._blocks_run:
                self._blocks_run.add(guard.block)
                self.last_block = guard.block
            self.order.extend(u for u in needs if u not in self.order)
        return needs

    def end_of_blocks(self) -> None:
        """The last block has run, and the tail is awaited: that guards the head, and nothing else for certain, since
        other weights of the tail may be read before the blocks."""
        if self.units.head is not None and torch.is_grad_enabled():
            self.fired.add(self.units.head)

    def end_of_step(self, with_gradients: Iterable[Tensor]) -> set[int]:
        """At `step()`: the unit of a parameter that got a gradient though no guard of it ran is awaited at the root
        from now on.

        Where no guard at all ran (attached after the forward, gradients made by hand), nothing was learnt: then all
        are, this once.

        Returns:
            The units that this was found out of just now.
        """
        if self.order:
            self._recording = False
        known = set(self._unguarded)
        if self.fired:
            if len(self.fired) < len(self.units.guards):
                self._note_unguarded(with_gradients)
            self.at_root = set(self._unguarded)
        else:
            self.at_root = set(range(len(self.units.units)))
        self.fired.clear()
        return self._unguarded - known

    def _note_unguarded(self, params: Iterable[Tensor]) -> None:
        for p in params:
            if self.fired.isdisjoint(self._guards_of.get(id(p), self.fired)):
                self._unguarded.add(self.unit_of[id(p)])

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


def _guards_of(units: UnitMap) -> dict[int, set[int]]:
    """The guards of each parameter, by the parameter's id."""
    found: dict[int, set[int]] = {}
    for number, guard in enumerate(units.guards):
        for p in guard.module.parameters(recurse=guard.block is not None):
            found.setdefault(id(p), set()).add(number)
    return found


def _install(model: nn.Module, units: UnitMap, keeper: weakref.ref[Any]) -> list[Any]:
    handles: list[Any] = [model.register_forward_pre_hook(_Hook(keeper, "before_root"), prepend=True)]
    for number, guard in enumerate(units.guards):
        handles.append(guard.module.register_forward_pre_hook(_Hook(keeper, "before_guard", number), prepend=True))
        if guard.block is not None:
            handles.append(guard.module.register_forward_hook(_Hook(keeper, "after_block", guard.block)))
    for module in model.modules():  # a part of the model may be saved or loaded by itself
        if module is model or next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_state_dict_pre_hook(_Hook(keeper, "before_state_read")))
            handles.append(module.register_load_state_dict_pre_hook(_Hook(keeper, "before_state_load")))
            handles.append(module.register_load_state_dict_post_hook(_Hook(keeper, "after_state_load")))
    return handles
