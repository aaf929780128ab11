"""Races on real streams: copies and kernels whose order is wrong whenever a wait is missing. Under a minute in all.

A kernel is slowed down by `torch.cuda._sleep`, which counts clock cycles: 20 million take about 10 ms. What is then
overwritten, freed or read too early shows in the bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.transport import LONG, needs_gpu, packed, segment

pytestmark = needs_gpu
CYCLES = 20_000_000
MIB = 1 << 20
SLOT = 32 * MIB


@pytest.fixture
def transport() -> Iterator[Any]:
    from hf_offload.transport.cuda import CudaTransport

    made = CudaTransport(4, SLOT, 0, current_stream=lambda: torch.cuda.current_stream(0).cuda_stream)
    yield made
    torch.cuda.synchronize()
    made.close()


def slow() -> None:
    torch.cuda._sleep(CYCLES)


def full(value: int, nbytes: int = SLOT) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda:0")


def test_a_copy_waits_for_the_kernel_that_writes_the_gradient(transport: Any) -> None:
    for value in range(1, 9):
        gradient = full(0)
        torch.cuda.synchronize()
        slow()
        gradient.fill_(value)
        event = transport.to_host([segment(gradient, 0)], value % 4, transport.mark())
        event.wait(LONG)
        assert (transport.down[value % 4] == value).all()


def test_a_copy_on_autograds_own_thread_and_stream(transport: Any) -> None:
    stream, found = torch.cuda.Stream(), []
    gradient = full(0)
    torch.cuda.synchronize()

    def backward() -> None:
        with torch.cuda.stream(stream):
            slow()
            gradient.fill_(7)
            found.append(transport.to_host([segment(gradient, 0)], 0, transport.mark()))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(LONG)
    found[0].wait(LONG)
    assert (transport.down[0] == 7).all()


def test_a_gradient_freed_right_after_the_call_is_not_given_to_anybody_else(transport: Any) -> None:
    """The caching allocator gives freed memory to the next tensor of that size at once, on the same stream."""
    for value in range(1, 9):
        blocker = full(9)
        gradient = full(value)
        torch.cuda.synchronize()
        pointer = gradient.data_ptr()
        ahead = transport.to_host([segment(blocker, 0)], 0, None)  # keeps the lane busy meanwhile
        event = transport.to_host([segment(gradient, 0)], 1, transport.mark())
        del gradient
        thief = full(0xEE)
        assert event.done() or thief.data_ptr() != pointer
        event.wait(LONG)
        ahead.wait(LONG)
        assert (transport.down[1] == value).all()
        del thief, blocker


def test_the_allocator_gets_the_memory_back_once_the_copy_was_seen_to_end(transport: Any) -> None:
    gradient = full(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    event = transport.to_host([segment(gradient, 0)], 0, transport.mark())
    del gradient
    event.wait(LONG)
    assert torch.cuda.memory_allocated() == before - SLOT


def test_a_kernel_behind_a_join_reads_the_new_weights(transport: Any) -> None:
    weight = full(0)
    torch.cuda.synchronize()
    for value in range(1, 9):
        slot = transport.up[value % 4]
        slot[:] = value
        event = transport.to_device([segment(weight, 0)], value % 4, transport.mark())
        transport.join(event, LONG)
        total = weight.to(torch.int64).sum()  # enqueued at once, while the copy runs
        assert int(total) == value * SLOT
        event.wait(LONG)


def test_a_copy_up_waits_for_the_kernels_that_read_the_old_weights(transport: Any) -> None:
    weight = full(1)
    torch.cuda.synchronize()
    transport.up[0][:] = 2
    slow()
    total = weight.to(torch.int64).sum()
    event = transport.to_device([segment(weight, 0)], 0, transport.mark())
    event.wait(LONG)
    assert int(total) == SLOT and int(weight.to(torch.int64).sum()) == 2 * SLOT


def test_a_ring_that_goes_round_and_round(transport: Any) -> None:
    """Down, a host step, up, as the overlapped schedule does it, with kernels that write and read at both ends."""
    n = 40
    gradients = [full(0, MIB) for _ in range(n)]
    weights = [full(0, MIB) for _ in range(n)]
    sums, up = [], []
    for k, gradient in enumerate(gradients):
        gradient.fill_(k + 1)
        down = transport.to_host([segment(gradient, 0)], k % 4, transport.mark())
        if k >= 4:
            up[k - 4].wait(LONG)
        down.wait(LONG)
        np.add(transport.down[k % 4][:MIB], 1, out=transport.up[k % 4][:MIB])
        up.append(transport.to_device([segment(weights[k], 0)], k % 4, None))
        transport.join(up[-1], LONG)
        sums.append(weights[k].to(torch.int64).sum())
    assert [int(s) for s in sums] == [(k + 2) * MIB for k in range(n)]


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_small_segments_are_packed_right_at_every_alignment(transport: Any, shift: int) -> None:
    dice = torch.Generator().manual_seed(shift)
    sizes = torch.randint(1, 4000, (700,), generator=dice).tolist()
    whole = torch.randint(0, 256, (sum(sizes) + 16 * len(sizes),), generator=dice, dtype=torch.uint8)
    device = whole.to("cuda:0")
    segments, expected, start, at = [], [], shift, 0
    for size in sizes:
        segments.append(segment(device, at, start, size))
        expected.append(whole[start : start + size].numpy().tobytes())
        start += -(-size // 16) * 16
        at += size
    slow()
    event = transport.to_host(segments, 0, transport.mark())
    event.wait(LONG)
    assert transport.down[0][:at].tobytes() == b"".join(expected)
    transport.up[0][:at] = transport.down[0][:at] ^ 0xFF
    transport.join(transport.to_device(segments, 0, transport.mark()), LONG)
    back = device.clone()
    for s, old in zip(segments, expected):
        first = s.pointer - device.data_ptr()
        assert back[first : first + s.nbytes].cpu().numpy().tobytes() == bytes(b ^ 0xFF for b in old)


def test_many_tensors_packed_while_the_device_is_busy(transport: Any) -> None:
    tensors = [full(0, 1000) for _ in range(500)]
    torch.cuda.synchronize()
    slow()
    for i, t in enumerate(tensors):
        t.fill_(i % 251)
    event = transport.to_host(packed(tensors), 0, transport.mark())
    event.wait(LONG)
    assert (transport.down[0][:500_000].reshape(500, 1000) == np.arange(500)[:, None] % 251).all()


def test_spans_are_on_the_hosts_clock(transport: Any) -> None:
    source = full(1)
    torch.cuda.synchronize()
    for _ in range(3):
        before = time.perf_counter()
        event = transport.to_host([segment(source, 0)], 0, None)
        event.wait(LONG)
        first, last = event.span()
        assert before <= first < last <= time.perf_counter()
        assert SLOT / (last - first) < 1e12, "faster than any link"


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from hf_offload.transport.cuda import CudaTransport

    before = torch.cuda.current_device()
    made = CudaTransport(2, MIB, 1, current_stream=lambda: torch.cuda.current_stream(1).cuda_stream)
    gradient = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda:1")
    made.to_host([segment(gradient, 0)], 0, made.mark()).wait(LONG)
    assert (made.down[0] == 5).all() and torch.cuda.current_device() == before
    made.close()
