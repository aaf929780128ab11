"""One cell of `bench.gpu`: a variant at a batch size, timed; and whether variants give the same bits."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_offload.bench import gpu_model
from hf_offload.bench.gpu_device import Device
from hf_offload.bench.gpu_variants import EXACT, VARIANTS, Stepper, Window
from hf_offload.optimizer import OffloadAdam

GIB = 1 << 30
WARMUP_STEPS = 3
FEWEST_STEPS = 2
CORRECT_STEPS = 5


class OutOfTime(Exception):
    """The time that is left does not suffice for the fewest steps that are worth a figure."""


class Budget:
    """Seconds that may still be spent."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.spent


def out_of_memory(error: BaseException) -> bool:
    """Whether the device, not the host, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "CUDA out of memory" in str(error)
    )


def steps_in(seconds_per_step: float, wanted: int, cell_seconds: float, left: float) -> int:
    """How many steps are timed: as many as wanted, in `cell_seconds` and in what is left.

    Raises:
        OutOfTime: fewer than FEWEST_STEPS would be.
    """
    if left < FEWEST_STEPS * seconds_per_step:
        raise OutOfTime
    return max(FEWEST_STEPS, min(wanted, int(min(cell_seconds, left) / max(seconds_per_step, 1e-9))))


def measure(
    model: Any,
    stepper: Stepper,
    device: Device,
    *,
    batch: int,
    seq_len: int,
    steps: int,
    cell_seconds: float,
    budget: Budget,
    max_norm: float,
) -> dict[str, Any]:
    """Train for some steps and time them.

    The window goes from the end of one step's `step()` to the end of a later one's, the device idle at both: what the
    engine still has to do in the background is the same at both ends, so all the work of the steps in between counts.

    Raises:
        OutOfTime: after the warm-up there is no time left for the steps themselves.
    """
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(batch)
    tokens = [
        torch.randint(0, vocab, (batch, seq_len), generator=generator).to(device.name) for _ in range(4)
    ]  # more batches than one, so that the model cannot learn it by heart in a few steps
    losses: list[Tensor] = []
    norms: list[Tensor] = []

    def step(number: int) -> None:
        ids = tokens[number % len(tokens)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms.append(stepper.step())
        losses.append(loss.detach())

    device.start_peak()
    for number in range(WARMUP_STEPS):
        device.synchronize()
        start = time.perf_counter()
        step(number)
    device.synchronize()
    count = steps_in(time.perf_counter() - start, steps, cell_seconds, budget.left)

    window = Window()
    window.start(stepper.stats())
    device.synchronize()
    start = time.perf_counter()
    for number in range(WARMUP_STEPS, WARMUP_STEPS + count):
        step(number)
        window.add(stepper.stats())
    device.synchronize()
    seconds = (time.perf_counter() - start) / count

    peak = device.peak()
    found = [float(n) for n in norms[WARMUP_STEPS:]]
    return {
        "steps": count,
        "seconds_per_step": seconds,
        "tokens_per_second": batch * seq_len / seconds,
        "peak_allocated_gib": None if peak.allocated is None else peak.allocated / GIB,
        "peak_reserved_gib": None if peak.reserved is None else peak.reserved / GIB,
        "losses": [float(losses[0]), float(losses[-1])],
        "grad_norms": [min(found), max(found)],
        "clipped_steps": sum(n > max_norm for n in found),
        "engine": window.as_json(),
    }


# ---- the same bits


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic kernels where it has them; what it has none for is not told of but shows in the control."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def correctness(shape: gpu_model.Llama, device: Device, names: Sequence[str] = EXACT) -> dict[str, Any]:
    """Whether each of `names` gives the bits of in order: losses, norms, weights and state of a small model.

    The bound of the norm bites in every other step. In order runs twice: where that differs, `deterministic` is False,
    the device's own kernels differ from run to run, and the comparison says nothing.
    """
    with deterministic():
        expected = _trained("in_order", shape, device)
        again = _same(expected, _trained("in_order", shape, device))
        same: dict[str, bool | str] = {}
        for name in names:
            try:
                same[name] = _same(expected, _trained(name, shape, device))
            except Exception as error:
                same[name] = f"failed: {type(error).__name__}: {error}"
    return {
        "params": shape.params,
        "steps": CORRECT_STEPS,
        "deterministic": again,
        "same_bits_as_in_order": same,
    }


def _trained(name: str, shape: gpu_model.Llama, device: Device) -> list[Tensor]:
    seq_len = 32
    model = gpu_model.build(shape, seq_len, device.name, attention="eager")
    config = VARIANTS[name].config(shape.params, bucket_bytes=1 << 16)
    generator = torch.Generator().manual_seed(0)
    trace: list[float] = []
    with OffloadAdam(model.parameters(), lr=1e-3, config=config, model=model) as optimizer:
        for step in range(CORRECT_STEPS):
            ids = torch.randint(0, shape.vocab, (2, seq_len), generator=generator).to(device.name)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = float(optimizer.clip_grad_norm_(math.inf))
            optimizer.clip_grad_norm_(norm * (0.5 if step % 2 else 2.0))
            optimizer.step()
            optimizer.zero_grad()
            trace += [float(loss.detach()), norm]
        optimizer.synchronize()
        saved = optimizer.state_dict()["state"]
        state = [torch.as_tensor(t).clone() for entry in saved.values() for t in entry.values()]
    return [torch.tensor(trace, dtype=torch.float64), *(p.detach().cpu() for p in model.parameters()), *state]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b))


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
