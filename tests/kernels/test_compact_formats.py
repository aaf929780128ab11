"""What bfloat16 and int8 moments mean: the NumPy formats, and the noise that rounds them."""

from __future__ import annotations

import numpy as np
import pytest

from hf_offload.kernels.cpu import CODECS, codecs, dither
from hf_offload.kernels.cpu.codecs import BFLOAT16, INT8, Held

NAMES = list(CODECS)
BLOCK = dither.BLOCK
MOST = np.uint32(0xFFFFFFFF)


def constant_noise(value, numel):
    return np.full((codecs.blocks(numel), BLOCK), value, np.uint32)


def every_value(codec):
    """Held moments in which each code occurs, as int8 under each scale."""
    if not codec.scaled:
        every = np.arange(1 << 16, dtype=np.uint16)
        return Held(every, every & 0x7FFF, *np.zeros((2, 0), np.uint8))
    codes = np.tile(np.arange(256, dtype=np.uint8), 256)  # two blocks of 128 a scale
    scales = np.repeat(np.arange(256, dtype=np.uint8), 2)
    return Held(codes, codes, scales, scales)


def wide(rng, shape, low=-45, high=36):
    return (rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(low, high, shape)).astype(np.float32)


@pytest.mark.parametrize("noise", [0, 0x80080000, int(MOST)])
@pytest.mark.parametrize("codec", CODECS.values(), ids=NAMES)
def test_what_can_be_held_is_kept_by_any_rounding(codec, noise):
    """So a state that is saved as float32 and loaded again is the same."""
    held = every_value(codec)
    m, v = codecs.decode(held, codec)
    again = codecs.decode(codecs.encode(m, v, constant_noise(noise, m.size), codec), codec)
    np.testing.assert_array_equal(again, (m, v))


@pytest.mark.parametrize("codec", CODECS.values(), ids=NAMES)
def test_zero_bytes_are_zero_moments_and_the_other_way_round(codec):
    empty = codec.empty(300, 3)
    assert not np.any(codecs.decode(empty, codec))
    zeros = np.zeros(300, np.float32)
    made = codecs.encode(-zeros, zeros, constant_noise(MOST, 300), codec)
    assert not np.any(codecs.decode(made, codec))
    if codec.scaled:
        assert not any(a.any() for a in made)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS.values(), ids=NAMES)
def test_what_is_not_finite_shows_and_stays_in_its_block(codec, bad):
    m, v = np.full((2, 3 * BLOCK), 0.5, np.float32)
    m[200], v[300] = bad, abs(bad)
    found = codecs.decode(codecs.encode(m, v, codecs.half(m.size, codec), codec), codec)
    for at, x in zip((200, 300), found):
        bad_ones = np.arange(at // BLOCK * BLOCK, (at // BLOCK + 1) * BLOCK) if codec.scaled else [at]
        np.testing.assert_array_equal(np.flatnonzero(~np.isfinite(x)), bad_ones)
        assert (x[np.isfinite(x)] == 0.5).all()


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (0.0, 0), (1.0, 127), (1.875, 127), (np.nextafter(np.float32(1.875), np.float32(2)), 128), (1.99, 128),
        (2.0, 128), (-1.0, 127), (2.0**-79, 48), (2.0**-78, 49), (2.0**-80, 48), (1e-45, 48), (1.875 * 2.0**127, 254),
        (3e38, 254), (3.4e38, 255), (np.inf, 255), (np.nan, 255),
    ],
)  # fmt: skip
def test_a_scale_is_the_exponent_of_the_largest(largest, byte):
    """Or the next one, where rounding may carry into it: from 1.875 on of what the exponent stands for."""
    m = np.linspace(0, 1e-3, BLOCK).astype(np.float32) * np.float32(0 if largest == 0 else 1e-45)
    m[77] = largest
    made = codecs.encode(m, np.abs(m), codecs.half(BLOCK, INT8), INT8)
    assert made.m_scale == made.v_scale == byte


def test_the_largest_of_a_block_never_overflows_its_code():
    """Any noise: every mantissa that is near a carry, of every exponent."""
    mantissas = np.array([0, 1, 0x6FFFFF, 0x700000, 0x700001, 0x780000, 0x7FFFFF], np.uint32)
    largest = ((np.arange(1, 254, dtype=np.uint32) << 23)[:, None] + mantissas).reshape(-1).view(np.float32)
    x = np.zeros((largest.size, BLOCK), np.float32)
    x[:, 5] = largest
    for noise in (0, MOST):
        made = codecs.encode(-x.reshape(-1), x.reshape(-1), constant_noise(noise, x.size), INT8)
        m, v = (a.reshape(x.shape).astype(np.float64) for a in codecs.decode(made, INT8))
        normal = largest >= 2.0 ** (codecs.LEAST_SCALE - 127 - 14)
        for found in (-m[:, 5], v[:, 5]):
            assert (np.abs(found / largest - 1)[normal] <= 0.125).all()
        others = np.arange(BLOCK) != 5
        assert not (m[:, others] > 0).any()
        scaled = largest >= 2.0 ** (codecs.LEAST_SCALE - 127)
        assert (v[:, others] <= 2.0**-30 * x[:, 5:6])[scaled].all()


@pytest.mark.parametrize("noise", [0, int(MOST)])
def test_int8_has_no_v_of_zero_beside_another(noise):
    """A step of m / eps would follow."""
    rng = np.random.default_rng(0)
    v = np.abs(wide(rng, (2000, BLOCK)))
    v[:, ::3] = 0
    v[7] = 0
    _, found = codecs.decode(codecs.encode(v.reshape(-1), v.reshape(-1), constant_noise(noise, v.size), INT8), INT8)
    found = found.reshape(v.shape)
    assert (found[v.any(axis=1)] > 0).all() and not found[7].any()


@pytest.mark.parametrize("codec", CODECS.values(), ids=NAMES)
def test_a_value_is_rounded_to_one_of_its_two_neighbours(codec):
    """int8: within an eighth of it, or of what the subnormals, or the least v, of its block are apart."""
    rng = np.random.default_rng(1)
    m, v = (wide(rng, (500, BLOCK), -3, 3) for _ in range(2))
    m, v = m.reshape(-1), np.abs(v).reshape(-1)
    noise = rng.integers(0, 1 << 32, (500, BLOCK), dtype=np.uint32)
    found = codecs.decode(codecs.encode(m, v, noise, codec), codec)
    relative, least_m, least_v = (1 / 8, 2.0**-17, 2.0**-31) if codec.scaled else (1 / 128, 0, 0)
    for x, y, least in zip((m, v), found, (least_m, least_v)):
        top = np.repeat(np.abs(x).reshape(500, BLOCK).max(axis=1), BLOCK)
        assert (np.abs(y - x) <= np.maximum(relative * np.abs(x), 2 * least * top)).all()
        assert (np.sign(y) * np.sign(x) >= 0).all()


# ---- rounding


@pytest.mark.parametrize("codec", CODECS.values(), ids=NAMES)
def test_rounding_has_no_bias(codec):
    """The mean of a value rounded at 1000 steps is that value, to a hundredth of the distance of its neighbours."""
    rng = np.random.default_rng(2)
    x = np.concatenate([[1.9], rng.uniform(0.01, 1.9, 255)]).astype(np.float32)
    total = np.zeros((2, x.size))
    for step in range(1000):
        row = dither.rows(1, np.array([0]), np.array([0]), np.array([step + 1]))[0]
        total += codecs.decode(codecs.encode(x, x, dither.noise(row, 2), codec), codec)
    apart = 2.0 ** np.floor(np.log2(x)) / (8 if codec.scaled else 128)
    assert (np.abs(total / 1000 - x) <= 0.01 * apart).all()


def test_a_subnormal_m_is_rounded_without_bias_too():
    x = np.linspace(-0.01, 0.01, BLOCK).astype(np.float32)
    x[0] = 1.0 * 2.0**7  # subnormals: below 2^7 * 2^-14
    total = np.zeros(x.size)
    for step in range(1000):
        row = dither.rows(1, np.array([0]), np.array([0]), np.array([step + 1]))[0]
        total += codecs.decode(codecs.encode(x, np.abs(x), dither.noise(row, 1), INT8), INT8)[0]
    assert (np.abs(total / 1000 - x) <= 0.01 * 2.0 ** (7 - 17)).all()


def draws(**changed):
    keys = {"seed": 1, "number": 2, "first": 3, "step": 4, **changed}
    row = dither.rows(keys["seed"], np.array([keys["number"]]), np.array([keys["first"]]), np.array([keys["step"]]))[0]
    return dither.noise(row, 512)


def test_noise_is_spread_evenly_over_elements():
    for half in (draws() >> 16, draws() & 0xFFFF):
        counts = np.bincount(half.reshape(-1) >> 8, minlength=256)
        chi = ((counts - half.size / 256) ** 2 / (half.size / 256)).sum()
        assert 150 < chi < 400  # 255 in the mean, with a standard deviation of 23


def test_noise_of_m_is_not_that_of_v():
    a, b = (x.reshape(-1).astype(np.float64) for x in (draws() >> 16, draws() & 0xFFFF))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


@pytest.mark.parametrize(
    "changed", [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"seed": -1}, {"number": 3}, {"first": 600}, {"step": 5}]
)
def test_other_keys_draw_other_noise(changed):
    a, b = (x.reshape(-1).astype(np.float64) for x in (draws(), draws(**changed)))
    assert np.mean(a == b) < 1e-3
    if "step" not in changed:  # in time it is one sequence, shifted
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


def test_the_noise_of_a_piece_is_its_parameters():
    np.testing.assert_array_equal(draws(first=13)[:100], draws()[10:110])


def test_steps_and_blocks_may_be_huge():
    row = dither.rows(1 << 70, np.array([1 << 40]), np.array([1 << 33]), np.array([1 << 45]))
    assert row.dtype == np.uint32 and np.unique(dither.noise(row[0], 4)).size > 500


def test_half_rounds_to_nearest():
    x = np.float32([1.0, 1.0 + 0.4 / 128, 1.0 + 0.6 / 128, 1.0 + 0.04, 1.0 + 0.07, -1.07])
    assert codecs.decode(codecs.encode(x, abs(x), codecs.half(6, BFLOAT16), BFLOAT16), BFLOAT16)[0].tolist() == [
        1.0, 1.0, 1 + 1 / 128, 1 + 5 / 128, 1 + 9 / 128, -1 - 9 / 128,
    ]  # fmt: skip
    m, v = codecs.decode(codecs.encode(x, abs(x), codecs.half(6, INT8), INT8), INT8)
    assert m.tolist() == [1, 1, 1, 1, 1.125, -1.125] and v.tolist() == [1, 1, 1, 1, 1.125, 1.125]
