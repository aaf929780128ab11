"""Seeing that somebody else wrote to the weights, so that stale masters never overwrite them.

Three signs: a weight's version counter or address moved (every step looks), its checksum changed since somebody
outside asked for a wait for all (`p.data.copy_()` moves neither), or a state dict was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hf_offload.engine.checksum import checksum


class WeightWatch:
    """Remembers how each weight with state was left by the last step.

    Attributes:
        left: for each arena, how its weights were left.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.left: list[Left] = []
        self._checksums: dict[int, int] = {}  # by the parameter's id
        self._all_suspect = False

    def note(self, arena: int, indices: Iterable[int] | None = None) -> None:
        """These weights of an arena (None: all) are now as our own step leaves them."""
        self.left[arena].read(indices)

    def note_step(self, arena: int, indices: Sequence[int] | None, versions: list[int], addresses: list[int]) -> None:
        """As `note`, of what is known already: version counters and addresses of the whole arena."""
        self.left[arena].take(indices, versions, addresses)

    def arm(self) -> None:
        """Somebody outside can reach the weights from now on: remember their checksums until the next step."""
        if not self._checksums:
            self._checksums = {id(p): checksum(p, self._threads) for left in self.left for p in left.params}

    @property
    def alert(self) -> bool:
        """Whether somebody outside may have reached the weights since the last step."""
        return self._all_suspect or bool(self._checksums)

    def suspect_all(self) -> None:
        self._all_suspect = True

    def suspects(self) -> list[tuple[int, list[int]]]:
        """Weights that somebody else may have written to since they were noted: (arena, indices) where there are any.

        Asked once a step.
        """
        found = [(number, self._suspects_of(left)) for number, left in enumerate(self.left)]
        return [(number, indices) for number, indices in found if indices]

    def settled(self) -> None:
        """The suspects' masters have been compared; not before, since an interrupt may come in between."""
        self._all_suspect = False
        self._checksums = {}

    def _suspects_of(self, left: Left) -> list[int]:
        if self._all_suspect:
            return list(range(len(left.params)))
        versions, addresses = _seen(left.params)
        moved = sorted({*_differing(versions, left.versions), *_differing(addresses, left.addresses)})
        if not self._checksums:
            return moved
        known = set(moved)
        others = (i for i in range(len(left.params)) if i not in known)
        return sorted(moved + [i for i in others if self._changed(left.params[i])])

    def _changed(self, p: Tensor) -> bool:
        return self._checksums.get(id(p)) != checksum(p, self._threads)


class Left:
    """Version counters and addresses of the weights of one arena."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self.read(None)

    def read(self, indices: Iterable[int] | None) -> None:
        """Note how these (None: all) are now."""
        if indices is None:
            self.versions, self.addresses = _seen(self.params)
            return
        for i in indices:
            self.versions[i], self.addresses[i] = self.params[i]._version, self.params[i].data_ptr()

    def take(self, indices: Sequence[int] | None, versions: list[int], addresses: list[int]) -> None:
        """These (None: all) are as these lists, of all, say. The lists stay the caller's."""
        if indices is None:
            self.versions, self.addresses = list(versions), list(addresses)
            return
        for i in indices:
            self.versions[i], self.addresses[i] = versions[i], addresses[i]


def _seen(params: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return [p._version for p in params], [p.data_ptr() for p in params]


def _differing(now: list[int], before: list[int]) -> list[int]:
    return [] if now == before else [i for i, (a, b) in enumerate(zip(now, before)) if a != b]
