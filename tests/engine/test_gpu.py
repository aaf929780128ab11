"""Training on a GPU: every exact schedule gives the bits of in order. Small; `pytest -m gpu` runs it.

What needs no CUDA runs on the CPU as well, so that it is known to run.
"""

from __future__ import annotations

import gc
import io
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from support.engine import EXACT, TinyLM, batches, optimizer_of, same, settings
from support.transport import needs_gpu

GPU = "cuda:0"


def on_gpu(modes: Sequence[str]) -> list[Any]:
    """Each mode on the GPU, and one on the CPU, to try the test itself (tests/engine/test_bits.py tries the rest)."""
    return [("cpu", modes[-1]), *(pytest.param(GPU, mode, marks=needs_gpu) for mode in modes)]


MIB = 1 << 20
CYCLES = 2_000_000  # about 1 ms of a GPU's time

Read = Callable[[nn.Module, OffloadAdam, str], Any]


@pytest.fixture(autouse=True)
def same_kernels_every_time() -> Iterator[None]:
    """No atomics in the kernels: two runs of in order have the same bits on a GPU, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Stack(nn.Module):
    """Equal square layers, whose gradients are large and whose activations are small."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def slow(device: str) -> None:
    """The device falls behind the training thread."""
    if device != "cpu":
        torch.cuda._sleep(CYCLES)


def on_host(tensors: Any) -> dict[str, Tensor]:
    return {k: v.detach().cpu().clone() for k, v in tensors}


def saved(optimizer: OffloadAdam) -> dict[str, Tensor]:
    entries = optimizer.state_dict()["state"].items()
    return {f"{i}.{k}": torch.as_tensor(v).clone() for i, entry in entries for k, v in entry.items()}


def finish(model: nn.Module, optimizer: OffloadAdam) -> dict[str, Tensor]:
    """Weights and state at the end."""
    optimizer.synchronize()
    found = {**on_host(model.named_parameters()), **saved(optimizer)}
    optimizer.close()
    return found


# ---- a language model: the same losses, norms, weights and state


def train(mode: str, device: str, dtype: torch.dtype, accumulation: int, read: Read | None = None) -> tuple[Any, ...]:
    """Five steps; the bound of the norm bites in some. What `read` sees after each step is part of the result."""
    model = TinyLM(dtype).to(device)
    optimizer = optimizer_of(model, settings(mode))
    data, seen = batches(), []
    for step in range(5):
        for _ in range(accumulation):
            loss = model(next(data).to(device))
            (loss / accumulation).backward()
            slow(device)
            seen.append(loss.detach())
        norm = optimizer.clip_grad_norm_(math.inf).item()
        optimizer.clip_grad_norm_(norm * (0.5 if step % 2 else 2.0))
        optimizer.step()
        optimizer.zero_grad()
        seen += [norm, None if read is None else read(model, optimizer, device)]
    seen = [x.item() if isinstance(x, Tensor) else x for x in seen]
    return seen, finish(model, optimizer)


@cache
def in_order(*args: Any) -> tuple[Any, ...]:
    return train("in_order", *args)


def assert_like_in_order(mode: str, *args: Any) -> None:
    found, expected = train(mode, *args), in_order(*args)
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


@pytest.mark.parametrize(("device", "mode"), on_gpu(EXACT))
@pytest.mark.parametrize(("dtype", "accumulation"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_five_clipped_steps(mode: str, dtype: torch.dtype, accumulation: int, device: str) -> None:
    assert_like_in_order(mode, device, dtype, accumulation)


def evaluates(model: nn.Module, optimizer: OffloadAdam, device: str) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(torch.arange(10).view(2, 5).to(device)).item()
    model.train()
    return loss


def saves(model: nn.Module, optimizer: OffloadAdam, device: str) -> bytes:
    """As a checkpoint does; bytes as they are in the file."""
    file = io.BytesIO()
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, file)
    return file.getvalue()


def looks_at_the_state(model: nn.Module, optimizer: OffloadAdam, device: str) -> list[list[float]]:
    return [t.flatten().tolist() for t in saved(optimizer).values()]


def takes_memory(model: nn.Module, optimizer: OffloadAdam, device: str) -> None:
    """Whatever the allocator believes to be free is written to at once."""
    for p in model.parameters():
        torch.full_like(p, math.nan)


@pytest.mark.parametrize(("device", "mode"), on_gpu(EXACT))
@pytest.mark.parametrize("read", [evaluates, saves, looks_at_the_state, takes_memory])
def test_whoever_reads_right_after_a_step_sees_the_step(mode: str, read: Read, device: str) -> None:
    assert_like_in_order(mode, device, torch.bfloat16, 1, read)


# ---- given equal gradients, the GPU's state is the CPU's


def given_gradients(mode: str, device: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """The gradients come from a generator on the host, so they are equal on any device; odd sizes, several buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 401), nn.LayerNorm(401), nn.Linear(401, 301)).to(device, dtype)
    optimizer = OffloadAdam(
        model.parameters(), lr=1e-2, model=model, config=settings(mode, bucket_bytes=50_000, ring_slots=3)
    )
    norms = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(p.shape, generator=generator).to(dtype).to(device) for p in model.parameters()]
        slow(device)
        torch.autograd.backward(list(model.parameters()), grads)
        del grads
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, finish(model, optimizer)


@cache
def given_in_order(dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    return given_gradients("in_order", "cpu", dtype)


@pytest.mark.parametrize(("device", "mode"), on_gpu(("in_order", "overlapped", "streamed", "speculative")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_gradients_give_the_bits_of_in_order_on_a_cpu(mode: str, dtype: torch.dtype, device: str) -> None:
    """Norms, too: they are summed on the device, or from the store on the host."""
    found, expected = given_gradients(mode, device, dtype), given_in_order(dtype)
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


# ---- streams


def other_stream(mode: str, device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """After each step the model runs on a stream of its own, before anybody waited for the weights."""
    model = Stack(6, 256).to(device)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, model=model, config=settings(mode, bucket_bytes=1 << 18))
    x, outputs = torch.ones(4, 256, device=device), []
    side = torch.cuda.Stream() if device != "cpu" else None
    if side is not None:
        torch.cuda.synchronize()
    for _ in range(4):
        slow(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), torch.cuda.stream(side):
            outputs.append(model(x).sum())
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)  # it reads the weights that the next step writes
    outputs = [out.cpu() for out in outputs]
    return outputs, finish(model, optimizer)


@pytest.mark.parametrize(("device", "mode"), on_gpu(("overlapped", "streamed", "speculative")))
def test_a_reader_on_another_stream_sees_the_step(mode: str, device: str) -> None:
    found, expected = other_stream(mode, device), other_stream("in_order", device)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert same(found[1], expected[1])


# ---- memory


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_streamed_gradients_take_a_few_buckets_of_the_device(self) -> None:
        bucket, slots, layers = 2 * MIB, 2, 24
        found = {mode: self._backward_bytes(mode, layers, bucket, slots) for mode in ("overlapped", "streamed")}
        (peak, after, _), (streamed_peak, streamed_after, counted) = found["overlapped"], found["streamed"]
        assert peak >= layers * bucket and after >= layers * bucket, "what there is without streaming"
        assert streamed_peak <= (slots + 4) * bucket, "the ring's, the one that arrives, and autograd's own"
        assert streamed_after <= 2 * bucket
        assert bucket <= counted <= streamed_peak + bucket

    @staticmethod
    def _backward_bytes(mode: str, layers: int, bucket: int, slots: int) -> tuple[int, int, int]:
        """Device bytes taken in a backward: the most, and at its end; and what the engine counted."""
        model = Stack(layers, 1024).to(GPU, torch.bfloat16)  # 2 MiB a layer
        config = settings(mode, bucket_bytes=bucket, ring_slots=slots)
        optimizer = OffloadAdam(model.parameters(), lr=1e-3, model=model, config=config)
        x = torch.ones(1, 1024, device=GPU, dtype=torch.bfloat16)
        peak = after = 0
        for _ in range(4):  # the first ones allocate cuBLAS's workspace
            loss = model(x).float().square().mean()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            optimizer.clip_grad_norm_(1e9)
            peak, after = (m() - before for m in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
        counted = optimizer.stats().device_bytes["gradients"]
        optimizer.close()
        return peak, after, counted

    def test_nothing_is_left_on_the_device(self) -> None:
        """Of 48 MiB of weights and as many of gradients, each time."""
        self._backward_bytes("in_order", 24, 2 * MIB, 2)  # cuBLAS's workspace stays
        gc.collect()
        before = torch.cuda.memory_allocated()
        for mode in ("in_order", "overlapped", "streamed"):
            self._backward_bytes(mode, 24, 2 * MIB, 2)
            gc.collect()
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() - before <= MIB, mode

    def test_the_transport_is_the_gpus_and_auto_overlaps(self) -> None:
        model = TinyLM().to(GPU)
        optimizer = OffloadAdam(model.parameters(), model=model)
        model(next(batches()).to(GPU)).backward()
        optimizer.step()
        optimizer.synchronize()
        stats = optimizer.stats()
        assert (stats.schedule, stats.transport) == ("overlapped", "cuda") and stats.host_bytes["pinned"] > 0
        optimizer.close()
