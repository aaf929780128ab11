"""The gradient store by itself: sums of squares, added up bucket by bucket, are those of whole parameters."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hf_offload.engine.arena import Arena
from hf_offload.engine.squares import Squares
from hf_offload.engine.store import GradientStore
from hf_offload.kernels import cpu

SIZES = [3, cpu.BLOCK, 0, cpu.CHUNK + 5, 40, 2 * cpu.BLOCK + 1, 7]
UNITS = [2, 0, 1, 1, 0, 2, 0]  # parameters do not lie in the arena in the order of their numbers
BUCKET_BYTES = [40, 3 * cpu.BLOCK, 2 * cpu.BLOCK, 2 * cpu.BLOCK + 6, 1 << 30]


def made(bucket_bytes: int, accumulate: str) -> tuple[GradientStore, list[np.ndarray], random.Random]:
    params = [torch.zeros(n, dtype=torch.bfloat16) for n in (SIZES if bucket_bytes > 100 else [3, 25, 0, 61, 40])]
    store = GradientStore(Arena(params, UNITS[: len(params)], bucket_bytes), accumulate, threads=1)
    rng = np.random.default_rng(0)
    grads = [rng.integers(0x3000, 0x4000, p.numel()).astype(np.uint16) for p in params]  # bf16, 2**-31 to 2
    return store, grads, random.Random(0)


def receive(store: GradientStore, grads: list[np.ndarray], k: int, adds: bool = False) -> None:
    pieces = store.arena.plan.buckets[k].pieces
    slot = np.concatenate([grads[p.param][p.start : p.start + p.length] for p in pieces])
    store.receive(k, slot, range(len(pieces)), [adds] * len(pieces))


def sums(store: GradientStore) -> list[float]:
    store.sum_params(range(len(store.arena.params)))
    return store.sums.tolist()


def expected(store: GradientStore) -> list[float]:
    numels = [s.numel for s in store.arena.specs]
    return [cpu.sum_of_squares(*store.of_param(i), 1) if n else 0.0 for i, n in enumerate(numels)]


@pytest.fixture
def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added up bucket by bucket has to do."""

    def refuse(*args: Any) -> None:
        raise AssertionError("summed once more as a whole")

    monkeypatch.setattr("hf_offload.engine.squares.Squares.sum_whole", refuse)


@pytest.mark.usefixtures("no_second_look")
@pytest.mark.parametrize("accumulate", ["wire", "float32"])
@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_sums_are_those_of_whole_parameters(bucket_bytes: int, accumulate: str) -> None:
    store, grads, order = made(bucket_bytes, accumulate)
    buckets = list(range(len(store.arena.plan.buckets)))
    for _ in range(3):  # a step after the other, other gradients in other orders
        order.shuffle(buckets)
        for k in buckets:
            receive(store, grads, k)
            store.sum_bucket(k)
        assert sums(store) == expected(store)
        grads = [np.roll(g, 1) + 1 for g in grads]


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
def test_what_arrives_after_a_sum_makes_it_void(bucket_bytes: int) -> None:
    """The backward that was taken for the last was not: some buckets were summed too soon, once or twice."""
    store, grads, order = made(bucket_bytes, "wire")
    buckets = list(range(len(store.arena.plan.buckets)))
    for _ in range(3):
        for adds in (False, True):
            order.shuffle(buckets)
            for k in buckets:
                receive(store, grads, k, adds)
                if order.random() < 0.5:
                    store.sum_bucket(k)
        assert sums(store) == expected(store)


def test_a_parameter_in_several_buckets_is_summed_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    store, grads, _ = made(2 * cpu.BLOCK, "wire")
    finished: list[int] = []
    finish = Squares.finish
    monkeypatch.setattr(Squares, "finish", lambda self, i, *rest: [finished.append(i), finish(self, i, *rest)])
    for _ in range(3):
        for k in range(len(store.arena.plan.buckets)):
            receive(store, grads, k)
            store.sum_bucket(k)
    assert sorted(finished) == [3] * 3 + [5] * 3


def test_zeroed_gradients_have_no_sum_left() -> None:
    store, grads, _ = made(2 * cpu.BLOCK, "wire")
    for k in range(len(store.arena.plan.buckets)):
        receive(store, grads, k)
        store.sum_bucket(k)
    before = sums(store)
    store.zero([1, 3])
    assert sums(store) == [0.0 if i in (1, 3) else s for i, s in enumerate(before)]
