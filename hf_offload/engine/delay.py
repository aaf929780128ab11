"""One step of staleness: the weights a step computes reach the device in the next one. Not exact, and opt-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_offload.engine.work import ArenaWork, BucketWork


class Delay:
    """Which buckets are delivered when. Known to the training thread alone.

    Args:
        warmup_steps: exact steps first, counted by the state's own step counts, so that a resumed run goes on the same.
        under_way: gives what the newest step delivers.

    Attributes:
        delivering: whether the delivery of what is pending has begun, and no step that does it was taken.
    """

    def __init__(self, warmup_steps: int, under_way: Callable[[], object]) -> None:
        self._warmup_steps = warmup_steps
        self._under_way = under_way
        self._pending: Sequence[BucketWork] = ()
        self._planned: tuple[object, Sequence[BucketWork]] | None = None
        self.delivering = False

    @property
    def pending(self) -> Sequence[BucketWork]:
        """Buckets that were stepped and whose weights the device does not have yet."""
        # An interrupt may have kept the step that was planned last from being taken: then nothing has changed.
        if self._planned is not None and self._under_way() is self._planned[0]:
            self._pending, self._planned = self._planned[1], None
        return self._pending

    def next(self, buckets: Sequence[BucketWork], steps: int) -> Sequence[BucketWork]:
        """What is delivered in the step that takes `buckets`; `steps`: the most steps a parameter has taken.

        The very same `buckets` while the delay has not begun. Once that step is taken, `buckets` are pending.
        """
        if steps < self._warmup_steps and not self.pending:
            return buckets
        delivered = list(self.pending)
        self._planned = delivered, buckets
        return delivered

    @staticmethod
    def note_weights(buckets: Sequence[BucketWork]) -> None:
        """After a step's own writes: from now on nobody may write to weights with a pending update."""
        for work in works_of(buckets):
            work.note_weights()

    def end(self) -> None:
        """What was pending is on its way."""
        self._pending, self.delivering = (), False

    def overwritten(self) -> bool:
        """Whether somebody wrote to a weight for which an update is pending."""
        return not self.delivering and any(work.written() for work in works_of(self.pending))


def works_of(buckets: Sequence[BucketWork]) -> list[ArenaWork]:
    """What the buckets are parts of, each once."""
    return list({id(b.work): b.work for b in buckets}.values())
