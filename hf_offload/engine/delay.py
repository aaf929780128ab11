"""One step of staleness: the weights a step computes reach the device in the next one. Not exact, and opt-in."""

from __future__ import annotations

from collections.abc import Sequence

from hf_offload.engine.work import ArenaWork, BucketWork


class Delay:
    """Which buckets are delivered when. Known to the training thread alone.

    Args:
        warmup_steps: exact steps first, counted by the state's own step counts, so that a resumed run goes on the same.

    Attributes:
        pending: buckets that were stepped and whose weights the device does not have yet.
        delivering: whether their delivery has begun, outside of a step.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self.pending: Sequence[BucketWork] = ()
        self.delivering = False

    def next(self, buckets: Sequence[BucketWork], steps: int) -> Sequence[BucketWork]:
        """What is delivered in the step that takes `buckets`; `steps`: the most steps a parameter has taken.

        The very same `buckets` while the delay has not begun.
        """
        if steps < self._warmup_steps and not self.pending:
            return buckets
        delivered, self.pending = self.pending, buckets
        return delivered

    def note_weights(self) -> None:
        """After this step's own writes: from now on nobody may write to weights with a pending update."""
        for work in works_of(self.pending):
            work.note_weights()

    def end(self) -> None:
        """What was pending is on its way."""
        self.pending, self.delivering = (), False

    def overwritten(self) -> bool:
        """Whether somebody wrote to a weight for which an update is pending."""
        return not self.delivering and any(work.written() for work in works_of(self.pending))


def works_of(buckets: Sequence[BucketWork]) -> list[ArenaWork]:
    """What the buckets are parts of, each once."""
    return list({id(b.work): b.work for b in buckets}.values())
