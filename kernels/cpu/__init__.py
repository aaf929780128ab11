"""The CPU kernels: NumPy arrays in, no torch.

Importing this package imports numba; nothing is compiled until a kernel is first called.
"""

from hf_offload.kernels.cpu.accumulate import add, put
from hf_offload.kernels.cpu.adam import INACTIVE, NUM_COEF, adam_step, adam_step_into, coefficients
from hf_offload.kernels.cpu.cast import narrow, reseed, widen
from hf_offload.kernels.cpu.codecs import CODECS, Codec, Held
from hf_offload.kernels.cpu.compact import CompactState, compact_step
from hf_offload.kernels.cpu.dither import BLOCK as BLOCK_OF_STATE
from hf_offload.kernels.cpu.dither import NUM_NOISE
from hf_offload.kernels.cpu.dither import rows as noise_rows
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
    "BLOCK_OF_STATE",
    "CHUNK",
    "CODECS",
    "INACTIVE",
    "LEAVES",
    "NUM_COEF",
    "NUM_NOISE",
    "Blocks",
    "Codec",
    "CompactState",
    "Held",
    "adam_step",
    "adam_step_into",
    "add",
    "checksum",
    "coefficients",
    "compact_step",
    "max_threads",
    "move",
    "narrow",
    "noise_rows",
    "put",
    "reseed",
    "sum_blocks",
    "sum_of_squares",
    "sums_of_trees",
    "touch",
    "widen",
]
