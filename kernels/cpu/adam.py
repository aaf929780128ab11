"""The fused AdamW pass over a bucket: 28 bytes of memory traffic per parameter with a 16-bit wire.

The formula, as the paper has it, is in `reference.adam_step`.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import block, chunks, jit
from hf_offload.kernels.cpu.bits import enter_ieee, leave_ieee, narrow_as, one_nan, widen_one, write_all
from hf_offload.kernels.cpu.columns import (
    ACTIVE,
    BETA2,
    DECAY,
    EPS,
    FADE1,
    KEEP1,
    L2,
    NUM_COEF,
    REST1,
    REST2,
    ROOT_SCALE,
    SCALE,
    STEP_SIZE,
)
from hf_offload.kernels.cpu.dither import BLOCK
from hf_offload.kernels.cpu.wire import Array, as_flat, as_float32, as_wire

INACTIVE: Array = np.zeros(NUM_COEF, dtype=np.float32)
INACTIVE.setflags(write=False)


def coefficients(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    decoupled: bool,
    maximize: bool,
) -> Array:
    """The coefficient row of one piece for one step, computed in float64 and rounded once.

    1 - beta2 of the rounded beta2 would be wrong in its fifth digit, and the bias corrections after it.

    Args:
        step: the step being taken, 1 at first.
        grad_scale: what the stored gradient is multiplied by (1 / loss scale, times the clip factor).
        decoupled: weight decay as in AdamW (theta times 1 - lr * weight_decay); else L2 (added to the gradient).
        maximize: ascend; the gradient's sign is turned.

    Returns:
        float32[NUM_COEF].
    """
    # grad_scale = power * part with 1 <= part < 2. Multiplying by a power of two is exact, and what else multiplies g
    # takes up `part`: so scaling costs no rounding of its own.
    part, exponent = math.frexp(grad_scale)
    part, power = (2.0 * part, math.ldexp(0.5, exponent)) if part else (1.0, 0.0)
    # beta1 = keep - fade. With beta1 itself, 1 - beta1 would not be what its rounded value leaves of m, and m would
    # settle 2e-7 off the mean gradient; below 1/2 that is small, while 1 - fade would cancel.
    keep1 = 1.0 if beta1 >= 0.5 else float(np.float32(beta1))
    row = np.zeros(NUM_COEF, dtype=np.float64)
    row[ACTIVE] = 1.0
    row[SCALE] = -power if maximize else power
    row[L2] = 0.0 if decoupled else weight_decay / part
    row[KEEP1], row[FADE1], row[REST1] = keep1, keep1 - beta1, (1.0 - beta1) * part
    row[BETA2], row[REST2] = beta2, (1.0 - beta2) * part**2
    row[DECAY] = 1.0 - lr * weight_decay if decoupled else 1.0
    row[STEP_SIZE] = lr / (1.0 - beta1**step)
    row[ROOT_SCALE] = 1.0 / math.sqrt(1.0 - beta2**step)
    row[EPS] = eps
    return row.astype(np.float32)


def adam_step(
    master: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    weight: Array,
    bounds: Array,
    coef: Array,
    *,
    wire: str,
    threads: int,
    grad_wire: str | None = None,
) -> None:
    """One fused AdamW step of a bucket of n elements in p pieces. The same bits for any bounds and thread count.

    Args:
        master, exp_avg, exp_avg_sq: float32[n], updated in place.
        grad: grad_wire[n] (uint16 bits of a 16-bit float, or float32), read.
        weight: wire[n], written: the new master, rounded to nearest even.
        bounds: int64[p + 1], rising from 0 to n; piece k is bounds[k] to bounds[k + 1] and may be empty.
        coef: float32[p, NUM_COEF], rows of `coefficients`, or `INACTIVE`: all bytes of that piece stay as they are.
        wire: bfloat16, float16 or float32.
        threads: at most this many; a small bucket stays in the calling thread.
        grad_wire: as `wire`, which is what None means; float32 where micro-batches were added up in it.

    Raises:
        ConfigError: unknown wire.
        TypeError, ValueError: an array of another dtype, shape or layout, or bounds that do not rise from 0 to n.
    """
    state = _checked_state("", (master, exp_avg, exp_avg_sq), None)
    n = state[0].size
    rest = _checked_rest(grad, weight, bounds, coef, wire, grad_wire, n)
    jit.run(_step_range, _step_parallel, (*state, *rest), n, threads)


def adam_step_into(
    state: tuple[Array, Array, Array],
    shadow: tuple[Array, Array, Array],
    grad: Array,
    weight: Array,
    bounds: Array,
    coef: Array,
    *,
    wire: str,
    threads: int,
    grad_wire: str | None = None,
) -> None:
    """`adam_step` whose results go elsewhere: `state` is read, `shadow` gets what `adam_step` would make of it.

    Args:
        state: master, exp_avg and exp_avg_sq, float32[n] each, untouched.
        shadow: the same three, written; inactive pieces are copied. No array may overlap another.
        others: as in `adam_step`. Raises as `adam_step`.
    """
    given = _checked_state("", state, None)
    n = given[0].size
    made = _checked_state("shadow's ", shadow, n)
    rest = _checked_rest(grad, weight, bounds, coef, wire, grad_wire, n)
    jit.run(_into_range, _into_parallel, (*given, *made, *rest), n, threads)


def _checked_state(whose: str, state: tuple[Array, Array, Array], n: int | None) -> tuple[Array, Array, Array]:
    master = as_float32(f"{whose}master", state[0], n)
    m, v = (as_float32(f"{whose}{name}", a, master.size) for name, a in zip(("exp_avg", "exp_avg_sq"), state[1:]))
    return master, m, v


def _checked_rest(
    grad: Array, weight: Array, bounds: Array, coef: Array, wire: str, grad_wire: str | None, n: int
) -> tuple[Array, ...]:
    return (
        as_wire("grad", grad, grad_wire or wire, n),
        as_wire("weight", weight, wire, n),
        checked_bounds(bounds, n),
        checked_coef(coef, len(bounds) - 1),
    )


def checked_bounds(bounds: Array, n: int) -> Array:
    bounds = as_flat("bounds", bounds, np.dtype(np.int64))
    if not bounds.size or bounds[0] != 0 or bounds[-1] != n or (bounds[1:] < bounds[:-1]).any():
        raise ValueError(f"bounds: must rise from 0 to the bucket's {n} elements, got {bounds}")
    return bounds


def checked_coef(coef: Array, pieces: int) -> Array:
    if coef.dtype != np.float32 or coef.shape != (pieces, NUM_COEF) or not coef.flags.c_contiguous:
        raise ValueError(f"coef: must be contiguous float32[{pieces}, {NUM_COEF}], got {coef.dtype}{list(coef.shape)}")
    return coef


@jit.helper
def _moments(m, v, g, c):  # type: ignore[no-untyped-def]
    m = (c[KEEP1] * m - c[FADE1] * m) + c[REST1] * g
    v = c[BETA2] * v + (c[REST2] * g) * g  # g * g first would overflow, or vanish, sooner
    return one_nan(np.float32(m)), one_nan(np.float32(v))


@jit.helper
def _stepped(theta, m, v, c):  # type: ignore[no-untyped-def]
    return one_nan(c[DECAY] * theta - c[STEP_SIZE] * (m / (np.sqrt(v) * c[ROOT_SCALE] + c[EPS])))


@intrinsic
def _step_block(typingctx, state, grad, weight, c, at):  # type: ignore[no-untyped-def]
    """Steps the block of 128 elements that begins at element `at`; state: master, m, v."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        *arrays, grad, weight = [
            block.pointer_to(context, builder, kind, array, args[4])
            for kind, array in (
                *((t, builder.extract_value(args[0], i)) for i, t in enumerate(sig.args[0])),
                (sig.args[1], args[1]), (sig.args[2], args[2]),
            )
        ]  # fmt: skip
        scalars = [builder.extract_value(args[3], i) for i in range(NUM_COEF)]
        wires = sig.args[1].dtype, sig.args[2].dtype
        block.Float32Block(builder, arrays, arrays, grad, weight, scalars, None, wires).emit(coupled=False)
        return context.get_dummy_value()

    return types.void(state, grad, weight, c, types.int64), codegen


@jit.helper
def _step_piece(master, exp_avg, exp_avg_sq, grad, weight, row):  # type: ignore[no-untyped-def]
    # Read once: as far as LLVM can tell the loop's stores may overwrite `row`.
    c = (
        row[ACTIVE], row[SCALE], row[L2], row[KEEP1], row[FADE1], row[REST1],
        row[BETA2], row[REST2], row[DECAY], row[STEP_SIZE], row[ROOT_SCALE], row[EPS],
    )  # fmt: skip
    if c[L2] == 0.0:
        whole = master.size // BLOCK * BLOCK
        for i in range(0, whole, BLOCK):
            _step_block((master, exp_avg, exp_avg_sq), grad, weight, c, i)  # type: ignore[call-arg]
        master, exp_avg, exp_avg_sq = master[whole:], exp_avg[whole:], exp_avg_sq[whole:]
        grad, weight = grad[whole:], weight[whole:]
        for i in range(master.size):
            g = c[SCALE] * widen_one(grad[i])
            m, v = _moments(exp_avg[i], exp_avg_sq[i], g, c)
            theta = _stepped(master[i], m, v, c)
            master[i], exp_avg[i], exp_avg_sq[i], weight[i] = theta, m, v, narrow_as(weight[i], theta)
    else:
        # A loop of its own: 0 * theta is NaN where theta is infinite. Its g and moments are float64, each rounded once:
        # an error of the sum g would count twice in its square.
        for i in range(master.size):
            g = np.float64(c[SCALE] * widen_one(grad[i])) + np.float64(c[L2]) * np.float64(master[i])
            m, v = _moments(np.float64(exp_avg[i]), np.float64(exp_avg_sq[i]), g, c)
            theta = _stepped(master[i], m, v, c)
            master[i], exp_avg[i], exp_avg_sq[i], weight[i] = theta, m, v, narrow_as(weight[i], theta)


@jit.helper
def first_piece(bounds, lo):  # type: ignore[no-untyped-def]
    """The first piece that ends after element lo."""
    first, last = 0, bounds.size - 1
    while first < last:
        middle = (first + last) // 2
        if bounds[middle + 1] <= lo:
            first = middle + 1
        else:
            last = middle
    return first


@jit.kernel
def _step_range(master, exp_avg, exp_avg_sq, grad, weight, bounds, coef, lo, hi):  # type: ignore[no-untyped-def]
    """Steps elements lo..hi of the bucket: each piece as far as it overlaps them."""
    mode = enter_ieee()
    for k in range(first_piece(bounds, lo), coef.shape[0]):
        a, b = max(bounds[k], lo), min(bounds[k + 1], hi)
        if a >= hi:
            break
        if a < b and coef[k, ACTIVE] != 0.0:
            # Views from 0, so that LLVM sees indices that are never negative and drops Numba's wraparound.
            _step_piece(master[a:b], exp_avg[a:b], exp_avg_sq[a:b], grad[a:b], weight[a:b], coef[k])
    write_all()
    leave_ieee(mode)


@jit.helper
def _step_piece_into(master, exp_avg, exp_avg_sq, to_master, to_m, to_v, grad, weight, row):  # type: ignore[no-untyped-def]
    """`_step_piece` with other outputs. One loop for both would be scalar: its arrays might overlap, or do."""
    c = (
        row[ACTIVE], row[SCALE], row[L2], row[KEEP1], row[FADE1], row[REST1],
        row[BETA2], row[REST2], row[DECAY], row[STEP_SIZE], row[ROOT_SCALE], row[EPS],
    )  # fmt: skip
    if c[ACTIVE] == 0.0:
        for i in range(master.size):
            to_master[i], to_m[i], to_v[i] = master[i], exp_avg[i], exp_avg_sq[i]
    elif c[L2] == 0.0:
        for i in range(master.size):
            g = c[SCALE] * widen_one(grad[i])
            m, v = _moments(exp_avg[i], exp_avg_sq[i], g, c)
            theta = _stepped(master[i], m, v, c)
            to_master[i], to_m[i], to_v[i], weight[i] = theta, m, v, narrow_as(weight[i], theta)
    else:
        for i in range(master.size):
            g = np.float64(c[SCALE] * widen_one(grad[i])) + np.float64(c[L2]) * np.float64(master[i])
            m, v = _moments(np.float64(exp_avg[i]), np.float64(exp_avg_sq[i]), g, c)
            theta = _stepped(master[i], m, v, c)
            to_master[i], to_m[i], to_v[i], weight[i] = theta, m, v, narrow_as(weight[i], theta)


@jit.kernel
def _into_range(master, exp_avg, exp_avg_sq, to_master, to_m, to_v, grad, weight, bounds, coef, lo, hi):  # type: ignore[no-untyped-def]
    """`_step_range` with other outputs."""
    mode = enter_ieee()
    for k in range(first_piece(bounds, lo), coef.shape[0]):
        a, b = max(bounds[k], lo), min(bounds[k + 1], hi)
        if a >= hi:
            break
        if a < b:
            state = master[a:b], exp_avg[a:b], exp_avg_sq[a:b]
            _step_piece_into(*state, to_master[a:b], to_m[a:b], to_v[a:b], grad[a:b], weight[a:b], coef[k])
    leave_ieee(mode)


@jit.parallel_kernel
def _into_parallel(master, exp_avg, exp_avg_sq, to_master, to_m, to_v, grad, weight, bounds, coef, tasks):  # type: ignore[no-untyped-def]
    n = master.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            lo, hi = jit.share(n, k, total), jit.share(n, k + 1, total)
            _into_range(master, exp_avg, exp_avg_sq, to_master, to_m, to_v, grad, weight, bounds, coef, lo, hi)
            k = chunks.take(taken, t, tasks, total)


@jit.parallel_kernel
def _step_parallel(master, exp_avg, exp_avg_sq, grad, weight, bounds, coef, tasks):  # type: ignore[no-untyped-def]
    n = master.size
    total = chunks.count(n, tasks)
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    for t in numba.prange(tasks):
        k = chunks.take(taken, t, tasks, total)
        while k >= 0:
            lo, hi = jit.share(n, k, total), jit.share(n, k + 1, total)
            _step_range(master, exp_avg, exp_avg_sq, grad, weight, bounds, coef, lo, hi)
            k = chunks.take(taken, t, tasks, total)
