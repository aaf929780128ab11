"""The step with bfloat16 and int8 moments against its NumPy twin, bit for bit; the formats; the rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_offload.errors import ConfigError
from hf_offload.kernels import cpu
from hf_offload.kernels.cpu import CODECS, CompactState, codecs, compact, dither, reference
from hf_offload.kernels.cpu.codecs import Held

WIRES = ["bfloat16", "float16", "float32"]
NAMES = list(CODECS)
KERNELS = compact._in_one_thread, compact._parallel, compact._compact_range
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

    def flat(self):
        return [self.state.master, *self.state.held, self.grad]

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


# ---- pieces, parts, threads


def odd_bucket(codec, **more):
    """Pieces of every awkward size, two of them inactive, over the size from which kernels run in parallel."""
    sizes = [0, 1, 127, 128, 129, 0, 5_000, 33_000, 128 * 3, 17, 2_000]
    bucket = Bucket(codec, "bfloat16", sizes, **more)
    bucket.coef[3] = bucket.coef[6] = cpu.INACTIVE
    return bucket


@pytest.mark.parametrize("data", ["ordinary", "any bits"])
@pytest.mark.parametrize("codec", NAMES)
def test_pieces_of_any_size_whoever_steps_them(codec, data):
    bucket = odd_bucket(codec, data=data)
    expected = bucket.twins()
    for threads in (1, 2, 3):
        assert_same_bits(bucket.ours(threads), expected)
    for k in (3, 6):
        piece = bucket.pieces()[k]
        np.testing.assert_array_equal(expected[1][piece], bucket.state.held.m[piece])
        assert not expected[-1][piece].any(), "an inactive piece's weight was written"


@pytest.mark.parametrize("codec", NAMES)
def test_any_partition_gives_the_same_bits(codec):
    bucket = odd_bucket(codec)
    expected, n = bucket.twins(), int(bucket.bounds[-1])
    rng = np.random.default_rng(3)
    for threads in (1, 2):
        cuts = [0, *sorted(rng.integers(0, n, 7).tolist()), n, n]
        assert_same_bits(bucket.ours(threads, part=itertools.pairwise(cuts)), expected)


@pytest.mark.parametrize("codec", NAMES)
def test_a_part_touches_only_the_blocks_that_begin_in_it(codec):
    bucket = Bucket(codec, "bfloat16", [1000])
    before, whole = [bucket.state.master, *bucket.state.held, bucket.weight], bucket.twins()
    for got, old, new in zip(bucket.ours(part=[(129, 500)]), before, whole):
        unit = 1 if got.size < 1000 else 128
        done = slice(2 * unit, 4 * unit)  # the blocks that begin at 256 and at 384
        np.testing.assert_array_equal(got[done].view(np.uint8), new[done].view(np.uint8))
        for rest in (slice(0, 2 * unit), slice(4 * unit, None)):
            np.testing.assert_array_equal(got[rest].view(np.uint8), old[rest].view(np.uint8))


@pytest.mark.parametrize("codec", NAMES)
def test_a_step_elsewhere_makes_the_same_bits_and_leaves_what_it_reads(codec):
    bucket = odd_bucket(codec)
    expected, before = bucket.twins(), copied(bucket.state)
    into = CompactState(np.full_like(before.master, 9), Held(*(np.full_like(a, 9) for a in before.held)))
    assert_same_bits(bucket.ours(into=into), expected)
    assert_same_bits([bucket.state.master, *bucket.state.held], [before.master, *before.held])


def beginning(array, offset):
    """A copy that begins `offset` elements behind the start of a cache line."""
    room = np.zeros(array.size + offset + 64, array.dtype)
    start = -room.ctypes.data % 64 // array.itemsize + offset
    room[start : start + array.size] = array
    return room[start : start + array.size]


@pytest.mark.parametrize("codec", ["float32", *NAMES])
def test_weights_that_begin_on_a_cache_line_or_off_it(codec):
    """On it whole lines are written past the cache; what lies before and behind is nobody's business."""
    bucket = Bucket("bfloat16" if codec == "float32" else codec, "bfloat16", [128 * 5, 400])
    for offset in (0, 1, 16, 31, 32):
        weight = beginning(np.full(1040, 7, np.uint16), offset)
        state, expected = copied(bucket.state), bucket.twins()
        rest = bucket.grad, weight, bucket.bounds, bucket.coef
        if codec == "float32":
            moments = [np.abs(bucket.state.master), np.abs(bucket.state.master)]
            twins, expected = [bucket.state.master.copy(), *(m.copy() for m in moments)], [np.zeros(1040, np.uint16)]
            reference.adam_step(*twins, bucket.grad, expected[-1], bucket.bounds, bucket.coef, wire="bfloat16")
            cpu.adam_step(state.master, *moments, *rest, wire="bfloat16", threads=1)
        else:
            cpu.compact_step(state, state, *rest, bucket.noise, codec=bucket.codec, wire="bfloat16", threads=1)
        np.testing.assert_array_equal(weight, expected[-1])
        around = weight.base
        first = (weight.ctypes.data - around.ctypes.data) // 2
        assert not around[:first].any() and not around[first + 1040 :].any()


@pytest.mark.parametrize("codec", NAMES)
def test_gradients_that_were_added_up_in_float32(codec):
    bucket = Bucket(codec, "bfloat16", [300, 40_000], "any bits")
    grad = np.random.default_rng(5).integers(0, 1 << 32, 40_300, dtype=np.uint32).view(np.float32)
    (ours, weight), (twins, twins_weight) = bucket.copy(), bucket.copy()
    rest = bucket.bounds, bucket.coef, bucket.noise
    wires = {"codec": bucket.codec, "wire": "bfloat16", "grad_wire": "float32"}
    cpu.compact_step(ours, ours, grad, weight, *rest, threads=1, **wires)
    reference.compact_step(twins, twins, grad, twins_weight, *rest, **wires)
    assert_same_bits([ours.master, *ours.held, weight], [twins.master, *twins.held, twins_weight])


def test_an_empty_bucket():
    Bucket("int8", "bfloat16", [0, 0]).ours()


def test_one_machine_code_for_every_kind_of_call():
    """Compilation takes seconds: no call may differ from another in the types it passes."""
    bucket = odd_bucket("int8")
    bucket.ours(1), bucket.ours(2)
    before = [len(d.signatures) for d in KERNELS]
    elsewhere = copied(bucket.state)
    bucket.ours(1, part=[(np.int64(0), np.int32(100))], into=elsewhere)
    bucket.ours(2, into=elsewhere)
    Bucket("int8", "bfloat16", [0]).ours(1)
    assert [len(d.signatures) for d in KERNELS] == before


# ---- what the bits of a result depend on


@pytest.mark.parametrize("codec", NAMES)
def test_bits_do_not_depend_on_where_a_parameter_is_cut(codec):
    """The second of a parameter's two pieces begins with its block 5; in a third bucket it comes after another."""
    whole = Bucket(codec, "bfloat16", [1000])
    cut = Bucket(codec, "bfloat16", [640, 360])
    cut.noise = dither.rows(7, np.array([0, 0]), np.array([0, 5]), np.array([3, 3]))
    assert_same_bits(cut.ours(), whole.ours())
    alone = Bucket(codec, "bfloat16", [100, 360])
    alone.noise = dither.rows(7, np.array([1, 0]), np.array([0, 5]), np.array([9, 3]))
    for mine, theirs in zip(alone.flat(), whole.flat()):
        mine[-(3 if mine.size < 100 else 360) :] = theirs[-(3 if theirs.size < 100 else 360) :]
    for mine, theirs in zip(alone.ours(), whole.ours()):
        tail = 3 if mine.size < 100 else 360
        np.testing.assert_array_equal(mine[-tail:].view(np.uint8), theirs[-tail:].view(np.uint8))


@pytest.mark.parametrize("changed", ["seed", "number", "first", "step"])
@pytest.mark.parametrize("codec", NAMES)
def test_another_seed_parameter_place_or_step_rounds_otherwise(codec, changed):
    bucket = Bucket(codec, "bfloat16", [4096])
    keys = {"seed": 7, "number": 0, "first": 0, "step": 3}
    made = []
    for k in (keys, {**keys, changed: keys[changed] + 1}):
        bucket.noise = dither.rows(k["seed"], np.array([k["number"]]), np.array([k["first"]]), np.array([k["step"]]))
        made.append(bucket.ours())
    np.testing.assert_array_equal(made[0][0], made[1][0], err_msg="theta takes its step before rounding")
    for name in (1, 2):
        assert 0.01 < np.mean(made[0][name] != made[1][name]) < 0.9


def broken(**changes):
    """A call's arguments, some of them changed."""
    bucket = Bucket("int8", "bfloat16", [100, 200])
    given = {
        "state": bucket.state, "to": bucket.state, "grad": bucket.grad, "weight": bucket.weight,
        "bounds": bucket.bounds, "coef": bucket.coef, "noise": bucket.noise, "codec": bucket.codec,
        "wire": "bfloat16", "threads": 1,
    }  # fmt: skip
    return {**given, **changes}


def with_held(**changes):
    state = Bucket("int8", "bfloat16", [100, 200]).state
    return state._replace(held=state.held._replace(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"wire": "bf16"}, ConfigError, "wire='bf16'"),
        ({"grad": np.zeros(299, np.uint16)}, ValueError, "grad: 299 elements where the other arrays have 300"),
        ({"weight": np.zeros(300, np.float32)}, TypeError, "weight: kernels take contiguous 1-dimensional uint16"),
        ({"bounds": np.array([0, 100, 299])}, ValueError, "must rise from 0 to the bucket's 300 elements"),
        ({"coef": np.zeros((1, cpu.NUM_COEF), np.float32)}, ValueError, r"coef: must be contiguous float32\[2, 12\]"),
        ({"noise": np.zeros((3, 2), np.uint32)}, ValueError, r"noise: must be .*\[2, 2\], got uint32\[3, 2\]"),
        ({"noise": np.zeros((2, 2), np.int64)}, ValueError, r"noise: must be .*uint32\[2, 2\], got int64"),
        ({"part": (0, 301)}, ValueError, r"part: must lie in the bucket's 300 elements, got \(0, 301\)"),
        ({"part": (7, 3)}, ValueError, r"part: must lie"),
        ({"part": (-1, 3)}, ValueError, r"part: must lie"),
        ({"codec": CODECS["bfloat16"]}, TypeError, "exp_avg: kernels take contiguous 1-dimensional uint16"),
        ({"state": with_held(m=np.zeros(299, np.uint8))}, ValueError, "exp_avg: 299 elements"),
        ({"state": with_held(v=np.zeros(600, np.uint8)[::2])}, TypeError, "exp_avg_sq: kernels take contiguous"),
        ({"state": with_held(m_scale=np.zeros(2, np.uint8))}, ValueError, "exp_avg's scale: 2 elements where .* 3"),
        ({"to": with_held(v_scale=np.zeros(4, np.uint8))}, ValueError, "exp_avg_sq's scale: 4 elements where .* 3"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, error, text):
    with pytest.raises(error, match=text):
        cpu.compact_step(**broken(**changes))


def test_what_the_bad_arguments_are_made_of_is_right():
    cpu.compact_step(**broken())
