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
        """The larger, as signed integers."""
        other = self._with(other)
        return Lanes(self.builder, self.builder.select(self.at_least(other), self.value, other))

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

    def to_float(self):
        """The float32 of each integer below 2^24."""
        return Lanes(self.builder, self.builder.sitofp(self.value, FLOATS))

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


def choose(mask, yes, no):
    """Lane by lane, or, where `mask` is one bit, all."""
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


def _place(builder, pointer, index):
    element = pointer.type.pointee
    kind = ir.VectorType(element, WIDTH)
    align = 4 if element == F32 else element.width // 8
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align
