"""What the contract suite needs of a transport: ways to make one, memory on its device, and ways to hold copies up."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_offload.transport import HostTransport, Segment, Transport

LONG = 30.0  # seconds: a wait that takes this long has failed


def ours() -> set[threading.Thread]:
    """The threads of hf_offload that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("hf_offload-")}


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
    """One transport under test. A later transport adds its own Kind with the same five methods."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    random_delays: bool = False

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


KINDS = (
    Kind("host"),
    Kind("host-link", {"link_gb_s": 2.0, "link_latency_us": 100.0}),
    Kind("host-random-delays", random_delays=True),
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
