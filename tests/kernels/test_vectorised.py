"""The element loop of the step is packed code: nothing else shows when it turns scalar, several times slower."""

from __future__ import annotations

import re
from pathlib import Path

import llvmlite.binding as llvm
import numba
import pytest
from numba import types

from hf_offload.kernels.cpu import accumulate, adam, cast, compact, jit, reduce

F32, COEF, BOUNDS = types.float32[::1], types.float32[:, ::1], types.int64[::1]
VIEW = {"bfloat16": types.uint16[::1], "float16": types.int16[::1], "float32": F32}
INT = types.int64
HELD = {"bfloat16": types.uint16[::1], "int8": types.uint8[::1]}


def step_signature(view):
    """Of `adam._step_range`."""
    return (F32, F32, F32, view, view, BOUNDS, COEF, INT, INT)


def compact_signature(held, view):
    """Of `compact._compact_range`."""
    state = (F32, held, held, types.uint8[::1], types.uint8[::1])
    return (*state, *state, view, view, BOUNDS, BOUNDS, COEF, types.uint32[:, ::1], types.boolean, INT, INT)


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
def _x86_with_avx(request):
    if "on_arm" in request.node.name:
        return
    if not llvm.get_process_triple().startswith("x86_64") or not llvm.get_host_cpu_features().get("avx"):
        pytest.skip("the instructions looked for are those of x86-64 with AVX")


@pytest.mark.parametrize("wire", list(VIEW))
def test_the_step_is_packed_and_never_contracted(wire):
    view = VIEW[wire]
    text = assembly(adam._step_range, *step_signature(view))
    for operation in ("sqrtps", "divps", "mulps", "addps", "subps", "cmpunordps"):
        assert packed(text, f"(?:{operation})"), operation
    # One square root and one division in each of the two loops (with and without L2); LLVM adds narrower copies.
    assert len(packed(text, "sqrtps")) >= 2 and len(packed(text, "divps")) >= 2
    if wire == "bfloat16":
        assert packed(text, "pslld") and packed(text, "pmovzxwd")
    if wire == "float16":
        assert packed(text, "cvtph2psx?") and packed(text, "cvtps2phx?")  # with an x: AVX512-FP16
    assert not re.search(r"\bvf(n?m(add|sub))", text), "contracted to FMA: bits would depend on the loop's shape"


@pytest.mark.parametrize(
    ("held", "wire"),
    [*(("float32", wire) for wire in VIEW), ("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float16")],
)
def test_weights_are_written_past_the_cache_and_fenced(held, wire):
    """Nothing but the fence lets, on x86-64, the thread that copies the weights see them."""
    if held == "float32":
        text = assembly(adam._step_range, *step_signature(VIEW[wire]))
    else:
        text = assembly(compact._compact_range, *compact_signature(HELD[held], VIEW[wire]))
    written = re.findall(r"^\s*v?movnt(?:dq|p[sd])\s", text, flags=re.M)
    assert len(written) >= 4 and re.search(r"^\s*sfence$", text, flags=re.M)


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
    in_, out = ("pslld", "psrld") if wire == "bfloat16" else ("cvtph2psx?", "cvtps2phx?")
    assert packed(widen, in_)
    if wire == "bfloat16" or llvm.llvm_version_info[0] >= 20:  # LLVM 15 (Numba 0.61) makes 128-bit code of this one
        assert packed(narrow, out)
        # With AVX2 alone LLVM leaves re-seeding scalar, and for some CPUs takes half registers. It runs after somebody
        # wrote to the weights, not every step.
        half = re.search(rf"^\s*v{out}\s.*%xmm", reseed, flags=re.M)
        assert packed(reseed, out) or half or not llvm.get_host_cpu_features().get("avx512f")


@pytest.mark.parametrize("wire", list(VIEW))
def test_reductions_are_packed(wire):
    squares = assembly(reduce._squares_range, VIEW[wire], types.float64[::1], INT, INT)
    assert packed(squares, "mulpd") and packed(squares, "addpd") and packed(squares, "cvtp[sh]2pd")
    assert packed(assembly(reduce._checksum_range, VIEW[wire], types.uint64[::1], INT, INT), "paddq")


def all_packed(text):
    """Whether each root and each quotient of a compact kernel is one of a whole register, and none is contracted."""
    roots, quotients = (re.findall(rf"v{name}[ps]s\s.*", text) for name in ("sqrt", "div"))
    return (
        roots
        and all("ps" in line and re.search("%[yz]mm", line) for line in roots + quotients)
        and not re.search(r"vf(n?m(add|sub))", text)
    )


@pytest.mark.parametrize("held", list(HELD))
def test_the_compact_step_is_packed_and_never_contracted(held):
    text = assembly(compact._compact_range, *compact_signature(HELD[held], VIEW["bfloat16"]))
    assert all_packed(text)


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
for held in t.HELD.values():
    text = t.assembly(t.compact._compact_range, *t.compact_signature(held, t.VIEW["bfloat16"]))
    assert "zmm" not in text and t.all_packed(text)
"""
    run_python(script, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+avx,+f16c,+fma,+bmi,+bmi2,+lzcnt,+popcnt")


# Makes LLVM's input for the kernels and hands it to LLVM's AArch64 pipeline: Numba compiles for this machine alone.
FOR_AARCH64 = r"""
import re, sys
sys.path.insert(0, {folder!r})
import llvmlite.binding as llvm
import numba
import test_vectorised as t
from hf_offload.kernels.cpu import bits
bits.architecture = lambda: "none"  # the floating-point mode is set by instructions of one architecture
llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple(t.AARCH64).create_target_machine(opt=3)
def on_aarch64(body, *signature):
    fresh = numba.njit(**t.jit.OPTIONS)(body.py_func)
    fresh.compile(signature)
    (text,) = fresh.inspect_llvm().values()
    module = llvm.parse_assembly(re.sub('(?m)^target .*$', '', text))
    module.triple, module.data_layout = t.AARCH64, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_assembly(module)
def check(text, view):
    for name in ('fsqrt', 'fdiv', 'fmul', 'fadd', 'fsub'):
        assert re.search(name + r'\tv\d+\.4s', text), name
    assert not re.search(r'\tf(n?m(add|sub)|ml[as])\t', text), 'contracted'
for name, view in t.VIEW.items():
    text = on_aarch64(t.adam._step_range, *t.step_signature(view))
    check(text, view)
    assert re.search(r'fmul\tv\d+\.2d', text), 'the loop with L2, in float64, which LLVM itself vectorises'
for held in t.HELD.values():
    text = on_aarch64(t.compact._compact_range, *t.compact_signature(held, t.VIEW['bfloat16']))
    check(text, view)
    assert not re.search(r'f(sqrt|div)\ts\d+', text), 'scalar'
print('checked')
"""
AARCH64 = "aarch64-unknown-linux-gnu"


def test_the_steps_are_packed_on_arm(run_python):
    """As far as this machine can tell: NEON's registers of four float32, in what LLVM makes of the source."""
    if not hasattr(llvm, "create_pass_builder"):
        pytest.skip("this llvmlite cannot run LLVM's passes for another machine")
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(AARCH64)
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no AArch64 target: {error}")
    script = FOR_AARCH64.format(folder=str(Path(__file__).parent))
    assert run_python(script, NUMBA_OPT="0").stdout.split() == ["checked"]
