"""m and v as an entry of `optimizer.state` names and holds them, in any `state_dtype`, and from one to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.formats import MOMENTS, StateFormat, blocks_of
from hf_offload.engine.tensors import flat, is_dense, like_layout
from hf_offload.kernels.cpu import BLOCK_OF_STATE, CODECS, Held, codecs

CODES = tuple(f"{name}_codes" for name in MOMENTS)
SCALES = tuple(f"{name}_scale" for name in MOMENTS)
INT8_NAMES = (CODES[0], SCALES[0], CODES[1], SCALES[1])
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AT_ONCE = 1 << 16
"""Elements that are converted at a time: NumPy's copies of them stay in the cache, and never are a second state."""


def names_of(kind: StateFormat) -> tuple[str, ...]:
    """What an entry has beside `step` and `master`."""
    return INT8_NAMES if kind.scaled else MOMENTS


def names_in(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """What the moments of this entry are called, going by what it has."""
    return INT8_NAMES if any(name in entry for name in INT8_NAMES) else MOMENTS


def scale_fits(codes: Tensor, scale: Any) -> bool:
    """Whether `scale` has one byte for each block of `codes`."""
    return (
        isinstance(scale, Tensor)
        and scale.layout == torch.strided
        and not scale.is_meta
        and scale.dtype == torch.uint8
        and scale.dim() == 1
        and scale.numel() == blocks_of(codes.numel(), BLOCK_OF_STATE)
    )


def in_floats(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """`exp_avg` and `exp_avg_sq` of an entry in floats, the shape and strides kept; new memory if they were codes."""
    if names_in(entry) == MOMENTS:
        return {name: entry[name] for name in MOMENTS}
    codes = [entry[name] if is_dense(entry[name]) else entry[name].contiguous() for name in CODES]
    arrays = [flat(c.cpu()).numpy() for c in codes]
    scales = [entry[name].cpu().numpy() for name in SCALES]
    found = {name: torch.empty_like(c, dtype=torch.float32, device="cpu") for name, c in zip(MOMENTS, codes)}
    targets = [flat(t).numpy() for t in found.values()]
    for run, blocks in _runs(arrays[0].size):
        held = Held(arrays[0][run], arrays[1][run], scales[0][blocks], scales[1][blocks])
        for target, values in zip(targets, codecs.decode(held, CODECS["int8"])):
            target[run] = values
    return found


def fill(views: Mapping[str, Tensor], entry: Mapping[str, Any], p: Tensor) -> None:
    """Copy the moments of `entry` into `views`, the host state of `p`: rounded to nearest where it holds less.

    Codes go to codes as they are, if their elements lie in the same order.
    """
    names = names_in(views)
    if names == MOMENTS:
        for name, values in in_floats(entry).items():
            views[name].copy_(values)
    elif names_in(entry) == names and _same_order(entry, views):
        for name in names:
            views[name].copy_(entry[name])
    else:
        _encode(in_floats(entry), views, p)


def _same_order(entry: Mapping[str, Tensor], views: Mapping[str, Tensor]) -> bool:
    def strides(t: Tensor) -> tuple[int, ...]:
        return tuple(0 if t.is_contiguous() or size == 1 else st for st, size in zip(t.stride(), t.shape))

    return all(strides(entry[name]) == strides(views[name]) for name in CODES)


def _encode(moments: Mapping[str, Tensor], views: Mapping[str, Tensor], p: Tensor) -> None:
    m, v = (flat(like_layout(t.to(device="cpu", dtype=torch.float32), p)).numpy() for t in moments.values())
    targets = [flat(views[name]).numpy() for name in INT8_NAMES]
    codec = CODECS["int8"]
    for run, blocks in _runs(m.size):
        held = codecs.encode(m[run], v[run], codecs.half(m[run].size, codec), codec)
        for target, where, values in zip(
            targets, (run, blocks, run, blocks), (held.m, held.m_scale, held.v, held.v_scale)
        ):
            target[where] = values


def _runs(numel: int) -> list[tuple[slice, slice]]:
    """Runs of elements, and their blocks."""
    found = []
    for low in range(0, numel, _AT_ONCE):
        high = min(low + _AT_ONCE, numel)
        first = low // BLOCK_OF_STATE
        found.append((slice(low, high), slice(first, first + blocks_of(high - low, BLOCK_OF_STATE))))
    return found


def clear(views: Mapping[str, Tensor]) -> None:
    """Zero moments."""
    for name in names_in(views):
        views[name].zero_()


def as_tensor(array: np.ndarray) -> Tensor:
    """A 1-D tensor over an array of a format: uint16 is bfloat16's bits."""
    t = torch.from_numpy(array)
    return t.view(torch.bfloat16) if array.dtype == np.uint16 else t
