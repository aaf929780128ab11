"""Where the state's arrays lie, and when their pages come."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, hostmem
from hf_offload.engine import memory
from hf_offload.engine.arena import Arena
from hf_offload.engine.plan import Bucket, Piece
from hf_offload.engine.speculation import Slot
from hf_offload.kernels import cpu

MIB = 1 << 20
FLOAT32, BYTE = np.dtype(np.float32), np.dtype(np.uint8)
SLACK = 4 * MIB
"""What else the process may take meanwhile, and one huge page at each end, bytes."""
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """What the compiler takes is not what is measured."""
    memory.touch(memory.allocate((MIB, BYTE)), threads=1)
    memory.touch(memory.allocate((MIB, BYTE)), threads=2)


def address(a: np.ndarray) -> int:
    return int(a.ctypes.data)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000, 40_000, 1 << 20])
def test_arrays_begin_at_cache_lines_hold_zeros_and_do_not_overlap(count: int) -> None:
    arrays = memory.allocate((count, FLOAT32), (3, BYTE), (count, FLOAT32), (count, np.dtype(np.uint16)))
    assert [(a.size, a.dtype) for a in arrays] == [(count, FLOAT32), (3, BYTE), (count, FLOAT32), (count, np.uint16)]
    assert all(address(a) % memory.CACHE_LINE == 0 and not a.any() for a in arrays)
    for k, a in enumerate(arrays):
        a[:] = k + 1
    assert all((a == k + 1).all() for k, a in enumerate(arrays))


@pytest.mark.parametrize("count", [1 << 15, 1 << 16, 1 << 20, 1 << 24, (1 << 20) + 1008, 3_000_000])
def test_no_two_arrays_lie_at_a_power_of_two_or_at_equal_places_of_a_page(count: int) -> None:
    arrays = memory.allocate(*[(count, FLOAT32)] * 3, (2 * count, BYTE))
    for k, a in enumerate(arrays):
        for b in arrays[:k]:
            apart = (address(a) - address(b)) % memory.SPAN
            assert min(apart, memory.SPAN - apart) >= memory.SKEW
            in_a_page = apart % 4096
            assert min(in_a_page, 4096 - in_a_page) >= 64


def test_an_arenas_state_is_allocated_here() -> None:
    arena = Arena([nn.Parameter(torch.zeros(100_000))], [0], 1 << 20)
    for before, after in pairwise(arena.state):
        assert (address(after) - address(before)) % memory.SPAN == memory.SKEW


@linux
def test_reserving_takes_no_memory_until_it_is_touched() -> None:
    before = hostmem.own_bytes()
    arrays = memory.allocate(*[(8 * MIB, FLOAT32)] * 3)
    assert hostmem.own_bytes() - before < SLACK
    memory.touch(arrays[:1], threads=1)
    assert abs(hostmem.own_bytes() - before - 32 * MIB) < SLACK


@linux
def test_construction_and_binding_do_not_touch_the_moments() -> None:
    """Only the masters: the first step then touches the moments, by the threads that step them."""
    p = nn.Parameter(torch.ones(4 * MIB, dtype=torch.bfloat16))
    config = OffloadConfig(bucket_bytes=MIB, ring_slots=2)
    with OffloadAdam([p], config=config) as warm:  # what kernels and threads take
        p.grad = torch.ones_like(p)
        warm.step()
    before = hostmem.own_bytes()
    with OffloadAdam([p], config=config) as optimizer:
        assert hostmem.own_bytes() - before < SLACK
        optimizer.engine.bind_trainable()
        assert abs(hostmem.own_bytes() - before - 16 * MIB) < SLACK
        optimizer.step()
        assert abs(hostmem.own_bytes() - before - 48 * MIB) < SLACK


@linux
@pytest.mark.parametrize("threads", [1, 2])
def test_every_page_is_touched(threads: int) -> None:
    for size in (1, 4095, 4096, 4097, 10 * MIB + 5):
        whole = memory.allocate((size, BYTE))[0]
        cpu.touch(whole, threads)
        assert not whole.any()
    before = hostmem.own_bytes()
    (block,) = memory.allocate((64 * MIB, BYTE))
    cpu.touch(block, threads)
    assert hostmem.own_bytes() - before > 63 * MIB


@linux
def test_a_shadow_is_resident_before_the_first_guess() -> None:
    arena = Arena([nn.Parameter(torch.zeros(4 * MIB, dtype=torch.bfloat16))], [1], 1 << 30)
    bucket = Bucket(0, "bfloat16", 0, 4 * MIB, (Piece(0, 0, 4 * MIB, 0),))
    before = hostmem.own_bytes()
    slot = Slot(arena, bucket, threads=1)
    assert slot.nbytes == Slot.bytes_for(arena, bucket) == 56 * MIB
    assert abs(hostmem.own_bytes() - before - slot.nbytes) < SLACK


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """What the kernel says of the mapping that `address` lies in (VmFlags of /proc/self/smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, _, high = first.partition("-")
            inside = int(low, 16) <= address < int(high, 16)
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text() or os.environ.get("NUMPY_MADVISE_HUGEPAGE") == "0",
    reason="transparent huge pages are off",
)
def test_the_state_asks_for_huge_pages() -> None:
    """NumPy does, for blocks of 4 MiB and more: should it cease to, this fails."""
    arena = Arena([nn.Parameter(torch.zeros(16 * MIB, dtype=torch.bfloat16))], [0], 1 << 24)
    for array in arena.state:
        assert "hg" in flags_at(address(array) + array.nbytes // 2)
