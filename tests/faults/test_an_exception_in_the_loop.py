"""An error of the user's, wherever it comes: the failed micro-batch is dropped, training goes on with the bits of a run
in which it never was, and nothing is kept of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam
from hf_offload.errors import ConfigError, StateError
from support.engine import TinyLM, batches, optimizer_of, settings
from support.faults import Boom, agree, bits_of, every_mode, grows, learn, most_modes, undisturbed

Fault = Callable[[TinyLM, OffloadAdam, Tensor], object]


def fail(*args: Any) -> Any:
    raise Boom("injected")


def out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def in_forward(model: TinyLM, optimizer: OffloadAdam, ids: Tensor, error: Callable[..., Any] = fail) -> None:
    handle = model.layers[1].down.register_forward_hook(error)
    try:
        model(ids).backward()
    finally:
        handle.remove()


def in_backward(model: TinyLM, optimizer: OffloadAdam, ids: Tensor, error: Callable[..., Any] = fail) -> None:
    """Gradients of the last blocks are there, or have left; those of the block itself in part."""
    handle = model.layers[1].up.weight.register_hook(error)
    try:
        model(ids).backward()
    finally:
        handle.remove()


def in_the_last_hook(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    handle = model.embed.weight.register_post_accumulate_grad_hook(fail)
    try:
        model(ids).backward()
    finally:
        handle.remove()


def in_the_closure(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        in_backward(model, optimizer, ids)
        raise AssertionError

    optimizer.step(closure)


def at_the_end_of_the_closure(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    def closure() -> Tensor:
        model(ids).backward()
        optimizer.clip_grad_norm_(1e-3)
        return fail()

    optimizer.step(closure)


def nan_seen(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    loss = model(ids) * float("nan")
    loss.backward()
    if not loss.isfinite():
        fail()


def after_clipping(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.clip_grad_norm_(1e-4)
    fail()


def a_bad_bound(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.clip_grad_norm_(float("nan"))


def a_backward_after_clipping(model: TinyLM, optimizer: OffloadAdam, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.clip_grad_norm_(1e-4)
    model(ids).backward()
    optimizer.step()


FAULTS: dict[str, Fault] = {
    "forward": in_forward,
    "out of memory in forward": lambda *args: in_forward(*args, error=out_of_memory),
    "backward": in_backward,
    "out of memory in backward": lambda *args: in_backward(*args, error=out_of_memory),
    "backward's last hook": in_the_last_hook,
    "the closure's backward": in_the_closure,
    "the closure's end": at_the_end_of_the_closure,
    "a loss that is NaN": nan_seen,
    "between clipping and step": after_clipping,
    "a bad bound": a_bad_bound,
    "a backward after clipping": a_backward_after_clipping,
}
KINDS = (Boom, ConfigError, StateError, torch.OutOfMemoryError)


@most_modes
@pytest.mark.parametrize("when", ["at first", "in the middle"])
@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_as_if_it_had_never_been(fault: str, when: str, mode: str) -> None:
    """The second micro-batch of a step fails; both are tried again. At first: state is allocated just then."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    before = 0 if when == "at first" else 3
    learn(model, optimizer, data, before, accumulation=2)
    ids = next(batches(9))
    if before:
        (model(ids) / 2).backward()
    with pytest.raises(KINDS):
        FAULTS[fault](model, optimizer, ids)
    optimizer.zero_grad()
    learn(model, optimizer, data, 3, accumulation=2)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, before + 3, accumulation=2))


@every_mode
def test_a_micro_batch_that_failed_in_forward_can_be_left_out(mode: str) -> None:
    """Nothing is dropped: the gradients of the micro-batches before it still count."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    for _ in range(4):
        (model(next(data)) / 2).backward()
        with pytest.raises(Boom):
            in_forward(model, optimizer, next(batches(9)))
        (model(next(data)) / 2).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 4, accumulation=2))


@every_mode
def test_gradients_dropped_by_the_model_are_dropped(mode: str) -> None:
    """`model.zero_grad()`, which is what the Trainer calls, knows nothing of us."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, 2)
    for _ in range(2):
        with pytest.raises(Boom):
            in_backward(model, optimizer, next(batches(9)))
        model.zero_grad()
        learn(model, optimizer, data, 1)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 4))


@every_mode
def test_a_scheduler_that_raises_after_the_step(mode: str) -> None:
    """The step was taken; the learning rate is as it was."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: fail() if step == 1 else 1.0)
    for step in range(4):
        learn(model, optimizer, data, 1)
        if step == 1:
            with pytest.raises(Boom):
                scheduler.step()
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 4))


@every_mode
def test_nothing_of_a_failed_backward_is_kept(mode: str) -> None:
    """Its error may be kept, as a notebook keeps the last one: gradients, model and optimizer go all the same."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, 1)
    made: list[weakref.ref[Any]] = []

    def watch(grad: Tensor) -> None:
        memory = grad.detach().numpy().copy()
        made.append(weakref.ref(memory))
        replaced = torch.from_numpy(memory)
        del memory
        return replaced  # type: ignore[return-value]

    handles = [p.register_hook(watch) for p in model.layers[2].parameters()]
    with pytest.raises(Boom):
        in_backward(model, optimizer, next(data))
    for handle in handles:
        handle.remove()
    assert made
    optimizer.zero_grad()
    optimizer.synchronize()
    gc.collect()
    assert [g for g in made if g() is not None] == []
    gone = [weakref.ref(x) for x in (model, optimizer, optimizer.engine, optimizer.engine.placement.transport)]
    del model, optimizer, handle, handles
    gc.collect()
    assert [g for g in gone if g() is not None] == []


@pytest.mark.parametrize("mode", ["in_order", "overlapped", "streamed", "speculative", "delayed"])
def test_memory_does_not_grow_with_faults(mode: str) -> None:
    """Each drops 2 MiB of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    given = {"shadow_bytes": 16 << 20} if mode == "speculative" else {}
    config = settings(mode, bucket_bytes=1 << 18, **given)
    optimizer = OffloadAdam(model.parameters(), config=config, model=model)

    def once() -> None:
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(Boom):
            model(torch.ones(4, 256)).sum().backward()
        handle.remove()
        optimizer.zero_grad()

    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    assert grows(once, 60) < 16 * 1024, "a gradient each would be 60 MiB"
    optimizer.close()
