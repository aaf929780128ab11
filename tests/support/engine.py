"""What the engine's tests share: tiny models, a training loop, slow copies, and bits to compare."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine import schedules
from hf_offload.engine.formats import FORMATS
from hf_offload.transport import HostTransport
from hf_offload.transport.select import DeviceFacts

Delay = Callable[[str, int], float]
MODES: dict[str, dict[str, Any]] = {
    "in_order": {"schedule": "in_order"},
    "overlapped": {"schedule": "overlapped"},
    "streamed": {"schedule": "overlapped", "stream_gradients": True},
    "streamed in order": {"schedule": "in_order", "stream_gradients": True},
    "speculative": {"schedule": "overlapped", "stream_gradients": True, "shadow_bytes": 1 << 20},
    "small shadow": {"schedule": "overlapped", "stream_gradients": True},
    "delayed": {"schedule": "delayed", "delay_warmup_steps": 2},
}
"""Ways to take a step, by name. "small shadow": speculation with room for two buckets."""
RESIDENT: dict[str, dict[str, Any]] = {
    "resident": {**MODES["overlapped"], "device_state_bytes": 1900},
    "resident speculative": {**MODES["speculative"], "device_state_bytes": 1900},
    "resident delayed": {**MODES["delayed"], "device_state_bytes": 1900},
}
"""Ways in which a share of the state, half of it in the contracts' model, stays on the device. Exact but the last."""
STREAMED = ("streamed", "streamed in order", "speculative", "small shadow")
EXACT = ("overlapped", *STREAMED)
"""Those that must give the bits of in order."""
KERNELS = ("adam_step", "adam_step_into", "put", "add")
VOCAB, WIDTH = 13, 6
LONG = 30.0  # seconds: a wait that takes this long has failed
LATE = 0.12  # seconds: later than anything the training thread does without waiting


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embeddings, blocks, norm, head. `forward` takes token ids, returns the loss of predicting each from the last.

    Args:
        dtype: of all weights, or of all but the adapters.
        fused_head: read `head.weight` without calling `head`, and without a norm before it, as TRL's fused head does.
        adapters: fp32 low-rank adapters beside each block, so that wire dtypes are mixed within a unit.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        blocks: int = 3,
        fused_head: bool = False,
        adapters: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList([Block(dtype) for _ in range(blocks)])
        if adapters:
            for layer in self.layers:
                layer.adapter = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10)
        self.norm = None if fused_head else nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
            if hasattr(layer, "adapter"):
                x = x + (x.float() @ layer.adapter).to(x.dtype)
        return x if self.norm is None else self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        logits = x @ self.head.weight.t() if self.norm is None else self.head(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def batches(seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCAB, (2, 5), generator=generator)


# ---- slow copies and kernels


@contextmanager
def copies(delay: Delay | None) -> Iterator[None]:
    """Every engine made in here has a transport that sleeps `delay(direction, nbytes)` seconds before a copy."""

    def make(config: OffloadConfig, facts: DeviceFacts, slot_bytes: int, *stream: Any) -> HostTransport:
        given = {name: getattr(config, name) for name in ("link_gb_s", "link_latency_us", "timeout_s")}
        return HostTransport(config.ring_slots, slot_bytes, delay=delay, **given)

    with patch("hf_offload.engine.placement.make_transport", make):
        yield


@contextmanager
def kernels(before: Callable[[], None], names: Sequence[str] = ("adam_step",)) -> Iterator[None]:
    """`before()` is called before each of these kernels: each bucket's Adam step, or any of KERNELS."""

    def slow(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            before()
            real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(schedules.cpu, name, slow(getattr(schedules.cpu, name))))
        yield


def late(direction: str, seconds: float = LATE) -> Delay:
    """Every copy of one direction is late."""
    return lambda d, nbytes: seconds if d == direction else 0.0


def dice(seed: int, most: float = 2e-3) -> Delay:
    """Copies late at random; each direction for itself, so that one seed gives one sequence each way."""
    rolls = {d: random.Random(f"{seed} {d}") for d in ("d2h", "h2d")}
    return lambda d, nbytes: rolls[d].choice((0.0, 0.0, 0.0, most / 10, most / 3, most))


class Hold:
    """Copies (of one direction, or all) stop in front of it while it is closed. It starts open."""

    def __init__(self, direction: str | None = None) -> None:
        self.direction = direction
        self.reached = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def __call__(self, direction: str, nbytes: int) -> float:
        if self.direction in (None, direction) and not self._open.is_set():
            self.reached.set()
            self._open.wait(LONG)
        return 0.0

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def release(self, after: float = 0.0) -> None:
        """Now, or from another thread in `after` seconds."""
        if after:
            threading.Timer(after, self._open.set).start()
        else:
            self._open.set()


# ---- a training loop


@dataclass
class Plan:
    """What a run does; the same for both schedules.

    Attributes:
        missing: step -> index of a parameter whose gradient is dropped before it.
        between: called with (model, optimizer, step) after each step.
        zero: what follows a step: "none" (gradients set to None), "zero" (in place), "keep".
    """

    steps: int = 4
    accumulation: int = 1
    clip: float | None = 0.5
    missing: Mapping[int, int] = field(default_factory=dict)
    between: Callable[[nn.Module, OffloadAdam, int], None] = lambda model, optimizer, step: None
    zero: str = "none"


@dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        return (
            self.losses == other.losses and same(self.weights, other.weights) and same(self.state, other.state)
        )  # fmt: skip


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(bits(a[k]), bits(b[k])) for k in a)


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are in memory, read past all hooks."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def state(optimizer: OffloadAdam) -> dict[str, Tensor]:
    """State of the parameters that were ever stepped: one may be bound already at a clip that no step followed."""
    saved = optimizer.state_dict()["state"]
    stepped = {i: entry for i, entry in saved.items() if float(entry["step"]) > 0}
    return {f"{i}.{k}": torch.as_tensor(v).clone() for i, entry in stepped.items() for k, v in entry.items()}


def settings(schedule: str, **more: Any) -> OffloadConfig:
    """Settings of one of MODES or RESIDENT. Small buckets, so that every unit has several."""
    mode = {**MODES, **RESIDENT}.get(schedule, {"schedule": schedule})
    given = {"bucket_bytes": 96, "ring_slots": 2, "timeout_s": LONG, **mode, **more}
    if schedule == "small shadow":  # at most 8 bytes of shadow for each byte on a wire that mixes 2 and 4
        least = 4 * FORMATS[given.get("state_dtype", "float32")].block  # bytes of the smallest bucket
        given.setdefault("shadow_bytes", 16 * max(given["bucket_bytes"], least))
    return OffloadConfig(**given)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, so that buckets hold pieces of both."""
    plain = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": plain, "lr": 3e-3, "weight_decay": 0.0},
    ]


def optimizer_of(model: nn.Module, config: OffloadConfig) -> OffloadAdam:
    return OffloadAdam(groups(model), lr=1e-2, config=config, model=model)


def train(
    config: OffloadConfig, plan: Plan | None = None, delay: Delay | None = None, make: Callable[[], nn.Module] = TinyLM
) -> Outcome:
    """Train `make()` for `plan.steps` steps."""
    plan = plan or Plan()
    data, losses = batches(), []
    with copies(delay):
        model = make()
        optimizer = optimizer_of(model, config)
    params = list(model.parameters())
    for step in range(plan.steps):
        for _ in range(plan.accumulation):
            loss = model(next(data))
            (loss / plan.accumulation).backward()
            losses.append(loss.item())
        if step in plan.missing:
            params[plan.missing[step] % len(params)].grad = None
        if plan.clip is not None:
            optimizer.clip_grad_norm_(plan.clip)
        optimizer.step()
        if plan.zero != "keep":
            optimizer.zero_grad(set_to_none=plan.zero == "none")
        plan.between(model, optimizer, step)
    optimizer.synchronize()
    outcome = Outcome(losses, weights(model), state(optimizer))
    optimizer.close()
    return outcome


def handmade(model: nn.Module, seed: int = 5) -> None:
    """Give each parameter a gradient that no backward made."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def watched_gradients(model: nn.Module) -> list[weakref.ref[Any]]:
    """Give each fp32 parameter a gradient whose memory can be watched: a reference dies when the memory is freed, not
    only one of the tensors over it."""
    found = []
    for p in model.parameters():
        memory = np.ones(tuple(p.shape), np.float32)
        p.grad = torch.from_numpy(memory)
        found.append(weakref.ref(memory))
    return found


def ours() -> set[threading.Thread]:
    """The threads of hf_offload that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("hf_offload-")}
