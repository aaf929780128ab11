"""Bit-level building blocks of the kernels: 16-bit floats held as integers, and a thread's floating-point mode.

Inside compiled code a wire array tells its format by its dtype, so that one kernel source compiles to three variants:
uint16 holds bfloat16 bits, int16 holds float16 bits, float32 is itself (`wire.py` makes these views).
"""

# `intrinsic` passes Numba and LLVM objects that carry no type hints.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

F32, F16 = ir.FloatType(), ir.HalfType()
I64, I32, I16, I8 = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)

# Round to nearest even, every exception masked, neither flush-to-zero nor denormals-are-zero.
MXCSR_IEEE = 0x1F80
FPCR_IEEE = 0


@intrinsic
def widen_one(typingctx, element):
    """The float32 value of a wire element, exactly."""

    def codegen(context, builder, sig, args):
        (bits,) = args
        if element == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)
        if element == types.int16:
            return builder.fpext(builder.bitcast(bits, F16), F32)
        return bits

    return types.float32(element), codegen


@intrinsic
def narrow_as(typingctx, like, value):
    """value in the format of the wire element `like`: nearest even; any NaN becomes the one quiet 0x7FC0 / 0x7E00.

    Only the type of `like` counts; where it is read for this alone, LLVM drops the load.
    """

    def codegen(context, builder, sig, args):
        if like == types.float32:
            return args[1]
        value = _one_nan(builder, args[1])
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(value, F16), I16)
        bits = builder.bitcast(value, I32)
        odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
        rounded = builder.add(builder.add(bits, I32(0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, I32(16)), I16)

    return like(like, types.float32), codegen


@intrinsic
def bits_of(typingctx, element):
    """The bits of a wire element, as uint32."""

    def codegen(context, builder, sig, args):
        if element == types.float32:
            return builder.bitcast(args[0], I32)
        return builder.zext(args[0], I32)

    return types.uint32(element), codegen


@intrinsic
def one_nan(typingctx, value):
    """value, with every NaN replaced by the quiet 0x7FC00000.

    Whose sign and payload a NaN result takes is the instruction's choice: it differs between a vector body and its
    scalar tail, and between architectures.
    """

    def codegen(context, builder, sig, args):
        return _one_nan(builder, args[0])

    return types.float32(types.float32), codegen


def _one_nan(builder, value):
    return builder.select(builder.fcmp_unordered("uno", value, value), F32(float("nan")), value)


@intrinsic
def enter_ieee(typingctx):
    """Sets this thread's floating-point mode to plain IEEE; returns the mode it had, for `leave_ieee`.

    Flush-to-zero changes results, and a thread inherits it from whoever started it
    (`torch.set_flush_denormal(True)` before the pool starts).
    """

    def codegen(context, builder, sig, args):
        return swap_mode(builder, architecture())

    return types.uint64(), codegen


@intrinsic
def leave_ieee(typingctx, mode):
    """Puts back the floating-point mode that `enter_ieee` returned."""

    def codegen(context, builder, sig, args):
        restore_mode(builder, architecture(), args[0])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@intrinsic
def write_all(typingctx):
    """Other threads see from here on what this one wrote past the cache: x86-64 keeps no order of such stores."""

    def codegen(context, builder, sig, args):
        if architecture() == "x86_64":
            _call(builder, "llvm.x86.sse.sfence", ir.VoidType())
        else:
            builder.fence("release")
        return context.get_dummy_value()

    return types.void(), codegen


def architecture() -> str:
    """`x86_64`, `aarch64` or another first part of LLVM's triple."""
    name = llvm.get_process_triple().split("-")[0]
    return "aarch64" if name == "arm64" else name


def swap_mode(builder, arch):
    """Emits: read the mode, set the IEEE one; returns the old one (i64). Nothing but on x86-64 and AArch64."""
    _fence(builder)
    old = I64(0)
    if arch == "x86_64":
        slot = cgutils.alloca_once(builder, I32)
        _call(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), builder.bitcast(slot, I8.as_pointer()))
        old = builder.zext(builder.load(slot), I64)
        _set_mode(builder, arch, I64(MXCSR_IEEE))
    elif arch == "aarch64":
        old = _call(builder, "llvm.aarch64.get.fpcr", I64)
        _set_mode(builder, arch, I64(FPCR_IEEE))
    _fence(builder)
    return old


def restore_mode(builder, arch, mode):
    """Emits: set the mode that `swap_mode` returned."""
    _fence(builder)
    _set_mode(builder, arch, mode)
    _fence(builder)


def _set_mode(builder, arch, mode):
    if arch == "x86_64":
        slot = cgutils.alloca_once(builder, I32)
        builder.store(builder.trunc(mode, I32), slot)
        _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), builder.bitcast(slot, I8.as_pointer()))
    elif arch == "aarch64":
        _call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), mode)


def _fence(builder):
    # A fence for the compiler alone, no instruction. LLVM does not know that arithmetic depends on the mode; but loads
    # and stores may not cross the fence, so neither may the arithmetic between a load and a store.
    builder.fence("seq_cst", targetscope="singlethread")


def _call(builder, name, result, *args):
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)
