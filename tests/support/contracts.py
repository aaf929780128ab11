"""What the contract suite shares: the matrix of cases, the oracle, and duels in which both get equal gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, OffloadConfig
from support.engine import EXACT as EXACT_BUT_IN_ORDER
from support.engine import MODES, RESIDENT, Delay, bits, copies, settings

# ---- the matrix

SCHEDULES = tuple(MODES)
EXACT = ("in_order", *EXACT_BUT_IN_ORDER)
"""Those that promise the bits of in order; `delayed` promises them for what it computes, one step late."""
WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "mixed": torch.bfloat16}
"""Mixed: bf16 weights with fp32 adapters between them."""
ACCUMULATIONS = (1, 3)


@dataclass(frozen=True)
class Tolerance:
    """How far state may be from the oracle's, since torch's vector code fuses multiplications and additions.

    Attributes:
        relative: of each element.
        absolute: in parts of the largest element of the tensor (of 1 for masters).
    """

    relative: float
    absolute: float


STATE_DTYPES = ("float32", "bfloat16", "int8")
TOLERANCE = Tolerance(relative=2e-6, absolute=1e-6)
"""fp32 state against torch's AdamW: ten steps of half an ulp of 1.2e-7 each. Other state must be the twin's."""
QUICK = {"float32": tuple(MODES), "bfloat16": ("overlapped",), "int8": ("in_order", "speculative")}
"""The schedules of each state dtype that run in the quick suite; the others are slow."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix: names of SCHEDULES, WIRES and STATE_DTYPES, and micro-batches a step."""

    schedule: str
    wire: str = "bfloat16"
    accumulation: int = 1
    state_dtype: str = "float32"

    @property
    def stale(self) -> bool:
        """Whether forward reads weights that are a step old."""
        return self.schedule.endswith("delayed")

    def __str__(self) -> str:
        return f"{self.schedule}-{self.wire}-{self.state_dtype}-x{self.accumulation}"

    def config(self, **more: Any) -> OffloadConfig:
        """Small buckets and few slots, so that everything is cut, shared and reused."""
        kind = {} if self.state_dtype == "float32" else {"state_dtype": self.state_dtype}
        return settings(self.schedule, **{"threads": 1, "bucket_bytes": 200, **kind, **more})


def _every(cases: Iterable[Case]) -> pytest.MarkDecorator:
    marked = [pytest.param(c, id=str(c), marks=() if c.schedule in QUICK[c.state_dtype] else pytest.mark.slow)
              for c in cases]  # fmt: skip
    return pytest.mark.parametrize("case", marked)


def _cells(schedules: Iterable[str], wires: Iterable[str], accumulations: Iterable[int]) -> list[Case]:
    """Every wire and accumulation with float32 state; the last of each with the others, which share its code."""
    wires, accumulations = list(wires), list(accumulations)
    return [
        Case(s, w, a, d) for s in schedules for w in wires for a in accumulations for d in STATE_DTYPES
        if d == "float32" or (w == "bfloat16" and a == accumulations[-1])
    ]  # fmt: skip


every_case = _every(_cells(SCHEDULES, WIRES, ACCUMULATIONS))
every_schedule = _every(_cells(SCHEDULES, ["bfloat16"], [1]))
every_schedule_accumulating = _every(_cells(SCHEDULES, ["bfloat16"], [3]))
every_schedule_and_wire = _every(_cells(SCHEDULES, WIRES, [1]))
every_exact = _every(_cells(EXACT, ["bfloat16"], [1]))
every_resident = _every(Case(schedule, "mixed") for schedule in RESIDENT)
"""A share of the state stays on the device, where it is float32."""
_RESUMED = [("resident", "resident speculative"), ("resident", "overlapped"), ("streamed", "resident")]
with_a_share_and_without = pytest.mark.parametrize(
    ("first", "then"), [tuple(Case(s, "mixed") for s in pair) for pair in _RESUMED], ids=str
)
with_grads_in_place = _every(_cells(["in_order", "overlapped", "delayed"], ["bfloat16"], [1]))
"""Schedules that leave gradients in `.grad` until `step()`."""


# ---- a model whose gradients are given


class Part(nn.Module):
    """Parameters, each multiplied by what its gradient is to be: the sum's gradient is that, whatever the weights."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, p in params.items():
            self.register_parameter(name, p)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        wanted = ((p, given[name]) for name, p in self.named_parameters() if name in given)
        return sum(((p.float() * g.float()).sum() for p, g in wanted), torch.zeros(()))


class Steered(nn.Module):
    """Embedding, three layers, head: `model(grads).backward()` adds grads[name] to the gradient of each parameter.

    A parameter without an entry takes no part in the graph. The loss, Σ weight · gradient, shows which weights a
    forward has read.
    """

    def __init__(self, wire: str = "bfloat16") -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = WIRES[wire]

        def param(*shape: int, to: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape).to(to))

        adapter = (lambda: {"adapter": param(5, to=torch.float32)}) if wire == "mixed" else dict
        self.embed = Part({"weight": param(13, 6), "empty": param(0, 3), "scale": param()})
        self.layers = nn.ModuleList(
            [Part({"weight": param(6, 7), "bias": param(7), **adapter()}) for _ in range(3)]
        )  # fmt: skip
        self.head = Part({"weight": param(13, 6)})

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        parts = {"embed": self.embed, **{f"layers.{i}": p for i, p in enumerate(self.layers)}, "head": self.head}
        losses = [
            part({name.rpartition(".")[2]: g for name, g in given.items() if name.rpartition(".")[0] == place})
            for place, part in parts.items()
        ]
        return torch.stack(losses).sum()


def gradients(model: nn.Module, seed: int, without: Collection[str] = (), scale: float = 1.0) -> dict[str, Tensor]:
    """The gradients of micro-batch `seed`, in each parameter's dtype; of very different sizes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    found = {}
    for name, p in model.named_parameters():
        size = 10 ** torch.randn((), generator=generator).item()
        g = (torch.randn(p.shape, generator=generator) * size * scale).to(p.dtype)
        if name not in without and p.requires_grad:
            found[name] = g
    return found


Groups = Callable[[nn.Module], list[dict[str, Any]]]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own, which share buckets."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


# ---- the oracle


class Oracle:
    """AdamW with fp32 masters, in plain torch: what OffloadAdam promises.

    `.grad` of the weights is widened, multiplied by the loss scale's inverse and the clip factor, and stepped by
    `torch.optim.AdamW` on the masters; the weights are the masters, rounded.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
        self.groups = [{**g, "params": list(dict.fromkeys(g["params"]))} for g in groups]
        self.masters = {p: p.detach().clone().float() for g in self.groups for p in g["params"]}
        self.adam = torch.optim.AdamW(
            [{**g, "params": [self.masters[p] for p in g["params"]]} for g in self.groups], foreach=False, **defaults
        )
        self._bound, self._inverse = math.inf, 1.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def norm(self) -> float:
        squares = (p.grad.double().square().sum().item() for p in self.masters if p.grad is not None)
        return math.sqrt(sum(squares)) * self._inverse

    def clip_grad_norm_(self, max_norm: float) -> float:
        self._bound = min(self._bound, max_norm)
        return self.norm()

    def unscale_(self, inverse: float) -> bool:
        self._inverse = inverse
        return not math.isfinite(self.norm())

    def step(self) -> None:
        clip = 1.0 if self._bound == math.inf else min(1.0, self._bound / (self.norm() + 1e-6))
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float() * (self._inverse * clip)
        self.adam.step()
        self._round()

    def entry(self, p: Tensor) -> dict[str, Any]:
        """The state of one of the twin's parameters, as `optimizer.state` has it; empty before its first step."""
        return self.adam.state.get(self.masters[p], {})

    @torch.no_grad()
    def _round(self) -> None:
        """The weights are the masters, rounded, and nothing is pending any more."""
        self._bound, self._inverse = math.inf, 1.0
        for p, master in self.masters.items():
            if p.grad is not None:
                p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._bound, self._inverse = math.inf, 1.0
        for p in self.masters:
            p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p.grad)

    def reseed(self, p: Tensor) -> None:
        """`p` was changed from outside: where it is no longer its rounded master, it becomes the master."""
        master = self.masters[p]
        master.copy_(torch.where(master.to(p.dtype) == p.detach(), master, p.detach().float()))


def oracle_of(state_dtype: str, groups: Sequence[dict[str, Any]], **defaults: Any) -> Oracle:
    if state_dtype == "float32":
        return Oracle(groups, **defaults)
    from support.compact_oracle import CompactOracle  # which is an Oracle

    return CompactOracle(state_dtype, groups, **defaults)


# ---- duels


class Duel:
    """An OffloadAdam and the oracle over two models with equal weights, which get equal gradients.

    Args:
        delay: of each copy of the OffloadAdam's.
        make, groups: the model, and its param groups.
        more: settings of the OffloadConfig.
    """

    def __init__(
        self, case: Case, delay: Delay | None = None, make: Callable[[str], nn.Module] = Steered,
        groups: Groups = two_groups, **more: Any,
    ) -> None:  # fmt: skip
        self.case = case
        self.model, self.twin = make(case.wire), make(case.wire)
        with copies(delay):
            self.optimizer = OffloadAdam(groups(self.model), lr=1e-2, config=case.config(**more), model=self.model)
        self.oracle = oracle_of(case.state_dtype, groups(self.twin), lr=1e-2)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def both(self) -> tuple[OffloadAdam, Oracle]:
        return self.optimizer, self.oracle

    def param(self, name: str) -> tuple[Tensor, Tensor]:
        """The parameter, of each."""
        return self.model.get_parameter(name), self.twin.get_parameter(name)

    def backward(self, seed: int, without: Collection[str] = (), scale: float = 1.0) -> None:
        given = gradients(self.model, seed, without, scale)
        loss = self.model(given)
        self.losses.append(loss.item())
        loss.backward()
        self.twin(given).backward()

    def freeze(self, names: Collection[str], frozen: bool = True) -> None:
        for name in names:
            for p in self.param(name):
                p.requires_grad_(not frozen)

    def write(self, given: dict[str, Tensor]) -> None:
        """Somebody writes to weights, in a way that moves no version counter; the oracle's masters follow."""
        for name, value in given.items():
            for p in self.param(name):
                p.data.copy_(value)
            self.oracle.reseed(self.param(name)[1])

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has: model and optimizer, copied."""
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved: dict[str, Any]) -> None:
        """As in a resumed run: the oracle is left behind."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def micro_batches(self, step: int, without: Collection[str] = (), scale: float = 1.0) -> None:
        """As many as the case accumulates."""
        for k in range(self.case.accumulation):
            self.backward(100 * step + k, without, scale)

    def clip(self, bound: float) -> None:
        norm = self.optimizer.clip_grad_norm_(bound).item()
        assert norm == pytest.approx(self.oracle.clip_grad_norm_(bound), rel=1e-6, nan_ok=True)
        assert self.optimizer.last_grad_norm is not None
        self.norms.append(self.optimizer.last_grad_norm)

    def step(self, zero: bool = True) -> None:
        for each in (self.oracle, self.optimizer):  # ours last: the next forward follows at once
            each.step()
            if zero:
                each.zero_grad()

    def train(self, steps: Iterable[int], clip: float | None = 0.5) -> None:
        for step in steps:
            self.micro_batches(step)
            if clip is not None:
                self.clip(clip)
            self.step()

    def agree(self) -> None:
        """Weights, masters, moments and step counts are the oracle's, as nearly as the state dtype allows."""
        self.optimizer.synchronize()
        near = TOLERANCE if self.case.state_dtype == "float32" else Tolerance(0.0, 0.0)
        for name, p in self.model.named_parameters():
            q = self.twin.get_parameter(name)
            mine = self.optimizer.state.get(p, {})
            theirs = self.oracle.entry(q)
            assert float(mine.get("step", 0.0)) == float(theirs.get("step", 0.0)), f"steps of {name}"
            if not mine:
                assert torch.equal(p, q), name
                continue
            _close(mine["master"], self.oracle.masters[q], near.relative, near.absolute, f"master of {name}")
            assert _same(p, mine["master"].to(p.dtype)), f"{name} is not its rounded master"
            for kind in mine.keys() - {"step", "master"}:
                expected = theirs.get(kind, torch.zeros_like(mine[kind]))
                largest = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
                _close(mine[kind], expected, near.relative, near.absolute * largest, f"{kind} of {name}")

    def bits(self) -> dict[str, object]:
        """All there is to compare with another schedule."""
        found: dict[str, object] = {"norms": repr(self.norms)}  # in text NaN is NaN
        if not self.case.stale:
            found["losses"] = repr(self.losses)
        return found | self.state_bits()

    def state_bits(self) -> dict[str, object]:
        """Every byte of weights and of host state."""
        self.optimizer.synchronize()
        found: dict[str, object] = {}
        for name, p in self.model.named_parameters():
            found[name] = bits(p).tolist()
            for kind, t in self.optimizer.state.get(p, {}).items():
                found[f"{kind} of {name}"] = bits(t).tolist()
        return found

    def __enter__(self) -> Duel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.optimizer.close()


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the payload of NaN."""
    a, b = (t.detach().nan_to_num(nan=0.123) for t in (a, b))
    return torch.equal(bits(a), bits(b))


def _close(a: Tensor, b: Tensor, relative: float, absolute: float, what: str) -> None:
    torch.testing.assert_close(
        a, b.detach(), rtol=relative, atol=absolute, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


Story = Callable[[Duel], None]
"""What happens in a duel. A function of a module, so that its reference is computed once."""


def prove(
    story: Story, case: Case, delay: Delay | None = None, make: Callable[[str], nn.Module] = Steered,
    groups: Groups = two_groups, **more: Any,
) -> None:  # fmt: skip
    """After `story` an OffloadAdam agrees with the oracle, and with its own in-order run bit for bit."""
    with Duel(case, delay, make, groups, **more) as duel:
        story(duel)
        duel.agree()
        found = duel.bits()
    expected = reference(story, replace(case, schedule="in_order"), make, groups)
    different = [what for what in found if found[what] != expected[what]]
    assert not different, f"not the bits of in order: {different}"
    assert found.keys() == expected.keys() - ({"losses"} if case.stale else set())


@cache
def reference(story: Story, case: Case, make: Callable[[str], nn.Module], groups: Groups) -> dict[str, object]:
    """The bits of in order, in one bucket a unit."""
    with Duel(case, None, make, groups, bucket_bytes=1 << 20, ring_slots=1) as duel:
        story(duel)
        return duel.bits()
