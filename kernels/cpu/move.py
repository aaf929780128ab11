"""Many small moves of memory in one call: a call for each would cost more than the move."""

# `intrinsic` passes Numba and LLVM objects that carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import jit
from hf_offload.kernels.cpu.wire import Array, as_flat


def move(to: Array, source: Array, nbytes: Array) -> None:
    """Copy `nbytes[k]` bytes from address `source[k]` to address `to[k]`, for each k, in this thread without the GIL.

    Args:
        to, source, nbytes: int64[n]. The runs must be this process's own memory and not overlap: nothing is checked.

    Raises as `adam_step`.
    """
    int64 = np.dtype(np.int64)
    to = as_flat("to", to, int64)
    arrays = (to, as_flat("source", source, int64, to.size), as_flat("nbytes", nbytes, int64, to.size))
    jit.run(_move_range, None, arrays, to.size, threads=1)


@intrinsic
def _copy(typingctx, to, source, nbytes):
    """memcpy between two addresses."""

    def codegen(context, builder, sig, args):
        pointer = ir.IntType(8).as_pointer()
        places = [builder.inttoptr(address, pointer) for address in args[:2]]
        cgutils.raw_memcpy(builder, *places, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@jit.kernel
def _move_range(to, source, nbytes, lo, hi):
    for k in range(lo, hi):
        _copy(to[k], source[k], nbytes[k])
