"""Chunks of a bucket, shared by threads: each is taken once, the own share first, and the step's bits stay."""

from __future__ import annotations

import numpy as np
import pytest

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import chunks


@pytest.mark.parametrize(("tasks", "total"), [(1, 1), (2, 2), (2, 7), (3, 3), (3, 20)])
def test_every_chunk_is_taken_once_and_a_thread_that_is_done_helps_the_others(tasks: int, total: int) -> None:
    taken = np.zeros(tasks * chunks.LINE, np.int64)
    last = tasks - 1  # all others stand still
    found = []
    while (k := chunks.take(taken, last, tasks, total)) >= 0:
        found.append(k)
    assert sorted(found) == list(range(total))
    assert found[0] == total * last // tasks
    assert all(chunks.take(taken, t, tasks, total) == -1 for t in range(tasks))


def test_a_share_of_many_chunks_gives_the_bits_of_one_thread() -> None:
    n = 9 * chunks.CHUNK + 5
    row = cpu.coefficients(
        lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.7, decoupled=True,
        maximize=False,
    )  # fmt: skip
    bounds, rows = np.array([0, 3 * chunks.CHUNK + 1, n], np.int64), np.stack([row, row])
    rng = np.random.default_rng(0)
    start = [rng.random(n, np.float32) for _ in range(3)]
    grad = rng.integers(0x3000, 0x4000, n).astype(np.uint16)
    made = []
    for threads in (1, 2):
        state, weight = [a.copy() for a in start], np.zeros(n, np.uint16)
        cpu.adam_step(*state, grad, weight, bounds, rows, wire="bfloat16", threads=threads)
        into, copy = [np.zeros_like(a) for a in start], np.zeros(n, np.uint16)
        cpu.adam_step_into(tuple(start), tuple(into), grad, copy, bounds, rows, wire="bfloat16", threads=threads)
        made += [[a.tobytes() for a in (*state, weight)], [a.tobytes() for a in (*into, copy)]]
    assert all(each == made[0] for each in made)
