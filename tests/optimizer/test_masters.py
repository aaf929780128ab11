"""fp32 weights cast to 16 bit, whose fp32 values wait on the host to become the master weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, hostmem
from hf_offload.engine import masters
from hf_offload.engine.masters import cast_trainable
from hf_offload.errors import HostMemoryError
from support.optimizer import EXACT, config, same_bits, state

every_mode = pytest.mark.parametrize("schedule", EXACT)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.kept = nn.Linear(5, 1)
        self.sixteen = nn.Parameter(torch.randn(3).half())
        self.register_buffer("inv_freq", torch.rand(4))


def cast(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    count = cast_trainable(model, dtype, keep=lambda name: name.startswith("kept."))
    assert count == sum(before[n].numel() for n in ("layer.weight", "layer.bias", "norm.weight", "norm.bias"))
    return before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_trainable_casts_trainable_fp32_parameters_and_nothing_else(dtype: torch.dtype) -> None:
    model = Model()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    identities = {n: id(p) for n, p in model.named_parameters()}
    before = cast(model, dtype)
    for name, p in model.named_parameters():
        is_cast = name.startswith(("layer.", "norm."))
        assert p.dtype == (dtype if is_cast else before[name].dtype), name
        assert id(p) == identities[name] and same_bits(p, before[name].to(p.dtype)), name
        assert p.requires_grad != name.startswith("frozen.")
    assert all(same_bits(b, buffers[n]) if b.is_floating_point() else b == buffers[n] for n, b in model.named_buffers())
    assert cast_trainable(model, dtype, keep=lambda name: name.startswith("kept.")) == 0


@every_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_start_from_the_fp32_values(dtype: torch.dtype, schedule: str) -> None:
    model = Model()
    before = cast(model, dtype)
    optimizer = OffloadAdam(model.parameters(), lr=0.0, weight_decay=0.0, config=config(schedule), model=model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.synchronize()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert same_bits(state(optimizer, p, "master"), before[name].float()), name
    again = OffloadAdam(model.parameters(), config=config())
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    again.step()
    assert not same_bits(state(again, model.layer.weight, "master"), before["layer.weight"]), "handed over for good"


@every_mode
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "data.copy_", "data ="])
def test_weights_loaded_between_the_cast_and_the_binding_win(how: str, schedule: str) -> None:
    """Element by element: a weight that is still the rounded fp32 value keeps its digits."""
    model = Model()
    before = cast(model, torch.bfloat16)
    optimizer = OffloadAdam(model.parameters(), lr=0.0, weight_decay=0.0, config=config(schedule), model=model)
    loaded = model.layer.weight.detach().clone()
    loaded[0] = 3.0
    if how == "load_state_dict":
        model.load_state_dict({**model.state_dict(), "layer.weight": loaded})
    elif how == "copy_":
        with torch.no_grad():
            model.layer.weight.copy_(loaded)
    elif how == "data.copy_":
        model.layer.weight.data.copy_(loaded)
    else:
        model.layer.weight.data = loaded
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.synchronize()
    expected = before["layer.weight"].clone()
    expected[0] = 3.0
    assert same_bits(state(optimizer, model.layer.weight, "master"), expected)


def test_resized_between_the_cast_and_the_binding() -> None:
    """The fp32 values no longer fit, not even by broadcasting: the weights are what counts."""
    for shape in ((9, 7), (1, 7), (35,)):
        model = Model()
        cast(model, torch.bfloat16)
        optimizer = OffloadAdam(model.parameters(), lr=0.0, weight_decay=0.0, config=config())
        p = model.layer.weight
        p.data = torch.randn(shape).bfloat16()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert same_bits(state(optimizer, p, "master"), p.detach().float())


def test_the_cast_values_count_once_against_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in memory already, and freed while the masters' own memory is filled."""
    model = nn.Linear(1000, 1000, bias=False)
    cast_trainable(model, torch.bfloat16)
    room = 8 * 1_000_000 + 2 * 2 * 1024  # m, v and the ring; the masters' 4 MB wait here
    monkeypatch.setattr(hostmem, "available_host_bytes", lambda root=None: hostmem.HostMemory(room, room, "a test"))
    OffloadAdam(model.parameters(), config=config())
    monkeypatch.setattr(hostmem, "available_host_bytes", lambda root=None: hostmem.HostMemory(room - 1, room, "a test"))
    with pytest.raises(HostMemoryError, match="8004096 bytes"):
        OffloadAdam(model.parameters(), config=config())


def test_a_model_that_dies_before_it_is_bound_frees_its_fp32_values() -> None:
    model = Model()
    before = len(masters._waiting)
    cast(model, torch.bfloat16)
    assert len(masters._waiting) == before + 4
    del model
    assert len(masters._waiting) == before
