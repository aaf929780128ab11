"""Formats of m and v in fewer bytes, in NumPy: what they mean, and the oracle of the compiled ones.

bfloat16: the upper half of the float32, rounded stochastically.

int8: blocks of 128 elements with one scale byte each, as in the microscaling formats (OCP MX specification 1.0, with
blocks of 32): a power of two beside 8-bit floats, so that no scale costs a division or a rounding of its own.

    exp_avg     sign, 4 bits of exponent, 3 of mantissa, with subnormals: 0, or 2^-17 to 1 of the block's largest
    exp_avg_sq  5 bits of exponent, 3 of mantissa, no sign, no 0: 2^-31 to 1 of the block's largest

A v that became 0 beside an m that did not would make a step of m / eps: hence no 0 in a block that has anything else.
Rounding is stochastic: to nearest, (1 - beta2) g^2 below a sixteenth of v would be lost in every step, and v would
stay where it is. All-zero bytes are all-zero moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_offload.kernels.cpu.dither import BLOCK
from hf_offload.kernels.cpu.wire import Array

SHIFT = 20
"""Bits of a float32's mantissa that an int8 code drops."""
DROPPED = (1 << SHIFT) - 1
LEAST_SCALE = 48
"""Blocks whose largest value is below 2^(48 - 127) share the scale of 2^-79: all exponents then are float32's own."""
ZERO, NOT_FINITE = 0, 255
M_RANGE, V_RANGE = 15, 31
QUIET_NAN = 0x7FC00000


class Held(NamedTuple):
    """m and v of a bucket as they are held.

    Attributes:
        m, v: bfloat16: uint16[n]; int8: uint8[n].
        m_scale, v_scale: uint8[blocks], one for each BLOCK elements of each piece, its last may be short; bfloat16:
            uint8[0].
    """

    m: Array
    v: Array
    m_scale: Array
    v_scale: Array


@dataclass(frozen=True)
class Codec:
    """How m and v are held: the element's dtype, and whether each block has a scale byte."""

    name: str
    dtype: np.dtype[np.unsignedinteger]
    scaled: bool

    def empty(self, numel: int, blocks: int) -> Held:
        """Zero moments."""
        scales = blocks if self.scaled else 0
        m, v = (np.zeros(numel, self.dtype) for _ in range(2))
        return Held(m, v, np.zeros(scales, np.uint8), np.zeros(scales, np.uint8))


BFLOAT16 = Codec("bfloat16", np.dtype(np.uint16), scaled=False)
INT8 = Codec("int8", np.dtype(np.uint8), scaled=True)
CODECS = {codec.name: codec for codec in (BFLOAT16, INT8)}


def blocks(numel: int) -> int:
    """How many blocks a run of elements is cut into."""
    return -(-numel // BLOCK)


def in_blocks(x: Array) -> Array:
    """[blocks, BLOCK]: a copy of the run x, with zeros behind its end."""
    padded = np.zeros((blocks(x.size), BLOCK), x.dtype)
    padded.reshape(-1)[: x.size] = x
    return padded


def decode(held: Held, codec: Codec) -> tuple[Array, Array]:
    """float32[n] m and v of one run of elements."""
    if not codec.scaled:
        return tuple((a.astype(np.uint32) << 16).view(np.float32) for a in held[:2])  # type: ignore[return-value]
    n = held.m.size
    m, v = _decode_m(in_blocks(held.m), held.m_scale), _decode_v(in_blocks(held.v), held.v_scale)
    return m.reshape(-1)[:n], v.reshape(-1)[:n]


def encode(m: Array, v: Array, noise: Array, codec: Codec) -> Held:
    """The float32[n] run m, v as held; noise: uint32[blocks, BLOCK] as `dither.noise` gives, or `half`."""
    n = m.size
    if not codec.scaled:
        u = noise.reshape(-1)[:n]
        return Held(_rounded(m, u >> 16), _rounded(v, u & 0xFFFF), *np.zeros((2, 0), np.uint8))
    m_codes, m_scale = _encode_m(in_blocks(m), noise >> 12)
    v_codes, v_scale = _encode_v(in_blocks(v), noise & DROPPED)
    return Held(m_codes.reshape(-1)[:n], v_codes.reshape(-1)[:n], m_scale, v_scale)


def half(numel: int, codec: Codec) -> Array:
    """Noise with which `encode` rounds to nearest: 1/2, for m and for v."""
    return np.full((blocks(numel), BLOCK), 0x80080000 if codec.scaled else 0x80008000, np.uint32)


def _rounded(x: Array, noise: Array) -> Array:
    bits = np.where(np.isnan(x), np.uint32(QUIET_NAN), x.view(np.uint32))
    return ((bits + noise) >> 16).astype(np.uint16)


def _scale(bits: Array) -> Array:
    """uint8[blocks]: the exponent of each block's largest value, one more where rounding may carry into it."""
    largest = bits.max(axis=1).astype(np.int64)
    exponent = (largest + DROPPED) >> 23
    return np.where(largest == 0, ZERO, exponent.clip(LEAST_SCALE, NOT_FINITE)).astype(np.uint8)


def _live(scale: Array) -> Array:
    """bool[blocks, 1]: whether a block has codes at all."""
    return ((scale != ZERO) & (scale != NOT_FINITE))[:, None]


def _exponent(scale: Array, below: int) -> Array:
    """int64[blocks, 1]: the float32 exponent `below` under the scale's, in its place among the bits."""
    return (_power(scale)[:, None] - below) << 23


def _power(scale: Array) -> Array:
    """int64[blocks]: the scale as a biased exponent. No byte between ZERO and LEAST_SCALE is ever made; all mean it."""
    return scale.astype(np.int64).clip(LEAST_SCALE)


def _as_floats(bits: Array, scale: Array) -> Array:
    """float32 of the bits of blocks: zeros or NaN in those that are not live."""
    bits = np.where(_live(scale), bits, 0) | np.where(scale == NOT_FINITE, QUIET_NAN, 0)[:, None]
    return bits.astype(np.uint32).view(np.float32)


def _decode_m(codes: Array, scale: Array) -> Array:
    code = codes.astype(np.int64)
    magnitude = code & 0x7F
    normal = (magnitude << SHIFT) + _exponent(scale, M_RANGE)
    unit = np.ldexp(1.0, _power(scale) - 144)[:, None]  # of subnormals: an eighth of the smallest normal
    subnormal = (magnitude * unit).astype(np.float32).view(np.uint32)
    bits = np.where(magnitude >= 8, normal, subnormal) | (code & 0x80) << 24
    return _as_floats(bits, scale)


def _encode_m(m: Array, noise: Array) -> tuple[Array, Array]:
    bits = m.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    scale = _scale(magnitude)
    normal = magnitude - _exponent(scale, M_RANGE)
    with np.errstate(all="ignore"):
        linear = np.abs(m) * np.ldexp(np.float32(1), 164 - _power(scale))[:, None]
    fraction = np.where(normal >= 1 << 23, normal, np.where(linear < 1 << 23, linear, 0).astype(np.int64))
    code = (fraction + noise) >> SHIFT | (bits >> 24) & 0x80
    return np.where(_live(scale), code, 0).astype(np.uint8), scale


def _decode_v(codes: Array, scale: Array) -> Array:
    return _as_floats((codes.astype(np.int64) << SHIFT) + _exponent(scale, V_RANGE), scale)


def _encode_v(v: Array, noise: Array) -> tuple[Array, Array]:
    bits = v.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    scale = _scale(bits)
    code = (np.maximum(bits - _exponent(scale, V_RANGE), 0) + noise) >> SHIFT
    return np.where(_live(scale), code, 0).astype(np.uint8), scale
