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
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hf_offload.kernels.cpu import adam, chunks, codecs, jit, lanes
from hf_offload.kernels.cpu.adam import ACTIVE, NUM_COEF
from hf_offload.kernels.cpu.bits import enter_ieee, leave_ieee
from hf_offload.kernels.cpu.codecs import BLOCK, DROPPED, M_RANGE, QUIET_NAN, SHIFT, V_RANGE, Codec, Held
from hf_offload.kernels.cpu.dither import MASK, NUM_NOISE, ODD, TABLE
from hf_offload.kernels.cpu.lanes import F32, I8, I16, I32, I64, INTS, Lanes, choose
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


# ---- one block, in vectors


class _Block:
    """Emits the code of one block: pointers to the element and the scales it begins with, and its piece's settings."""

    def __init__(self, builder, here, there, grad, weight, coef, noise, wires) -> None:
        self.builder = builder
        self.master, self.m, self.v, self.m_scale, self.v_scale = here
        self.to_master, self.to_m, self.to_v, self.to_m_scale, self.to_v_scale = there
        self.grad, self.weight = grad, weight
        self.grad_wire, self.wire = wires
        self.c = [self._setting(coef, i) for i in range(NUM_COEF)]
        self.noise = noise

    def _setting(self, coef, i):
        return lanes.splat(self.builder, self.builder.load(self.builder.gep(coef, [I64(i)])))

    def raw(self, pointer, k):
        return lanes.load(self.builder, pointer, I64(k * lanes.WIDTH))

    def put(self, value, pointer, k) -> None:
        lanes.store(self.builder, value, pointer, I64(k * lanes.WIDTH))

    def integers(self, pointer, k):
        return Lanes(self.builder, self.builder.zext(self.raw(pointer, k), INTS))

    def draw(self, k):
        """The noise of vector k."""
        row = ir.Constant(INTS, [int(x) for x in TABLE[k * lanes.WIDTH : (k + 1) * lanes.WIDTH]])
        return Lanes(self.builder, row) + self.noise

    def gradient(self, k, coupled):
        g = self.c[adam.SCALE] * _widened(self.builder, self.raw(self.grad, k), self.grad_wire)
        return g + self.c[adam.L2] * Lanes(self.builder, self.raw(self.master, k)) if coupled else g

    def update(self, k, m, v, coupled):
        """Steps vector k, whose decoded moments are m and v; writes theta; returns the new moments."""
        c, theta = self.c, Lanes(self.builder, self.raw(self.master, k))
        g = self.gradient(k, coupled)
        m = (c[adam.KEEP1] * m - c[adam.FADE1] * m) + c[adam.REST1] * g
        v = c[adam.BETA2] * v + (c[adam.REST2] * g) * g
        m, v = m.one_nan(), v.one_nan()
        step = c[adam.STEP_SIZE] * (m / (v.root() * c[adam.ROOT_SCALE] + c[adam.EPS]))
        theta = (c[adam.DECAY] * theta - step).one_nan()
        self.put(theta.value, self.to_master, k)
        self.put(_narrowed(self.builder, theta, self.wire), self.weight, k)
        return m, v

    def bfloat16(self, coupled) -> None:
        for k in range(BLOCK // lanes.WIDTH):
            m, v = ((self.integers(p, k) << 16).as_floats() for p in (self.m, self.v))
            m, v = self.update(k, m, v, coupled)
            u = self.draw(k)
            m, v = (m.as_bits() + (u >> 16)) >> 16, (v.as_bits() + (u & 0xFFFF)) >> 16
            self.put(self.builder.trunc(m.value, ir.VectorType(I16, lanes.WIDTH)), self.to_m, k)
            self.put(self.builder.trunc(v.value, ir.VectorType(I16, lanes.WIDTH)), self.to_v, k)

    def int8(self, coupled) -> None:
        m_scale, v_scale = (_Scale(self.builder, self.builder.load(p)) for p in (self.m_scale, self.v_scale))
        made = []
        largest_m = largest_v = Lanes(self.builder, lanes.constant(INTS, 0))
        for k in range(BLOCK // lanes.WIDTH):
            m, v = m_scale.decode_m(self.integers(self.m, k)), v_scale.decode_v(self.integers(self.v, k))
            m, v = (x.as_bits() for x in self.update(k, m, v, coupled))
            made.append((m, v))
            magnitude = m & 0x7FFFFFFF
            largest_m = largest_m.largest(magnitude)
            largest_v = largest_v.largest(v)
        m_scale, v_scale = (_Scale.of(self.builder, x.top()) for x in (largest_m, largest_v))
        self.builder.store(m_scale.byte, self.to_m_scale)
        self.builder.store(v_scale.byte, self.to_v_scale)
        for k, (m, v) in enumerate(made):
            u = self.draw(k)
            for value, to in ((m_scale.encode_m(m, u >> 12), self.to_m), (v_scale.encode_v(v, u & DROPPED), self.to_v)):
                self.put(self.builder.trunc(value.value, ir.VectorType(I8, lanes.WIDTH)), to, k)


class _Scale:
    """A block's scale byte, and the vectors that follow from it. Twins of the functions in `codecs`."""

    def __init__(self, builder, byte) -> None:
        self.builder, self.byte = builder, byte
        e, least = builder.zext(byte, I32), I32(codecs.LEAST_SCALE)
        self.e = e = builder.select(builder.icmp_unsigned("<", e, least), least, e)
        finite = builder.icmp_unsigned("!=", byte, I8(codecs.NOT_FINITE))
        self.live = builder.and_(builder.icmp_unsigned("!=", byte, I8(codecs.ZERO)), finite)
        self.dead_bits = lanes.splat(builder, builder.select(finite, I32(0), I32(QUIET_NAN)))
        self.none = Lanes(builder, lanes.constant(INTS, 0))
        self._below = {
            r: lanes.splat(builder, builder.shl(builder.sub(e, I32(r)), I32(23))) for r in (M_RANGE, V_RANGE)
        }

    @classmethod
    def of(cls, builder, largest):
        """The scale of a block whose largest magnitude has these bits."""
        exponent = builder.lshr(builder.add(largest, I32(DROPPED)), I32(23))
        least, most = I32(codecs.LEAST_SCALE), I32(codecs.NOT_FINITE)
        exponent = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
        exponent = builder.select(builder.icmp_unsigned(">", exponent, most), most, exponent)
        exponent = builder.select(builder.icmp_unsigned("==", largest, I32(0)), I32(codecs.ZERO), exponent)
        return cls(builder, builder.trunc(exponent, I8))

    def _power(self, exponent):
        """The float32 with this biased exponent in all lanes."""
        return lanes.splat(self.builder, self.builder.bitcast(self.builder.shl(exponent, I32(23)), F32))

    def decode_m(self, code):
        magnitude = code & 0x7F
        normal = (magnitude << SHIFT) + self._below[M_RANGE]
        subnormal = (magnitude.to_float() * self._power(self.builder.sub(self.e, I32(17)))).as_bits()
        bits = choose(magnitude.at_least(8), normal, subnormal) | ((code & 0x80) << 24)
        return choose(self.live, bits, self.dead_bits).as_floats()

    def encode_m(self, bits, noise):
        magnitude = bits & 0x7FFFFFFF
        normal = magnitude - self._below[M_RANGE]
        linear = magnitude.as_floats() * self._power(self.builder.sub(I32(291), self.e))
        fraction = choose(normal.at_least(1 << 23), normal, linear.to_int())
        code = ((fraction + noise) >> SHIFT) | ((bits >> 24) & 0x80)
        return choose(self.live, code, self.none)

    def decode_v(self, code):
        return choose(self.live, (code << SHIFT) + self._below[V_RANGE], self.dead_bits).as_floats()

    def encode_v(self, bits, noise):
        code = ((bits - self._below[V_RANGE]).largest(0) + noise) >> SHIFT
        return choose(self.live, code, self.none)


def _widened(builder, raw, wire):
    """The float32 lanes of sixteen wire elements."""
    if wire == types.uint16:
        return (Lanes(builder, builder.zext(raw, INTS)) << 16).as_floats()
    if wire == types.int16:
        return Lanes(builder, builder.fpext(builder.bitcast(raw, ir.VectorType(lanes.F16, lanes.WIDTH)), lanes.FLOATS))
    return Lanes(builder, raw)


def _narrowed(builder, x, wire):
    """Sixteen wire elements nearest to x, which has but the one NaN."""
    if wire == types.uint16:
        bits = x.as_bits()
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return builder.trunc(rounded.value, ir.VectorType(I16, lanes.WIDTH))
    if wire == types.int16:
        halves = builder.fptrunc(x.value, ir.VectorType(lanes.F16, lanes.WIDTH))
        return builder.bitcast(halves, ir.VectorType(I16, lanes.WIDTH))
    return x.value


@intrinsic
def _step_block(typingctx, here, there, grad, weight, coef, k, at, block, noise):
    """Steps the block of 128 elements that begins at element `at` of the arrays, with scale number `block`.

    here, there: master, m, v, m_scale, v_scale. coef: row k of it. noise: uint32, the block's.
    """

    def codegen(context, builder, sig, args):
        def place(kind, value, *index):
            array = context.make_array(kind)(context, builder, value)
            pointer = array.data
            for i in index:
                pointer = builder.gep(pointer, [i])
            return pointer

        def state(kind, value):
            parts = [builder.extract_value(value, i) for i in range(len(kind))]
            index = [args[6]] * 3 + [args[7]] * 2
            return [place(t, part, i) for t, part, i in zip(kind, parts, index)]

        row = builder.mul(args[5], I64(NUM_COEF))
        block_ = _Block(
            builder, state(sig.args[0], args[0]), state(sig.args[1], args[1]),
            place(sig.args[2], args[2], args[6]), place(sig.args[3], args[3], args[6]),
            place(sig.args[4], args[4], row), args[8], (sig.args[2].dtype, sig.args[3].dtype),
        )  # fmt: skip
        emit = block_.int8 if sig.args[0][1].dtype == types.uint8 else block_.bfloat16
        l2 = builder.load(place(sig.args[4], args[4], builder.add(row, I64(adam.L2))))
        with builder.if_else(builder.fcmp_ordered("==", l2, F32(0.0))) as (decoupled, coupled):
            with decoupled:
                emit(coupled=False)
            with coupled:
                emit(coupled=True)  # 0 * theta is NaN where theta is infinite
        return context.get_dummy_value()

    args = here, there, grad, weight, coef, types.int64, types.int64, types.int64, types.uint32
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


@jit.helper
def _short_block(here, there, grad, weight, coef, k, at, block, size, noise):  # type: ignore[no-untyped-def]
    """A parameter's last block, by way of a whole one with zeros behind its end."""
    master, m, v = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, here[1].dtype), np.zeros(BLOCK, here[2].dtype)
    g, w = np.zeros(BLOCK, grad.dtype), np.zeros(BLOCK, weight.dtype)
    for i in range(size):
        master[i], m[i], v[i], g[i] = here[0][at + i], here[1][at + i], here[2][at + i], grad[at + i]
    block_in = master, m, v, here[3][block:], here[4][block:]
    block_out = master, m, v, there[3][block:], there[4][block:]
    _step_block(block_in, block_out, g, w, coef, k, 0, 0, noise)
    for i in range(size):
        there[0][at + i], there[1][at + i], there[2][at + i], weight[at + i] = master[i], m[i], v[i], w[i]


@jit.kernel
def _compact_range(  # type: ignore[no-untyped-def]
    master, m, v, m_scale, v_scale, to_master, to_m, to_v, to_m_scale, to_v_scale,
    grad, weight, bounds, firsts, coef, noise, copies, lo, hi,
):  # fmt: skip
    """Steps the blocks of the bucket that begin in lo..hi."""
    here, there = (master, m, v, m_scale, v_scale), (to_master, to_m, to_v, to_m_scale, to_v_scale)
    scaled = m_scale.size != 0
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
            elif size == BLOCK:
                _step_block(here, there, grad, weight, coef, k, at, number, _noise_of(noise, k, b))
            else:
                _short_block(here, there, grad, weight, coef, k, at, number, size, _noise_of(noise, k, b))
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
