"""The CPU kernels: NumPy arrays in, no torch.

Importing this package imports numba; nothing is compiled until a kernel is first called.
"""

from hf_offload.kernels.cpu.accumulate import add, put
from hf_offload.kernels.cpu.adam import INACTIVE, NUM_COEF, adam_step, adam_step_into, coefficients
from hf_offload.kernels.cpu.cast import narrow, reseed, widen
from hf_offload.kernels.cpu.jit import max_threads
from hf_offload.kernels.cpu.move import move
from hf_offload.kernels.cpu.reduce import (
    BLOCK,
    CHUNK,
    LEAVES,
    Blocks,
    checksum,
    sum_blocks,
    sum_of_squares,
    sums_of_trees,
)
from hf_offload.kernels.cpu.touch import touch

__all__ = [
    "BLOCK",
    "CHUNK",
    "INACTIVE",
    "LEAVES",
    "NUM_COEF",
    "Blocks",
    "adam_step",
    "adam_step_into",
    "add",
    "checksum",
    "coefficients",
    "max_threads",
    "move",
    "narrow",
    "put",
    "reseed",
    "sum_blocks",
    "sum_of_squares",
    "sums_of_trees",
    "touch",
    "widen",
]
