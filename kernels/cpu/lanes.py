"""Sixteen lanes at a time, written as formulas: what LLVM's loop vectoriser does not find by itself.

A kernel that reads a block, needs something of all of it (its largest value), and then writes it, keeps the block in
registers only where the vectors are spelt out. `Lanes` wraps LLVM's <16 x float> or <16 x i32> with Python's operators;
LLVM cuts them into what the target has: one register of AVX-512, two of AVX2, four of NEON.
"""

# LLVM objects carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

WIDTH = 16
F32, F16 = ir.FloatType(), ir.HalfType()
I64, I32, I16, I8, I1 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.IntType(1)
FLOATS, INTS, MASK = (ir.VectorType(t, WIDTH) for t in (F32, I32, I1))


class Lanes:
    """Sixteen float32 or 32-bit integers. Operators act lane by lane; `>>` shifts zeros in; comparisons give a mask."""

    def __init__(self, builder, value) -> None:
        self.builder, self.value = builder, value

    @property
    def is_float(self) -> bool:
        return self.value.type == FLOATS

    def _with(self, other):
        if isinstance(other, Lanes):
            return other.value
        if isinstance(other, (int, float)):
            return constant(self.value.type, other)
        return other if isinstance(other.type, ir.VectorType) else splat(self.builder, other).value

    def _emit(self, for_floats, for_ints, other):
        emit = getattr(self.builder, for_floats if self.is_float else for_ints)
        return Lanes(self.builder, emit(self.value, self._with(other)))

    def __add__(self, other):
        return self._emit("fadd", "add", other)

    def __sub__(self, other):
        return self._emit("fsub", "sub", other)

    def __mul__(self, other):
        return self._emit("fmul", "mul", other)

    def __truediv__(self, other):
        return self._emit("fdiv", "udiv", other)

    def __and__(self, other):
        return self._emit("", "and_", other)

    def __or__(self, other):
        return self._emit("", "or_", other)

    def __lshift__(self, count):
        return self._emit("", "shl", count)

    def __rshift__(self, count):
        return self._emit("", "lshr", count)

    def at_least(self, other):
        """Mask: self >= other, as signed integers."""
        return self.builder.icmp_signed(">=", self.value, self._with(other))

    def largest(self, other):
        """The larger, as unsigned integers."""
        other = self._with(other)
        more = self.builder.icmp_unsigned(">", self.value, other)
        return Lanes(self.builder, self.builder.select(more, self.value, other))

    def root(self):
        return Lanes(self.builder, intrinsic(self.builder, "llvm.sqrt.v16f32", FLOATS, self.value))

    def one_nan(self):
        """Every NaN becomes the quiet 0x7FC00000."""
        unordered = self.builder.fcmp_unordered("uno", self.value, self.value)
        return Lanes(self.builder, self.builder.select(unordered, constant(FLOATS, float("nan")), self.value))

    def as_bits(self):
        return Lanes(self.builder, self.builder.bitcast(self.value, INTS))

    def as_floats(self):
        return Lanes(self.builder, self.builder.bitcast(self.value, FLOATS))

    def to_int(self):
        """Each float32 cut off to an integer; undefined from 2^31 on."""
        return Lanes(self.builder, self.builder.fptosi(self.value, INTS))

    def top(self):
        """The largest lane, as unsigned integers: an i32."""
        return intrinsic(self.builder, "llvm.vector.reduce.umax.v16i32", I32, self.value)


def constant(kind, value):
    """A vector that has `value` in each lane."""
    return ir.Constant(kind, [value] * WIDTH)


def splat(builder, scalar):
    """Lanes that all have the scalar."""
    kind = FLOATS if scalar.type == F32 else INTS
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return Lanes(builder, builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * WIDTH)))


def from_half(builder, bits):
    """The float32 of the bits of sixteen float16, exactly."""
    return Lanes(builder, builder.fpext(builder.bitcast(bits, ir.VectorType(F16, WIDTH)), FLOATS))


def opaque(builder, value):
    """The integers of a vector, in a way of which LLVM cannot tell that it changes nothing."""
    zero = builder.asm(ir.FunctionType(I32, [I32]), "", "=r,0", [I32(0)], False)
    one = builder.insert_element(ir.Constant(value.type, ir.Undefined), builder.trunc(zero, value.type.element), I32(0))
    zeros = builder.shuffle_vector(one, ir.Constant(value.type, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))
    return builder.or_(value, zeros)


def choose(mask, yes, no):
    """Lane by lane."""
    return Lanes(yes.builder, yes.builder.select(mask, yes.value, no.value))


def intrinsic(builder, name, result, *args):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def load(builder, pointer, index):
    """The raw vector of the sixteen elements from `index` on."""
    place, align = _place(builder, pointer, index)
    return builder.load(place, align=align)


def store(builder, value, pointer, index) -> None:
    """Writes the vector to the sixteen elements from `index` on."""
    place, align = _place(builder, pointer, index)
    builder.store(value, place, align=align)


def itemsize(pointer):
    """Bytes of what a pointer points to."""
    return 4 if pointer.type.pointee == F32 else pointer.type.pointee.width // 8


def _place(builder, pointer, index):
    kind = ir.VectorType(pointer.type.pointee, WIDTH)
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), itemsize(pointer)


# ---- two vectors at a time

EVEN, ODD = range(0, 2 * WIDTH, 2), range(1, 2 * WIDTH, 2)


def _shuffled(builder, a, b, order):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, WIDTH), list(order)))


def dealt(builder, first, second):
    """The even and the odd ones of 32 elements."""
    return [Lanes(builder, _shuffled(builder, first, second, order)) for order in (EVEN, ODD)]


def gathered(builder, even, odd):
    """The 32 elements, as two raw vectors, of which these are the even and the odd ones."""
    order = [i // 2 + i % 2 * WIDTH for i in range(2 * WIDTH)]
    return [_shuffled(builder, even, odd, half) for half in (order[:WIDTH], order[WIDTH:])]


def load_pairs(builder, pointer, k):
    """Vectors k and k + 1 of 16-bit elements, as integers of which each holds an even one and above it an odd one."""
    place, align = _pairs_at(builder, pointer, k)
    return Lanes(builder, builder.load(place, align=align))


def store_pairs(builder, pairs, pointer, k) -> None:
    """Writes what `load_pairs` reads."""
    place, align = _pairs_at(builder, pointer, k)
    builder.store(pairs.value, place, align=align)


def _pairs_at(builder, pointer, k):
    # Little endian, as everything that Numba compiles for.
    place = builder.gep(pointer, [I64(k * WIDTH)])
    return builder.bitcast(place, INTS.as_pointer()), itemsize(pointer)


# ---- memory


LINE = 64
READ, KEPT, DATA = 0, 3, 1


def prefetch(builder, pointer, index) -> None:
    """Asks for the line of an element, which need not exist."""
    place = builder.bitcast(builder.gep(pointer, [index]), I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    builder.call(function, [place, I32(READ), I32(KEPT), I32(DATA)])


def scratch(builder, element, count):
    """Room for `count` elements on the stack, whole lines: a pointer to the first."""
    with builder.goto_entry_block():
        room = builder.alloca(ir.ArrayType(element, count))
        room.align = LINE
    return builder.bitcast(room, element.as_pointer())


def write_lines(builder, source, target, count) -> None:
    """Copies `count` elements, whole lines of `source`: past the cache where they are whole lines of `target`, too."""
    kind = ir.VectorType(F32, WIDTH)
    lines = count * itemsize(source) // LINE
    from_, to = (builder.bitcast(p, kind.as_pointer()) for p in (source, target))
    offset = builder.and_(builder.ptrtoint(to, I64), I64(LINE - 1))
    values = [builder.load(builder.gep(from_, [I64(i)]), align=LINE) for i in range(lines)]
    with builder.if_else(builder.icmp_unsigned("==", offset, I64(0)), likely=True) as (whole, cut):
        with whole:
            for i, value in enumerate(values):
                line = builder.store(value, builder.gep(to, [I64(i)]), align=LINE)
                line.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        with cut:
            for i, value in enumerate(values):
                builder.store(value, builder.gep(to, [I64(i)]), align=itemsize(target))
