"""Tensors that were computed and are too many for memory: they wait in a file without a name, and are mapped."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_offload.checkpoint.torch_file import writing


class _Place(NamedTuple):
    """Where a tensor lies in the file, its elements in memory order."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    numel: int


def mapped(tensors: Iterable[Tensor], folder: Path) -> list[Tensor]:
    """The same tensors as views of a file in `folder` that is gone when the last of them is.

    Each is asked for when the one before it has been written, so that one at a time takes memory. Each has a storage
    of its own, since torch.save writes a storage whole.

    Args:
        tensors: dense: their elements fill one block of memory.

    Raises:
        CheckpointError: the disk is full or refuses.
    """
    places, end = [], 0
    with writing(folder / "scratch"), tempfile.TemporaryFile(dir=folder) as file:
        for t in tensors:
            end += -end % t.itemsize
            places.append(_Place(end, t.dtype, t.shape, t.stride(), t.numel()))
            file.seek(end)
            file.write(torch.as_strided(t, (t.numel(),), (1,)).view(torch.uint8).numpy().data)
            end += t.nbytes
        file.flush()
        # torch wants memory that it could write to
        memory = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY) if end else b""
    return [_view(memory, place) for place in places]


def _view(memory: mmap.mmap | bytes, place: _Place) -> Tensor:
    if not place.numel:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=place.dtype, offset=place.start, count=place.numel)
    return torch.as_strided(flat, place.shape, place.stride)
