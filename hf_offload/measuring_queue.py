"""What the engine's own code takes between two buckets where its thread has no time to rest: from a step's spans.

*In order* the thread waits for every copy. Its core rests meanwhile, and whatever it does next takes longer: the system
wakes it up, and its code and data have left the core's caches. Where buckets queue up there is none of this.
"""

from __future__ import annotations

from collections import defaultdict

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


def queued(spans: Spans, slots: int) -> list[float]:
    """Seconds from the end of a bucket's kernel to the begin of the next one's, in *overlapped* steps, where at that
    end the next gradients were there already, and the slot for the next weights was free.

    Args:
        slots: of the ring, each way.
    """
    found = []
    for phases in spans.of.values():
        down, kernels, up = (phases[name] for name in ("d2h", "host_step", "h2d"))
        for k in range(1, len(kernels)):
            ended, begun = kernels[k - 1][1], kernels[k][0]
            if down[k][1] <= ended and (k < slots or up[k - slots][1] <= ended):
                found.append(begun - ended)
    return found
