"""The sum of squares of arrays on a GPU, with the bits that `kernels.cpu.sum_of_squares` gives on the host.

The same tree: 256 lanes a block of 65536 elements, halved; then blocks by `sum_of_blocks` on the host. A square of a
float32 is exact in float64, so it does not matter whether the compiler fuses it with the addition.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hf_offload.kernels.cpu.reduce import BLOCK, CHUNK, LANES, sum_of_blocks

NAME = "hf_offload_squares"
ROWS = 160  # arrays of 24 bytes a launch: a kernel's arguments are 4096 bytes at most
WIRES = {"bfloat16": 0, "float16": 1, "float32": 2}
_LEAVES = CHUNK // BLOCK
_ROW = np.dtype([("pointer", np.uint64), ("numel", np.uint64), ("first", np.uint32), ("wire", np.uint32)])
_TABLE = np.dtype([("row", _ROW, (ROWS,))])
_NO_MEMORY = 2  # cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY

_BODY = """
typedef unsigned long long u64;
struct Row { u64 pointer; u64 numel; unsigned int first; unsigned int wire; };
struct Table { Row row[ROWS]; };

__device__ double half_to_double(unsigned int bits)
{
    const u64 exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 0) return (double)mantissa * (1.0 / 16777216.0);
    const u64 shifted = exponent == 31 ? 2047 : exponent + 1008;
    return __longlong_as_double((long long)(shifted << 52 | mantissa << 42));  // the sign goes in the square
}

__device__ double element(const Row& row, u64 i)
{
    if (row.wire == 2) return (double)reinterpret_cast<const float*>(row.pointer)[i];
    const unsigned int bits = reinterpret_cast<const unsigned short*>(row.pointer)[i];
    return row.wire == 1 ? half_to_double(bits) : (double)__int_as_float((int)(bits << 16));
}

// Block b sums the squares of 65536 elements of the array in whose leaves it lies; beyond its end there is 0.
extern "C" __global__ void hf_offload_squares(const Table table, int rows, double* leaves, unsigned int start)
{
    __shared__ double lanes[LANES];
    const unsigned int leaf = start + blockIdx.x, lane = threadIdx.x;
    int low = 0, high = rows - 1;  // the last row that starts at or before this leaf
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.row[middle].first <= leaf) low = middle; else high = middle - 1;
    }
    const Row row = table.row[low];
    const u64 begin = (u64)(leaf - row.first) * BLOCK;
    const u64 end = begin + BLOCK < row.numel ? begin + BLOCK : row.numel;
    double sum = 0.0;
    for (u64 i = begin + lane; i < end; i += LANES) {
        const double value = element(row, i);
        sum += value * value;
    }
    lanes[lane] = sum;
    for (unsigned int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) lanes[lane] += lanes[lane + half];
    }
    if (lane == 0) leaves[leaf] = lanes[0];
}
"""
SOURCE = f"#define ROWS {ROWS}\n#define BLOCK {BLOCK}ull\n#define LANES {LANES}{_BODY}"


class CompileError(RuntimeError):
    """CuPy is not there, or cannot compile the kernel (no NVRTC, say)."""


class SquareSums:
    """Sums of squares of arrays on one device: a kernel, a stream, and 8 bytes of device memory per 65536 elements.

    Args:
        device: torch's index of the device.
        current_stream: gives the calling thread's current torch stream on that device, a cudaStream_t as int.
        cupy: the CuPy module; None imports it.

    Raises:
        CompileError: there will be no kernel.
        RuntimeError: the device has no memory left; in the words accelerate looks for.
    """

    def __init__(self, device: int, current_stream: Callable[[], int], cupy: Any = None) -> None:
        self._cupy = cupy or import_cupy()
        self._device = device
        self._current_stream = current_stream
        self._lock = threading.Lock()
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(device):
            self._kernel = loaded(self._cupy, SOURCE, NAME, "the kernel of the gradient norm")
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._event = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        self._leaves = _Leaves(self._cupy)
        weakref.finalize(self, _free, self._cupy, device, self._leaves, self._event, os.getpid()).atexit = False

    def sums_of_squares(self, arrays: Sequence[tuple[int, int, str]]) -> list[float]:
        """Σ x² of each array, in float64, once the current stream's work until now is done. Inf and NaN come through.

        One transfer for all. Blocks the caller, without the GIL.

        Args:
            arrays: (device address, elements, "bfloat16" | "float16" | "float32") of each contiguous array.

        Raises:
            RuntimeError: the device has no memory left; in the words accelerate looks for.
        """
        chunks = [-(-numel // CHUNK) for _, numel, _ in arrays]
        firsts = np.concatenate(([0], np.cumsum(chunks, dtype=np.int64))) * _LEAVES
        found = np.empty(int(firsts[-1]), np.float64)
        filled = [k for k, n in enumerate(chunks) if n]
        with self._lock, self._cupy.cuda.Device(self._device):
            self._run(arrays, filled, firsts, found)
        tree = found.reshape(-1, _LEAVES)
        rows = (firsts // _LEAVES).tolist()
        return [sum_of_blocks(tree[a:b]) for a, b in pairwise(rows)]

    def _run(
        self, arrays: Sequence[tuple[int, int, str]], filled: list[int], firsts: np.ndarray, found: np.ndarray
    ) -> None:
        if not filled:
            return
        runtime, stream = self._cupy.cuda.runtime, self._stream.ptr
        leaves = self._leaves.at_least(found.nbytes)
        runtime.eventRecord(self._event, self._current_stream())
        runtime.streamWaitEvent(stream, self._event)
        for at in range(0, len(filled), ROWS):
            part = filled[at : at + ROWS]
            table = np.zeros(1, _TABLE)
            for row, k in zip(table["row"][0], part):
                row["pointer"], row["numel"], row["first"] = arrays[k][0], arrays[k][1], firsts[k]
                row["wire"] = WIRES[arrays[k][2]]
            start, end = int(firsts[part[0]]), int(firsts[part[-1] + 1])
            with self._stream:
                self._kernel(
                    (end - start,), (LANES,), (table, np.int32(len(part)), np.uint64(leaves), np.uint32(start))
                )
        runtime.memcpyAsync(found.ctypes.data, leaves, found.nbytes, runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)


class _Leaves:
    """Device memory for the sums of the blocks; it only grows. The device must be current."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._nbytes = 0
        self._pointer = 0

    def at_least(self, nbytes: int) -> int:
        if nbytes > self._nbytes:
            self.free()
            try:
                self._pointer = self._cupy.cuda.runtime.malloc(nbytes)
            except Exception as error:
                _refuse_no_memory(error, f"{nbytes} bytes for the gradient norm")
                raise
            self._nbytes = nbytes
        return self._pointer

    def free(self) -> None:
        pointer, self._pointer, self._nbytes = self._pointer, 0, 0
        if pointer:
            self._cupy.cuda.runtime.free(pointer)


def _free(cupy: Any, device: int, leaves: _Leaves, event: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # forked off: CUDA works in the parent only
    with cupy.cuda.Device(device):
        leaves.free()
        cupy.cuda.runtime.eventDestroy(event)


def loaded(cupy: Any, source: str, name: str, what: str) -> Any:
    """A kernel, loaded on the current device: what is wrong with the compiler shows here and not in a step.

    Raises:
        CompileError, RuntimeError: as `SquareSums`.
    """
    try:
        kernel = cupy.RawKernel(source, name)
        kernel.compile()
    except Exception as error:
        _refuse_no_memory(error, what)
        raise CompileError(str(error)) from error
    return kernel


def _refuse_no_memory(error: Exception, what: str) -> None:
    if isinstance(error, MemoryError) or getattr(error, "status", None) == _NO_MEMORY:
        raise RuntimeError(
            f"CUDA out of memory. It ran out at {what} ({error}). Lower the batch size, or train fewer parameters."
        ) from error


def import_cupy() -> Any:
    """Raises CompileError where it cannot be."""
    try:
        import cupy
    except Exception as error:
        raise CompileError(f"CuPy cannot be imported: {error}") from error
    return cupy
