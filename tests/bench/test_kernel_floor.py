"""Counting a loop's instructions, and what is derived from floors; times themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from hf_offload.bench import kernel_floor
from hf_offload.errors import ConfigError
from hf_offload.kernels.cpu import anatomy

# Two loops: .L2 steps 16 parameters, in 7 instructions by way of .L4 and in 5 without; .L9, a tail, 4 in 3.
ASSEMBLY = """
\t.text
f:
\tpushq\t%rbx
\tvsqrtps\t%zmm9, %zmm9
.L2:
\tvmovups\t(%rax), %zmm0
\tvsqrtps\t%zmm0, %zmm1
\tje\t.L4
.L3:
\taddq\t$64, %rax
\tjne\t.L2
\tjmp\t.L9
.L4:
\tnop
\tjmp\t.L3
\t.p2align\t4
.L9:
\tvsqrtps\t%xmm0, %xmm1
\tdecq\t%rcx
\tjne\t.L9
\tvsqrtss\t%xmm0, %xmm1, %xmm1
\tretq
"""


def test_the_shortest_way_round_the_widest_loop_is_counted():
    assert anatomy.instructions_per_parameter(ASSEMBLY) == 5 / 16


def test_a_loop_of_scalars_or_of_another_machine_is_not_counted():
    assert anatomy.instructions_per_parameter(ASSEMBLY.replace("sqrtps", "sqrtss")) is None


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_the_kernels_own_loops_are_found(state):
    if not llvm.get_process_triple().startswith("x86_64"):
        pytest.skip("counts x86-64 instructions")
    found = anatomy.instructions_per_parameter(anatomy.assembly(state))
    assert found is not None and 1 < found < 40


def test_thresholds_follow_from_floors_and_bytes():
    """Of 1000 parameters and of 3000: the call itself costs 1 us, which must not count; nor must slow rounds."""
    figures = {
        "float32": ([1.5e-6] * 3, [2.5e-6] * 3),
        "bfloat16": ([1.6e-6, 9e-6, 1.6e-6], [2.8e-6, 3.5e-6, 9e-6]),
        "int8": ([1.8e-6] * 3, [3.4e-6] * 3),
    }
    found = kernel_floor.derived(figures, (1000, 3000), {"float32": 2.5, "bfloat16": 4.0, "int8": None})
    assert found["float32"].wins_below_gb_per_s is None and found["float32"].instructions_per_param == 2.5
    assert found["float32"].memory_bound_below_gb_per_s == pytest.approx(56)
    assert found["bfloat16"].ns_per_param == pytest.approx(0.6) and found["bfloat16"].spread == pytest.approx(0.25)
    assert found["int8"].wins_below_gb_per_s == pytest.approx(35)
    assert found["int8"].memory_bound_below_gb_per_s == pytest.approx(20.04, abs=0.01)
    assert "< 35.0 GB/s" in kernel_floor.told(found)


def test_too_few_rounds_are_refused():
    with pytest.raises(ConfigError, match="--rounds=2: the fastest"):
        kernel_floor.run(2)


def test_every_kernel_really_steps_what_is_timed():
    for state in kernel_floor.BYTES:
        step = kernel_floor.step_of(state, 384)
        cells = dict(zip(step.__code__.co_freevars, (cell.cell_contents for cell in step.__closure__)))
        assert cells["weight"].ctypes.data % 64 == 2
        step()
        assert cells["weight"].all()


@pytest.mark.slow
def test_the_command_prints_json():
    command = [sys.executable, "-m", "hf_offload.bench.kernel_floor", "--json", "--rounds", "3"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert set(found["kernels"]) == {"float32", "bfloat16", "int8"}
    assert all(kernel["ns_per_param"] > 0 for kernel in found["kernels"].values())
    assert found["machine"]["cores"] and found["rounds"] == 3
