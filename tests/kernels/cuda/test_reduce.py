"""The norm on a GPU has the bits of the norm on the host."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_offload.kernels import cpu
from hf_offload.kernels.cuda import SquareSums
from hf_offload.kernels.cuda.reduce import ROWS
from support.fake_cupy import FakeCupy
from support.transport import needs_gpu

DEVICE = 1
HELD = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}
SIZES = (0, 1, 255, 257, 65535, 65536, 65537, (1 << 20) + 3, 0, 5)


def arrays(wire: str, seed: int = 0) -> list[np.ndarray]:
    """Random values over many magnitudes, as bits where NumPy has no such type."""
    dice = np.random.default_rng(seed)
    found = []
    for n in SIZES:
        values = (dice.standard_normal(n) * 10.0 ** dice.integers(-7, 4, n)).astype(np.float32)
        if wire == "float16":
            found.append(values.astype(np.float16).view(np.uint16))
        else:
            found.append(values if wire == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16))
    return found


def make(fake: FakeCupy) -> SquareSums:
    return SquareSums(DEVICE, fake.current_stream(DEVICE), fake)


def sums(squares: SquareSums, found: list[np.ndarray], wire: str) -> list[float]:
    return squares.sums_of_squares([(x.ctypes.data, x.size, wire) for x in found])


@pytest.mark.parametrize("wire", HELD)
def test_every_array_of_any_size_has_the_bits_of_the_host(wire: str) -> None:
    """The kernel itself runs on a GPU only (below); here its stand-in shows what is asked of it and put together."""
    found = arrays(wire)
    assert sums(make(FakeCupy()), found, wire) == [cpu.sum_of_squares(x, wire, 1) for x in found]


def test_more_arrays_than_one_launch_takes_and_one_transfer_for_all() -> None:
    fake = FakeCupy()
    squares = make(fake)
    found = [np.full(1 + k % 3, k, np.float32) for k in range(2 * ROWS + 7)]
    assert sums(squares, found, "float32") == [float(k * k * (1 + k % 3)) for k in range(2 * ROWS + 7)]
    assert fake.calls["launch"] == 3 and fake.calls["memcpyAsync"] == 1 and fake.calls["malloc"] == 1
    sums(squares, found, "float32")
    assert fake.calls["malloc"] == 1 and fake.calls["eventCreateWithFlags"] == 1, "nothing new in the second step"


def test_nothing_at_all() -> None:
    squares = make(FakeCupy())
    assert squares.sums_of_squares([]) == []
    assert squares.sums_of_squares([(0, 0, "float32")]) == [0.0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_comes_through(value: float) -> None:
    found = [np.ones(9, np.float32), np.array([1, value], np.float32)]
    first, second = sums(make(FakeCupy()), found, "float32")
    assert first == 9.0 and not np.isfinite(second)


def test_it_waits_for_the_current_stream() -> None:
    fake, gate = FakeCupy(), threading.Event()
    gradient = np.zeros(4, np.float32)
    fake.run_on(DEVICE, 0, lambda: gate.wait(30.0))
    fake.run_on(DEVICE, 0, lambda: gradient.fill(2.0))
    threading.Timer(0.05, gate.set).start()
    assert sums(make(fake), [gradient], "float32") == [16.0]


def test_a_full_device_lowers_the_batch_size() -> None:
    fake = FakeCupy()
    fake.allocatable = 100
    squares = make(fake)
    with pytest.raises(RuntimeError, match=r"CUDA out of memory\.") as caught:
        sums(squares, [np.ones(1, np.float32)], "float32")
    assert should_reduce_batch_size(caught.value)
    fake.allocatable = 200
    assert sums(squares, [np.ones(1, np.float32)], "float32") == [1.0]


def test_nothing_is_left_on_the_device() -> None:
    fake = FakeCupy()
    squares = make(fake)
    sums(squares, [np.ones(1, np.float32)], "float32")
    assert fake.device == 0 and fake.allocated and fake.handles
    del squares
    gc.collect()
    assert not fake.allocated and not fake.handles


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("wire", HELD)
    def test_the_kernel_has_the_bits_of_the_host(self, wire: str) -> None:
        squares = SquareSums(0, lambda: torch.cuda.current_stream(0).cuda_stream)
        for seed in range(3):
            found = [*arrays(wire, seed), _everything(wire)]
            on_device: list[Any] = [torch.from_numpy(x.view(np.uint8)).to("cuda:0") for x in found]
            got = squares.sums_of_squares([(d.data_ptr(), x.size, wire) for d, x in zip(on_device, found)])
            assert got == [cpu.sum_of_squares(x, wire, 1) for x in found]


def _everything(wire: str) -> np.ndarray:
    """Every finite 16-bit value, subnormal ones too; in float32 the subnormal ones."""
    if wire == "float32":
        return np.arange(1, 100_000, dtype=np.uint32).view(np.float32)
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent = 0x7F80 if wire == "bfloat16" else 0x7C00
    return bits[(bits & exponent) != exponent]
