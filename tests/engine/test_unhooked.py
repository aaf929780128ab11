"""Weights that no hook announces, or not when one would think: every situation in every mode gives the right bits.

Copies up are late and weights in flight are NaN (`poison`), so whoever reads a weight too early shows. A situation is a
model, how it is called, what a step does and what comes between steps; the reference is in order (for `delayed`, which
is not exact: itself, undisturbed).
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadAdam
from hf_offload.engine.gates import Gates
from hf_offload.errors import StateError
from support.engine import (
    LONG,
    VOCAB,
    WIDTH,
    Block,
    Outcome,
    TinyLM,
    batches,
    copies,
    late,
    optimizer_of,
    settings,
    state,
    weights,
)

MODES = ("overlapped", "streamed", "speculative", "delayed")
STEPS = 5
BUCKET_BYTES = 400
CLIPS = (0.5, 100.0)  # bites in every other step, so that speculation hits and misses

Data = Iterator[Tensor]
Call = Callable[[Tensor], Tensor]


def as_it_is(model: nn.Module) -> Call:
    return model


def one_backward(call: Call, model: nn.Module, data: Data, step: int) -> list[float]:
    loss = call(next(data))
    loss.backward()
    return [loss.item()]


def nothing(model: nn.Module, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    return []


def first_layer(model: Any) -> nn.Module:
    return model.layers[0]


@dataclass(frozen=True)
class Situation:
    """One way to meet the weights.

    Attributes:
        make: the model.
        call: what is called for it: the model, or what became of it by compilation. Made before the optimizer.
        step: forwards and backwards of one step; returns what it saw.
        between: what happens after each step; returns what it saw.
        first: the module that must be reached while the weights that run after it are still on their way.
        at_root: units that cannot but be awaited before anything runs.
    """

    make: Callable[[], nn.Module] = TinyLM
    call: Callable[[nn.Module], Call] = as_it_is
    step: Callable[[Call, nn.Module, Data, int], list[float]] = one_backward
    between: Callable[[nn.Module, OffloadAdam, Data, int], list[float]] = nothing
    first: Callable[[Any], nn.Module] = first_layer
    at_root: frozenset[int] = frozenset()


# ---- weights read without calling their module


def fused_head() -> nn.Module:
    return TinyLM(fused_head=True)


class BareInBlock(TinyLM):
    """Blocks read the weights of their parts themselves, as fused MLPs do."""

    class Fused(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = nn.functional.linear(self.norm(x), self.up.weight, self.up.bias)
            return x + torch.tanh(hidden) @ self.down.weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Fused() for _ in range(3)])


class BareTail(TinyLM):
    """A weight of the tail is read before anything runs, and its module is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Linear(1, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1 + self.gain.weight.square().mean()
        return super().forward(ids) * scale


class OwnParameters(TinyLM):
    """Parameters of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids) * self.scale) + self.shift
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Parametrized(TinyLM):
    """The weights of the parts are computed wherever they are read."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrizations.weight_norm(layer.up)
        parametrizations.weight_norm(self.head)


class PartsOnly(TinyLM):
    """The root is never called."""

    def forward(self, ids: Tensor) -> Tensor:
        raise AssertionError("never called")


def loss_of_parts(model: Any) -> Call:
    def call(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.head(model.hidden(ids)).flatten(0, 1), ids[:, 1:].flatten())

    return call


def functional(model: nn.Module) -> Call:
    return lambda ids: functional_call(model, dict(model.named_parameters()), (ids,))


# ---- tied weights


def tied(fused: bool = False) -> nn.Module:
    model = TinyLM(fused_head=fused)
    model.head.weight = model.embed.weight
    return model


def tied_blocks() -> nn.Module:
    model = TinyLM()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[2].down = model.layers[1].down
    return model


# ---- out of order, or not at all


class Ordered(TinyLM):
    """Blocks run in the order that `order` gives."""

    order: tuple[int, ...] = (0, 1, 2)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for i in self.order:
            x = self.layers[i](x)
        return x if self.norm is None else self.norm(x)


def backwards() -> nn.Module:
    model = Ordered(fused_head=True)
    model.order = (2, 1, 0)
    return model


def orders(*given: tuple[int, ...]) -> Callable[[Call, nn.Module, Data, int], list[float]]:
    """A step of which the blocks run in another order each time."""

    def step(call: Call, model: Any, data: Data, step: int) -> list[float]:
        model.order = given[step % len(given)]
        return one_backward(call, model, data, step)

    return step


class Idle(TinyLM):
    """Has a module that is never called and never read, and one that is only called in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        self.calls += 1
        return x + self.sometimes(x) if self.calls % 2 else x


class TwoStacks(nn.Module):
    """The decoder is registered first and runs last; then the head's weight is read without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.decoder = nn.ModuleList([Block() for _ in range(2)])
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.encoder:
            x = layer(x)
        y = self.embed(ids[:, :-1]) + x.mean(1, keepdim=True)
        for layer in self.decoder:
            y = layer(y)
        return nn.functional.cross_entropy((y @ self.head.weight.t()).flatten(0, 1), ids[:, 1:].flatten())


# ---- several forwards, generation


def three_backwards(call: Call, model: nn.Module, data: Data, step: int) -> list[float]:
    return [loss for _ in range(3) for loss in one_backward(call, model, data, step)]


def two_forwards_one_backward(call: Call, model: nn.Module, data: Data, step: int) -> list[float]:
    loss = call(next(data)) + 0.5 * call(next(data))
    loss.backward()
    return [loss.item()]


def evaluation_in_the_middle(call: Call, model: nn.Module, data: Data, step: int) -> list[float]:
    """Forwards without gradients: before the first backward, and between two."""
    with torch.no_grad():
        before = call(next(data)).item()
    first = one_backward(call, model, data, step)
    with torch.no_grad():
        between = call(next(data)).item()
    return [before, *first, between, *one_backward(call, model, data, step)]


def generate(model: Any, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    """Greedy, token by token; the head is read without calling it."""
    ids = next(data)
    with torch.no_grad():
        for _ in range(3):
            logits = model.hidden(torch.cat([ids, ids[:, :1]], 1)) @ model.head.weight.t()
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return [logits.sum().item(), *ids.flatten().tolist()]


def generation_within(call: Call, model: nn.Module, data: Data, step: int) -> list[float]:
    """As in online reinforcement learning: generation, then training on something else."""
    return [*generate(model, None, data, step), *three_backwards(call, model, data, step)]  # type: ignore[arg-type]


# ---- compilation and checkpointing


def whole(backend: str) -> Callable[[nn.Module], Call]:
    return lambda model: torch.compile(model, backend=backend)


def whole_in_place(backend: str) -> Callable[[nn.Module], Call]:
    def compiled(model: nn.Module) -> Call:
        model.compile(backend=backend)
        return model

    return compiled


def each_block(backend: str) -> Callable[[nn.Module], Call]:
    def compiled(model: Any) -> Call:
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend=backend)
        return model

    return compiled


def each_block_in_place(backend: str) -> Callable[[nn.Module], Call]:
    def compiled(model: Any) -> Call:
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    return compiled


class Checkpointed(TinyLM):
    def __init__(self, reentrant: bool, together: bool = False) -> None:
        super().__init__()
        self.reentrant, self.together = reentrant, together

    def hidden(self, ids: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        x = self.embed(ids[:, :-1])
        for part in (run,) if self.together else self.layers:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        assert self.norm is not None
        return self.norm(x)


# ---- others who read and write weights between steps


def reads(model: nn.Module, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    optimizer.synchronize()
    return [p.detach().double().sum().item() for p in model.parameters()]


def edits(model: Any, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    optimizer.synchronize()
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.5)
        model.head.weight.data.add_(0.125)  # moves no version counter
    return []


def syncs(model: Any, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    """As weight sync to an inference engine: by `state_dict`, of the whole or part by part; nobody asks to wait."""
    twin = type(model)()
    if step % 2:
        twin.load_state_dict(model.state_dict())
    else:
        for name, part in model.named_children():
            twin.get_submodule(name).load_state_dict(part.state_dict())
    with torch.no_grad():
        return [twin(next(data)).item(), copy.deepcopy(model)(next(data)).item()]


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank correction, which can be merged into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.merged = False

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.base.weight.add_(sign * (self.b.weight @ self.a.weight))
        self.merged = sign > 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x) + 0.1
        return x + torch.tanh(out if self.merged else out + self.b(self.a(x)))


class Adapted(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LowRank() for _ in range(3)])


def merges(model: Any, optimizer: OffloadAdam, data: Data, step: int) -> list[float]:
    """Adapters are merged, the model is used, and they are taken out again."""
    optimizer.synchronize()
    for layer in model.layers:
        layer.merge(1)
    with torch.no_grad():
        seen = model(next(data)).item()
    for layer in model.layers:
        layer.merge(-1)
    return [seen]


BARE_HEAD = {"make": fused_head}
SITUATIONS: dict[str, Situation] = {
    "plain": Situation(),
    "fused head": Situation(**BARE_HEAD),
    "fused blocks": Situation(BareInBlock),
    "bare weight of the tail": Situation(BareTail, at_root=frozenset({4})),
    "parameters of the root": Situation(OwnParameters),
    "parametrized": Situation(Parametrized),
    "parts called, never the root": Situation(PartsOnly, loss_of_parts),
    "functional call": Situation(call=functional),
    "tied": Situation(tied),
    "tied, fused head": Situation(lambda: tied(fused=True)),
    "tied blocks": Situation(tied_blocks),
    "backwards, fused head": Situation(backwards, first=lambda m: m.layers[2]),
    "another order each step": Situation(Ordered, step=orders((0, 1, 2), (2, 0, 1), (1, 2, 0))),
    "another order, fused head": Situation(
        lambda: Ordered(fused_head=True), step=orders((0, 1, 2), (2, 0, 1), (1, 2, 0))
    ),
    "blocks left out": Situation(Ordered, step=orders((0, 1, 2), (0, 2), (1,), (0, 1), (2, 0))),
    "blocks twice": Situation(Ordered, step=orders((0, 1, 2, 0), (2, 2), (1, 0, 1, 2))),
    "idle modules": Situation(Idle),
    "two stacks, fused head": Situation(TwoStacks, first=lambda m: m.encoder[0]),
    "several backwards": Situation(step=three_backwards),
    "several backwards, fused head": Situation(**BARE_HEAD, step=three_backwards),
    "two forwards, one backward": Situation(step=two_forwards_one_backward),
    "evaluation in the middle": Situation(step=evaluation_in_the_middle),
    "generation between steps": Situation(**BARE_HEAD, between=generate),
    "generation within a step": Situation(**BARE_HEAD, step=generation_within),
    "checkpointed, reentrant": Situation(lambda: Checkpointed(True)),
    "checkpointed, not reentrant": Situation(lambda: Checkpointed(False)),
    "checkpointed together, reentrant": Situation(lambda: Checkpointed(True, True)),
    "checkpointed together, not reentrant": Situation(lambda: Checkpointed(False, True)),
    "somebody reads": Situation(between=reads),
    "somebody edits": Situation(between=edits),
    "somebody syncs": Situation(between=syncs),
    "adapters merged": Situation(Adapted, between=merges),
}
COMPILED = {
    f"{name}, {backend}": Situation(call=compiled(backend), step=three_backwards)
    for name, compiled in {
        "compiled": whole,
        "compiled in place": whole_in_place,
        "blocks compiled": each_block,
        "blocks compiled in place": each_block_in_place,
    }.items()
    for backend in ("eager", "aot_eager")
}
ALL = {**SITUATIONS, **COMPILED}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose by more, and lose most where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(name: str, mode: str, disturbed: bool) -> Outcome:
    """Train in a situation; `disturbed`: copies up are late, and weights in flight are NaN."""
    chosen = ALL[name]
    data: Data = batches()
    with contextlib.ExitStack() as stack:
        if name in COMPILED:
            stack.enter_context(fresh_compiler())
        stack.enter_context(copies(late("h2d", 2e-3) if disturbed else None))
        model = chosen.make()
        call = chosen.call(model)
        optimizer = optimizer_of(model, settings(mode, poison=disturbed, bucket_bytes=BUCKET_BYTES))
        seen: list[float] = []
        for step in range(STEPS):
            seen += chosen.step(call, model, data, step)
            optimizer.clip_grad_norm_(CLIPS[step % 2])
            optimizer.step()
            optimizer.zero_grad()
            seen += chosen.between(model, optimizer, data, step)
        optimizer.synchronize()
        outcome = Outcome(seen, weights(model), state(optimizer))
        if mode == "speculative":
            assert optimizer.stats().speculation_misses > 0
        optimizer.close()
        if mode == "speculative" and chosen.step is one_backward and chosen.between is nothing:
            assert optimizer.stats().speculation_hits > 0
    assert all(map(math.isfinite, outcome.losses)), "a weight was read while it was on its way"
    return outcome


@cache
def reference(name: str, mode: str) -> Outcome:
    return run(name, mode if mode == "delayed" else "in_order", disturbed=False)


def marks_of(name: str, mode: str) -> list[Any]:
    quick = {("compiled, aot_eager", "overlapped"), ("blocks compiled in place, eager", "speculative")}
    return [pytest.mark.slow] if name in COMPILED and (name, mode) not in quick else []


def cells(names: Any) -> list[Any]:
    """Every (situation, mode); compilation takes seconds, so only two of its cells are quick."""
    return [pytest.param(n, m, marks=marks_of(n, m), id=f"{n}-{m}") for n in names for m in MODES]


@pytest.mark.parametrize(("name", "mode"), cells(ALL))
def test_every_weight_is_read_when_it_is_new(name: str, mode: str) -> None:
    found, expected = run(name, mode, disturbed=True), reference(name, mode)
    assert found.losses == expected.losses
    assert found == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_was_read_too_early_is_told_and_awaited_from_then_on(mode: str) -> None:
    """A bare head is awaited after the block that ran last in the first forward. Here that one is left out later."""

    def run(mode: str, disturbed: bool, drop: int | None) -> Outcome:
        data, seen = batches(), []
        with copies(late("h2d", 4e-3) if disturbed else None):
            model = Ordered(fused_head=True)
            optimizer = optimizer_of(model, settings(mode, poison=disturbed, bucket_bytes=BUCKET_BYTES))
            for step in range(6):
                model.order = (0, 1) if step in (2, 4) else (0, 1, 2)
                seen += one_backward(model, model, data, step)
                if step == drop:
                    if disturbed:
                        with pytest.raises(StateError, match=r"weights of 'tail' were used .* before the model runs"):
                            optimizer.step()
                    assert seen.pop() > 0 or disturbed
                else:
                    optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            outcome = Outcome(seen, weights(model), state(optimizer))
            optimizer.close()
        return outcome

    found = run(mode, True, drop=2)
    assert found == run(mode if mode == "delayed" else "in_order", False, drop=2)
    assert all(map(math.isfinite, found.losses))


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_read_unannounced_after_a_wait_for_all_is_no_error(mode: str) -> None:
    data = batches()
    with copies(late("h2d", 1e-3)):
        model = Ordered(fused_head=True)
        optimizer = optimizer_of(model, settings(mode, bucket_bytes=BUCKET_BYTES))
        for step in range(4):
            model.order = (0, 1) if step == 2 else (0, 1, 2)
            optimizer.synchronize()
            one_backward(model, model, data, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()


# ---- overlapped where that is possible


class HoldLast:
    """Copies up stop in front of it from the `allowed`-th on while it is closed."""

    def __init__(self) -> None:
        self.closed = False
        self.allowed = 0
        self._passed = 0
        self._changed = threading.Condition()

    def __call__(self, direction: str, nbytes: int) -> float:
        if direction == "h2d":
            with self._changed:
                self._changed.wait_for(lambda: not self.closed or self._passed < self.allowed, LONG)
                self._passed += 1
        return 0.0

    def close(self) -> None:
        with self._changed:
            self.closed, self.allowed, self._passed = True, 0, 0

    def allow(self, copies: int) -> None:
        with self._changed:
            self.allowed = copies
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self.closed = False
            self._changed.notify_all()


class Arrival:
    """A hook that notes whether copies were still held back when its module ran, and lets them go."""

    def __init__(self, hold: HoldLast) -> None:
        self._hold = hold
        self.held: list[bool] = []

    @torch.compiler.disable
    def __call__(self, *args: Any) -> None:
        if torch.is_grad_enabled() or self._hold.closed:
            self.held.append(self._hold.closed)
        self._hold.release()


def gates_of(optimizer: OffloadAdam) -> Gates:
    gates = optimizer.engine.gates
    assert gates is not None
    return gates


def needed_first(optimizer: OffloadAdam, module: nn.Module) -> int:
    """How many buckets must have arrived for `module` and all that runs before it."""
    engine, gates = optimizer.engine, gates_of(optimizer)
    number = next(n for n, g in enumerate(gates.units.guards) if getattr(g.module, "_orig_mod", g.module) is module)
    own = gates.units.guards[number].units
    before = {u for u in gates.order if gates.rank()[u] <= max(gates.rank()[v] for v in own)}
    return 1 + max(engine._last_of_unit.get(u, -1) for u in before | own | gates.at_root)


READERS = (reads, edits, syncs, merges, generate)  # they wait for all, or need all
MUST_OVERLAP = [n for n, s in ALL.items() if s.between not in READERS and s.step is not generation_within]


@pytest.mark.parametrize(("name", "mode"), cells(n for n in MUST_OVERLAP if n != "evaluation in the middle"))
def test_the_first_block_runs_while_the_last_weights_are_on_their_way(name: str, mode: str) -> None:
    chosen, hold, data = ALL[name], HoldLast(), batches()
    with contextlib.ExitStack() as stack:
        if name in COMPILED:
            stack.enter_context(fresh_compiler())
        stack.enter_context(copies(hold))
        model = chosen.make()
        first, arrival = chosen.first(model), Arrival(hold)
        first.register_forward_pre_hook(arrival)
        call = chosen.call(model)
        more = {"delay_warmup_steps": 0} if mode == "delayed" else {}
        optimizer = optimizer_of(model, settings(mode, poison=True, bucket_bytes=BUCKET_BYTES, ring_slots=16, **more))
        for _ in range(3):
            arrival.held.clear()
            chosen.step(call, model, data, 0)
            optimizer.clip_grad_norm_(CLIPS[1])
            hold.close()
            optimizer.step()
            optimizer.zero_grad()
            needed, all_of_them = needed_first(optimizer, first), len(optimizer.engine._pipeline._step.delivered)
            hold.allow(needed)
        assert gates_of(optimizer).at_root == chosen.at_root
        assert all_of_them - needed >= 3, "there must be something to overlap with"
        arrival.held.clear()
        stuck = threading.Timer(LONG / 3, hold.release)
        stuck.start()
        chosen.step(call, model, data, 0)
        assert arrival.held[0], "the training thread waited for weights that nobody needed yet"
        stuck.cancel()
        optimizer.close()


# ---- what no hook can see, poison shows


class EarlyExit(TinyLM):
    """Reads the head's weight after the first block, and calls the head at the end: hooks see only the call."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids[:, :-1]))
        self.early = (x @ self.head.weight.t()).square().mean()
        for layer in self.layers[1:]:
            x = layer(x)
        assert self.norm is not None
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.early


@pytest.mark.parametrize("mode", ("overlapped", "streamed", "speculative"))  # synchronizing ends a delay
@pytest.mark.parametrize("asked", [False, True], ids=["not asked", "asked to wait"])
def test_poison_shows_a_weight_that_is_read_before_its_module_is_called(mode: str, asked: bool) -> None:
    hold, data, seen = HoldLast(), batches(), []
    with copies(hold):
        model = EarlyExit()
        optimizer = optimizer_of(model, settings(mode, poison=True, bucket_bytes=BUCKET_BYTES, ring_slots=16))
    for step in range(3):
        optimizer.synchronize()
        one_backward(model, model, data, step)
        if step == 2:
            hold.close()
        optimizer.step()
        optimizer.zero_grad()
    if asked:
        hold.release()
        optimizer.synchronize()
    else:
        hold.allow(needed_first(optimizer, model.layers[0]))

    def look(*args: Any) -> None:
        seen.append(model.early.item())
        hold.release()

    model.layers[1].register_forward_pre_hook(look, prepend=True)  # before ours, which waits
    model(next(data))
    assert math.isnan(seen[0]) != asked
    optimizer.close()
