"""What the engine's own code takes between two buckets where its thread has no time to rest: from a step's spans.

*In order* the thread waits for every copy: the system wakes it up, on a core that has rested, and its own code takes
longer. Where buckets queue up there is none of this. The kernels are as fast either way: on an Intel Xeon of two cores
with 2e6 parameters in a bucket, 1.03 instead of 1.01 ns a parameter after 1.5 ms of rest.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hf_offload.timeline import NoTimeline


class Spans(NoTimeline):
    """Keeps the spans of each step in memory.

    Attributes:
        of: by the step's number and the phase: from when to when, in the order of the buckets; seconds.
    """

    def __init__(self) -> None:
        self.of: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))

    def add(self, phase: str, name: str, start: float, end: float, step: int) -> None:
        self.of[step][phase].append((start, end))


class Queued(NamedTuple):
    """Seconds from the end of a bucket's kernel to the begin of the next one's, where nothing had to be waited for.

    Attributes:
        up: between buckets whose weights are sent up; down: between buckets whose gradients come down.
    """

    up: list[float]
    down: list[float]


def queued(spans: Spans, slots: int) -> Queued:
    """What *delayed* steps show that are awaited at once: each steps its buckets, then sends their weights up.

    A gap between two kernels counts if, when the first one ended, the next gradients were there already, or the slot
    for the next weights was free.

    Args:
        slots: of the ring, each way.
    """
    found = Queued([], [])
    for phases in spans.of.values():
        down, kernels, up = (phases[name] for name in ("d2h", "host_step", "h2d"))
        stepping, delivering = kernels[: len(down)], kernels[len(down) :]
        for k in range(1, len(delivering)):
            ended = delivering[k - 1][1]
            if k < slots or up[k - slots][1] <= ended:
                found.up.append(delivering[k][0] - ended)
        for k in range(1, len(stepping)):
            ended = stepping[k - 1][1]
            if down[k][1] <= ended:
                found.down.append(stepping[k][0] - ended)
    return found
