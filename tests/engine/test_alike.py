"""What a step looks at for all tensors at once: a change of any one is not missed, whichever it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_offload import OffloadAdam, OffloadConfig
from hf_offload.engine.alike import alike
from hf_offload.engine.arena import Arena
from hf_offload.engine.work import ArenaWork, BucketWork, DeviceGradients, versions_of
from hf_offload.errors import StateError


def like() -> list[Tensor]:
    return [torch.ones(3, 4), torch.ones(2, 1, 5), torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)]


class Named(Tensor):
    """Another type."""


def test_tensors_like_their_examples_are_known() -> None:
    """Also where a dimension of one element has another stride, which changes nothing."""
    check = alike(like())
    assert check(like()) and check([t * 2 for t in like()])
    assert check([like()[0], torch.ones(2, 5).as_strided((2, 1, 5), (5, 7, 1)), like()[2]])


def test_examples_that_require_a_gradient_are_known_in_a_step() -> None:
    examples = [nn.Parameter(t) for t in like()]
    with torch.no_grad():
        check = alike(examples)
        assert check(examples) and check([nn.Parameter(t) for t in like()])


def test_parameters_that_were_bound_within_autocast_are_known_in_a_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = OffloadAdam(model.parameters(), model=model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 4)).sum().backward()
    (arena,) = optimizer.engine.arenas
    optimizer.step()
    with torch.no_grad():
        assert arena._all_alike is not None and arena._all_alike(arena.params)
    optimizer.close()


OTHERS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda t: None,
    "dtype": lambda t: t.double(),
    "dtype of the same size": lambda t: t.view(torch.int32),
    "shape": lambda t: t.reshape(12, 1) if t.dim() == 2 else t.reshape(-1),
    "dimensions": lambda t: t[None],
    "order in memory": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "gaps": lambda t: torch.ones(*t.shape[:-1], t.shape[-1] * 2)[..., ::2],
    "sparse": lambda t: t.to_sparse(),
    "neg": lambda t: torch._neg_view(t),
    "device": lambda t: t.to("meta"),
    "type": lambda t: t.as_subclass(Named),
    "a parameter": lambda t: nn.Parameter(t),
    "inference": lambda t: _inferred(t),
}


@torch.inference_mode()
def _inferred(t: Tensor) -> Tensor:
    return t.clone()


@pytest.mark.parametrize("other", OTHERS)
def test_another_tensor_is_not_taken_for_one_like_its_example(other: str) -> None:
    check = alike(like())
    for k in range(3):
        tensors: list[Tensor | None] = [*like()]
        tensors[k] = OTHERS[other](like()[k])
        with torch.no_grad():
            assert not check(tensors)
    assert not check(like()[:2]) and not check([*like(), torch.ones(1)]) and not check([])


def test_where_nothing_can_be_told_nothing_is_claimed() -> None:
    assert not alike(())(()) and not alike([torch.ones(2).to_sparse()])([torch.ones(2).to_sparse()])


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 16])
def test_a_write_shows_in_the_version_counters_of_the_bucket(bucket_bytes: int) -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    grads: list[Tensor | None] = [torch.ones(4) for _ in params]
    arena = Arena(params, [0] * 3, bucket_bytes)
    gradients = DeviceGradients(grads, [None] * 3, versions_of(grads), [1] * 3, list(arena.piece_counts))
    work = ArenaWork(arena, gradients, params, [], [1] * 3, np.zeros((3, 1), np.float32), np.arange(3), arena.turns)
    work.note_weights()
    buckets = [BucketWork(work, k, "all") for k in range(len(arena.plan.buckets))]
    assert len(buckets) == (1 if bucket_bytes > 16 else 3)

    def complaints() -> list[int]:
        found = []
        for bucket in buckets:
            for check in (bucket.check_gradients_unchanged, bucket.check_weights_unwritten,
                          bucket.check_arrived_unwritten):  # fmt: skip
                try:
                    check()
                    found.append(0)
                except StateError:
                    found.append(1)
        return found

    assert not any(complaints())
    grads[1].mul_(2)  # type: ignore[union-attr]
    assert sum(complaints()) == 1
    with torch.no_grad():
        params[2].mul_(2)
    assert sum(complaints()) == 3


def test_a_parameter_that_moves_to_another_group_has_its_settings() -> None:
    """In between all have a gradient, so that nothing but the groups has changed."""
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [{"params": [a, b], "lr": 0.5}, {"params": [c], "lr": 0.0}]
    with OffloadAdam(groups, weight_decay=0.0, config=OffloadConfig(schedule="in_order")) as optimizer:
        for _ in range(2):
            for p in (a, b, c):
                p.grad = torch.ones(2)
            optimizer.step()
        before = b.detach().clone()
        first, second = optimizer.param_groups
        first["params"], second["params"] = [a], [b, c]
        for p in (a, b, c):
            p.grad = torch.ones(2)
        optimizer.step()
        assert torch.equal(b, before), "lr is 0 there"
