"""Checks of what callers pass, and the views by whose dtype compiled code tells the wire formats apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_offload.errors import ConfigError, explain, nearest

Array = NDArray[Any]

# What the caller holds, and the view of it that kernels are compiled for.
HELD: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
}
VIEW: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
    "float32": np.dtype(np.float32),
}


def as_wire(name: str, array: Array, wire: str, size: int | None = None) -> Array:
    """The view of a wire array (uint16 bits or float32) for compiled code.

    Raises:
        ConfigError: unknown wire.
        TypeError, ValueError: not a contiguous 1-dimensional array of that dtype, or not of `size` elements.
    """
    if wire not in HELD:
        raise ConfigError(explain("wire", wire, "not a wire dtype", nearest(str(wire), HELD)))
    return as_flat(name, array, HELD[wire], size).view(VIEW[wire])


def as_float32(name: str, array: Array, size: int | None = None) -> Array:
    """`array`, checked to be flat float32. Raises as `as_wire`."""
    return as_flat(name, array, HELD["float32"], size)


def as_flat(name: str, array: Array, dtype: np.dtype[Any], size: int | None = None) -> Array:
    """`array`, checked to be contiguous, 1-dimensional, of this dtype and size. Raises as `as_wire`."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        found = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name}: kernels take contiguous 1-dimensional {dtype} arrays, got {found}")
    if size is not None and array.size != size:
        raise ValueError(f"{name}: {array.size} elements where the other arrays have {size}")
    return array
