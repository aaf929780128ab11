"""Processes that are forked off or spawned while our threads run: right or refused, never hung; the parent goes on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_offload import OffloadAdam
from hf_offload.errors import OffloadError
from support.engine import Hold, TinyLM, batches, copies, late, optimizer_of, settings, weights
from support.faults import SOON, Rows, agree, bits_of, every_mode, learn, most_modes, twin_of, undisturbed
from support.transport import LONG, exit_code

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def in_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does `work`: 0 if that went well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return exit_code(child)


def refused(use: Callable[[], object]) -> None:
    try:
        use()
    except OffloadError as error:
        assert "fork" in str(error) and "new" in str(error), error
    else:
        raise AssertionError("not refused")


@every_mode
def test_a_fork_in_the_middle_of_a_step(mode: str) -> None:
    """In the child whatever needs the parent's threads is refused; the parent's step ends as if nothing had been."""
    hold, data = Hold("d2h"), batches()
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, 1)
    optimizer.synchronize()
    step_under_way = mode in ("overlapped", "delayed")
    ids = next(data)
    if step_under_way:
        model(ids).backward()
        optimizer.clip_grad_norm_(0.5)
        hold.close()
        optimizer.step()
        assert hold.reached.wait(LONG)

    def child() -> None:
        refused(optimizer.step if not step_under_way else optimizer.synchronize)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        refused(optimizer.step)
        try:
            optimizer.close()  # must not wait for threads that do not exist here
        except OffloadError as error:
            assert "fork" in str(error)

    def ids_given() -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        child()

    assert in_child(ids_given) == 0
    hold.release()
    if not step_under_way:
        model(ids).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    optimizer.zero_grad()
    learn(model, optimizer, data, 1)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 3))


@every_mode
def test_a_child_that_trains_a_copy_with_an_optimizer_of_its_own(mode: str) -> None:
    """Kernels run in it, though the parent's thread pool was started."""
    data = batches()
    model = TinyLM()
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, 2)
    optimizer.synchronize()
    expected = undisturbed(mode, 3)

    def child() -> None:
        own = TinyLM()
        again = optimizer_of(own, settings(mode))
        learn(own, again, batches(), 3)
        found = bits_of(own, again)
        again.close()
        assert agree(found, expected)

    assert in_child(child) == 0
    learn(model, optimizer, data, 1)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, expected)


@pytest.mark.parametrize("end", ["sys.exit", "del", "nothing"])
def test_a_child_that_ends_through_its_exit_functions(end: str) -> None:
    """`weakref.finalize` runs them in a forked child as well: they must close nothing of the parent's, nor wait."""
    hold, data = Hold("h2d"), batches()
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings("overlapped"))
    learn(model, optimizer, data, 1)
    optimizer.synchronize()
    hold.close()
    learn(model, optimizer, data, 1)
    child = os.fork()
    if child == 0:
        try:
            if end == "del":
                del optimizer
            import atexit

            atexit._run_exitfuncs()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert exit_code(child) == 0
    hold.release()
    learn(model, optimizer, data, 1)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed("overlapped", 3))


# ---- loaders of data


def epochs(mode: str, **loader: Any) -> Any:
    """Two epochs; copies are late, so that workers are forked while steps are under way."""
    with copies(late("h2d", 1e-3)):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode))
    rows = Rows(loader.pop("kernel", False))
    data = DataLoader(rows, batch_size=4, **loader)
    for _ in range(2):
        learn(model, optimizer, iter(data), len(data))
    found = bits_of(model, optimizer)
    optimizer.close()
    return found


@most_modes
def test_forked_workers(mode: str) -> None:
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    expected = epochs(mode)
    assert agree(epochs(mode, **forked, kernel=True), expected)
    assert agree(epochs(mode, **forked, persistent_workers=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlapped", "speculative"])
def test_spawned_workers(mode: str) -> None:
    """Slow: each worker imports torch."""
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    assert agree(epochs(mode, **spawned), epochs(mode))


@pytest.mark.parametrize("mode", ["overlapped", "speculative"])
def test_a_worker_that_fails_or_is_killed(mode: str) -> None:
    """torch's own error, in the training thread; then training goes on."""

    class Broken(Rows):
        def __getitem__(self, i: int) -> Tensor:
            if i == 9:
                if mode == "overlapped":
                    raise ValueError("mine")
                os._exit(3)
            return super().__getitem__(i)

    model = TinyLM()
    optimizer = optimizer_of(model, settings(mode))
    data = iter(DataLoader(Broken(), batch_size=4, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises((ValueError, RuntimeError), match=r"mine|exited unexpectedly"):
        learn(model, optimizer, data, 6)
    optimizer.zero_grad()
    learn(model, optimizer, iter(DataLoader(Rows(), batch_size=4)), 2)
    optimizer.close()


@most_modes
def test_pools_and_programs_beside_training(mode: str) -> None:
    data = batches()
    model = TinyLM()
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, data, 1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        result = pool.map_async(abs, range(-50, 0))
        learn(model, optimizer, data, 1)
        assert result.get(SOON) == list(range(50, 0, -1))
    assert subprocess.run([sys.executable, "-S", "-c", "print(1)"], capture_output=True, timeout=SOON).stdout == b"1\n"
    learn(model, optimizer, data, 1)
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, undisturbed(mode, 3))


def test_a_child_may_read_and_copy_a_model_at_rest() -> None:
    """An evaluation in a forked process, say."""
    import copy

    model = TinyLM()
    optimizer: OffloadAdam = optimizer_of(model, settings("overlapped"))
    learn(model, optimizer, batches(), 2)
    optimizer.synchronize()
    before = weights(model)

    def child() -> None:
        assert all(torch.equal(a, b) for a, b in zip(weights(copy.deepcopy(model)).values(), before.values()))
        with torch.no_grad():
            model(next(batches()))
        model.state_dict()
        own = copy.deepcopy(model)
        again = twin_of(own, settings("overlapped"))
        learn(own, again, batches(), 1)
        again.close()

    assert in_child(child) == 0
    optimizer.close()
