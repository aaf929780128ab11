"""The element loop of the step is packed code: nothing else shows when it turns scalar, several times slower."""

from __future__ import annotations

import re
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest
from numba import types

from hf_offload.kernels.cpu import accumulate, adam, cast, jit, reduce

F32, COEF, BOUNDS = types.float32[::1], types.float32[:, ::1], types.int64[::1]
VIEW = {"bfloat16": types.uint16[::1], "float16": types.int16[::1], "float32": F32}
INT = types.int64


def assembly(body, *signature):
    """What Numba makes of a kernel's body on this machine, with the options of `jit`, uncached."""
    fresh = numba.njit(**jit.OPTIONS)(body.py_func)
    fresh.compile(signature)
    (text,) = fresh.inspect_asm().values()
    return text


def packed(text, operation):
    """Lines of the operation on whole 256- or 512-bit registers."""
    return re.findall(rf"^\s*v{operation}\s.*%[yz]mm", text, flags=re.M)


@pytest.fixture(autouse=True)
def _x86_with_avx():
    if not llvm.get_process_triple().startswith("x86_64") or not llvm.get_host_cpu_features().get("avx"):
        pytest.skip("the instructions looked for are those of x86-64 with AVX")


@pytest.mark.parametrize("wire", list(VIEW))
def test_the_step_is_packed_and_never_contracted(wire):
    view = VIEW[wire]
    text = assembly(adam._step_range, F32, F32, F32, view, view, BOUNDS, COEF, INT, INT)
    for operation in ("sqrtps", "divps", "mulps", "addps", "subps", "cmpunordps"):
        assert packed(text, f"(?:{operation})"), operation
    # One square root and one division in each of the two loops (with and without L2); LLVM adds narrower copies.
    assert len(packed(text, "sqrtps")) >= 2 and len(packed(text, "divps")) >= 2
    if wire == "bfloat16":
        assert packed(text, "pslld") and packed(text, "pmovzxwd")
    if wire == "float16":
        assert packed(text, "cvtph2ps") and packed(text, "cvtps2ph")
    assert not re.search(r"\bvf(n?m(add|sub))", text), "contracted to FMA: bits would depend on the loop's shape"


@pytest.mark.parametrize("wire", list(VIEW))
def test_the_step_into_a_shadow_is_packed_too(wire):
    view = VIEW[wire]
    text = assembly(adam._into_range, *[F32] * 6, view, view, BOUNDS, COEF, INT, INT)
    assert packed(text, "sqrtps") and packed(text, "divps")


@pytest.mark.parametrize("wire", list(VIEW))
def test_adding_gradients_up_is_packed(wire):
    assert packed(assembly(accumulate._add_range, VIEW[wire], VIEW[wire], INT, INT), "addps")
    assert packed(assembly(accumulate._add_range, VIEW[wire], F32, INT, INT), "addps")


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_casts_are_packed(wire):
    widen = assembly(cast._widen_range, VIEW[wire], F32, INT, INT)
    narrow = assembly(cast._narrow_range, F32, VIEW[wire], INT, INT)
    reseed = assembly(cast._reseed_range, VIEW[wire], F32, BOUNDS, INT, INT)
    in_, out = ("pslld", "psrld") if wire == "bfloat16" else ("cvtph2ps", "cvtps2ph")
    assert packed(widen, in_)
    if wire == "bfloat16" or llvm.llvm_version_info[0] >= 20:  # LLVM 15 (Numba 0.61) makes 128-bit code of this one
        assert packed(narrow, out)
        # With AVX2 alone LLVM leaves re-seeding scalar. It runs after somebody wrote to the weights, not every step.
        assert packed(reseed, out) or not llvm.get_host_cpu_features().get("avx512f")


@pytest.mark.parametrize("wire", list(VIEW))
def test_reductions_are_packed(wire):
    squares = assembly(reduce._squares_range, VIEW[wire], types.float64[::1], INT, INT)
    assert packed(squares, "mulpd") and packed(squares, "addpd") and packed(squares, "cvtps2pd")
    assert packed(assembly(reduce._checksum_range, VIEW[wire], types.uint64[::1], INT, INT), "paddq")


def test_the_step_is_packed_on_a_machine_with_avx2_alone(run_python):
    script = f"""
import re, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_vectorised as t
for view in t.VIEW.values():
    text = t.assembly(t.adam._step_range, t.F32, t.F32, t.F32, view, view, t.BOUNDS, t.COEF, t.INT, t.INT)
    assert "zmm" not in text
    assert t.packed(text, "sqrtps") and t.packed(text, "divps")
    assert text.count("vsqrtps") >= 2, "the loop with L2 (LLVM 15 makes 128-bit code of it for float16)"
    assert not re.search(r"vf(n?m(add|sub))", text)
"""
    run_python(script, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+avx,+f16c,+fma,+bmi,+bmi2,+lzcnt,+popcnt")
