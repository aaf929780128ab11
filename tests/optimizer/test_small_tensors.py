"""Models of many small tensors: what is shared to make them quick changes no bit."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine import norm
from hf_offload.engine.tensors import WIRE, host_array
from hf_offload.kernels import cpu
from hf_offload.transport.host import PART_BYTES, _parts

SIZES = (1, 0, 333, norm.SMALL, 5, norm.SMALL + 1, 70_000, 17)


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_taken_together_are_those_taken_one_by_one(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [
        torch.randn(n, generator=generator).to(dtype) * 10.0**e
        for n in SIZES for dtype, e in ((torch.bfloat16, -20), (torch.float16, 0), (torch.float32, 15))
    ]  # fmt: skip
    grads.append(torch.randn(40, 30, generator=generator).t())
    grads += [torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), -1.0]), torch.tensor(3.0)]
    one_by_one = [cpu.sum_of_squares(host_array(g), WIRE[g.dtype], 1) for g in grads]
    assert np.array_equal(norm.gradient_sums(grads, threads), one_by_one, equal_nan=True)


def test_small_gradients_share_a_call_of_the_kernel() -> None:
    grads = [torch.ones(100) for _ in range(300)]
    with patch.object(cpu, "sum_blocks", wraps=cpu.sum_blocks) as together, patch.object(cpu, "sum_of_squares") as one:
        assert norm.gradient_sums(grads, 2) == [100.0] * 300
    assert together.call_count == 1 and not one.called


def test_weights_that_moved_get_the_result_where_they_are_now() -> None:
    """What is remembered of their addresses holds only as long as nothing moves."""
    params = [nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(4)]
    with OffloadAdam(params, lr=0.5, weight_decay=0.0, config=OffloadConfig(schedule="in_order")) as optimizer:
        for step in range(4):
            before = [p.data for p in params]
            if step == 2:
                params[1].data = params[1].data.clone()
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            assert all((p == 1 - 0.5 * (step + 1)).all() for p in params)
            assert (before[1] == 1 - 0.5 * (step + (step != 2))).all(), "the memory it had is left alone"


@pytest.mark.parametrize(
    "sizes",
    [
        [], [0], [10], [PART_BYTES], [PART_BYTES + 1], [3 * PART_BYTES + 5, 0, 7], [1000] * 5000,
        [PART_BYTES // 2 + 1] * 5, [1, PART_BYTES, 1, 2 * PART_BYTES - 1],
    ],
)  # fmt: skip
def test_parts_are_all_of_the_runs_in_order_and_none_is_much_too_large(sizes: list[int]) -> None:
    nbytes = np.array(sizes, np.int64)
    to = np.cumsum(nbytes) - nbytes + 10**6
    parts = list(_parts((to, to + 10**9, nbytes)))
    pieces = [(t, s, n) for part in parts for t, s, n in zip(*(a.tolist() for a in part)) if n]
    assert all(s == t + 10**9 for t, s, _ in pieces)
    ends = [t + n for t, _, n in pieces]
    assert [t for t, _, _ in pieces] == ([10**6, *ends[:-1]] if pieces else []), "without a gap"
    assert (ends[-1] if ends else 10**6) == 10**6 + sum(sizes)
    assert all(int(part[2].sum()) <= 2 * PART_BYTES for part in parts)
