"""Parameters and gradients of any shape, memory layout and value, in any groups: the bits of the NumPy twin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_offload.engine.norm import clip_factor
from hf_offload.errors import UnsupportedError
from support.fuzz import both_sizes, examples_of
from support.optimizer import DTYPES, EXACT, Twin, give, offload, same_bits, state

# ---- shapes and memory layouts

sides = st.sampled_from((0, 1, 1, 2, 3, 5, 17))
shapes = st.lists(sides, max_size=4).map(tuple) | st.sampled_from(
    ((), (1,), (0,), (1501,), (3, 0, 2), (1, 1, 1), (129,))
)
LAYOUTS = ("contiguous", "permuted", "channels_last", "a part of a storage", "a part, permuted")


def laid_out(shape: tuple[int, ...], layout: str, seed: int, dtype: torch.dtype) -> Tensor:
    """A dense tensor of normal values of this shape."""
    generator = torch.Generator().manual_seed(seed)
    numel, offset = math.prod(shape), 0
    if layout.startswith("a part"):
        offset = 3
    storage = torch.randn(numel + 2 * offset, generator=generator).to(dtype)
    flat = storage[offset : offset + numel]
    if layout.endswith("permuted"):
        return flat.view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    made = flat.view(shape)
    return made.contiguous(memory_format=torch.channels_last) if layout == "channels_last" and len(shape) == 4 else made


params_drawn = st.lists(
    st.tuples(shapes, st.sampled_from(LAYOUTS), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=5
)

# ---- values

BITS = {
    torch.float32: (0x7FC12345, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x80000001,
                    0x007FFFFF, 0x7F7FFFFF, 0x00800000),
    torch.bfloat16: (0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x8000, 1, 0x8001, 0x007F, 0x7F7F, 0x0080),
    torch.float16: (0x7E01, 0xFC01, 0x7C00, 0xFC00, 0x8000, 1, 0x8001, 0x03FF, 0x7BFF, 0x0400),
}  # fmt: skip
"""NaNs with a payload (quiet and signalling), infinities, -0.0, denormals, the largest, the smallest normal."""


def with_bits(t: Tensor, positions: list[tuple[int, int]]) -> Tensor:
    """`t` with special values at some of its elements."""
    made = t.clone(memory_format=torch.preserve_format)
    if made.numel():
        flat = torch.as_strided(made, (made.numel(),), (1,))
        kind = (np.uint32, torch.int32) if t.element_size() == 4 else (np.uint16, torch.int16)
        ints = np.array(BITS[t.dtype], kind[0])
        for at, which in positions:
            flat.view(kind[1]).numpy().view(kind[0])[at % made.numel()] = ints[which % len(ints)]
    return made


kinds, seeds = st.sampled_from(("all", "one missing", "clipped")), st.integers(0, 99)
specials = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 9)), max_size=4)

# ---- groups

rates = st.sampled_from((0.0, 1e-3, 0.3, 1e-30, 10.0))
settings_of_a_group = st.fixed_dictionaries(
    {},
    optional={
        "lr": rates | rates.map(lambda lr: torch.tensor(lr, dtype=torch.float64)),
        "betas": st.tuples(st.sampled_from((0.0, 0.3, 0.9)), st.sampled_from((0.0, 0.5, 0.999, 1 - 1e-9))),
        "eps": st.sampled_from((1e-8, 1e-30, 1.0)),
        "weight_decay": st.sampled_from((0.0, 0.01, 1.0)),
    },
)
groupings = st.lists(st.tuples(settings_of_a_group, st.integers(0, 3)), min_size=1, max_size=6)


def grouped(params: list[Any], grouping: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """The parameters dealt to groups of those sizes, some of them empty; the last takes the rest."""
    found, at = [], 0
    for i, (given_settings, size) in enumerate(grouping):
        members = params[at:] if i == len(grouping) - 1 else params[at : at + size]
        at += len(members)
        found.append({**given_settings, "params": members} if i % 2 else {"params": members, **given_settings})
    return found


def own(params: list[Any]) -> list[Any]:
    return [nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def assert_values(found: Tensor, expected: Tensor) -> None:
    """The same bits; of NaNs only that they are: which operand's payload comes through is the processor's choice."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    both_nan = found.isnan() & expected.isnan()
    zero = torch.zeros((), dtype=found.dtype)
    assert same_bits(torch.where(both_nan, zero, found), torch.where(both_nan, zero, expected))


def send(optimizer: Any, params: list[Any], grads: list[Tensor | None]) -> None:
    """As a forward and a backward bring them, which streamed gradients need."""
    if hasattr(optimizer, "_bag"):
        optimizer._bag()
    pairs = [(p, g) for p, g in zip(params, grads) if g is not None]
    if pairs:
        torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])


def exact_norm(params: list[Any]) -> float:
    squares = [x * x for p in params if p.grad is not None for x in p.grad.double().flatten().tolist()]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.sqrt(sum(squares))


@both_sizes
@pytest.mark.parametrize("mode", EXACT)
def test_any_parameters_in_any_groups(mode: str, examples: int) -> None:
    @examples_of(examples // 3)
    @given(
        params_drawn,
        groupings,
        specials,
        specials,
        st.sampled_from(("all", "one missing", "clipped")),
        st.integers(0, 99),
    )
    def check(drawn: Any, grouping: Any, weight_bits: Any, grad_bits: Any, kind: str, seed: int) -> None:
        tensors = [laid_out(shape, layout, seed + i, DTYPES[d]) for i, (shape, layout, d) in enumerate(drawn)]
        params = [nn.Parameter(with_bits(t, weight_bits)) for t in tensors]
        others = own(params)
        optimizer = offload(grouped(params, grouping), mode, {"skip_nonfinite": "never"})
        twin = Twin(grouped(others, grouping))
        for step in range(2):
            grads: list[Tensor | None] = [
                with_bits(laid_out(tuple(p.shape), "contiguous", seed + 50 * step + i, p.dtype), grad_bits)
                for i, p in enumerate(others)
            ]
            if kind == "one missing":
                grads[seed % len(grads)] = None
            give(others, grads)
            send(optimizer, params, grads)
            factor = 1.0
            if kind == "clipped":
                optimizer.clip_grad_norm_(0.25)
                norm = optimizer.last_grad_norm
                assert norm is not None and norm == pytest.approx(exact_norm(others), rel=1e-14, nan_ok=True)
                factor = clip_factor(0.25, norm)
            optimizer.step()
            optimizer.zero_grad()
            with np.errstate(all="ignore"):
                twin.step(factor)
        optimizer.synchronize()
        for p, q in zip(params, others):
            assert_values(p.detach(), q.detach())
            if twin.steps[q]:
                assert state(optimizer, p, "step").item() == twin.steps[q]
                for name, arrays in (("master", twin.master), ("exp_avg", twin.m), ("exp_avg_sq", twin.v)):
                    found = torch.empty(p.shape).copy_(state(optimizer, p, name))  # by index, as the twin goes
                    assert_values(found, torch.from_numpy(arrays[q]).view(p.shape))
        optimizer.close()

    check()


cuttings = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 9)), min_size=2, max_size=4)


@both_sizes
@pytest.mark.parametrize("mode", EXACT)
def test_views_of_one_storage(mode: str, examples: int) -> None:
    """Apart, they are stepped and what lies between them is not touched; overlapping, they are refused."""

    @examples_of(examples // 5)
    @given(
        st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 9)), min_size=2, max_size=4),
        st.sampled_from(sorted(DTYPES)),
    )
    def check(cuts: list[tuple[int, int]], wire: str) -> None:
        storage = torch.arange(64.0).to(DTYPES[wire])
        params, taken, at = [], torch.zeros(64, dtype=torch.int64), 1
        for gap, size in cuts:
            start = max(at + gap, 0)
            params.append(nn.Parameter(storage[start : start + size]))
            taken[start : start + size] += 1
            at = start + size
        before = storage.clone()
        if taken.max() > 1:
            with pytest.raises(UnsupportedError, match="share memory"):
                offload(params, mode)
            return
        optimizer = offload(params, mode, lr=0.5)
        give(params, [torch.ones_like(p) for p in params])
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(storage != before, taken == 1)
        optimizer.close()

    check()


GAPS = {
    "expanded": lambda: torch.ones(1).expand(4),
    "expanded rows": lambda: torch.ones(1, 3).expand(2, 3),
    "every other": lambda: torch.arange(8.0)[::2],
    "a column": lambda: torch.ones(3, 4)[:, 1],
    "rows that overlap": lambda: torch.as_strided(torch.ones(8), (3, 4), (2, 1)),
    "a window that slides": lambda: torch.ones(8).unfold(0, 3, 1),
}


@pytest.mark.parametrize("what", GAPS)
def test_memory_with_gaps_or_overlaps_is_refused(what: str) -> None:
    with pytest.raises(UnsupportedError, match=r"do not fill one block of memory\. Make the parameter from"):
        offload([nn.Parameter(torch.ones(2)), nn.Parameter(GAPS[what]())])


def test_very_many_tiny_parameters() -> None:
    params = [nn.Parameter(torch.full((i % 3,), float(i))) for i in range(1000)]
    others = own(params)
    groups = [{"params": params[i::50]} for i in range(50)]
    optimizer, twin = offload(groups), Twin([{"params": others[i::50]} for i in range(50)])
    grads = [torch.full_like(p, 0.5) for p in params]
    for _ in range(2):
        give(params, grads)
        give(others, grads)
        optimizer.step()
        twin.step()
    for p, q in zip(params, others):
        assert same_bits(p, q)
    optimizer.close()
