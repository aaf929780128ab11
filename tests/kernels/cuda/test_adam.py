"""The fused step on a GPU has the bits of the Numba kernel, its twin.

Without a GPU two things can be seen: that the launches ask for the right thing (over the fake, whose kernel is the
twin), and that the kernel's own source computes it (as C++, where CUDA's `__fmul_rn` and its like are plain
operations, and the two conversions of PTX are the compiler's).
"""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload.kernels import cpu
from hf_offload.kernels.cuda import STEP, STEP_STATE, WRITE_WEIGHTS, AdamSteps, CompileError, adam
from hf_offload.kernels.cuda.adam import ROWS, SHARE
from support.fake_cupy import FakeCupy
from support.transport import needs_gpu

DEVICE = 1
HELD = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}
SIZES = (1, 0, 255, SHARE - 1, SHARE, SHARE + 1, 3 * SHARE + 7, 5)
NAMES = ("master", "exp_avg", "exp_avg_sq", "grad", "weight")
MODES = {"step": STEP, "state alone": STEP_STATE, "weights alone": WRITE_WEIGHTS}


class Problem:
    """Arrays of one wire dtype with values of many magnitudes, some of them special, and rows of coefficients."""

    def __init__(self, wire: str, seed: int = 0, sizes: tuple[int, ...] = SIZES) -> None:
        dice = np.random.default_rng(seed)
        self.wire = wire
        self.arrays: list[dict[str, np.ndarray]] = []
        self.rows: list[np.ndarray] = []
        for k, n in enumerate(sizes):
            master, m = (self._values(dice, n) for _ in range(2))
            v = np.abs(self._values(dice, n))
            grad, weight = (np.empty(n, HELD[wire]) for _ in range(2))
            cpu.narrow(self._values(dice, n), grad, wire, 1)
            weight.fill(0)
            self.arrays.append(dict(zip(NAMES, (master, m, v, grad, weight))))
            self.rows.append(
                cpu.coefficients(
                    lr=1e-2, beta1=0.9 if k % 3 else 0.3, beta2=0.999, eps=1e-8, weight_decay=0.1, step=k + 1,
                    grad_scale=0.37 if k % 2 else 1.0, decoupled=k % 4 != 3, maximize=k % 5 == 4,
                )
            )  # fmt: skip

    @staticmethod
    def _values(dice: np.random.Generator, n: int) -> np.ndarray:
        values = (dice.standard_normal(n) * 10.0 ** dice.integers(-30, 10, n)).astype(np.float32)
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 65504.0, 65520.0, 5e-8], np.float32)
        ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11], np.float32)  # of bf16 and of fp16
        special = np.concatenate((special, ties))
        values[: n // 20] = dice.choice(special, n // 20)
        return values

    def addresses(self) -> list[tuple[Any, ...]]:
        return [
            (*(a[name].ctypes.data for name in NAMES), a["grad"].size, self.wire, row)
            for a, row in zip(self.arrays, self.rows)
        ]

    def by_the_twin(self, mode: int) -> list[dict[str, np.ndarray]]:
        found = [{name: x.copy() for name, x in a.items()} for a in self.arrays]
        for a, row in zip(found, self.rows):
            if mode == WRITE_WEIGHTS:
                cpu.narrow(a["master"], a["weight"], self.wire, 1)
                continue
            weight = a["weight"].copy() if mode == STEP_STATE else a["weight"]
            bounds = np.array([0, weight.size])
            state = (a[name] for name in NAMES[:3])
            cpu.adam_step(*state, a["grad"], weight, bounds, row[None], wire=self.wire, threads=1)
        return found

    def expect(self, expected: list[dict[str, np.ndarray]]) -> None:
        for mine, theirs in zip(self.arrays, expected, strict=True):
            for name, x in mine.items():
                assert np.array_equal(x.view(np.uint8), theirs[name].view(np.uint8)), name


# ---- what is asked of the device


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", HELD)
def test_every_array_is_stepped_whole(wire: str, mode: str) -> None:
    problem, fake = Problem(wire), FakeCupy()
    expected = problem.by_the_twin(MODES[mode])
    AdamSteps(DEVICE, fake).run(problem.addresses(), MODES[mode], 0)
    fake.synchronize(DEVICE, 0)
    problem.expect(expected)
    assert fake.calls["launch"] == 1 and not fake.calls["malloc"] and fake.device == 0


def test_more_arrays_than_one_launch_takes() -> None:
    problem, fake = Problem("bfloat16", sizes=(3, 0) * (2 * ROWS + 1)), FakeCupy()
    expected = problem.by_the_twin(STEP)
    AdamSteps(DEVICE, fake).run(problem.addresses(), STEP, 0)
    fake.synchronize(DEVICE, 0)
    problem.expect(expected)
    assert fake.calls["launch"] == 3


def test_it_comes_after_what_the_stream_was_asked_for_and_before_what_it_will_be() -> None:
    fake, gate, seen = FakeCupy(delays=(0.0, 1e-3)), threading.Event(), []
    with fake.cuda.Device(DEVICE):
        stream = fake.cuda.Stream(non_blocking=True)
    problem = Problem("float32", sizes=(4,))
    expected, weight = problem.by_the_twin(STEP), problem.arrays[0]["weight"]
    fake.run_on(DEVICE, stream.ptr, lambda: gate.wait(30.0))
    fake.run_on(DEVICE, stream.ptr, lambda: seen.append(weight.copy()))
    AdamSteps(DEVICE, fake).run(problem.addresses(), STEP, stream.ptr)
    fake.run_on(DEVICE, stream.ptr, lambda: seen.append(weight.copy()))
    time.sleep(0.05)  # a kernel that did not wait would have run by now
    gate.set()
    fake.synchronize(DEVICE, stream.ptr)
    assert not seen[0].any() and np.array_equal(seen[1], expected[0]["weight"], equal_nan=True)


def test_nothing_is_left_on_the_device() -> None:
    for closes in (True, False):
        fake, problem = FakeCupy(), Problem("float32", sizes=(4,))
        steps = AdamSteps(DEVICE, fake)
        steps.run(problem.addresses(), STEP, 0)
        fake.synchronize(DEVICE, 0)
        assert len(fake.handles) == 3, "a stream and two events"
        if closes:
            steps.close()
            steps.close()
        del steps
        gc.collect()
        assert not fake.handles


def test_without_a_compiler_there_is_no_kernel() -> None:
    fake = FakeCupy()
    fake.compiles = OSError("no libnvrtc.so")
    with pytest.raises(CompileError, match=r"no libnvrtc\.so"):
        AdamSteps(DEVICE, fake)


# ---- the kernel's source, as C++

_SHIM = """
#include <cstdint>
#include <cstring>
#include <cmath>
#define __device__
#define __global__
static struct { unsigned x; } blockIdx, threadIdx;
template <class To, class From> static To as(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(int x) { return as<float>(x); }
static int __float_as_int(float x) { return as<int>(x); }
#define BINARY(name, type, op) static type name(type a, type b) { return a op b; }
BINARY(__fmul_rn, float, *) BINARY(__fadd_rn, float, +) BINARY(__fsub_rn, float, -) BINARY(__fdiv_rn, float, /)
BINARY(__dmul_rn, double, *) BINARY(__dadd_rn, double, +) BINARY(__dsub_rn, double, -)
static float __fsqrt_rn(float x) { return std::sqrt(x); }
static float __double2float_rn(double x) { return (float)x; }
"""
_RUN = """
extern "C" void run(const Table* table, int rows, int mode, unsigned blocks)
{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) hf_offload_adam(*table, rows, mode);
}
"""
_ASM = {
    r'asm\("cvt\.f32\.f16[^;]*;" : "=f"\(value\) : "h"\(bits\)\);': "value = (float)as<_Float16>(bits);",
    r'asm\("cvt\.rn\.f16\.f32[^;]*;" : "=h"\(bits\) : "f"\(theta\)\);': "bits = as<unsigned short>((_Float16)theta);",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernel's source with")
    source = adam.SOURCE
    for pattern, plain in _ASM.items():
        source, count = re.subn(pattern, plain, source)
        assert count == 1, pattern
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "adam.cpp").write_text(_SHIM + source + _RUN)
    command = [compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", "adam.so", "adam.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "adam.so"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wire", HELD)
def test_the_source_computes_what_the_twin_does(compiled: Any, wire: str, mode: str) -> None:
    """Bit for bit, infinities, NaN and subnormal numbers too; blocks and rows are found as on a GPU."""
    problem = Problem(wire, seed=1)
    expected = problem.by_the_twin(MODES[mode])
    filled = [a for a in problem.addresses() if a[5]]
    table, blocks = adam._table(filled)
    compiled.run(ctypes.c_void_p(table.ctypes.data), len(filled), MODES[mode], blocks)
    problem.expect(expected)


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("wire", HELD)
    def test_the_kernel_has_the_bits_of_the_twin(self, wire: str, mode: str) -> None:
        for seed in range(3):
            problem = Problem(wire, seed)
            expected = problem.by_the_twin(MODES[mode])
            held = [
                {name: torch.from_numpy(x.view(np.uint8)).to("cuda:0") for name, x in a.items()} for a in problem.arrays
            ]
            there = [
                (*(h[name].data_ptr() for name in NAMES), a["grad"].size, wire, row)
                for h, a, row in zip(held, problem.arrays, problem.rows)
            ]
            AdamSteps(0).run(there, MODES[mode], torch.cuda.current_stream(0).cuda_stream)
            for h, a in zip(held, problem.arrays):
                for name, x in a.items():
                    x.view(np.uint8)[:] = h[name].cpu().numpy()
            problem.expect(expected)
