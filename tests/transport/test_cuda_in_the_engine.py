"""Training over the CUDA transport gives the bits of training in order over the host transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadConfig
from hf_offload.errors import ConfigError
from hf_offload.optimizer import OffloadAdam
from hf_offload.transport import Event
from hf_offload.transport.cuda import CudaTransport, DeviceMemoryError
from support.fake_cupy import CUDARuntimeError, FakeCupy
from support.transport import needs_gpu

DEVICE = 1


class OnACpu(CudaTransport):
    """torch's kernels run at once here, in the calling thread and not on the fake's stream: so the thread waits."""

    fake: FakeCupy

    def join(self, event: Event, timeout_s: float) -> None:
        super().join(event, timeout_s)
        self.fake.synchronize(DEVICE, 0)


@contextmanager
def over(fake: FakeCupy) -> Iterator[None]:
    def make(config: OffloadConfig, facts: Any, slot_bytes: int, *stream: Any) -> CudaTransport:
        OnACpu.fake = fake
        return OnACpu(config.ring_slots, slot_bytes, DEVICE, current_stream=fake.current_stream(DEVICE), cupy=fake)

    with patch("hf_offload.engine.placement.make_transport", make):
        yield


def train(schedule: str, device: str = "cpu", **more: Any) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(33, 33), nn.LayerNorm(33), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device, torch.bfloat16)
    config = OffloadConfig(schedule=schedule, bucket_bytes=3000, ring_slots=3, **more)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config)
    optimizer.attach(model)
    x = torch.randn(8, 33).to(device, torch.bfloat16)
    for _ in range(8):
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = [p.detach().cpu().clone() for p in model.parameters()]
    found += [t.clone() for e in optimizer.state_dict()["state"].values() for t in e.values()]
    optimizer.close()
    return found


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. It ran out at the kernel."), CUDARuntimeError(2)])
def test_a_device_without_memory_for_the_kernel_of_the_step_says_so(error: Exception) -> None:
    with (
        over(FakeCupy()),
        patch("hf_offload.transport.cuda_in_place.AdamSteps", side_effect=error),
        pytest.raises(DeviceMemoryError, match="out of memory"),
    ):
        train("overlapped", device_state_bytes=1 << 20)


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_over_the_fake(schedule: str) -> None:
    expected = train("in_order")
    fake = FakeCupy(delays=(0.0, 0.0, 2e-4, 1e-3))
    with over(fake):
        found = train(schedule)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert fake.calls["launch"] > 0, "the small parameters were packed"
    assert not fake.handles and not fake.pinned


SHARES = {"half": 6 * 6 * (33 * 33 + 3 * 33), "all": 1 << 30}
RESIDENT = [
    ("in_order", {}), ("overlapped", {}), ("overlapped", {"stream_gradients": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "more", "share"), [(*case, share) for case, share in zip(RESIDENT, ("all", "half", "half"))]
)
def test_state_that_stays_on_the_device_over_the_fake(schedule: str, more: dict[str, Any], share: str) -> None:
    """The step of it is put on torch's stream, behind which the next forward runs."""
    expected = train("in_order")
    fake = FakeCupy(delays=(0.0, 0.0, 2e-4, 1e-3))
    with over(fake):
        found = train(schedule, device_state_bytes=SHARES[share], **more)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not fake.handles and not fake.pinned
    if share == "all":
        assert not fake.calls["memcpyAsync"] and fake.calls["launch"]


def test_a_reader_on_another_stream_waits_for_the_step_on_the_device() -> None:
    fake = FakeCupy()
    with over(fake), fake.cuda.Device(DEVICE):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        config = OffloadConfig(schedule="overlapped", device_state_bytes=1 << 30)
        optimizer = OffloadAdam(model.parameters(), lr=0.5, config=config, model=model)
        side, gate, seen = fake.cuda.Stream(non_blocking=True), threading.Event(), []
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = model[0].weight.detach().clone()
        fake.run_on(DEVICE, 0, lambda: gate.wait(30.0))
        with patch.object(OnACpu, "join", CudaTransport.join):  # nobody waits but the streams
            optimizer.step()
            fake.use_stream(DEVICE, side.ptr)
            optimizer.engine.before_root()
            optimizer.engine.before_guard(0)
            fake.run_on(DEVICE, side.ptr, lambda: seen.append(model[0].weight.detach().clone()))
            threading.Timer(0.05, gate.set).start()
            fake.synchronize(DEVICE, side.ptr)
            fake.use_stream(DEVICE, 0)
        assert not torch.equal(seen[0], before)
        optimizer.close()


def test_a_kernel_that_cannot_be_compiled_is_told_before_anything_is_bound() -> None:
    fake = FakeCupy()
    with over(fake):
        model = nn.Linear(5, 5)
        optimizer = OffloadAdam(model.parameters(), config=OffloadConfig(device_state_bytes=1 << 30))
        model(torch.ones(5)).sum().backward()
        fake.compiles = OSError("no libnvrtc.so")
        with pytest.raises(ConfigError, match=r"device_state_bytes=.*cannot be compiled \(no libnvrtc.so\)"):
            optimizer.step()
        assert not optimizer.engine.bound
        optimizer.close()


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("share", SHARES)
    @pytest.mark.parametrize(("schedule", "more"), RESIDENT)
    def test_state_that_stays_on_the_device(self, schedule: str, more: dict[str, Any], share: str) -> None:
        found = [train("in_order", "cuda:0"), train(schedule, "cuda:0", device_state_bytes=SHARES[share], **more)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_overlapped_is_in_order(self) -> None:
        found = [train(schedule, "cuda:0") for schedule in ("in_order", "overlapped")]
        assert all(torch.equal(a, b) for a, b in zip(*found))
