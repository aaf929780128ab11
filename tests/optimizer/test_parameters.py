"""Which parameters are stepped, when they get state, and in whatever shape and memory order they come."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.errors import ConfigError, StateError, UnsupportedError
from support.optimizer import (
    DTYPES,
    EXACT,
    Bag,
    Twin,
    assert_same_run,
    assert_twin,
    config,
    give,
    gradients,
    make_params,
    offload,
    same_bits,
    snapshot,
    state,
    train,
    twins,
)

every_mode = pytest.mark.parametrize("schedule", EXACT)
every_wire = pytest.mark.parametrize("wire", DTYPES)


# ---- which have a gradient


@every_mode
@every_wire
def test_without_a_gradient_nothing_of_a_parameter_changes(wire: str, schedule: str) -> None:
    """Skipped, state untouched, own step counts; a neighbour in the same bucket is stepped (field.md, 8 and 16)."""
    params = make_params(DTYPES[wire], shapes=[(5,), (6,), (7,), (0, 2)])
    others = twins(params)
    optimizer, twin = offload(params, schedule, lr=1e-2), Twin([{"params": others, "lr": 1e-2}])
    present = [(1, 1, 0, 1), (1, 0, 0, 0), (0, 1, 0, 1), (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 1, 0)]
    for step, has in enumerate(present):
        for own in (params, others):
            give(own, [g if h else None for g, h in zip(gradients(step, own), has)])
        optimizer.step()
        twin.step()
    optimizer.synchronize()
    for p, q, count in zip(params, others, map(sum, zip(*present))):
        assert same_bits(p, q)
        assert state(optimizer, p, "step").item() == twin.steps[q] == count
        assert same_bits(state(optimizer, p, "exp_avg_sq").reshape(-1), torch.from_numpy(twin.v[q]))


@every_mode
def test_a_step_without_any_gradient_is_no_step(schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params, schedule)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    optimizer.zero_grad()
    optimizer.step()
    assert snapshot(optimizer, params) == before


@every_mode
def test_zero_gradients_do_step(schedule: str) -> None:
    """A gradient of zeros is a gradient: momentum goes on, decay is applied, the step is counted."""
    params, others = make_params(shapes=[(5,)]), make_params(shapes=[(5,)])
    optimizer, theirs = offload(params, schedule, lr=0.1), torch.optim.AdamW(others, lr=0.1, weight_decay=0.01)
    for o, own in ((optimizer, params), (theirs, others)):
        train(o, own, [0])
        for _ in range(3):
            o.zero_grad(set_to_none=False)
            o.step()
    optimizer.synchronize()
    torch.testing.assert_close(params[0], others[0], rtol=2e-6, atol=1e-6)
    assert state(optimizer, params[0], "step").item() == 4


@every_mode
def test_frozen_then_unfrozen_and_the_other_way(schedule: str) -> None:
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    params[1].requires_grad_(False)
    optimizer, theirs = offload(params, schedule, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    plan = [(1, 0), (1, 0), (1, 1), (0, 1), (0, 1), (1, 1)]
    for step, has in enumerate(plan):
        for p, h in zip(params, has):
            p.requires_grad_(bool(h))
        for own in (params, others):
            give(own, [g if h else None for g, h in zip(gradients(step, own), has)])
        optimizer.step()
        theirs.step()
        if step == 1:
            saved = optimizer.state_dict()["state"]
            assert sorted(saved) == [0], "a frozen parameter needs no 12 bytes an element"
    optimizer.synchronize()
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
        assert state(optimizer, p, "step").item() == theirs.state[q]["step"].item()


@every_mode
@pytest.mark.parametrize("stepped_before", [False, True])
def test_a_gradient_of_a_parameter_frozen_since_backward_is_stepped_as_torch_does(
    stepped_before: bool, schedule: str
) -> None:
    params = make_params(shapes=[(5,), (6,)])
    others = twins(params)
    optimizer, theirs = offload(params, schedule, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    for o, own in ((optimizer, params), (theirs, others)):
        if stepped_before:
            train(o, own, [0])
        give(own, gradients(1, own))
        own[0].requires_grad_(False)
        o.step()
    optimizer.synchronize()
    for p, q in zip(params, others):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-6, atol=1e-6)


@every_mode
def test_groups_added_after_steps(schedule: str) -> None:
    """An extension of the state at the next step; earlier parameters keep theirs and the settings of their group."""
    params = make_params(shapes=[(5,), (600,)])
    others = twins(params)
    optimizer, theirs = (
        offload(params[:1], schedule, lr=1e-2),
        torch.optim.AdamW(others[:1], lr=1e-2, weight_decay=0.01),
    )
    for o, own in ((optimizer, params), (theirs, others)):
        train(o, own[:1], range(3))
        o.add_param_group({"params": own[1], "lr": 0.3, "betas": (0.7, 0.8)})
        assert len(o.state_dict()["state"]) == 1
        train(o, own, range(3, 6))
    assert_like(optimizer, theirs, params, others)
    assert [state(optimizer, p, "step").item() for p in params] == [6, 3]
    assert optimizer.param_groups[1]["eps"] == 1e-8 and optimizer.param_groups[1]["decoupled_weight_decay"] is True


def assert_like(optimizer: OffloadAdam, theirs: Any, params: list[Any], others: list[Any]) -> None:
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
        assert state(optimizer, p, "step").item() == theirs.state[q]["step"].item()


@every_mode
def test_empty_groups_stay(schedule: str) -> None:
    """Schedulers and PEFT rely on the number of groups (field.md, 16)."""
    params = make_params(shapes=[(5,)])
    optimizer = offload([{"params": []}, {"params": params}, {"params": []}], schedule)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[], [0], []]
    optimizer.load_state_dict(saved)
    train(optimizer, params, [2])
    assert optimizer.clip_grad_norm_(1.0).device == params[0].device


@every_mode
def test_a_tensor_twice_in_a_group_is_stepped_once_with_torchs_warning(schedule: str) -> None:
    params, others = make_params(shapes=[(5,), (6,)]), make_params(shapes=[(5,), (6,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = offload([params[0], params[1], params[0]], schedule, lr=1e-2)
    plain = offload(others, schedule, lr=1e-2)
    norms: list[list[float]] = [[], []]
    for step in range(3):
        for k, (o, own) in enumerate(((optimizer, params), (plain, others))):
            give(own, gradients(step, own))
            norms[k].append(o.clip_grad_norm_(0.1).item())
            o.step()
    assert norms[0] == norms[1]
    optimizer.synchronize()
    plain.synchronize()
    assert_same_run(optimizer, params, plain, others)
    assert state(optimizer, params[0], "step").item() == 3
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["params"] == [2, 1, 2] and sorted(saved["state"]) == [1, 2], "torch's numbers"
    optimizer.load_state_dict(saved)
    train(optimizer, params, [3])
    train(plain, others, [3])
    assert_same_run(optimizer, params, plain, others)


def test_a_tensor_in_two_groups_is_refused() -> None:
    (p,) = make_params(shapes=[(5,)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        offload([{"params": [p]}, {"params": [p]}])
    optimizer = offload([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1


@every_mode
def test_tied_weights_are_one_parameter(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(11, 4), "head": nn.Linear(4, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = OffloadAdam(model.parameters(), lr=0.1, config=config(schedule), model=model)
    ids = torch.arange(11)
    for _ in range(3):
        optimizer.zero_grad()
        model["head"](model["embed"](ids)).logsumexp(-1).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    assert model["head"].weight is model["embed"].weight
    assert len(optimizer.state_dict()["state"]) == 1
    assert optimizer.stats().params == 44


def test_two_parameters_that_share_memory_are_refused() -> None:
    """Each would be stepped and the last to arrive would win: tied by `.data`, or overlapping views of one buffer."""
    block = torch.randn(20)
    a, b, c = nn.Parameter(block[:10]), nn.Parameter(block[9:]), nn.Parameter(block[10:])
    with pytest.raises(UnsupportedError, match=r"shapes \(10,\) and \(11,\).*share memory.*one Parameter"):
        offload([a, b])
    optimizer = offload([a, c])  # neighbours in one buffer are fine, as cuDNN lays out an RNN
    train(optimizer, [a, c], range(2))
    b.data = a.data
    optimizer.add_param_group({"params": [b]})
    give([a, b, c], [torch.ones_like(p) for p in (a, b, c)])
    before = snapshot(optimizer, [a, c])
    with pytest.raises(UnsupportedError, match="share memory"):
        optimizer.step()
    assert snapshot(optimizer, [a, c]) == before


# ---- their memory


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


# name: shape, how a parameter's values are laid out, how its gradient's are
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "transposed": ((5, 7), lambda t: t.t().contiguous().t(), lambda t: t.t().contiguous().t()),
    "transposed, gradient not": ((5, 7), lambda t: t.t().contiguous().t(), lambda t: t.contiguous()),
    "gradient transposed": ((5, 7), lambda t: t.contiguous(), lambda t: t.t().contiguous().t()),
    "gradient expanded": ((5, 7), lambda t: t.contiguous(), lambda t: t[:, :1].clone().expand(5, 7)),
    "both, expanded": ((5, 7), lambda t: t.t().contiguous().t(), lambda t: t[:1].clone().expand(5, 7)),
    "gradient strided": ((5, 7), lambda t: t.contiguous(), lambda t: t.repeat_interleave(2, 1)[:, ::2]),
    "gradient negated": ((5, 7), lambda t: t.contiguous(), lambda t: torch._neg_view(t.clone())),
    "permuted": ((2, 3, 4), lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0), lambda t: t.contiguous()),
    "channels last": ((2, 3, 4, 5), channels_last, channels_last),
    "channels last, gradient not": ((2, 3, 4, 5), channels_last, lambda t: t.contiguous()),
    "dimensions of one": ((1, 6, 1, 3), channels_last, lambda t: t.contiguous()),
    "in the middle of a buffer": ((5, 7), lambda t: torch.cat([t[:3], t, t[:1]])[3:8], lambda t: t.contiguous()),
}


@every_mode
@every_wire
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_dense_layout(layout: str, wire: str, schedule: str) -> None:
    """Bit-equal with contiguous copies, state shown in the parameter's shape; neighbours share its buckets."""
    shape, lay_param, lay_grad = LAYOUTS[layout]
    shapes = [(3,), shape, (4,)]
    params = make_params(DTYPES[wire], shapes)
    others = twins(params)
    params[1] = nn.Parameter(lay_param(params[1].detach()))
    assert not layout.startswith(("transposed", "permuted", "channels")) or not params[1].is_contiguous()
    optimizer, twin = offload(params, schedule, {"bucket_bytes": 64}, lr=1e-2), Twin([{"params": others, "lr": 1e-2}])
    for step in range(4):
        grads = gradients(step, params)
        for own in (params, others):
            for p, g in zip(own, grads):
                p.grad = g
        params[1].grad = lay_grad(grads[1])
        others[1].grad = params[1].grad.resolve_neg().clone().contiguous()
        norm = torch.cat([q.grad.double().reshape(-1) for q in others]).norm().item()
        assert optimizer.clip_grad_norm_(float("inf")).item() == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        twin.step()
    optimizer.synchronize()
    for p, q in zip(params, others):
        assert same_bits(p, q)
        saved = optimizer.state[p]
        assert saved["exp_avg"].shape == p.shape
        assert same_bits(saved["exp_avg"].reshape(-1), torch.from_numpy(twin.m[q]))
        assert same_bits(saved["master"].reshape(-1), torch.from_numpy(twin.master[q]))


GAPS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(4),
    "expanded rows": lambda: torch.ones(1, 3).expand(2, 3),
    "every other": lambda: torch.ones(8)[::2],
    "columns": lambda: torch.ones(4, 4)[:, :2],
    "overlapping": lambda: torch.ones(8).as_strided((3, 3), (2, 1)),
    "negated": lambda: torch._neg_view(torch.ones(4)),
}


@pytest.mark.parametrize("gap", GAPS)
def test_gaps_and_overlaps_are_refused(gap: str) -> None:
    p = nn.Parameter(GAPS[gap]())
    with pytest.raises(UnsupportedError, match=r"stride of parameter 1, shape .*contiguous"):
        offload([*make_params(shapes=[(2,)]), p])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda t: t.double().to(torch.float16 if t.dtype != torch.float16 else torch.float32),
    "dtype of the same size": lambda t: t.to(torch.float16 if t.dtype == torch.bfloat16 else torch.bfloat16),
    "unsupported dtype": lambda t: t.double(),
    "more elements": lambda t: torch.zeros(8, 4, 2, 3, dtype=t.dtype),
    "another shape": lambda t: t.reshape(4, 4, 2, 3).clone() if t.dim() else t,
    "memory format": channels_last,
    "a view at the same address": lambda t: t.transpose(0, 1),
    "expanded": lambda t: t[:1].clone().expand(4, 4, 3, 2),
}


@every_mode
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changes_after_its_state_was_made_is_refused(change: str, schedule: str) -> None:
    """Its state would be applied to other elements than it belongs to: `model.to(memory_format=…)`, for one."""
    params = make_params(torch.bfloat16, shapes=[(5,), (4, 4, 3, 2)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    optimizer.zero_grad()
    params[1].data = CHANGES[change](params[1].data)
    before = [a.tobytes() for arena in optimizer.engine.arenas for a in (arena.master, arena.state[1], arena.steps)]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(StateError, match=r"shape \(4, 4, 3, 2\), bfloat16 on cpu=.*changed after its state was"):
        optimizer.step()
    after = [a.tobytes() for arena in optimizer.engine.arenas for a in (arena.master, arena.state[1], arena.steps)]
    assert after == before


def test_a_parameter_that_moves_to_another_device_after_its_state_was_made_is_refused() -> None:
    """`model.to("cuda")` after a step on the CPU: the copies would go to addresses of another memory."""
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params)
    train(optimizer, params, [0])
    (arena,) = optimizer.engine.arenas
    optimizer.engine.watch.left[0].addresses[1] = 0  # it would have another address there
    arena._layouts[1] = (torch.device("cuda:0"), *arena._layouts[1][1:])  # there is no second device here to move to
    give(params, gradients(1, params))
    with pytest.raises(StateError, match=r"\(6,\), float32 on cuda:0=.*on cpu'.*device.*changed.*move"):
        optimizer.step()


@pytest.mark.parametrize("change", ["more elements", "another shape", "memory format"])
def test_state_is_not_loaded_for_a_parameter_that_changed_after_its_state_was_made(change: str) -> None:
    """It would lie in the memory of other elements."""
    params = make_params(torch.bfloat16, shapes=[(5,), (4, 4, 3, 2)])
    optimizer = offload(params)
    train(optimizer, params, range(2))
    params[1].data = CHANGES[change](params[1].data)
    other = offload(twins(params))
    train(other, [p for g in other.param_groups for p in g["params"]], range(3))
    before = [a.tobytes() for a in (optimizer.engine.arenas[0].state[1], optimizer.engine.arenas[0].steps)]
    with pytest.raises(StateError, match="changed after its state was made"):
        optimizer.load_state_dict(other.state_dict())
    assert [a.tobytes() for a in (optimizer.engine.arenas[0].state[1], optimizer.engine.arenas[0].steps)] == before


def test_parameters_added_on_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a second GPU, say."""
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload(params[:1])
    train(optimizer, params[:1], [0])
    optimizer.add_param_group({"params": params[1:]})
    give(params, gradients(1, params))
    placement = optimizer.engine.placement
    placement.device = "cuda:0"
    before = snapshot(optimizer, params)
    with pytest.raises(UnsupportedError, match=r"device='cpu': other parameters of this optimizer are on cuda:0"):
        optimizer.step()
    placement.device = "cpu"
    assert snapshot(optimizer, params) == before
    optimizer.step()


def test_the_transport_follows_parameters_that_are_moved_before_the_first_step() -> None:
    params = make_params(shapes=[(5,)])
    optimizer = offload(params)
    placement = optimizer.engine.placement
    made = placement.transport
    placement.device = "cuda:0"  # as if the model had been on a GPU when the optimizer was made
    train(optimizer, params, [0])
    assert placement.device == "cpu" and placement.transport is not made
    assert not made.pinned_bytes, "the old ring is freed"


@every_mode
def test_nothing_but_empty_parameters(schedule: str) -> None:
    params = make_params(shapes=[(0,), (3, 0)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    assert [state(optimizer, p, "step").item() for p in params] == [2, 2]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("change", ["dtype", "memory format", "another shape", "more elements"])
def test_before_its_state_is_made_a_parameter_may_change(change: str) -> None:
    params = make_params(torch.bfloat16, shapes=[(5,), (4, 4, 3, 2)])
    optimizer = offload(params, lr=1e-2)
    params[1].data = CHANGES[change](params[1].data)
    others = twins(params)
    others[1].data = others[1].data.contiguous()
    twin = Twin([{"params": others, "lr": 1e-2}])
    for step in range(2):
        train(optimizer, params, [step])
        give(others, gradients(step, others))
        twin.step()
    assert_twin(optimizer, params, twin, others)


# ---- what is refused at construction, or where it can first be seen


def dtensor() -> Any:
    class Sharded(Tensor):
        device_mesh = "mesh"

    return nn.Parameter(torch.ones(3).as_subclass(Sharded))


def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)), r"torch\.float64.*Convert the parameter"),
    "complex": (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), r"torch\.complex64.*Convert"),
    "lazy": (lambda: nn.LazyLinear(3).weight, r"UninitializedParameter.*Run one forward"),
    "sharded": (dtensor, r"Sharded.*FSDP2"),
    "inference": (made_in_inference_mode, r"inference_mode.*outside of inference_mode"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_parameters(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=message):
        offload([{"params": make_params(shapes=[(2,)])}, {"params": [make()]}])


@pytest.mark.parametrize("kind", ["float64", "complex", "lazy", "sharded", "inference"])
def test_a_refused_group_leaves_the_optimizer_as_it_was(kind: str) -> None:
    params = make_params(shapes=[(2,)])
    optimizer = offload(params)
    before = snapshot(optimizer, params)
    with pytest.raises(UnsupportedError):
        optimizer.add_param_group({"params": [REFUSED[kind][0]()]})
    assert snapshot(optimizer, params) == before
    train(optimizer, params, [0])


def test_a_meta_parameter_added_later_is_refused_when_it_is_to_be_stepped() -> None:
    params = make_params(shapes=[(2,)])
    optimizer = offload(params)
    train(optimizer, params, [0])
    added = nn.Parameter(torch.ones(3, device="meta"))
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(3, device="meta")
    before = snapshot(optimizer, params)
    with pytest.raises(UnsupportedError, match="device='meta'"):
        optimizer.step()
    assert snapshot(optimizer, params) == before


def test_a_real_dtensor(tmp_path: Any) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        p = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
        with pytest.raises(UnsupportedError, match=r"DTensor.*FSDP2"):
            offload([p])
    finally:
        torch.distributed.destroy_process_group()


def test_the_meta_device() -> None:
    with pytest.raises(UnsupportedError, match=r"device='meta'.*Move the model"):
        offload([nn.Parameter(torch.ones(3, device="meta"))])
    with pytest.raises(UnsupportedError, match=r"device=\['cpu', 'meta'\].*Put the model on one device"):
        offload([nn.Parameter(torch.ones(3, device="meta")), *make_params(shapes=[(2,)])])


def test_nothing_to_train() -> None:
    params = [p.requires_grad_(False) for p in make_params(shapes=[(2,), (3,)])]
    with pytest.raises(ConfigError, match=r"2 parameters.*none of them requires a gradient.*Unfreeze"):
        offload(params)
    with pytest.raises(ConfigError, match=r"0 parameters"):
        offload([{"params": []}])
    with pytest.raises(ValueError, match="empty parameter list"):
        offload([])


@pytest.mark.parametrize("where", ["argument", "group", "group added"])
def test_amsgrad(where: str) -> None:
    params = make_params(shapes=[(2,), (3,)])
    match = r"amsgrad=True.*no maximum of the second moment.*Leave amsgrad out"
    with pytest.raises(UnsupportedError, match=match):
        if where == "argument":
            offload(params, amsgrad=True)
        elif where == "group":
            offload([{"params": params, "amsgrad": True}])
        else:
            offload(params[:1]).add_param_group({"params": params[1:], "amsgrad": True})
    assert offload(params, amsgrad=False).param_groups[0]["amsgrad"] is False


NUMBERS: dict[str, tuple[Any, str]] = {
    "lr negative": ({"lr": -1e-3}, r"lr=-0\.001.*at least 0"),
    "lr nan": ({"lr": float("nan")}, r"lr=nan"),
    "lr inf": ({"lr": float("inf")}, r"lr=inf"),
    "lr text": ({"lr": "1e-3"}, r"lr='1e-3': not a number"),
    "lr vector": ({"lr": torch.ones(2)}, r"lr=tensor.*not a number"),
    "lr None": ({"lr": None}, r"lr=None: not a number"),
    "lr bool": ({"lr": True}, r"lr=True: not a number"),
    "beta1 one": ({"betas": (1.0, 0.9)}, r"betas\[0\]=1\.0.*\[0, 1\)"),
    "beta2 negative": ({"betas": (0.9, -0.1)}, r"betas\[1\]=-0\.1"),
    "beta2 nan": ({"betas": (0.9, float("nan"))}, r"betas\[1\]=nan"),
    "betas alone": ({"betas": 0.9}, r"betas=0\.9: not two numbers"),
    "betas three": ({"betas": (0.9, 0.9, 0.9)}, r"betas=\(0\.9, 0\.9, 0\.9\): not two"),
    "betas text": ({"betas": ("0.9", 0.9)}, r"betas\[0\]='0\.9': not a number"),
    "eps negative": ({"eps": -1e-8}, r"eps=-1e-08"),
    "eps nan": ({"eps": float("nan")}, r"eps=nan"),
    "decay negative": ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
    "decay text": ({"weight_decay": "0.1"}, r"weight_decay='0\.1': not a number"),
    "decoupled text": ({"decoupled_weight_decay": "false"}, r"decoupled_weight_decay='false': not a bool"),
    "maximize number": ({"maximize": 1}, r"maximize=1: not a bool"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_hyper_parameters_out_of_range(name: str) -> None:
    given, match = NUMBERS[name]
    params = make_params(shapes=[(2,), (3,)])
    with pytest.raises(ConfigError, match=match):
        offload(params, **given)
    optimizer = offload(params[:1])
    with pytest.raises(ConfigError, match=match):
        optimizer.add_param_group({"params": params[1:], **given})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "lr", [torch.tensor(0.01), torch.tensor([0.01]), torch.tensor(0.01, dtype=torch.float64), 0, 1]
)
def test_learning_rates_that_are_fine(lr: Any) -> None:
    (p,), (q,) = make_params(shapes=[(4,)]), make_params(shapes=[(4,)])
    ours, theirs = offload([p], lr=lr), torch.optim.AdamW([q], lr=float(lr), weight_decay=0.01)
    train(ours, [p], range(3))
    train(theirs, [q], range(3))
    torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)


@every_mode
def test_hyper_parameters_that_become_impossible_leave_all_as_it_was(schedule: str) -> None:
    """β1 = 1 set by hand: its bias correction divides by zero; no step count may have moved by then."""
    params = make_params(shapes=[(5,), (6,)])
    optimizer = offload([{"params": params[:1]}, {"params": params[1:]}], schedule)
    train(optimizer, params, range(2))
    good = optimizer.param_groups[1]["betas"]
    before = snapshot(optimizer, params)
    optimizer.param_groups[1]["betas"] = (1.0, 0.999)
    give(params, gradients(2, params))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.param_groups[1]["betas"] = good
    assert snapshot(optimizer, params) == before
    optimizer.step()
    optimizer.synchronize()
    assert [state(optimizer, p, "step").item() for p in params] == [3, 3]


def test_other_arguments_of_the_wrong_kind() -> None:
    params = make_params(shapes=[(2,)])
    with pytest.raises(ConfigError, match=r"config=\{'threads': 2\}: not an OffloadConfig.*from_mapping"):
        OffloadAdam(params, config={"threads": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model='str': not a torch module"):
        OffloadAdam(params, model="gpt2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model='Linear': it has none of the optimizer's parameters"):
        OffloadAdam(params, model=nn.Linear(2, 2))
    with pytest.raises(TypeError, match="set"):
        OffloadAdam([{"params": set(params)}])
    with pytest.raises(ValueError, match="non-leaf"):
        OffloadAdam([params[0] * 2])


# ---- gradients that are refused at the step


def sparse(p: Tensor) -> None:
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True)


def other_shape(p: Tensor) -> None:
    p.grad = torch.ones(4)
    p.grad.data = torch.ones(3)


def other_dtype(p: Tensor) -> None:
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch refuses such a gradient itself")
    p.grad_dtype = None
    p.grad = torch.ones(4, dtype=torch.float64)


GRADIENTS: dict[str, tuple[Callable[[Tensor], None], str]] = {
    "sparse": (sparse, r"sparse.*sparse=False"),
    "another shape": (other_shape, r"\(3,\).*the parameter is \(4,\)"),
    "another dtype": (other_dtype, r"torch\.float64.*the parameter is \(4,\) torch\.float32"),
}


@every_mode
@pytest.mark.parametrize("kind", GRADIENTS)
def test_refused_gradients(kind: str, schedule: str) -> None:
    spoil, match = GRADIENTS[kind]
    params = make_params(shapes=[(3,), (4,)])
    optimizer = offload(params, schedule)
    train(optimizer, params, range(2))
    give(params, gradients(2, params))
    spoil(params[1])
    before = snapshot(optimizer, params)
    for refused in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), lambda: optimizer.unscale_(0.5)):
        with pytest.raises(UnsupportedError, match=f"gradient of a parameter of shape .*{match}"):
            refused()
    assert snapshot(optimizer, params) == before
    train(optimizer, params, [2])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_when_attached(kind: Any) -> None:
    model = nn.Sequential(kind(4, 2, sparse=True))
    with pytest.raises(UnsupportedError, match=r"0\.sparse=True.*sparse=False"):
        OffloadAdam(model.parameters(), model=model)


def test_data_parallel_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"DataParallel.*DistributedDataParallel"):
        OffloadAdam(model.parameters(), model=nn.DataParallel(model))


def test_overlapped_without_a_model_is_refused_at_the_first_step_and_nothing_changed() -> None:
    params = make_params(shapes=[(3,)])
    optimizer = OffloadAdam(params, config=config("overlapped"))
    give(params, gradients(0, params))
    with pytest.raises(ConfigError, match=r"schedule='overlapped'.*no model is attached.*attach\(model\)"):
        optimizer.step()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 0
    optimizer.attach(Bag(params))
    optimizer.step()
    optimizer.synchronize()
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1


def test_no_warning_of_its_own_in_ordinary_use() -> None:
    params = make_params(shapes=[(3,)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = offload(params)
        train(optimizer, params, range(2))
        optimizer.clip_grad_norm_(1.0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
