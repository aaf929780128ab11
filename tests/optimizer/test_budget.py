"""What an optimizer says it will take of the host's memory, what it takes, and what is left when it is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_offload import OffloadAdam, OffloadConfig, hostmem, procfs
from hf_offload.engine.budget import Budget
from hf_offload.errors import ConfigError, HostMemoryError
from hf_offload.hostmem import HostMemory
from support.optimizer import Bag, config, give, gradients, offload, snapshot, train

N = 1500
STATE, RING = 12 * N, 2 * 2 * 1024


def params() -> list[Any]:
    return [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(500))]


def machine(monkeypatch: pytest.MonkeyPatch, available: int, total: int = 10**12) -> None:
    limit = HostMemory(available, total, "a made-up machine")
    monkeypatch.setattr(hostmem, "host_limits", lambda root=None: [limit])


def ranks(monkeypatch: pytest.MonkeyPatch, local: int) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "64"), ("LOCAL_WORLD_SIZE", str(local))):
        monkeypatch.setenv(name, value)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(HostMemoryError) as caught:
        OffloadAdam(*args, **kwargs)
    return str(caught.value)


# ---- several ranks


def test_the_ranks_of_a_node_add_up_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 4)
    fits = 4 * STATE + RING  # the rings of the other three may be taken already
    machine(monkeypatch, fits)
    OffloadAdam(params(), config=config()).close()
    machine(monkeypatch, fits - 1)
    text = refusal(params(), config=config())
    assert "4 ranks share this node" in text and f"{4 * (STATE + RING)} bytes) together" in text
    assert "Run at most 3 ranks on a node" in text
    ranks(monkeypatch, 3)
    OffloadAdam(params(), config=config()).close()


def test_waiting_masters_of_every_rank_are_in_memory_already(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_offload.engine.masters import cast_trainable

    model = nn.Linear(30, 50, bias=False)
    cast_trainable(model, torch.bfloat16)
    ranks(monkeypatch, 4)
    machine(monkeypatch, 4 * 8 * N + RING)
    OffloadAdam(model.parameters(), config=config()).close()
    machine(monkeypatch, 4 * 8 * N + RING - 1)
    refusal(model.parameters(), config=config())


def test_at_binding_the_other_ranks_may_have_theirs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 4)
    machine(monkeypatch, 10**9)
    for available, total, fits in [(STATE, 4 * (STATE + RING), True), (STATE - 1, 10**9, False),
                                   (STATE, 4 * (STATE + RING) - 1, False)]:  # fmt: skip
        mine = params()
        with monkeypatch.context() as later:
            optimizer = offload(mine)
            give(mine, gradients(0, mine))
            machine(later, available, total)
            if fits:
                optimizer.step()
            else:
                with pytest.raises(HostMemoryError):
                    optimizer.step()
            assert bool(optimizer.engine.arenas) is fits
            optimizer.close()


def test_the_users_cap_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 8)
    machine(monkeypatch, 10**9)
    OffloadAdam(params(), config=config(max_host_bytes=STATE + RING)).close()


# ---- what would help


LARGE: dict[str, Any] = {"bucket_bytes": 1 << 20, "ring_slots": 4}


def advice(text: str) -> dict[str, Any]:
    """The settings that the first line of a refusal names, as OffloadConfig takes them."""
    found = re.findall(r"(\w+)=([\w']+)", text.splitlines()[0].split("are left")[-1])
    return {name: {"false": False, "'wire'": "wire"}.get(value, int(value) if value.isdigit() else value)
            for name, value in found}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "local", "short", "names"),
    [
        pytest.param(LARGE, 1, 1, {"ring_slots"}, id="fewer slots"),
        pytest.param(LARGE, 1, 7 << 20, {"ring_slots", "bucket_bytes"}, id="smaller buckets"),
        pytest.param(LARGE, 3, 7 << 20, {"ring_slots", "bucket_bytes"}, id="smaller buckets of all ranks"),
        pytest.param({"stream_gradients": True}, 1, 2 * N, {"stream_gradients"}, id="no streaming"),
        pytest.param({"stream_gradients": True, "accumulate_dtype": "float32"}, 1, 2 * N, {"accumulate_dtype"},
                     id="adding up as on the wire"),
        pytest.param({"stream_gradients": True, "shadow_bytes": 5000}, 1, 2 * N, {"stream_gradients", "shadow_bytes"},
                     id="no streaming, so no shadow"),
    ],
)  # fmt: skip
def test_what_a_refusal_advises_fits(
    asked: dict[str, Any], local: int, short: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece of advice, followed to the letter, by itself."""
    mine = [nn.Parameter(torch.zeros(N, dtype=torch.bfloat16))]
    if local > 1:
        ranks(monkeypatch, local)
    budget = Budget(config(**asked))
    machine(monkeypatch, local * (sum(budget.need(mine).values()) + budget.ring_bytes - short))
    told = advice(refusal(mine, config=config(**asked)))
    assert names <= set(told)
    followed = {**asked, **{name: told[name] for name in names}}
    if not followed.get("stream_gradients"):
        followed.pop("accumulate_dtype", None)
    OffloadAdam(mine, config=config(**followed)).close()


def test_a_shadow_that_is_too_large_is_told_how_large_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shadow: dict[str, Any] = {"stream_gradients": True, "shadow_bytes": 50_000}
    machine(monkeypatch, STATE + 4 * N + RING + 20_000)
    text = refusal(params(), config=config(**shadow))
    assert text.startswith("shadow_bytes=50000: everything else fits") and "Set shadow_bytes=20000" in text
    OffloadAdam(params(), config=config(**{**shadow, "shadow_bytes": 20_000})).close()


# ---- what it says is what it takes


ALLOCATING = ("engine.arena", "engine.memory", "transport.host")


class Allocations:
    """NumPy as the modules that allocate see it: counts what they ask for, and may refuse once.

    Args:
        refuse: which array fails, of those of more than `above` bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: int | None = None, above: int = 0) -> None:
        self.nbytes = 0
        self._refuse, self._above = refuse, above
        self._large = 0
        for module in ALLOCATING:
            monkeypatch.setattr(f"hf_offload.{module}.np", self)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return partial(self._make, found) if name in ("empty", "zeros") else found

    def _make(self, make: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        array: np.ndarray = make(*args, **kwargs)
        self.nbytes += array.nbytes
        if array.nbytes > self._above:
            self._large += 1
            if self._large - 1 == self._refuse:
                raise MemoryError(f"Unable to allocate {array.nbytes} bytes")
        return array


shapes = st.lists(
    st.tuples(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(0, 3000)), min_size=1,
    max_size=6,
).filter(lambda found: sum(n for _, n in found) > 0)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    shapes, st.integers(64, 5000), st.integers(1, 4), st.sampled_from(["in_order", "overlapped", "delayed"]),
    st.sampled_from([None, "wire", "float32"]), st.booleans(),
)  # fmt: skip
def test_the_lines_add_up_to_what_is_really_allocated(
    given_params: Sequence[tuple[torch.dtype, int]], bucket: int, slots: int, schedule: str, streamed: str | None,
    shadowed: bool,
) -> None:  # fmt: skip
    more: dict[str, Any] = {}
    if streamed is not None and schedule != "delayed":
        more = {"stream_gradients": True, "accumulate_dtype": streamed}
        more |= {"shadow_bytes": 8 * bucket + 100} if shadowed else {}
    mine = [nn.Parameter(torch.ones(n, dtype=dtype)) for dtype, n in given_params]
    chosen = OffloadConfig(
        schedule=schedule, bucket_bytes=bucket, ring_slots=slots, threads=1, delay_warmup_steps=0, **more
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Allocations(monkeypatch)
        optimizer = OffloadAdam(mine, config=chosen)
        bag = Bag(mine)
        optimizer.attach(bag)
        for step in range(2):
            bag().backward() if more else give(mine, gradients(step, mine))
            optimizer.step()
        optimizer.synchronize()
        host = dict(optimizer.stats().host_bytes)
        allocated = counted.nbytes
    budget = Budget(chosen)
    need = {**budget.need(mine), **budget.fixed}
    align = 64 * (1 + 2 * len(mine))  # where a slab or a run of another dtype begins
    for line, figure in (("master", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"),
                         ("pinned ring", "pinned")):  # fmt: skip
        assert need[line] == host[figure], line
    assert 0 <= host["store"] - need.get("gradient store", 0) <= align
    assert host["shadow"] <= chosen.shadow_bytes
    scratch = getattr(optimizer.engine._pipeline.schedule, "_scratch", np.empty(0))  # type: ignore[union-attr]
    assert scratch.nbytes <= need.pop("scratch", 0)
    said = sum(need.values()) + host["shadow"]
    steps = 4 * len(mine)  # each parameter's count
    speculation = optimizer.engine.speculation
    blocks = 2 + (len(speculation._slots) if speculation else 0)  # state, store, shadow: arrays at cache lines
    assert said + steps <= allocated <= said + steps + align + blocks * 4 * 64
    optimizer.close()


# ---- the system refuses what seemed to fit


SPECULATIVE: dict[str, Any] = {"shadow_bytes": 100_000}


@pytest.mark.parametrize("which", range(4))
def test_an_allocation_that_fails_leaves_nothing_half_bound(which: int) -> None:
    """The state, the store, and each slot of the shadow, in turn; the next forward goes on as if nothing had been."""
    results = []
    for fails in (True, False):
        mine = params()
        optimizer = offload(mine, "speculative", SPECULATIVE)
        bag = optimizer._bag  # type: ignore[attr-defined]
        before = snapshot(optimizer, mine)
        if fails:
            with pytest.MonkeyPatch.context() as monkeypatch:
                Allocations(monkeypatch, which, above=900)
                with pytest.raises(HostMemoryError, match=r"refused memory .*Unable to allocate \d+ bytes") as caught:
                    bag()
            assert "gradient store" in str(caught.value) and isinstance(caught.value.__cause__, MemoryError)
            del caught
            assert snapshot(optimizer, mine) == before
            assert not optimizer.engine.arenas and not optimizer.engine.bound and not optimizer.state
            assert sum(optimizer.stats().host_bytes.values()) == optimizer.stats().host_bytes["pinned"]
        for _ in range(2):
            (bag() * 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({k: v for k, v in snapshot(optimizer, mine).items() if k != "group 0 params"})
        optimizer.close()
    assert results[0] == results[1]


def test_what_was_allocated_is_freed_where_seeding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = params()
    optimizer = offload(mine, "speculative", SPECULATIVE)
    bag = optimizer._bag  # type: ignore[attr-defined]

    def fails(*args: Any) -> Any:
        raise RuntimeError("a copy failed")

    with monkeypatch.context() as patched:
        patched.setattr("hf_offload.engine.engine.seeded_masters", fails)
        with pytest.raises(RuntimeError, match="a copy failed"):
            bag()
    assert sum(optimizer.stats().host_bytes.values()) == optimizer.stats().host_bytes["pinned"]
    bag().backward()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.stats().host_bytes["shadow"] == 14 * N + 2 * N, "fp32 weights take 4"
    optimizer.close()


def test_a_ring_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        Allocations(patched, 0)
        text = refusal(params(), config=config())
    assert "refused memory" in text and f"pinned ring  0.00 GB ({RING} bytes)" in text
    mine = params()
    optimizer = offload(mine)
    train(optimizer, mine, [0])
    optimizer.close()


def test_a_real_limit_on_address_space_is_seen_before_it_bites() -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = procfs.fields(hostmem.Path("/proc/self/status")).get("VmSize:")
    if mapped is None:
        pytest.skip("needs /proc")
    large = nn.Parameter(torch.empty(10**7))
    try:
        resource.setrlimit(resource.RLIMIT_AS, (mapped * 1024 + (100 << 20), limits[1]))
        text = refusal([large], config=config())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "host memory='ulimit -v'" in text and "ulimit -v unlimited" in text


# ---- state that stays on the device


def test_what_stays_on_a_cpu_counts_as_its_memory_but_not_under_the_users_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"device_state_bytes": 12 * 500}
    machine(monkeypatch, STATE + RING)
    OffloadAdam(params(), config=config(max_host_bytes=12 * 1000 + RING, **half)).close()
    machine(monkeypatch, STATE + RING - 1)
    text = refusal(params(), config=config(**half))
    assert re.search(r"state on the device +0.00 GB \(6000 bytes\)", text)
    machine(monkeypatch, STATE + RING)
    text = refusal(params(), config=config(max_host_bytes=12 * 1000 + RING - 1, **half))
    assert text.startswith("max_host_bytes=") and "state_dtype" not in text, "which would be refused"


def test_what_stays_on_a_gpu_takes_none_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(config(device_state_bytes=1))
    mine = params()
    machine(monkeypatch, 12 * 1000 + RING)
    budget.check_construction(mine[:1])
    budget.check_binding(mine[:1], 0)
    with pytest.raises(HostMemoryError):
        budget.check_binding(mine[:1], 0, here=6000)


def test_at_binding_what_stays_counts_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = params()
    machine(monkeypatch, 10**9)
    optimizer = offload(mine, settings={"device_state_bytes": 12 * 500})
    give(mine, gradients(0, mine))
    machine(monkeypatch, STATE - 1)
    with pytest.raises(HostMemoryError, match="state on the device"):
        optimizer.step()
    assert not optimizer.engine.arenas
    machine(monkeypatch, STATE)
    optimizer.step()
    assert optimizer.stats().device_bytes["optimizer"] == 12 * 500
    optimizer.close()


def test_more_than_a_gpu_has_left_is_refused_before_anything_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = params()
    optimizer = offload(mine, settings={"device_state_bytes": 12 * 500})
    monkeypatch.setattr(optimizer.engine.placement.memory, "room_bytes", lambda: 5999)
    give(mine, gradients(0, mine))
    with pytest.raises(ConfigError, match=r"device_state_bytes=6000: .* takes 6000 bytes, and cpu has 5999 left. Give"):
        optimizer.step()
    assert not optimizer.engine.arenas
    monkeypatch.setattr(optimizer.engine.placement.memory, "room_bytes", lambda: 6000)
    optimizer.step()
    optimizer.close()
