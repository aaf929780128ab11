"""What the hooks on a model learn, and that the model stays an ordinary model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_offload import OffloadAdam
from hf_offload.engine.gates import Gates
from support.engine import TinyLM, batches, copies, groups, handmade, late, optimizer_of, same, settings, weights


def gates_of(optimizer: OffloadAdam) -> Gates:
    gates = optimizer.engine.gates
    assert gates is not None
    return gates


def one_step(model: nn.Module, optimizer: OffloadAdam, call: Callable[[Tensor], Tensor] | None = None) -> None:
    (call or model)(next(batches())).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what is learnt


def test_a_forward_in_grad_mode_fires_every_guard() -> None:
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)
    model(next(batches()))
    assert gates.fired == set(range(len(gates.units.guards)))
    assert gates.order == [0, 1, 2, 3, 4]
    optimizer.close()


def test_a_fused_head_stays_in_the_tail() -> None:
    """Its weight is never seen behind a hook, but the wait after the last block covers it: it must not move to the
    root, where nothing would be hidden."""
    model = TinyLM(fused_head=True)
    optimizer = optimizer_of(model, settings("overlapped"))
    for _ in range(3):
        one_step(model, optimizer)
    assert gates_of(optimizer).at_root == set()
    optimizer.close()


def test_another_bare_weight_of_the_tail_moves_to_the_root() -> None:
    """Only the output embeddings are known to be read after the last block."""

    class Gain(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Linear(1, 6, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (1 + self.gain.weight.square().mean())

    model = Gain()
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)
    one_step(model, optimizer)
    assert gates.at_root == {gates.units.tail}
    ranks = gates.rank()
    assert ranks[4] == 0 and sorted(ranks) == [0, 1, 2, 3, 4], "what is awaited first is stepped first"
    optimizer.close()


def test_evaluation_does_not_vouch_for_training() -> None:
    """Evaluation before the first step calls a module whose weight training reads bare: it still counts as bare."""

    class Switch(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Linear(6, 6, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            if not self.training:
                return self.gain(self.hidden(ids)).sum()
            scale = 1 + self.gain.weight.square().mean()
            return super().forward(ids) * scale

    model = Switch()
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)
    with torch.no_grad():
        model.eval()(next(batches()))
    model.train()
    one_step(model, optimizer)
    assert gates.at_root == {gates.units.tail}
    optimizer.close()


class Checkpointed(TinyLM):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        assert self.norm is not None
        return self.norm(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_blocks_in_backward_changes_nothing(reentrant: bool) -> None:
    """Block 0 is recomputed last: awaiting the tail after it would hide nothing."""
    model = Checkpointed(reentrant)
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)
    for _ in range(2):
        one_step(model, optimizer)
        assert gates.last_block == 3
        assert gates.order == [0, 1, 2, 3, 4]
        assert gates.at_root == set()
    optimizer.close()


def test_a_compiled_model_waits_as_well() -> None:
    """torch.compile leaves the hooks to Python, whichever of the two models is attached."""

    def run(schedule: str, attach: str) -> tuple[list[float], dict[str, Tensor]]:
        with copies(late("h2d", 2e-3) if schedule == "overlapped" else None):
            model = TinyLM()
            compiled = torch.compile(model, backend="eager")
            given = compiled if attach == "compiled" else model
            optimizer = OffloadAdam(groups(model), lr=1e-2, config=settings(schedule), model=given)
        data, losses = batches(), []
        for _ in range(3):
            loss = compiled(next(data))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert gates_of(optimizer).order == [0, 1, 2, 3, 4] and gates_of(optimizer).at_root == set()
        optimizer.close()
        return losses, weights(model)

    expected = run("in_order", "plain")
    for attach in ("plain", "compiled"):
        found = run("overlapped", attach)
        assert found[0] == expected[0] and same(found[1], expected[1])


def test_the_last_block_is_the_one_that_ran_last_not_the_one_registered_last() -> None:
    class Backwards(TinyLM):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.embed(ids[:, :-1])
            for layer in reversed(self.layers):
                x = layer(x)
            assert self.norm is not None
            return self.norm(x)

    model = Backwards()
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)
    assert gates.last_block == 3
    one_step(model, optimizer)
    assert gates.last_block == 1
    assert gates.order == [0, 3, 2, 1, 4]
    optimizer.close()


def test_the_order_is_that_of_the_first_forward() -> None:
    """Later forwards, and those of the same micro-batch's backward, do not change it."""
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    one_step(model, optimizer)
    before = list(gates_of(optimizer).order)
    for layer in reversed(model.layers):
        layer(torch.zeros(1, 6))
    one_step(model, optimizer)
    assert gates_of(optimizer).order == before
    optimizer.close()


def test_a_unit_that_does_not_run_costs_nothing_and_breaks_nothing() -> None:
    class Skips(TinyLM):
        skip = -1

        def hidden(self, ids: Tensor) -> Tensor:
            x = self.embed(ids[:, :-1])
            for i, layer in enumerate(self.layers):
                if i != self.skip:
                    x = layer(x)
            assert self.norm is not None
            return self.norm(x)

    def run(schedule: str) -> tuple[dict[str, Tensor], list[int]]:
        with copies(late("h2d", 1e-3) if schedule == "overlapped" else None):
            model = Skips()
            optimizer = optimizer_of(model, settings(schedule))
        data, moved = batches(), []
        for skip in (-1, 1, 1, -1, 2, 0, -1):
            model.skip = skip
            model(next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            moved.append(optimizer.stats().h2d_bytes)
        assert gates_of(optimizer).at_root == set()
        optimizer.close()
        return weights(model), moved

    (in_order, _), (overlapped, moved) = run("in_order"), run("overlapped")
    assert same(in_order, overlapped)
    everything, block = (
        4 * sum(p.numel() for p in Skips().parameters()),
        4 * sum(p.numel() for p in Skips().layers[0].parameters()),
    )
    assert moved == [everything - block * (skip >= 0) for skip in (-1, 1, 1, -1, 2, 0, -1)]


def test_several_forwards_a_step_and_generation_in_between() -> None:
    def run(schedule: str) -> tuple[list[float], dict[str, Tensor]]:
        with copies(late("h2d", 1e-3) if schedule == "overlapped" else None):
            model = TinyLM()
            optimizer = optimizer_of(model, settings(schedule))
        data, seen = batches(), []
        for _ in range(3):
            for _ in range(3):
                model(next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ids = next(data)
            with torch.no_grad():
                for _ in range(3):  # greedy, token by token
                    logits = model.head(model.hidden(torch.cat([ids, ids[:, :1]], 1)))
                    ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            seen += [float(logits.sum()), *ids.flatten().tolist()]
        optimizer.synchronize()
        optimizer.close()
        return seen, weights(model)

    a, b = run("in_order"), run("overlapped")
    assert a[0] == b[0] and same(a[1], b[1])


# ---- the model stays an ordinary model


COPIERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_of_a_hooked_model_is_inert(copier: str) -> None:
    """It does not wait, is not waited for, and can be given an optimizer of its own."""
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    one_step(model, optimizer)
    twin = COPIERS[copier](model)
    gates = gates_of(optimizer)
    gates.fired.clear()
    twin(next(batches())).backward()
    twin.load_state_dict(twin.state_dict())
    assert gates.fired == set()
    assert not optimizer.engine.watch._all_suspect
    own = optimizer_of(twin, settings("overlapped"))
    one_step(twin, own)
    assert gates_of(own).order == [0, 1, 2, 3, 4]
    own.close()
    optimizer.close()
    again = COPIERS[copier](twin)
    again(next(batches()))


def test_close_takes_every_hook_off() -> None:
    model = TinyLM()
    before = {name: len(getattr(m, kind)) for name, m in model.named_modules() for kind in _hook_dicts(m)}
    optimizer = optimizer_of(model, settings("overlapped"))
    assert any(len(getattr(m, kind)) for m in model.modules() for kind in _hook_dicts(m))
    optimizer.close()
    assert {name: len(getattr(m, kind)) for name, m in model.named_modules() for kind in _hook_dicts(m)} == before


def _hook_dicts(module: nn.Module) -> list[str]:
    return [k for k, v in vars(module).items() if k.endswith("_hooks") and isinstance(v, dict)]


def test_attaching_the_same_model_again_or_a_wrapper_adds_nothing() -> None:
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    gates = gates_of(optimizer)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

    optimizer.attach(model)
    optimizer.attach(Wrapper())
    assert gates_of(optimizer) is gates
    assert len(model.layers[0]._forward_pre_hooks) == 1
    optimizer.close()


@pytest.mark.parametrize("before", ["nothing", "a step without a model", "another part of the model"])
def test_a_model_attached_late_has_its_units_waited_for(before: str) -> None:
    """The layout of the state is older than the model's units: they are looked up anew, and overlap still works."""
    with copies(late("h2d", 2e-3)):
        model = TinyLM()
        schedule = "in_order" if before == "a step without a model" else "overlapped"
        optimizer = OffloadAdam(groups(model), lr=1e-2, config=settings(schedule, bucket_bytes=700))
    twin = TinyLM()
    reference = OffloadAdam(groups(twin), lr=1e-2, config=settings("in_order", bucket_bytes=700))
    steps = 0
    if before == "a step without a model":
        handmade(model, 9)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        with copies(late("h2d", 2e-3)):
            optimizer = OffloadAdam(groups(model), lr=1e-2, config=settings("overlapped", bucket_bytes=700))
        optimizer.load_state_dict(saved)  # binds: the layout knows no units
        handmade(twin, 9)
        reference.step()
        steps = 1
    elif before == "another part of the model":
        optimizer.attach(model.layers)
        model(next(batches()))  # binds, with the units of that part
    optimizer.attach(model)
    assert {u for arena in optimizer.engine.arenas for units in arena.bucket_units for u in units} <= {0, 1, 2, 3, 4}
    data, other = batches(3), batches(3)
    for _ in range(3):
        loss, expected = model(next(data)), twin(next(other))
        assert loss.item() == expected.item()
        loss.backward()
        expected.backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    optimizer.synchronize()
    assert optimizer.state[model.head.weight]["step"] == 3 + steps
    assert same(weights(model), weights(twin))
    optimizer.close()
    reference.close()


def test_hooks_survive_being_called_while_their_engine_goes() -> None:
    """`del optimizer` leaves hooks on the model that find nobody."""
    model = TinyLM()
    optimizer = optimizer_of(model, settings("overlapped"))
    one_step(model, optimizer)
    del optimizer
    model(next(batches())).backward()
    model.load_state_dict(model.state_dict())
    copy.deepcopy(model)


def test_a_backward_through_a_retained_graph_raises_instead_of_using_new_weights() -> None:
    for schedule in ("in_order", "overlapped"):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(schedule))
        loss = model(next(batches()))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.close()
