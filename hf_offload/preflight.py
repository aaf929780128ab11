"""The refusal of a plan that needs more host memory than there is, with the numbers and what would help. Stdlib only.

What a plan does not count, since it is none: saving a checkpoint. `torch.save(optimizer.state_dict())` writes the flat
host state piece by piece without a copy, and what it leaves in the page cache the kernel takes back on demand; loading
with `mmap=True` copies out of the page cache just so (measured with 60 million parameters: below 0.1 MB each, of 720
MB). `torch.load` without it puts 12 bytes a parameter beside the state before we are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hf_offload import hostmem
from hf_offload.errors import HostMemoryError, explain
from hf_offload.hostmem import MORE_MEMORY, HostMemory
from hf_offload.planner import CACHE_LINE, GB, pinned_ring_bytes

SMALLEST_BUCKET = 1 << 16
"""Bytes below which no bucket is advised: each is a copy and a host step of its own."""


class WayOut(Protocol):
    """Something that can be changed so that a process takes less."""

    def text(self, over: int) -> str | None:
        """What to change to take at least `over` bytes less, as the rest of a sentence; None where it would not do."""
        ...


@dataclass(frozen=True)
class Saves:
    """A change that saves `nbytes`, all or nothing."""

    change: str
    nbytes: int

    def text(self, over: int) -> str | None:
        return self.change if self.nbytes >= over else None


@dataclass(frozen=True)
class SmallerRing:
    """Fewer slots, down to two each way; else smaller buckets, too."""

    slots: int
    bucket_bytes: int

    def text(self, over: int) -> str | None:
        return ring_within(pinned_ring_bytes(self.bucket_bytes, self.slots) - over, self.slots, self.bucket_bytes)


@dataclass(frozen=True)
class FewerParameters:
    """Of `count` trainable parameters, each taking `bytes_each`."""

    count: int
    bytes_each: int

    def text(self, over: int) -> str | None:
        fit = self.count - -(-over // self.bytes_each)
        return f"train at most {fit:,} parameters (freeze some, or use LoRA)" if fit > 0 else None


def ring_within(room: int, slots: int, bucket_bytes: int) -> str | None:
    """The settings with which a ring takes at most `room` bytes, as "set ring_slots=2"; None where none is of use.

    Args:
        slots, bucket_bytes: the settings with which it takes more.
    """
    fewer = max(0, room) // pinned_ring_bytes(bucket_bytes, 1)
    if fewer >= 2:
        return f"set ring_slots={fewer}"
    fewest = min(2, slots)
    smaller = max(0, room) // (2 * fewest) // CACHE_LINE * CACHE_LINE
    return f"set ring_slots={fewest} and bucket_bytes={smaller}" if smaller >= SMALLEST_BUCKET else None


def check_host_budget(
    need: Mapping[str, int], max_host_bytes: int | None, root: Path = Path("/"), ways: Sequence[WayOut] = ()
) -> None:
    """Refuses what does not fit this process, before anything is allocated.

    Args:
        need: bytes of each line of the plan, in the order in which an error lists them.
        max_host_bytes: the user's cap on the sum, or None.
        root: as in `hostmem.available_host_bytes`.
        ways: what may help; those that would are named.

    Raises:
        HostMemoryError: the sum is above the cap, or above what is available. Where that is unknown, it passes.
    """
    needed = sum(need.values())
    if max_host_bytes is not None and needed > max_host_bytes:
        cause = f"the plan takes {as_bytes(needed)} of host memory"
        options = [f"raise max_host_bytes to at least {needed}", *_that_help(ways, needed - max_host_bytes)]
        raise HostMemoryError(explain("max_host_bytes", max_host_bytes, cause, any_of(options)) + _table(need))
    memory = hostmem.available_host_bytes(root)
    if memory.known and needed > memory.available:
        cause = f"the plan takes {as_bytes(needed)}, but {_left(memory)}"
        options = [*_that_help(ways, needed - memory.available), *_at_the_limit(memory, needed, root)]
        raise HostMemoryError(explain("host memory", memory.source, cause, any_of(options)) + _table(need))


def check_node_budget(
    need: Mapping[str, int], ranks: int, ahead: int | None, root: Path = Path("/"), ways: Sequence[WayOut] = ()
) -> None:
    """Refuses what does not fit `ranks` processes on this node, each with the same need.

    They do not look at the same moment, so a part of what each other one takes may be gone from what is available, and
    would be counted twice.

    Args:
        need: of one process.
        ahead: bytes that each of the others may have taken of its own need when this one looks. None: all of it; then
            the need of all is compared with what there is in all, not with what is left.
        root, ways: as in `check_host_budget`.

    Raises:
        HostMemoryError: it does not fit.
    """
    if ranks < 2:
        return
    needed = sum(need.values())
    for memory in hostmem.host_limits(root):
        room = memory.total if ahead is None else memory.available
        if not memory.shared or ranks * needed <= room + (ranks - 1) * (ahead or 0):
            continue
        cause = (
            f"{ranks} ranks share this node, and the plan takes {as_bytes(needed)} for each, "
            f"{as_bytes(ranks * needed)} together, but {_left(memory)}"
        )
        fit = room // needed
        fewer = [f"run at most {fit} rank{'s' if fit > 1 else ''} on a node"] if fit else []
        options = [*fewer, *_that_help(ways, -(-(ranks * needed - room) // ranks))]
        options += _at_the_limit(memory, ranks * needed, root)
        raise HostMemoryError(explain("host memory", memory.source, cause, any_of(options)) + _table(need, ranks))


@contextmanager
def allocating(need: Mapping[str, int]) -> Iterator[None]:
    """Around an allocation of `need`, by line, that seemed to fit. Raises HostMemoryError where the system refuses."""
    try:
        yield
    except MemoryError as error:
        memory = hostmem.available_host_bytes()
        cause = f"the system refused memory that the plan takes ({error or 'no reason given'}), though {_left(memory)}"
        remedy = "End other programs, raise the limits on this process (ulimit -a), or train fewer parameters"
        raise HostMemoryError(explain("host memory", memory.source, cause, remedy) + _table(need)) from error


def as_bytes(count: int) -> str:
    return f"{count / GB:.2f} GB ({count} bytes)"


def _left(memory: HostMemory) -> str:
    if not memory.known:
        return "how much is left is not known"
    return f"of {as_bytes(memory.total)} only {as_bytes(memory.available)} are left"


def _that_help(ways: Sequence[WayOut], over: int) -> list[str]:
    return [text for way in ways if (text := way.text(over)) is not None]


def _at_the_limit(memory: HostMemory, needed: int, root: Path) -> list[str]:
    """What helps without a change of the plan: more left of this limit, or a higher one, if no other is in the way."""
    others = [m for m in hostmem.host_limits(root) if m.shared and m.source != memory.source]
    room_elsewhere = all(needed <= m.available for m in others)
    options = [memory.to_free] if memory.to_free and needed + hostmem.own_bytes(root) <= memory.total else []
    return [*options, memory.to_raise if room_elsewhere else MORE_MEMORY]


def any_of(options: Sequence[str]) -> str:
    """A sentence that offers each of `options`."""
    text = "; or ".join(options)
    return text[:1].upper() + text[1:]


def _table(need: Mapping[str, int], ranks: int = 1) -> str:
    needed = sum(need.values())
    lines = [*need.items(), ("sum" if ranks == 1 else "sum, one rank", needed)]
    if ranks > 1:
        lines.append((f"{ranks} ranks", ranks * needed))
    width = max(len(name) for name, _ in lines)
    return "".join(f"\n  {name:<{width}}  {as_bytes(count)}" for name, count in lines)
