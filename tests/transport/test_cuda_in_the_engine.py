"""Training over the CUDA transport gives the bits of training in order over the host transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadConfig
from hf_offload.optimizer import OffloadAdam
from hf_offload.transport import Event
from hf_offload.transport.cuda import CudaTransport
from support.fake_cupy import FakeCupy
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


def train(schedule: str, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(33, 33), nn.LayerNorm(33), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*blocks).to(device, torch.bfloat16)
    config = OffloadConfig(schedule=schedule, bucket_bytes=3000, ring_slots=3)
    optimizer = OffloadAdam(model.parameters(), lr=1e-2, config=config)
    optimizer.attach(model)
    x = torch.randn(8, 33).to(device, torch.bfloat16)
    for _ in range(8):
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = [p.detach().cpu().clone() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_over_the_fake(schedule: str) -> None:
    expected = train("in_order")
    fake = FakeCupy(delays=(0.0, 0.0, 2e-4, 1e-3))
    with over(fake):
        found = train(schedule)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert fake.calls["launch"] > 0, "the small parameters were packed"
    assert not fake.handles and not fake.pinned


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_overlapped_is_in_order(self) -> None:
        found = [train(schedule, "cuda:0") for schedule in ("in_order", "overlapped")]
        assert all(torch.equal(a, b) for a, b in zip(*found))
