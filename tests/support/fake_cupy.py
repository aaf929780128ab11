"""A CuPy without a GPU: the part of it that `transport/cuda*.py` and
`kernels/cuda` use, as asynchronous and as unforgiving as CUDA.

Device memory is ordinary memory. Each stream runs its operations on a thread of its own, which sleeps before each as
`delays` says; a copy reads its source when the stream reaches it. What CUDA forbids or leaves undefined raises here: a
destroyed handle, an event on another device's stream, a call with the wrong device current, any call in a forked child.
`tests/transport/test_cuda_signatures.py` compares names and arguments with the real CuPy.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hf_offload.kernels import cpu

NOT_READY, NO_MEMORY, BAD_HANDLE, FAILED = 600, 2, 400, 719
FORKED = 77
"""The exit code of a forked child that calls CUDA."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        names = {NO_MEMORY: "cudaErrorMemoryAllocation: out of memory", BAD_HANDLE: "cudaErrorInvalidResourceHandle",
                 FAILED: "cudaErrorLaunchFailure: unspecified launch failure"}  # fmt: skip
        super().__init__(names.get(status, f"cudaError {status}"))
        self.status = status


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class _Record:
    """One recording of an event: reached once, at `when`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.when = 0.0

    def reach(self) -> None:
        self.when = time.perf_counter()
        self.reached.set()


class _Event:
    def __init__(self, device: int, timed: bool) -> None:
        self.device, self.timed = device, timed
        self.record: _Record | None = None


class _Queue:
    """A stream's operations. Its thread lives while there are any."""

    def __init__(self, device: int, fake: FakeCupy) -> None:
        self.device = device
        self._fake = fake
        self._lock = threading.Lock()
        self._operations: deque[Callable[[], object]] = deque()
        self.busy = False

    def put(self, operation: Callable[[], object]) -> None:
        with self._lock:
            self._operations.append(operation)
            if self.busy:
                return
            self.busy = True
        threading.Thread(target=self._run, name="fake-stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._fake.delay())
            operation = self._operations[0]
            try:
                if not self._fake.failed:
                    operation()
            except BaseException:
                traceback.print_exc()
                self._fake.failed = True
            del operation
            with self._lock:
                self._operations.popleft()
                if not self._operations:
                    self.busy = False
                    return


class _Runtime:
    """cupy.cuda.runtime."""

    eventDefault, eventDisableTiming = 0, 2
    hostAllocPortable = 1
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    streamNonBlocking = 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, fake: FakeCupy) -> None:
        self._fake = fake

    def getDevice(self) -> int:
        self._fake.called("getDevice")
        return self._fake.device

    def setDevice(self, device: int) -> None:
        self._fake.called("setDevice")
        if not 0 <= device < self._fake.devices:
            raise CUDARuntimeError(101)
        self._fake.local.device = device

    def hostAlloc(self, size: int, flags: int) -> int:
        self._fake.called("hostAlloc")
        if size > self._fake.pinnable:
            raise CUDARuntimeError(NO_MEMORY)
        memory = mmap.mmap(-1, max(size, 1))
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
        self._fake.pinned[address] = (size, memory)
        return address

    def freeHost(self, ptr: int) -> None:
        self._fake.called("freeHost")
        self._fake.pinned.pop(ptr)[1].close()  # a copy that still runs crashes

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        fake = self._fake
        fake.called("memcpyAsync")
        queue = fake.queue(stream)
        host = dst if kind == self.memcpyDeviceToHost else src
        if fake.is_pinned(host, size):
            queue.put(lambda: _move(dst, src, size))
        elif kind == self.memcpyDeviceToHost:  # pageable: the call returns when it is over
            ended = threading.Event()
            queue.put(lambda: (_move(dst, src, size), ended.set())[0])
            ended.wait(30.0)
        else:
            staged = ctypes.string_at(src, size)
            queue.put(lambda: _move(dst, _address(staged), size))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._fake.called("eventCreateWithFlags")
        return self._fake.handle(_Event(self._fake.device, flags != self.eventDisableTiming))

    def eventDestroy(self, event: int) -> None:
        self._fake.called("eventDestroy")
        self._event(event)
        del self._fake.handles[event]

    def eventRecord(self, event: int, stream: int) -> None:
        self._fake.called("eventRecord")
        found, queue = self._event(event), self._fake.queue(stream)
        if found.device != queue.device:
            raise CUDARuntimeError(BAD_HANDLE)
        found.record = _Record()
        queue.put(found.record.reach)

    def eventQuery(self, event: int) -> int:
        self._fake.called("eventQuery")
        record = self._event(event).record
        if self._fake.failed:
            return FAILED
        return 0 if record is None or record.reached.is_set() else NOT_READY

    def eventElapsedTime(self, start: int, end: int) -> float:
        self._fake.called("eventElapsedTime")
        events = [self._event(e) for e in (start, end)]
        if not all(e.timed and e.record is not None for e in events):
            raise CUDARuntimeError(BAD_HANDLE)
        first, last = (e.record for e in events)
        assert first is not None and last is not None
        if not (first.reached.is_set() and last.reached.is_set()):
            raise CUDARuntimeError(NOT_READY)
        return float(np.float32((last.when - first.when) * 1e3))

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self._fake.called("streamWaitEvent")
        record = self._event(event).record
        if record is not None:
            self._fake.queue(stream).put(lambda: _wait(record, self._fake))

    def streamQuery(self, stream: int) -> int:
        self._fake.called("streamQuery")
        if self._fake.failed:
            return FAILED
        return NOT_READY if self._fake.queue(stream).busy else 0

    def streamSynchronize(self, stream: int) -> None:
        self._fake.called("streamSynchronize")
        self._fake.synchronize(self._fake.device, stream)

    def malloc(self, size: int) -> int:
        self._fake.called("malloc")
        if size > self._fake.allocatable:
            raise CUDARuntimeError(NO_MEMORY)
        memory = np.full(size, 0xEE, np.uint8)
        self._fake.allocated[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, ptr: int) -> None:
        self._fake.called("free")
        del self._fake.allocated[ptr]

    def launchHostFunc(self, stream: int, callback: Callable[[Any], None], arg: int) -> None:
        self._fake.called("launchHostFunc")
        self._fake.queue(stream).put(lambda: callback(arg))

    def _event(self, event: int) -> _Event:
        found = self._fake.handles.get(event)
        if not isinstance(found, _Event) or found.device != self._fake.device:
            raise CUDARuntimeError(BAD_HANDLE)
        return found


class _Stream:
    """cupy.cuda.Stream."""

    def __init__(self, fake: FakeCupy) -> None:
        fake.called("Stream")
        self._fake = fake
        self.ptr = fake.handle(_Queue(fake.device, fake))

    def __enter__(self) -> _Stream:
        self._fake.local.stack = [*getattr(self._fake.local, "stack", []), self.ptr]
        return self

    def __exit__(self, *error: object) -> None:
        self._fake.local.stack.pop()

    def __del__(self) -> None:
        self._fake.check_process()
        del self._fake.handles[self.ptr]


class _Device:
    """cupy.cuda.Device, as a context."""

    def __init__(self, fake: FakeCupy, index: int) -> None:
        self._fake, self._index = fake, index
        self._before: list[int] = []

    def __enter__(self) -> _Device:
        self._before.append(self._fake.device)
        self._fake.cuda.runtime.setDevice(self._index)
        return self

    def __exit__(self, *error: object) -> None:
        self._fake.cuda.runtime.setDevice(self._before.pop())


class _RawKernel:
    """cupy.RawKernel: what a kernel does is looked up in `KERNELS` by its name."""

    def __init__(self, fake: FakeCupy, code: str, name: str) -> None:
        self._fake, self._name = fake, name
        assert f"__global__ void {name}(" in code

    def compile(self, log_stream: Any = None) -> None:
        self._fake.called("compile")
        if self._fake.compiles is not None:
            raise self._fake.compiles

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        self._fake.called("launch")
        values = [a.copy() for a in args]  # by value, as they are now
        assert all(a.size == 1 for a in values) and sum(a.itemsize for a in values) <= 4096
        stack = getattr(self._fake.local, "stack", [])
        self._fake.queue(stack[-1] if stack else 0).put(lambda: KERNELS[self._name](grid[0], *values))


def _pack(rows: int, table: np.ndarray, slot: np.uint64, up: np.int32) -> None:
    for pointer, offset, nbytes in table["row"][0][:rows].tolist():
        host = int(slot) + offset
        _move(*((pointer, host) if up else (host, pointer)), nbytes)


def _squares(grid: int, table: np.ndarray, rows: np.int32, leaves: np.uint64, start: np.uint32) -> None:
    """Block by block as `kernels/cuda/reduce.py` says, in NumPy."""
    found = table["row"][0][: int(rows)].tolist()
    out = _view(int(leaves) + 8 * int(start), grid, np.float64)
    for leaf in range(int(start), int(start) + grid):
        pointer, numel, first, wire = next(row for row in reversed(found) if row[2] <= leaf)
        begin = (leaf - first) << 16
        n = max(0, min(1 << 16, numel - begin))
        values = np.zeros(-(-n // 256) * 256)
        if wire == 2:
            values[:n] = _view(pointer + 4 * begin, n, np.float32)
        elif wire == 1:
            values[:n] = _view(pointer + 2 * begin, n, np.float16)
        else:
            values[:n] = (_view(pointer + 2 * begin, n, np.uint16).astype(np.uint32) << 16).view(np.float32)
        lanes = np.zeros(256)
        for row in values.reshape(-1, 256):
            lanes += row * row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        out[leaf - int(start)] = lanes[0]


def _adam(grid: int, table: np.ndarray, rows: np.int32, mode: np.int32) -> None:
    """As `kernels/cuda/adam.py` says, by the Numba kernel. The grid must be what the rows need."""
    blocks = 0
    for row in table["row"][0][: int(rows)]:
        n, wire = int(row["numel"]), ("bfloat16", "float16", "float32")[int(row["wire"])]
        assert blocks == row["first"]
        blocks += -(-n // 4096)
        held = np.float32 if wire == "float32" else np.uint16
        state = [_view(int(row[name]), n, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")]
        weight = np.empty(n, held) if mode == 1 else _view(int(row["weight"]), n, held)
        if mode == 2:
            cpu.narrow(state[0], weight, wire, 1)
        else:
            grad, coef = _view(int(row["grad"]), n, held), row["coefficients"][None].copy()
            cpu.adam_step(*state, grad, weight, np.array([0, n]), coef, wire=wire, threads=1)
    assert blocks == grid


def _view(address: int, n: int, dtype: Any) -> np.ndarray:
    raw = (ctypes.c_uint8 * (n * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


KERNELS: dict[str, Callable[..., None]] = {"hf_offload_pack": _pack, "hf_offload_squares": _squares,
                                          "hf_offload_adam": _adam}  # fmt: skip


class FakeCupy:
    """The module `cupy`.

    Args:
        devices: how many there are; each thread starts at device 0.
        delays: seconds to sleep before an operation of a stream, one of these at random.
        pinnable: bytes that one `hostAlloc` may ask for.
    """

    def __init__(self, devices: int = 2, delays: Sequence[float] = (0.0,), pinnable: float = float("inf")) -> None:
        self.devices, self.pinnable = devices, pinnable
        self.allocatable = float("inf")
        self.allocated: dict[int, Any] = {}
        self.compiles: Exception | None = None
        self.failed = False
        """Whether the device has failed, for good: set it, and every call says so."""
        self.calls: Counter[str] = Counter()
        self.handles: dict[int, Any] = {}
        self.pinned: dict[int, tuple[int, Any]] = {}
        self.local = threading.local()
        self._numbers = itertools.count(0x7000)
        self._default = [_Queue(i, self) for i in range(devices)]
        self._delays, self._dice = delays, random.Random(0)
        self._pid = os.getpid()
        self.cuda = SimpleNamespace(
            runtime=_Runtime(self),
            Stream=lambda null=False, non_blocking=False: _Stream(self),
            Device=lambda device: _Device(self, device),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        )

    def RawKernel(self, code: str, name: str) -> _RawKernel:
        return _RawKernel(self, code, name)

    # ---- for tests

    def current_stream(self, device: int) -> Callable[[], int]:
        """What torch would say on that device; `use_stream` changes it for one thread."""
        return lambda: getattr(self.local, "torch", {}).get(device, 0)

    def use_stream(self, device: int, stream: int) -> None:
        self.local.torch = {**getattr(self.local, "torch", {}), device: stream}

    def run_on(self, device: int, stream: int, operation: Callable[[], object]) -> None:
        """A kernel: any function, run when `stream` of `device` reaches it."""
        self._of(device, stream).put(operation)

    def synchronize(self, device: int, stream: int) -> None:
        """Wait until `stream` of `device` has done all that it was asked for."""
        ended = threading.Event()
        self.run_on(device, stream, ended.set)
        if not ended.wait(0.0 if self.failed else 30.0):
            raise CUDARuntimeError(FAILED)

    # ---- for the parts

    @property
    def device(self) -> int:
        return getattr(self.local, "device", 0)

    def called(self, name: str) -> None:
        self.check_process()
        self.calls[name] += 1

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            os._exit(FORKED)

    def handle(self, thing: Any) -> int:
        number = next(self._numbers)
        self.handles[number] = thing
        return number

    def queue(self, stream: int) -> _Queue:
        """The stream by its handle, 0 being the current device's own; its device must be current."""
        found = self._of(self.device, stream)
        if found.device != self.device:
            raise CUDARuntimeError(BAD_HANDLE)
        return found

    def _of(self, device: int, stream: int) -> _Queue:
        found = self.handles.get(stream) if stream else self._default[device]
        if not isinstance(found, _Queue):
            raise CUDARuntimeError(BAD_HANDLE)
        return found

    def is_pinned(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + n for start, (n, _) in self.pinned.items())

    def delay(self) -> float:
        return self._dice.choice(self._delays)


def _move(to: int, source: int, nbytes: int) -> None:
    ctypes.memmove(to, source, nbytes)


def _address(content: bytes) -> int:
    found = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
    assert found is not None
    return found


def _wait(record: _Record, fake: FakeCupy) -> None:
    while not record.reached.wait(0.05) and not fake.failed:
        pass
