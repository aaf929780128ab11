"""How a checkpoint holds a parameter's m and v: as floats, or as int8's codes with a scale byte for each block.

    floats  exp_avg, exp_avg_sq                                             the parameter's shape
    int8    exp_avg_codes, exp_avg_sq_codes                                 uint8, the parameter's shape
            exp_avg_scale, exp_avg_sq_scale                                 uint8[blocks], in the codes' memory order

What the bytes mean is in `kernels/cpu/codecs.py`. To look at them needs no kernels, which are slow to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = tuple(f"{name}_codes" for name in MOMENTS)
SCALES = tuple(f"{name}_scale" for name in MOMENTS)
INT8_NAMES = (CODES[0], SCALES[0], CODES[1], SCALES[1])
BLOCK = 128
"""Elements that share one scale."""
LEAST_SCALE, NOT_FINITE = 48, 255
"""A scale is 0 (the block is all zeros), one of these, or between them."""
PART = 1 << 22
"""Elements that are looked at at once: 16 MiB of fp32."""


def names_in(entry: Mapping[str, object]) -> tuple[str, ...]:
    """What the moments of this entry are called."""
    return INT8_NAMES if any(name in entry for name in INT8_NAMES) else MOMENTS


def shaped_in(entry: Mapping[str, object]) -> tuple[str, ...]:
    """Those of them that have the parameter's shape."""
    return CODES if names_in(entry) == INT8_NAMES else MOMENTS


def blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def dtypes(entry: Mapping[str, Tensor]) -> dict[str, str]:
    """In what `exp_avg`, `exp_avg_sq` and `master` are held, as far as they are there."""
    codes = dict.fromkeys(MOMENTS, "int8") if names_in(entry) == INT8_NAMES else {}
    floats = {name: _dtype(entry[name]) for name in (*MOMENTS, "master") if name in entry}
    return {**codes, **floats}


def in_float32(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `exp_avg` and `exp_avg_sq`, dense: codes decoded and 16-bit floats widened; float64 stays."""
    if names_in(entry) == INT8_NAMES:
        from hf_offload.engine import moments  # imports the kernels

        return moments.in_floats(entry)
    wide = {name: torch.promote_types(entry[name].dtype, torch.float32) for name in MOMENTS}
    return {name: entry[name].to(wide[name], copy=True) for name in MOMENTS}


def not_finite(entry: Mapping[str, Tensor]) -> dict[str, int]:
    """How many values of each moment and of the master are infinite or NaN."""
    found = {name: sum(int((~torch.isfinite(part)).sum()) for part in parts(entry[name]))
             for name in (*MOMENTS, "master") if name in entry}  # fmt: skip
    if names_in(entry) == INT8_NAMES:
        found |= {name: _in_blocks(entry[scale] == NOT_FINITE, entry[codes].numel())
                  for name, codes, scale in zip(MOMENTS, CODES, SCALES)}  # fmt: skip
    return found


def negative(entry: Mapping[str, Tensor]) -> int:
    """How many values of `exp_avg_sq` are below 0; codes have no sign."""
    return sum(int((part < 0).sum()) for part in parts(entry[MOMENTS[1]])) if MOMENTS[1] in entry else 0


def unmade_scales(entry: Mapping[str, Tensor]) -> int:
    """How many scale bytes are of the values that are never written."""
    found = (entry[name] for name in SCALES if name in entry)
    return sum(int(((scale > 0) & (scale < LEAST_SCALE)).sum()) for scale in found)


def _in_blocks(chosen: Tensor, numel: int) -> int:
    """How many of `numel` elements lie in the chosen blocks, the last of which may be short."""
    count = BLOCK * int(chosen.sum())
    return count - (BLOCK * len(chosen) - numel if count and bool(chosen[-1]) else 0)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def parts(t: Tensor) -> Iterator[Tensor]:
    """The elements in pieces of `PART`."""
    flat = t.detach().reshape(-1)
    return (flat[at : at + PART] for at in range(0, flat.numel(), PART))
