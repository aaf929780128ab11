"""Seeing that somebody else wrote to the weights, so that stale masters never overwrite them.

Three signs: a weight's version counter or address moved (every step looks), its checksum changed since somebody
outside asked for a wait for all (`p.data.copy_()` moves neither), or a state dict was loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hf_offload.engine.checksum import checksum


class WeightWatch:
    """Remembers how each watched weight was left by the last step."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._left: dict[Tensor, tuple[int, int]] = {}
        self._checksums: dict[Tensor, int] = {}
        self._all_suspect = False

    def note(self, params: Iterable[Tensor]) -> None:
        """These weights are now as our own step leaves them."""
        for p in params:
            self._left[p] = (p._version, p.data_ptr())

    def arm(self) -> None:
        """Somebody outside can reach the weights from now on: remember their checksums until the next step."""
        if not self._checksums:
            self._checksums = {p: checksum(p, self._threads) for p in self._left}

    def suspect_all(self) -> None:
        self._all_suspect = True

    def suspects(self) -> Sequence[Tensor]:
        """Weights that somebody else may have written to since they were noted; asked once a step."""
        if self._all_suspect:
            return list(self._left)
        return [p for p, left in self._left.items() if self._changed(p, left)]

    def settled(self) -> None:
        """The suspects' masters have been compared; not before, since an interrupt may come in between."""
        self._all_suspect = False
        self._checksums = {}

    def _changed(self, p: Tensor, left: tuple[int, int]) -> bool:
        if (p._version, p.data_ptr()) != left:
            return True
        return bool(self._checksums) and self._checksums.get(p) != checksum(p, self._threads)
