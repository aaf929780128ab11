"""What the contract suite needs of a transport: ways to make one, memory on its device, and ways to hold copies up."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_offload.transport import HostTransport, Segment, Transport
from hf_offload.transport.cuda import CudaTransport
from support.fake_cupy import FakeCupy

LONG = 30.0  # seconds: a wait that takes this long has failed


def ours() -> set[threading.Thread]:
    """The threads of hf_offload that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("hf_offload-")}


LIVE: set[tuple[str, int]] = set()
"""Events and pinned memory that CUDA transports made by `CudaKind` have not freed yet, each as (what, handle)."""


def leftovers() -> set[Any]:
    """Whatever a transport has to give back when it ends, and has not."""
    return ours() | LIVE


class Hold:
    """Copies stop in front of it until `release()`. `reached` is set once one waits there."""

    def __init__(self, direction: str | None = None) -> None:
        self.direction = direction
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, direction: str, nbytes: int) -> float:
        if self.direction in (None, direction):
            self.reached.set()
            self._open.wait(LONG)
        return 0.0

    def release(self) -> None:
        self._open.set()


class FailAt:
    """The copy number `number` (from 0) of one direction raises."""

    def __init__(self, direction: str, number: int) -> None:
        self.direction, self.number, self.seen = direction, number, 0

    def __call__(self, direction: str, nbytes: int) -> float:
        if direction == self.direction:
            self.seen += 1
            if self.seen == self.number + 1:
                raise OSError("injected: the link is down")
        return 0.0


@dataclass
class Kind:
    """One transport under test. Another transport has its own class with the same methods."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    random_delays: bool = False
    cancels = True
    """Whether close() lets copies fail that are queued; else they are carried out first."""

    def make(
        self, slots: int = 2, slot_bytes: int = 4096, delay: Callable[[str, int], float] | None = None
    ) -> Transport:
        if delay is None and self.random_delays:
            dice = random.Random(0)
            delay = lambda direction, nbytes: dice.choice((0.0, 0.0, 2e-4, 2e-3))  # noqa: E731
        return HostTransport(slots, slot_bytes, delay=delay, **self.settings)

    def held(self, direction: str | None = None, **sizes: int) -> tuple[Transport, Hold]:
        """A transport whose copies (of one direction or both) do not start before `hold.release()`."""
        hold = Hold(direction)
        return self.make(delay=hold, **sizes), hold

    def failing(self, direction: str, number: int, **sizes: int) -> Transport:
        """A transport whose copy number `number` of `direction` fails."""
        return self.make(delay=FailAt(direction, number), **sizes)

    def memory(self, content: bytes) -> Tensor:
        """Device memory with this content; uint8, 1-D."""
        return torch.tensor(list(content), dtype=torch.uint8).to(self.device)

    def content(self, memory: Tensor) -> bytes:
        return memory.cpu().numpy().tobytes()


class Watched:
    """A CuPy, real or fake, that counts in `LIVE` and whose copies first stop at `delay`, on their stream.

    `FailAt` strikes in the call itself: CUDA reports most errors there.
    """

    def __init__(self, cupy: Any, delay: Callable[[str, int], float] | None) -> None:
        self.RawKernel = cupy.RawKernel
        self.cuda = SimpleNamespace(runtime=_WatchedRuntime(cupy.cuda.runtime, delay), Stream=cupy.cuda.Stream)


class _WatchedRuntime:
    def __init__(self, runtime: Any, delay: Callable[[str, int], float] | None) -> None:
        self._runtime, self._delay = runtime, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        direction = "d2h" if kind == self._runtime.memcpyDeviceToHost else "h2d"
        delay = self._delay
        if isinstance(delay, FailAt):
            delay(direction, size)
        elif delay is not None and getattr(delay, "direction", None) in (None, direction):
            self._runtime.launchHostFunc(stream, lambda _: time.sleep(delay(direction, size)), 0)
        self._runtime.memcpyAsync(dst, src, size, kind, stream)

    def eventCreateWithFlags(self, flags: int) -> int:
        event = self._runtime.eventCreateWithFlags(flags)
        LIVE.add(("event", event))
        return event

    def eventDestroy(self, event: int) -> None:
        self._runtime.eventDestroy(event)
        LIVE.remove(("event", event))

    def hostAlloc(self, size: int, flags: int) -> int:
        address = self._runtime.hostAlloc(size, flags)
        LIVE.add(("pinned", address))
        return address

    def freeHost(self, ptr: int) -> None:
        self._runtime.freeHost(ptr)
        LIVE.remove(("pinned", ptr))


@dataclass
class CudaKind(Kind):
    """The CUDA transport over the real CuPy, or over the fake one if there is one."""

    fake: FakeCupy | None = None
    cancels = False

    @property
    def index(self) -> int:
        return 0 if self.fake is None else 1  # not the one that threads start with: a forgotten setDevice shows

    def make(
        self, slots: int = 2, slot_bytes: int = 4096, delay: Callable[[str, int], float] | None = None
    ) -> Transport:
        stream = _torch_stream if self.fake is None else self.fake.current_stream(self.index)
        cupy = Watched(_real_cupy() if self.fake is None else self.fake, delay)
        return CudaTransport(slots, slot_bytes, self.index, current_stream=stream, timeout_s=LONG, cupy=cupy)

    def content(self, memory: Tensor) -> bytes:
        """As the current stream sees it."""
        if self.fake is not None:
            self.fake.synchronize(self.index, self.fake.current_stream(self.index)())
        return memory.cpu().numpy().tobytes()


def _real_cupy() -> Any:
    import cupy

    return cupy


def _torch_stream() -> int:
    return torch.cuda.current_stream(0).cuda_stream


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy"),
]
KINDS = (
    Kind("host"),
    Kind("host-link", {"link_gb_s": 2.0, "link_latency_us": 100.0}),
    Kind("host-random-delays", random_delays=True),
    CudaKind("cuda-fake", fake=FakeCupy()),
    CudaKind("cuda-fake-random-delays", fake=FakeCupy(delays=(0.0, 0.0, 2e-4, 2e-3))),
    pytest.param(CudaKind("cuda", device="cuda:0"), marks=needs_gpu),
)


def segment(memory: Tensor, offset: int, start: int = 0, nbytes: int | None = None, owner: Any = None) -> Segment:
    """`nbytes` of `memory` from byte `start` (default: all of it), at byte `offset` of the slot."""
    length = memory.numel() - start if nbytes is None else nbytes
    return Segment(memory.data_ptr() + start, length, offset, memory if owner is None else owner)


def packed(memories: Sequence[Tensor], gap: int = 0) -> list[Segment]:
    """One segment a memory, one behind the other in the slot, `gap` bytes between them."""
    found, at = [], 0
    for memory in memories:
        found.append(segment(memory, at))
        at += memory.numel() + gap
    return found


def fill(slot: Any, content: bytes) -> None:
    """Write `content` to the start of a host slot."""
    slot[: len(content)] = list(content)


def exit_code(child: int) -> int:
    """The exit code of a forked child, which is killed if it hangs."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the forked child hangs")
