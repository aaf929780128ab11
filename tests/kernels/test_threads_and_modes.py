"""Thread counts, Numba's layers, forks, and the floating-point mode of whoever calls: none of them changes a bit."""

from __future__ import annotations

import ctypes.util
import hashlib
import importlib.util
import os
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import bits, jit, reference

WIRES = ["bfloat16", "float16", "float32"]

# Runs every kernel on states full of denormals and prints a hash of all results.
EVERYTHING = """
import hashlib, sys
import numpy as np
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import codecs, dither, reference
def everything(threads, n=150_000):
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for wire in ("bfloat16", "float16", "float32"):
        signs = rng.integers(0, 2, n, dtype=np.uint32) << 31
        small = [rng.integers(0, 1 << 24, n, dtype=np.uint32) | signs for _ in range(4)]
        theta, m, v, g = (x.view(np.float32) for x in small)
        v.view(np.uint32)[:] &= 0x7FFFFFFF  # no arithmetic of NumPy's here: it would obey the mode under test
        weight = np.zeros(n, np.float32 if wire == "float32" else np.uint16)
        grad = g if wire == "float32" else (rng.integers(0, 1 << 10, n).astype(np.uint16))
        settings = dict(lr=1e-3, beta1=.9, beta2=.999, eps=1e-30, weight_decay=.1, step=2, grad_scale=.3)
        coef = np.stack([cpu.coefficients(decoupled=kind, maximize=False, **settings) for kind in (True, False)])
        total = cpu.sum_of_squares(theta, "float32", threads), cpu.sum_of_squares(grad, wire, threads)
        cpu.adam_step(theta, m, v, grad, weight, np.array([0, n // 3, n]), coef, wire=wire, threads=threads)
        wide, narrow = np.zeros(n, np.float32), np.zeros_like(weight)
        cpu.widen(grad, wide, wire, threads)
        halves = rng.integers(0x33000000, 0x38800000, n, dtype=np.uint32).view(np.float32)  # 3e-8 to 6e-5
        cpu.narrow(halves, narrow, wire, threads)
        seeded = m.copy()
        total += cpu.reseed(weight, seeded, wire, threads), cpu.checksum(weight, threads)
        for part in (theta, m, v, weight, wide, narrow, seeded, repr(total).encode()):
            digest.update(bytes(part))
    bounds, first = np.array([0, n]), np.zeros(1, int)
    for codec in cpu.CODECS.values():
        held = codec.empty(n, -(-n // codecs.BLOCK))
        held.m[:] = rng.integers(0, 1 << 7, n) | rng.integers(0, 2, n) << 8 * codec.dtype.itemsize - 1
        held.v[:] = rng.integers(0, 1 << 7, n)
        held.m_scale[:] = held.v_scale[:] = 1  # the least
        state = cpu.CompactState(theta.copy(), held)
        grad, weight = rng.integers(0, 1 << 7, n).astype(np.uint16), np.zeros(n, np.uint16)
        rest = bounds, coef[:1], dither.rows(0, first, first, first)
        cpu.compact_step(state, state, grad, weight, *rest, codec=codec, wire="bfloat16", threads=threads)
        for part in (state.master, *held, weight):
            digest.update(bytes(part))
    return digest.hexdigest()
"""


def need(layer):
    if layer == "omp" and importlib.util.find_spec("numba.np.ufunc.omppool") is None:
        pytest.skip("this Numba was built without OpenMP")
    if layer == "omp" and sys.platform == "linux" and ctypes.util.find_library("gomp") is None:
        pytest.skip("libgomp, which Numba's omp layer loads, is not installed")


@pytest.fixture(scope="module")
def expected():
    scope: dict = {}
    exec(EVERYTHING, scope)
    one, two = scope["everything"](1), scope["everything"](2)
    assert one == two
    return one


def test_denormals_matter_in_what_is_hashed():
    """Else the tests below would prove nothing: the data must change when denormals are flushed."""
    tiny = (np.arange(1, 1000, dtype=np.uint32)).view(np.float32)
    assert cpu.sum_of_squares(tiny, "float32", 1) > 0
    halves = np.arange(1, 1000, dtype=np.uint16)
    wide = np.zeros(halves.size, np.float32)
    cpu.widen(halves, wide, "float16", 1)
    assert (wide > 0).all()


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_flush_to_zero_set_before_the_pool_starts(layer, expected, run_python):
    """torch.set_flush_denormal is inherited by threads started after it; and the caller's mode is left as it was."""
    need(layer)
    script = (
        EVERYTHING
        + """
import torch
if not torch.set_flush_denormal(True):
    print("unsupported"); sys.exit()
flushed = lambda: (torch.tensor([1e-40]) * 1.0).item() == 0.0
assert flushed()
for threads in (2, 1):
    print(everything(threads))
    assert flushed()
torch.set_flush_denormal(False)
print(everything(2))
assert not flushed()
"""
    )
    lines = run_python(script, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2").stdout.split()
    if lines == ["unsupported"]:
        pytest.skip("this CPU cannot flush denormals")
    assert lines == [expected] * 3


def test_flush_to_zero_of_the_calling_thread(expected):
    import torch

    scope: dict = {}
    exec(EVERYTHING, scope)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        found = [scope["everything"](threads) for threads in (1, 2)]
    finally:
        torch.set_flush_denormal(False)
    assert found == [expected] * 2


def test_the_mode_change_compiles_for_aarch64():
    """What an ARM machine would run, as far as this one can tell: read, clear and restore FPCR around the work."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.FloatType(), [ir.FloatType().as_pointer()]), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    mode = bits.swap_mode(builder, "aarch64")
    value = builder.load(function.args[0])
    builder.store(builder.fmul(value, value), function.args[0])
    bits.restore_mode(builder, "aarch64", mode)
    builder.ret(value)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no AArch64 target: {error}")
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = "aarch64-unknown-linux-gnu"
    lines = target.create_target_machine(opt=3).emit_assembly(parsed).lower().split("\n")
    order = [word for line in lines for word in ("mrs", "msr", "fmul") if line.split()[:1] == [word]]
    assert order == ["mrs", "msr", "fmul", "msr"]


def test_many_threads(expected, run_python):
    script = EVERYTHING + "\nassert cpu.max_threads() == 7\nprint(everything(7), everything(3), everything(99))"
    assert run_python(script, NUMBA_NUM_THREADS="7").stdout.split() == [expected] * 3


def test_two_python_threads_at_once(expected, run_python):
    """Without the lock, Numba's workqueue layer ends the process: 'Concurrent access has been detected'."""
    script = (
        EVERYTHING
        + """
import threading
found = []
def work():
    found.extend(everything(2) for _ in range(3))
workers = [threading.Thread(target=work) for _ in range(3)]
[w.start() for w in workers]; [w.join() for w in workers]
print(*found)
"""
    )
    env = {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    assert run_python(script, **env).stdout.split() == [expected] * 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_process_forked_after_the_pool_started(layer, expected, run_python):
    """GNU OpenMP ends a forked process that enters a parallel region; there the kernels use one thread."""
    need(layer)
    script = (
        EVERYTHING
        + """
import os
print(everything(2), flush=True)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(everything(2), flush=True)
"""
    )
    process = run_python(script, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2")
    assert process.stdout.split() == [expected] * 3
    assert ("this process was forked" in process.stderr) == (layer == "omp")


def test_a_launchers_omp_num_threads_does_not_count(run_python):
    """torchrun and accelerate set OMP_NUM_THREADS=1; the pool still has its threads, the caller being one of them."""
    script = """
import os
import numpy as np
from hf_offload.kernels import cpu
assert cpu.max_threads() == 3
before = len(os.listdir("/proc/self/task"))
x = np.zeros(1 << 20, np.uint16)
cpu.widen(x, np.zeros(x.size, np.float32), "bfloat16", 3)
print(len(os.listdir("/proc/self/task")) - before)
"""
    need("omp")
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    env = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "3", "NUMBA_THREADING_LAYER": "omp"}
    assert run_python(script, **env).stdout.split() == ["2"]


def test_max_threads_follows_the_affinity(run_python):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs sched_setaffinity")
    script = """
import os
from hf_offload.kernels import cpu
assert cpu.max_threads() == len(os.sched_getaffinity(0)), "what OMP_NUM_THREADS says must not count"
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
assert cpu.max_threads() == 1
"""
    run_python(script, OMP_NUM_THREADS="1", NUMBA_NUM_THREADS=None)


def test_the_callers_numba_thread_count_is_left_alone():
    import numba

    before = numba.get_num_threads()
    x = np.zeros(100_000, np.uint16)
    cpu.widen(x, np.zeros(x.size, np.float32), "bfloat16", 2)
    assert numba.get_num_threads() == before


def test_small_arrays_stay_in_the_calling_thread(monkeypatch):
    monkeypatch.setattr(jit._pool, "call", lambda *args: pytest.fail("a parallel region for a small array"))
    x = np.zeros(jit.PARALLEL_FROM - 1, np.uint16)
    cpu.widen(x, np.zeros(x.size, np.float32), "bfloat16", 2)
    cpu.sum_of_squares(x, "bfloat16", 2)
    cpu.checksum(x, 2)


def test_share_covers_everything_once():
    for size in (0, 1, 63, 64, 65, 1000, 123_457, 7_000_000_001):
        for tasks in (1, 2, 3, 7, 64):
            cuts = [jit.share.py_func(size, t, tasks) for t in range(tasks + 1)]
            assert cuts[0] == 0 and cuts[-1] == size and cuts == sorted(cuts)
            assert all(cut % 64 == 0 for cut in cuts[:-1])


def test_the_hash_is_of_the_right_results():
    """The twins agree on the same denormal data, so that the hash above is not one of a common mistake."""
    rng = np.random.default_rng(4)
    n = 50_000
    for wire in WIRES:
        state = [rng.integers(0, 1 << 24, n, dtype=np.uint32).view(np.float32) for _ in range(3)]
        grad = state[0][::-1].copy() if wire == "float32" else rng.integers(0, 1 << 10, n).astype(np.uint16)
        arrays = [*state, grad, np.zeros_like(grad)]
        twins = [a.copy() for a in arrays]
        settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-30, "weight_decay": 0.1, "step": 2}
        coef = cpu.coefficients(**settings, grad_scale=0.3, decoupled=True, maximize=False)[None]
        cpu.adam_step(*arrays, np.array([0, n]), coef, wire=wire, threads=2)
        reference.adam_step(*twins, np.array([0, n]), coef, wire=wire)
        digests = [hashlib.sha256(b"".join(map(bytes, both))).hexdigest() for both in (arrays, twins)]
        assert digests[0] == digests[1]
