"""The fused AdamW pass over a bucket whose m and v are held as bfloat16 or int8: 20 or 16 bytes a parameter.

The formula is `reference.compact_step`'s, the formats are `codecs`'. A block of 128 elements is read, widened, updated,
rounded and written in one pass: its new m and v wait in registers until the largest of them is known.
"""

# `intrinsic` passes Numba and LLVM objects that carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import adam, block, chunks, columns, jit
from hf_offload.kernels.cpu.bits import enter_ieee, leave_ieee, write_all
from hf_offload.kernels.cpu.codecs import BLOCK, Codec, Held
from hf_offload.kernels.cpu.columns import ACTIVE, NUM_COEF
from hf_offload.kernels.cpu.dither import MASK, NUM_NOISE, ODD
from hf_offload.kernels.cpu.lanes import I64
from hf_offload.kernels.cpu.wire import Array, as_flat, as_float32, as_wire


class CompactState(NamedTuple):
    """Where a bucket's state lies: float32[n] masters, and its moments as held."""

    master: Array
    held: Held


def compact_step(
    state: CompactState,
    to: CompactState,
    grad: Array,
    weight: Array,
    bounds: Array,
    coef: Array,
    noise: Array,
    *,
    codec: Codec,
    wire: str,
    threads: int,
    grad_wire: str | None = None,
    part: tuple[int, int] | None = None,
) -> None:
    """One fused AdamW step of a bucket of n elements in p pieces. The same bits for any bounds and thread count.

    Args:
        state: what is read.
        to: what is written; `state` itself, or arrays of the same sizes that overlap none of it. Inactive pieces are
            copied there.
        grad, weight, bounds, coef, wire, threads, grad_wire: as in `adam.adam_step`. Each piece begins at a multiple
            of BLOCK of its parameter, and ends at one or where the parameter ends.
        noise: uint32[p, NUM_NOISE], rows of `dither.rows`.
        part: the elements of which this call takes those blocks that begin in it; None: all. Blocks of parts that
            together are the bucket are taken once each.

    Raises:
        ConfigError, TypeError, ValueError: as `adam.adam_step`.
    """
    n, pieces = state.master.size, len(bounds) - 1
    bounds = adam.checked_bounds(bounds, n)
    firsts = np.zeros(pieces + 1, np.int64)
    np.cumsum((np.diff(bounds) + BLOCK - 1) // BLOCK, out=firsts[1:])
    low, high = (int(i) for i in part or (0, n))  # another integer type would be compiled for
    if not 0 <= low <= high <= n:
        raise ValueError(f"part: must lie in the bucket's {n} elements, got {part}")
    copies = state.master.ctypes.data != to.master.ctypes.data
    args = (
        *_checked(state, codec, n, int(firsts[-1])), *_checked(to, codec, n, int(firsts[-1])),
        as_wire("grad", grad, grad_wire or wire, n), as_wire("weight", weight, wire, n),
        bounds, firsts, adam.checked_coef(coef, pieces), _checked_noise(noise, pieces), copies, low, high,
    )  # fmt: skip
    jit.run(_in_one_thread, _parallel, args, high - low, threads)


def _checked(state: CompactState, codec: Codec, n: int, blocks: int) -> tuple[Array, ...]:
    m, v, m_scale, v_scale = state.held
    scales = blocks if codec.scaled else 0
    return (
        as_float32("master", state.master, n),
        as_flat("exp_avg", m, codec.dtype, n),
        as_flat("exp_avg_sq", v, codec.dtype, n),
        as_flat("exp_avg's scale", m_scale, np.dtype(np.uint8), scales),
        as_flat("exp_avg_sq's scale", v_scale, np.dtype(np.uint8), scales),
    )


def _checked_noise(noise: Array, pieces: int) -> Array:
    if noise.dtype != np.uint32 or noise.shape != (pieces, NUM_NOISE) or not noise.flags.c_contiguous:
        wanted = f"contiguous uint32[{pieces}, {NUM_NOISE}]"
        raise ValueError(f"noise: must be {wanted}, got {noise.dtype}{list(noise.shape)}")
    return noise


@intrinsic
def _step_block(typingctx, here, there, wires, room, short, coef, k, at, number, noise):
    """Steps the block of 128 elements that begins at element `at` of the arrays, with scale `number`.

    here, there: master, m, v, m_scale, v_scale. wires: grad, weight. room: master, m, v, grad, weight of one block, to
    be stepped instead where the block is short. coef: row k of it. noise: uint32, the block's.
    """

    def codegen(context, builder, sig, args):
        def pointers(i, indices):
            parts = [builder.extract_value(args[i], j) for j in range(len(sig.args[i]))]
            return [block.pointer_to(context, builder, *of, index) for *of, index in zip(sig.args[i], parts, indices)]

        def either(whole, instead):
            return [builder.select(args[4], i, w) for w, i in zip(whole, instead)]

        at, number = args[7:9]
        state, to = (pointers(i, [at] * 3 + [number] * 2) for i in (0, 1))
        instead = pointers(3, [I64(0)] * 5)
        row = block.pointer_to(context, builder, sig.args[5], args[5], builder.mul(args[6], I64(NUM_COEF)))
        c = [builder.load(builder.gep(row, [I64(i)])) for i in range(NUM_COEF)]
        emitter = (block.Int8Block if sig.args[0][1].dtype == types.uint8 else block.Bfloat16Block)(
            builder,
            either(state[:3], instead[:3]) + state[3:],
            either(to[:3], instead[:3]) + to[3:],
            *either(pointers(2, [at] * 2), instead[3:]),
            c,
            args[9],
            tuple(t.dtype for t in sig.args[2]),
        )
        block.branch(builder, emitter.emit, c[columns.L2])
        return context.get_dummy_value()

    args = here, there, wires, room, types.boolean, coef, types.int64, types.int64, types.int64, types.uint32
    return types.void(*args), codegen


# ---- all blocks


@jit.helper
def _mixed(x):  # type: ignore[no-untyped-def]
    """`dither.mix`."""
    x = np.uint64(x)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(MASK)
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(MASK)
    return x ^ (x >> np.uint64(16))


@jit.helper
def _noise_of(noise, k, b):  # type: ignore[no-untyped-def]
    mixed = _mixed((np.uint64(noise[k, 0]) + np.uint64(b) * np.uint64(ODD)) & np.uint64(MASK))
    return np.uint32((mixed + np.uint64(noise[k, 1])) & np.uint64(MASK))


@jit.helper
def _copy_run(here, there, at, size):  # type: ignore[no-untyped-def]
    for i in range(at, at + size):
        there[0][i], there[1][i], there[2][i] = here[0][i], here[1][i], here[2][i]


@jit.kernel
def _compact_range(  # type: ignore[no-untyped-def]
    master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
    grad, weight, bounds, firsts, coef, noise, copies, lo, hi,
):  # fmt: skip
    """Steps the blocks of the bucket that begin in lo..hi."""
    here, there = (master, m, v, m_scale, v_scale), (to_master, to_m, to_v, to_m_scale, to_v_scale)
    scaled = m_scale.size != 0
    room_master, room_m, room_v = np.empty(BLOCK, np.float32), np.empty(BLOCK, m.dtype), np.empty(BLOCK, v.dtype)
    room_grad, room_weight = np.empty(BLOCK, grad.dtype), np.empty(BLOCK, weight.dtype)
    room = room_master, room_m, room_v, room_grad, room_weight
    mode = enter_ieee()
    for k in range(adam.first_piece(bounds, lo), coef.shape[0]):
        start, end = bounds[k], bounds[k + 1]
        if start >= hi:
            break
        b0 = max(0, lo - start + BLOCK - 1) // BLOCK
        b1 = (min(hi, end) - start + BLOCK - 1) // BLOCK
        active = coef[k, ACTIVE] != 0.0
        if not active and not copies:
            continue
        for b in range(b0, b1):
            at, number = start + b * BLOCK, firsts[k] + b if scaled else 0
            size = min(BLOCK, end - at)
            if not active:
                _copy_run(here, there, at, size)
                if scaled:
                    to_m_scale[number], to_v_scale[number] = m_scale[number], v_scale[number]
                continue
            short = size < BLOCK
            if short:  # a whole block instead, with zeros behind the parameter's end
                for j in range(BLOCK):
                    inside = j < size
                    room_master[j], room_grad[j] = (master[at + j], grad[at + j]) if inside else (0, 0)
                    room_m[j], room_v[j] = (m[at + j], v[at + j]) if inside else (0, 0)
            # In one place alone: its code takes long to compile.
            _step_block(here, there, (grad, weight), room, short, coef, k, at, number, _noise_of(noise, k, b))
            if short:
                for j in range(size):
                    to_master[at + j], to_m[at + j], to_v[at + j] = room_master[j], room_m[j], room_v[j]
                    weight[at + j] = room_weight[j]
    write_all()
    leave_ieee(mode)


@jit.kernel
def _in_one_thread(  # type: ignore[no-untyped-def]
    master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
    grad, weight, bounds, firsts, coef, noise, copies, low, high, lo, hi,
):  # fmt: skip
    """The part low..high in one thread; lo..hi, as `jit.run` gives it, is 0..high - low."""
    _compact_range(
        master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
        grad, weight, bounds, firsts, coef, noise, copies, low, high,
    )  # fmt: skip


@jit.parallel_kernel
def _parallel(  # type: ignore[no-untyped-def]
    master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
    grad, weight, bounds, firsts, coef, noise, copies, low, high, tasks,
):  # fmt: skip
    size = high - low
    total = chunks.count(size, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            lo, hi = low + jit.share(size, k, total), low + jit.share(size, k + 1, total)
            _compact_range(
                master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
                grad, weight, bounds, firsts, coef, noise, copies, lo, hi,
            )  # fmt: skip
            k = chunks.take(taken, t, tasks, total)
