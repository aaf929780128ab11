"""Sharing a bucket among threads that do not run equally fast.

Copies, data loaders and training take cores away from the step as they please. With one fixed share a thread, the
slowest one would set the pace; so shares are cut into chunks, and who has finished his own helps the others.
"""

# `intrinsic` passes Numba and LLVM objects that carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import jit

CHUNK = 32_768
"""Elements of one chunk: about 25 us of one core's work."""

LINE = 8
"""int64 counters a cache line of 64 bytes holds: each thread's own is alone in its."""


@intrinsic
def _fetch_add(typingctx, counters, index):
    """counters[index], to which 1 is added at the same moment. C(`__atomic_fetch_add`, relaxed)."""

    def codegen(context, builder, sig, args):
        kind = sig.args[0]
        array = context.make_array(kind)(context, builder, args[0])
        place = cgutils.get_item_pointer(context, builder, kind, array, [args[1]], wraparound=False)
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counters, types.intp), codegen


@jit.helper
def count(size, tasks):  # type: ignore[no-untyped-def]
    """How many chunks `size` elements are cut into: at least one for each of `tasks` threads."""
    return max(tasks, size // CHUNK)


@jit.helper
def take(taken, t, tasks, chunks):  # type: ignore[no-untyped-def]
    """The next chunk for thread t of `tasks`, its own share first; -1 if none is left.

    Args:
        taken: int64[tasks * LINE], zeros at first: how many chunks of each thread's share are taken.
    """
    for ahead in range(tasks):
        whose = (t + ahead) % tasks
        first, end = chunks * whose // tasks, chunks * (whose + 1) // tasks
        if first + taken[whose * LINE] < end:  # mostly spares the atomic
            k = first + _fetch_add(taken, whose * LINE)  # type: ignore[call-arg]
            if k < end:
                return k
    return -1
