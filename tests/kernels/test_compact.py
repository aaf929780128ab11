"""The step with bfloat16 and int8 moments against its NumPy twin, bit for bit; the formats; the rounding."""

from __future__ import annotations

import numpy as np
import pytest

from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import CODECS, CompactState, codecs, dither, reference
from hf_offload.kernels.cpu.codecs import Held

WIRES = ["bfloat16", "float16", "float32"]
NAMES = list(CODECS)
DEFAULTS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
    "step": 3, "grad_scale": 0.25, "decoupled": True, "maximize": False,
}  # fmt: skip


def row(**changed):
    return cpu.coefficients(**{**DEFAULTS, **changed})


def held(wire):
    return np.float32 if wire == "float32" else np.uint16


class Bucket:
    """A bucket of these pieces; each begins with block `firsts` of parameter `numbers`."""

    def __init__(self, codec, wire, sizes, data="ordinary", firsts=None, seed=0, **settings):
        self.codec, self.wire = CODECS[codec], wire
        self.bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        n, pieces = int(self.bounds[-1]), len(sizes)
        rng = np.random.default_rng(seed)
        blocks = sum(codecs.blocks(s) for s in sizes)
        if data == "any bits":
            floats = [rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32) for _ in range(2)]
            raw = [rng.integers(0, 1 << 8 * self.codec.dtype.itemsize, n, self.codec.dtype) for _ in range(2)]
            scales = [rng.integers(0, 256, blocks if self.codec.scaled else 0, np.uint8) for _ in range(2)]
            self.state = CompactState(floats[0], Held(*raw, *scales))
            self.grad = floats[1] if wire == "float32" else rng.integers(0, 1 << 16, n, dtype=np.uint16)
        else:
            m, v, theta, grad = rng.standard_normal((4, n)).astype(np.float32)
            made = [codecs.encode(0.1 * m[p], v[p] ** 2, codecs.half(p.stop - p.start, self.codec), self.codec)
                    for p in self.pieces()]  # fmt: skip
            whole = [np.concatenate([getattr(h, f) for h in made]) for f in Held._fields]
            self.state = CompactState(theta, Held(*whole))
            self.grad = reference.narrowed(grad, wire)
        self.weight = np.zeros(n, held(wire))
        self.coef = np.stack([row(**settings)] * pieces)
        firsts = np.zeros(pieces, np.int64) if firsts is None else np.array(firsts)
        self.noise = dither.rows(7, np.arange(pieces), firsts, np.full(pieces, 3))

    def pieces(self):
        return [slice(a, b) for a, b in zip(self.bounds, self.bounds[1:])]

    def copy(self):
        return copied(self.state), self.weight.copy()

    def ours(self, threads=2, part=None, into=None):
        state, weight = self.copy()
        to = into or state
        for low, high in part or [(0, int(self.bounds[-1]))]:
            cpu.compact_step(state, to, self.grad, weight, self.bounds, self.coef, self.noise,
                             codec=self.codec, wire=self.wire, threads=threads, part=(low, high))  # fmt: skip
        return [to.master, *to.held, weight]

    def twins(self):
        state, weight = self.copy()
        reference.compact_step(state, state, self.grad, weight, self.bounds, self.coef, self.noise,
                               codec=self.codec, wire=self.wire)  # fmt: skip
        return [state.master, *state.held, weight]


def copied(state):
    return CompactState(state.master.copy(), Held(*(a.copy() for a in state.held)))


def assert_same_bits(got, wanted):
    for name, a, b in zip(("master", "m", "v", "m_scale", "v_scale", "weight"), got, wanted):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("data", ["ordinary", "any bits"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("codec", NAMES)
def test_bits_equal_the_twins(codec, wire, data):
    for settings in ({}, {"decoupled": False, "weight_decay": 0.1, "maximize": True}):
        bucket = Bucket(codec, wire, [40_003], data, **settings)
        ours = bucket.ours()
        assert_same_bits(ours, bucket.twins())
        assert not np.array_equal(ours[0], bucket.state.master)
