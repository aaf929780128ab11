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
        self._left: dict[int, tuple[Tensor, int, int]] = {}  # by id: tensors hash slowly
        self._checksums: dict[Tensor, int] = {}
        self._all_suspect = False

    def note(self, params: Iterable[Tensor]) -> None:
        """These weights are now as our own step leaves them."""
        left = self._left
        for p in params:
            left[id(p)] = p, p._version, p.data_ptr()

    def arm(self) -> None:
        """Somebody outside can reach the weights from now on: remember their checksums until the next step."""
        if not self._checksums:
            self._checksums = {p: checksum(p, self._threads) for p, _, _ in self._left.values()}

    def suspect_all(self) -> None:
        self._all_suspect = True

    def suspects(self) -> Sequence[Tensor]:
        """Weights that somebody else may have written to since they were noted; asked once a step."""
        if self._all_suspect:
            return [p for p, _, _ in self._left.values()]
        if not self._checksums:
            return [p for p, v, at in self._left.values() if p._version != v or p.data_ptr() != at]
        return [p for p, v, at in self._left.values() if self._changed(p, v, at)]

    def settled(self) -> None:
        """The suspects' masters have been compared; not before, since an interrupt may come in between."""
        self._all_suspect = False
        self._checksums = {}

    def _changed(self, p: Tensor, version: int, address: int) -> bool:
        if p._version != version or p.data_ptr() != address:
            return True
        return self._checksums.get(p) != checksum(p, self._threads)
