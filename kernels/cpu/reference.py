"""The kernels in NumPy, one line a formula: what they compute, and the oracle of their tests.

Same arguments as the compiled kernels, without `threads`. The results are equal bit for bit, because both do the same
float32 operations in the same order.
"""

from __future__ import annotations

import numpy as np

from hf_offload.kernels.cpu import adam, codecs, dither, reduce
from hf_offload.kernels.cpu.codecs import Codec, Held
from hf_offload.kernels.cpu.compact import CompactState
from hf_offload.kernels.cpu.wire import Array


def adam_step(
    theta: Array,
    m: Array,
    v: Array,
    grad: Array,
    weight: Array,
    bounds: Array,
    coef: Array,
    *,
    wire: str,
    grad_wire: str | None = None,
) -> None:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), every piece with its own coefficients.

        g   = scale * grad  (+ L2 * theta where the decay is not decoupled)
        m   = beta1 * m + (1 - beta1) * g
        v   = beta2 * v + (1 - beta2) * g^2
        theta = (1 - lr * decay) * theta - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    theta, m and v (float32[n]) are updated in place; weight (wire[n]) gets the rounded theta.
    """
    for k, c in enumerate(coef):
        piece = slice(bounds[k], bounds[k + 1])
        if c[adam.ACTIVE]:
            g = widened(grad[piece], grad_wire or wire)
            theta[piece], m[piece], v[piece] = _update(theta[piece], m[piece], v[piece], g, c)
            weight[piece] = narrowed(theta[piece], wire)


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
    grad_wire: str | None = None,
) -> None:
    """`adam_step` with m and v as `codec` holds them: decoded, stepped in float32, encoded with `noise`.

    theta takes its step with m and v as they are before they are rounded.
    """
    block = 0
    for k, c in enumerate(coef):
        piece = slice(bounds[k], bounds[k + 1])
        first, block = block, block + codecs.blocks(bounds[k + 1] - bounds[k])
        scales = slice(first, block if codec.scaled else first)
        source, target = (
            Held(h.m[piece], h.v[piece], h.m_scale[scales], h.v_scale[scales]) for h in (state.held, to.held)
        )
        theta, made = state.master[piece], source
        if c[adam.ACTIVE]:
            m, v = codecs.decode(source, codec)
            theta, m, v = _update(theta, m, v, widened(grad[piece], grad_wire or wire), c, np.float32)
            made = codecs.encode(m, v, dither.noise(noise[k], codecs.blocks(m.size)), codec)
            weight[piece] = narrowed(theta, wire)
        to.master[piece] = theta
        for array, values in zip(target, made):
            array[:] = values


def put(src: Array, dst: Array, wire: str, held: str) -> None:
    """dst = src, in dst's format."""
    dst[:] = src if wire == held else narrowed(widened(src, wire), held)


def add(src: Array, dst: Array, wire: str, held: str) -> None:
    """dst = round(dst + src), as autograd adds a second gradient to the first."""
    with np.errstate(all="ignore"):
        dst[:] = narrowed(one_nan(widened(dst, held) + widened(src, wire)), held)


def _update(
    theta: Array, m: Array, v: Array, grad: Array, c: Array, l2_in: type[np.floating] = np.float64
) -> tuple[Array, Array, Array]:
    with np.errstate(all="ignore"):
        g = c[adam.SCALE] * grad
        if c[adam.L2]:
            g, m, v = g.astype(l2_in), m.astype(l2_in), v.astype(l2_in)
            g = g + l2_in(c[adam.L2]) * theta
        m = one_nan(((c[adam.KEEP1] * m - c[adam.FADE1] * m) + c[adam.REST1] * g).astype(np.float32))
        v = one_nan((c[adam.BETA2] * v + (c[adam.REST2] * g) * g).astype(np.float32))
        step = c[adam.STEP_SIZE] * (m / (np.sqrt(v) * c[adam.ROOT_SCALE] + c[adam.EPS]))
        return one_nan(c[adam.DECAY] * theta - step), m, v


def one_nan(x: Array) -> Array:
    """x with every NaN the quiet 0x7FC00000."""
    return np.where(np.isnan(x), np.float32(np.nan), x)


def widened(bits: Array, wire: str) -> Array:
    """The float32 values of a wire array, exactly; a float16 NaN keeps its sign and payload and turns quiet."""
    if wire == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if wire == "float16":
        wide = bits.astype(np.uint32)
        nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
        values = bits.view(np.float16)
        return np.where(np.isnan(values), nan.view(np.float32), values.astype(np.float32))
    return bits


def narrowed(x: Array, wire: str) -> Array:
    """The wire array nearest to x, ties to even; every NaN becomes 0x7FC0 (bfloat16) or 0x7E00 (float16)."""
    if wire == "bfloat16":
        bits = x.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
    if wire == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = x.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7E00), rounded)
    return x


def reseed(weight: Array, master: Array, wire: str) -> int:
    """master = weight wherever the rounded master is not the weight, bit for bit; returns how many."""
    held = np.uint32 if wire == "float32" else np.uint16
    changed = narrowed(master, wire).view(held) != weight.view(held)
    master[changed] = widened(weight, wire)[changed]
    return int(changed.sum())


def sum_of_squares(x: Array, wire: str) -> float:
    """Blocks of 65,536 elements, each dealt out to 256 lanes; lanes, then the 16 blocks of a chunk, added pairwise."""
    values = widened(x, wire).astype(np.float64)
    chunks = -(-x.size // reduce.CHUNK)
    squares = np.zeros((chunks * reduce.CHUNK // reduce.BLOCK, reduce.BLOCK // reduce.LANES, reduce.LANES))
    squares.reshape(-1)[: x.size] = values * values
    lanes = np.zeros((len(squares), reduce.LANES))
    for r in range(squares.shape[1]):
        lanes += squares[:, r]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return reduce.sum_of_blocks(lanes.reshape(chunks, reduce.CHUNK // reduce.BLOCK))


def checksum(x: Array) -> int:
    """sum of (bits[i] + 1) * odd(i) mod 2**64, finished."""
    bits = x.view(np.uint32 if x.dtype == np.float32 else np.uint16).astype(np.uint64)
    odd = np.arange(x.size, dtype=np.uint64) * np.uint64(reduce.ODD)
    odd = (odd ^ (odd >> np.uint64(32))) | np.uint64(1)
    return reduce.finish_checksum(int(((bits + np.uint64(1)) * odd).sum(dtype=np.uint64)), x.size)
