"""One block of 128 elements, stepped in vectors: the code that the step kernels of every state format share.

What LLVM's vectoriser cannot do with a loop: read ahead of itself, write the 16-bit weights past the cache (as they are
not read again here, fetching their lines first would cost 2 of 30 bytes), and keep a block in registers until the
largest of it is known.
"""

# LLVM objects carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba.core import types

from hf_offload.kernels.cpu import codecs, columns, lanes
from hf_offload.kernels.cpu.codecs import DROPPED, M_RANGE, QUIET_NAN, SHIFT, V_RANGE
from hf_offload.kernels.cpu.dither import BLOCK, TABLE
from hf_offload.kernels.cpu.lanes import F32, I8, I16, I32, I64, INTS, WIDTH, Lanes, choose

LINE = 64
VECTORS = range(BLOCK // WIDTH)


class Block:
    """Emits the step of one block. Subclasses know how m and v are held.

    Args:
        here, there: pointers to the block's first master, m, v and scales: read, and written; they may be the same.
        grad, weight: pointers to the block's first gradient and weight.
        c: float32[NUM_COEF], the piece's coefficients, as scalars.
        noise: what `dither` adds to TABLE in this block, an i32.
        wires: Numba's types of a gradient and a weight.
    """

    ahead = 512
    """Elements by which memory is asked for before it is used: a quarter of a microsecond of one core's work. Where a
    block is few lines of each array, the hardware's own prefetchers come too late. 128 elements cost a tenth."""

    def __init__(self, builder, here, there, grad, weight, c, noise, wires) -> None:
        self.builder, self.noise = builder, noise
        self.master, self.m, self.v, *self.scales = here
        self.to_master, self.to_m, self.to_v, *self.to_scales = there
        self.grad, self.weight = grad, weight
        self.grad_wire, self.wire = wires
        self.scalars = c
        self.c = [lanes.splat(builder, x) for x in c]
        self.tile = lanes.scratch(builder, weight.type.pointee, BLOCK)

    def emit(self, coupled: bool) -> None:
        """The block's code; coupled: with L2, whose sum is float32."""
        raise NotImplementedError

    def raw(self, pointer, k):
        return lanes.load(self.builder, pointer, I64(k * WIDTH))

    def put(self, value, pointer, k) -> None:
        lanes.store(self.builder, value, pointer, I64(k * WIDTH))

    def fetch(self, k) -> None:
        """Asks for what vector k of a later block will read."""
        for pointer in (self.master, self.m, self.v, self.grad):
            a_line = LINE // lanes.itemsize(pointer)
            if k * WIDTH % a_line == 0:
                lanes.prefetch(self.builder, pointer, I64(self.ahead + k * WIDTH))

    def read(self, k):
        """theta and the gradient as it came, of vector k."""
        grad = _widened(self.builder, self.raw(self.grad, k), self.grad_wire)
        return Lanes(self.builder, self.raw(self.master, k)), grad

    def faded(self, m, v):
        """What is left of the moments before the gradient is added."""
        c = self.c
        return c[columns.KEEP1] * m - c[columns.FADE1] * m, c[columns.BETA2] * v

    def update(self, theta, grad, faded, coupled):
        """theta and the moments, of any NaN, after the step; faded: as `faded` gives them."""
        c, (m, v) = self.c, faded
        g = c[columns.SCALE] * grad
        if coupled:
            g = g + c[columns.L2] * theta
        m, v = m + c[columns.REST1] * g, v + (c[columns.REST2] * g) * g
        step = c[columns.STEP_SIZE] * (m / (v.root() * c[columns.ROOT_SCALE] + c[columns.EPS]))
        return (c[columns.DECAY] * theta - step).one_nan(), m, v

    def write(self, theta, k) -> None:
        """theta, and its weights into the tile, of vector k."""
        self.put(theta.value, self.to_master, k)
        self.put(_narrowed(self.builder, theta, self.wire), self.tile, k)

    def write_out(self) -> None:
        """The tile of weights to where they belong: past the cache, where whole lines of it can be written."""
        lanes.write_lines(self.builder, self.tile, self.weight, BLOCK)


class Float32Block(Block):
    """m and v as they are. No twin of its own: `reference.adam_step`, where decay is decoupled."""

    ahead = 512  # of wider elements

    def emit(self, coupled: bool) -> None:
        assert not coupled, "with L2 the sum is float64: adam's own loop"
        for k in VECTORS:
            self.fetch(k)
            m, v = (Lanes(self.builder, self.raw(p, k)) for p in (self.m, self.v))
            theta, grad = self.read(k)
            theta, m, v = self.update(theta, grad, self.faded(m, v), coupled)
            self.write(theta, k)
            self.put(m.one_nan().value, self.to_m, k)
            self.put(v.one_nan().value, self.to_v, k)
        self.write_out()


def _noise(builder, table, of_block):
    """What elements draw whose rows of TABLE these are."""
    return Lanes(builder, ir.Constant(INTS, [int(x) for x in table])) + of_block


class Bfloat16Block(Block):
    """Two vectors at a time, the even and the odd ones of 32 elements: to widen and to pack what is 16 bits wide takes
    half the instructions so, which pays for dealing the masters out."""

    def emit(self, coupled: bool) -> None:
        for k in VECTORS[::2]:
            self.fetch(k)
            self.fetch(k + 1)
            thetas = lanes.dealt(self.builder, self.raw(self.master, k), self.raw(self.master, k + 1))
            read = zip(thetas, self._pair(self.grad, k, self.grad_wire), *(self._pair(p, k) for p in (self.m, self.v)))
            made = []
            for i, (theta, grad, m, v) in enumerate(read):
                theta, m, v = self.update(theta, grad, self.faded(m, v), coupled)
                u = _noise(self.builder, TABLE[k * WIDTH + i : (k + 2) * WIDTH : 2], self.noise)
                made.append((theta, m.one_nan().as_bits() + (u >> 16), v.one_nan().as_bits() + (u & 0xFFFF)))
            thetas, ms, vs = zip(*made)
            for i, theta in enumerate(lanes.gathered(self.builder, *(t.value for t in thetas))):
                self.put(theta, self.to_master, k + i)
            self._put_pair(ms, self.to_m, k)
            self._put_pair(vs, self.to_v, k)
            self._put_weights(thetas, k)
        self.write_out()

    def _pair(self, pointer, k, wire=types.uint16):
        """The even and the odd float32 of vectors k and k + 1."""
        if wire != types.uint16:
            raw = lanes.dealt(self.builder, self.raw(pointer, k), self.raw(pointer, k + 1))
            return [_widened(self.builder, x.value, wire) for x in raw]
        both = lanes.load_pairs(self.builder, pointer, k)
        return (both << 16).as_floats(), (both & 0xFFFF0000).as_floats()

    def _put_pair(self, bits, pointer, k) -> None:
        """Writes the upper halves of the bits of the even and the odd elements."""
        even, odd = bits
        lanes.store_pairs(self.builder, (even >> 16) | (odd & 0xFFFF0000), pointer, k)

    def _put_weights(self, thetas, k) -> None:
        if self.wire == types.uint16:
            self._put_pair([_rounded(t) for t in thetas], self.tile, k)
        else:
            narrowed = [_narrowed(self.builder, t, self.wire) for t in thetas]
            for i, weights in enumerate(lanes.gathered(self.builder, *narrowed)):
                self.put(weights, self.tile, k + i)


class Int8Block(Block):
    """A NaN needs no form of its own: it makes its block not finite, and then no code of it counts."""

    def emit(self, coupled: bool) -> None:
        self._scale_coefficients()
        made = []
        largest_m = largest_v = Lanes(self.builder, lanes.constant(INTS, 0))
        for k in VECTORS:
            self.fetch(k)
            m, v = _m_in_scale(self.builder, self.raw(self.m, k)), _v_in_scale(self.builder, self.raw(self.v, k))
            theta, grad = self.read(k)
            theta, *moments = self.update(theta, grad, self.faded(m, v), coupled)
            self.write(theta, k)
            m, v = (x.as_bits() for x in moments)
            made.append((m, v))
            largest_m, largest_v = largest_m.largest(m & 0x7FFFFFFF), largest_v.largest(v)
        m_scale, v_scale = (Scale.of(self.builder, x.top()) for x in (largest_m, largest_v))
        for k, (m, v) in enumerate(made):
            u = _noise(self.builder, TABLE[k * WIDTH : (k + 1) * WIDTH], self.noise)
            for code, to in ((m_scale.encode_m(m, u >> 12), self.to_m), (v_scale.encode_v(v, u & DROPPED), self.to_v)):
                self.put(self.builder.trunc(code.value, ir.VectorType(I8, WIDTH)), to, k)
        for scale, to, codes in zip((m_scale, v_scale), self.to_scales, (self.to_m, self.to_v)):
            self.builder.store(scale.byte, to)
            with self.builder.if_then(scale.is_dead(), likely=False):
                for k in VECTORS:
                    self.put(lanes.constant(ir.VectorType(I8, WIDTH), 0), codes, k)
        self.write_out()

    def _scale_coefficients(self) -> None:
        """Puts the scales of m and v into what they are multiplied by. The bits stay: they are powers of two, 0 or NaN,
        so the products are the same numbers before rounding, and neither factor leaves float32's range."""
        for scale, names in zip(self.scales, ((columns.KEEP1, columns.FADE1), (columns.BETA2,))):
            unit = Scale(self.builder, self.builder.load(scale)).unit()
            for name in names:
                self.c[name] = lanes.splat(self.builder, self.builder.fmul(self.scalars[name], unit))


def _m_in_scale(builder, codes):
    """The float32 of m's codes under the scale 1: float16 without its upper exponents, the sign one bit up."""
    halves = ir.VectorType(I16, WIDTH)
    moved = builder.shl(builder.sext(codes, halves), lanes.constant(halves, 7))
    return lanes.from_half(builder, builder.and_(moved, lanes.constant(halves, 0xBFFF)))


def _v_in_scale(builder, codes):
    """The float32 of v's codes under the scale 1."""
    return ((Lanes(builder, builder.zext(codes, INTS)) << SHIFT) + ((127 - V_RANGE) << 23)).as_floats()


class Scale:
    """A block's scale byte, and what follows from it. Twins of the functions in `codecs`."""

    def __init__(self, builder, byte) -> None:
        self.builder, self.byte = builder, byte
        e, least = builder.zext(byte, I32), I32(codecs.LEAST_SCALE)
        self.e = builder.select(builder.icmp_unsigned("<", e, least), least, e)

    @classmethod
    def of(cls, builder, largest):
        """The scale of a block whose largest magnitude has these bits; from NOT_FINITE's on they may be any NaN's."""
        most = I32((codecs.NOT_FINITE << 23) + 1)
        largest = builder.select(builder.icmp_unsigned(">", largest, most), most, largest)
        exponent = builder.lshr(builder.add(largest, I32(DROPPED)), I32(23))
        least = I32(codecs.LEAST_SCALE)
        exponent = builder.select(builder.icmp_unsigned("<", exponent, least), least, exponent)
        exponent = builder.select(builder.icmp_unsigned("==", largest, I32(0)), I32(codecs.ZERO), exponent)
        return cls(builder, builder.trunc(exponent, I8))

    def is_dead(self):
        """Whether the block has no codes."""
        return self.builder.or_(self._is(codecs.ZERO), self._is(codecs.NOT_FINITE))

    def _is(self, byte):
        return self.builder.icmp_unsigned("==", self.byte, I8(byte))

    def unit(self):
        """The float32 that codes under the scale 1 are multiplied by: a power of two, 0 or NaN."""
        bits = self.builder.shl(self.e, I32(23))
        bits = self.builder.select(self._is(codecs.NOT_FINITE), I32(QUIET_NAN), bits)
        return self.builder.bitcast(self.builder.select(self._is(codecs.ZERO), I32(0), bits), F32)

    def _below(self, exponents):
        """The bits of the power of two so far below the scale, as a float32."""
        return self.builder.shl(self.builder.sub(self.e, I32(exponents)), I32(23))

    def encode_m(self, bits, noise):
        magnitude = bits & 0x7FFFFFFF
        normal = magnitude - self._below(M_RANGE)
        unit = self.builder.bitcast(self.builder.shl(self.builder.sub(I32(291), self.e), I32(23)), F32)
        linear = (magnitude.as_floats() * unit).to_int()
        fraction = choose(normal.at_least(1 << 23), normal, linear)
        return ((fraction + noise) >> SHIFT) | ((bits >> 24) & 0x80)

    def encode_v(self, bits, noise):
        least = self._below(V_RANGE)
        return (bits.largest(least) - least + noise) >> SHIFT


def _widened(builder, raw, wire):
    """The float32 lanes of sixteen wire elements."""
    if wire == types.uint16:
        return (Lanes(builder, builder.zext(raw, INTS)) << 16).as_floats()
    return lanes.from_half(builder, raw) if wire == types.int16 else Lanes(builder, raw)


def _narrowed(builder, x, wire):
    """Sixteen wire elements nearest to x, which has but the one NaN."""
    if wire == types.uint16:
        return builder.trunc((_rounded(x) >> 16).value, ir.VectorType(I16, WIDTH))
    if wire == types.int16:
        halves = builder.fptrunc(x.value, ir.VectorType(lanes.F16, WIDTH))
        # Else they reach the store as halves, and LLVM (to 22 at least) has no store of these past the cache.
        return lanes.opaque(builder, builder.bitcast(halves, ir.VectorType(I16, WIDTH)))
    return x.value


def _rounded(x):
    """Bits whose upper halves are the bfloat16 nearest to x."""
    bits = x.as_bits()
    return bits + 0x7FFF + ((bits >> 16) & 1)


def pointer_to(context, builder, kind, array, index):
    """The address of an element of a Numba array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


def branch(builder, block, l2) -> None:
    """The block's code without L2 or with it: 0 * theta is NaN where theta is infinite."""
    with builder.if_else(builder.fcmp_ordered("==", l2, F32(0.0))) as (decoupled, coupled):
        with decoupled:
            block(coupled=False)
        with coupled:
            block(coupled=True)
