"""The fused AdamW step of arrays on a GPU, with the bits of `kernels.cpu.adam_step`, its twin.

The same float32 operations in the same order, each rounded by itself: `__fmul_rn` and its like are never fused into an
FMA. 28 bytes of device memory traffic per parameter with 16-bit weights, and no other memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_offload.kernels.cpu.adam import NUM_COEF
from hf_offload.kernels.cuda.reduce import WIRES, import_cupy, loaded

NAME = "hf_offload_adam"
ROWS = 38  # arrays of 104 bytes a launch: a kernel's arguments are 4096 bytes at most
THREADS, SHARE = 256, 4096
"""Threads of a block, and elements that it steps."""
STEP, STEP_STATE, WRITE_WEIGHTS = 0, 1, 2
"""State and weights; state alone; weights from masters alone."""
_ROW = np.dtype(
    [(name, np.uint64) for name in ("master", "exp_avg", "exp_avg_sq", "grad", "weight", "numel")]
    + [("first", np.uint32), ("wire", np.uint32), ("coefficients", np.float32, (NUM_COEF,))]
)
_TABLE = np.dtype([("row", _ROW, (ROWS,))])

_BODY = """
typedef unsigned long long u64;
struct Row {
    float* master; float* exp_avg; float* exp_avg_sq; const void* grad; void* weight; u64 numel;
    unsigned int first; unsigned int wire;
    float active, scale, l2, keep1, fade1, rest1, beta2, rest2, decay, step_size, root_scale, eps;
};
struct Table { Row row[ROWS]; };

__device__ float one_nan(float x) { return x == x ? x : __int_as_float(0x7FC00000); }

__device__ float widened(const Row& row, u64 i)
{
    if (row.wire == 2) return static_cast<const float*>(row.grad)[i];
    const unsigned short bits = static_cast<const unsigned short*>(row.grad)[i];
    if (row.wire == 0) return __int_as_float((int)bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ void write_weight(const Row& row, u64 i, float theta)
{
    if (row.wire == 2) {
        static_cast<float*>(row.weight)[i] = theta;
        return;
    }
    unsigned short bits;
    if (row.wire == 0) {
        const unsigned int wide = (unsigned int)__float_as_int(one_nan(theta));
        bits = (unsigned short)((wide + 0x7FFFu + (wide >> 16 & 1u)) >> 16);
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(theta));
        if (theta != theta) bits = 0x7E00;
    }
    static_cast<unsigned short*>(row.weight)[i] = bits;
}

__device__ float stepped(const Row& c, u64 i)
{
    const float theta = c.master[i], m_old = c.exp_avg[i], v_old = c.exp_avg_sq[i];
    const float grad = __fmul_rn(c.scale, widened(c, i));
    float m, v;
    if (c.l2 == 0.0f) {
        m = __fadd_rn(__fsub_rn(__fmul_rn(c.keep1, m_old), __fmul_rn(c.fade1, m_old)), __fmul_rn(c.rest1, grad));
        v = __fadd_rn(__fmul_rn(c.beta2, v_old), __fmul_rn(__fmul_rn(c.rest2, grad), grad));
    } else {  // in double precision, rounded once: an error of the sum would count twice in its square
        const double g = __dadd_rn((double)grad, __dmul_rn((double)c.l2, (double)theta));
        const double faded = __dsub_rn(__dmul_rn((double)c.keep1, (double)m_old),
                                       __dmul_rn((double)c.fade1, (double)m_old));
        m = __double2float_rn(__dadd_rn(faded, __dmul_rn((double)c.rest1, g)));
        v = __double2float_rn(__dadd_rn(__dmul_rn((double)c.beta2, (double)v_old),
                                        __dmul_rn(__dmul_rn((double)c.rest2, g), g)));
    }
    m = one_nan(m);
    v = one_nan(v);
    const float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.root_scale), c.eps);
    const float step = __fmul_rn(c.step_size, __fdiv_rn(m, root));
    c.exp_avg[i] = m;
    c.exp_avg_sq[i] = v;
    return c.master[i] = one_nan(__fsub_rn(__fmul_rn(c.decay, theta), step));
}

// Block b steps SHARE elements of the array in whose blocks it lies.
extern "C" __global__ void hf_offload_adam(const Table table, int rows, int mode)
{
    int low = 0, high = rows - 1;  // the last row that starts at or before this block
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.row[middle].first <= blockIdx.x) low = middle; else high = middle - 1;
    }
    const Row& row = table.row[low];
    const u64 begin = (u64)(blockIdx.x - row.first) * SHARE;
    const u64 end = begin + SHARE < row.numel ? begin + SHARE : row.numel;
    for (u64 i = begin + threadIdx.x; i < end; i += THREADS) {
        const float theta = mode == 2 ? row.master[i] : stepped(row, i);
        if (mode != 1) write_weight(row, i, theta);
    }
}
"""
SOURCE = f"#define ROWS {ROWS}\n#define SHARE {SHARE}ull\n#define THREADS {THREADS}{_BODY}"

Arrays = tuple[int, int, int, int, int, int, str, np.ndarray]
"""Device addresses of master, exp_avg and exp_avg_sq (float32[n]), of gradient and weight (wire[n]); n; the wire; the
coefficients, float32[NUM_COEF], of `kernels.cpu.coefficients`."""


class AdamSteps:
    """Steps arrays on one device, in place: a kernel, a stream, and two events that tie it to torch's.

    Args:
        device: torch's index of the device.
        cupy: the CuPy module; None imports it.

    Raises:
        CompileError: there will be no kernel.
        RuntimeError: the device has no memory left; in the words accelerate looks for.
    """

    def __init__(self, device: int, cupy: Any = None) -> None:
        self._cupy = cupy or import_cupy()
        self._device = device
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(device):
            self._kernel = loaded(self._cupy, SOURCE, NAME, "the kernel of Adam's step")
            self._stream: Any = self._cupy.cuda.Stream(non_blocking=True)
            self._events = tuple(runtime.eventCreateWithFlags(runtime.eventDisableTiming) for _ in range(2))
        freed = weakref.finalize(self, _free, self._cupy, device, self._events, os.getpid())
        freed.atexit = False
        self._freed = freed

    def run(self, arrays: Sequence[Arrays], mode: int, stream: int) -> None:
        """Step `arrays` as if on `stream`, a cudaStream_t as int: after all that it was asked for, and before all that
        it will be. Returns at once.

        Args:
            mode: STEP, STEP_STATE or WRITE_WEIGHTS.
        """
        filled = [a for a in arrays if a[5]]
        runtime, (begin, end) = self._cupy.cuda.runtime, self._events
        with self._cupy.cuda.Device(self._device):
            runtime.eventRecord(begin, stream)
            runtime.streamWaitEvent(self._stream.ptr, begin)
            for at in range(0, len(filled), ROWS):
                table, blocks = _table(filled[at : at + ROWS])
                rows = min(ROWS, len(filled) - at)
                with self._stream:
                    self._kernel((blocks,), (THREADS,), (table, np.int32(rows), np.int32(mode)))
            runtime.eventRecord(end, self._stream.ptr)
            runtime.streamWaitEvent(stream, end)

    def close(self) -> None:
        """Let go of stream and events; what they were asked for still ends. May be called twice."""
        self._freed()
        self._stream = None


def _free(cupy: Any, device: int, events: tuple[int, ...], pid: int) -> None:
    if os.getpid() != pid:
        return  # forked off: CUDA works in the parent only
    with cupy.cuda.Device(device):
        for event in events:
            cupy.cuda.runtime.eventDestroy(event)


def _table(arrays: Sequence[Arrays]) -> tuple[np.ndarray, int]:
    """The kernel's argument, and how many blocks there are."""
    table, blocks = np.zeros(1, _TABLE), 0
    for row, (*numbers, wire, coefficients) in zip(table["row"][0], arrays):
        for name, number in zip(_ROW.names or (), numbers):
            row[name] = number
        row["first"], row["wire"], row["coefficients"] = blocks, WIRES[wire], coefficients
        blocks += -(-numbers[5] // SHARE)
    return table, blocks
