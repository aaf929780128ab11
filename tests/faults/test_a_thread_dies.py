"""A thread of ours that ends where it should not, or that the system never gave: told at once, nothing left over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hf_offload.engine import pipeline
from hf_offload.errors import OffloadError, StateError, TransportError
from hf_offload.transport import HostTransport, Segment, host
from support.engine import KERNELS, TinyLM, batches, copies, kernels, optimizer_of, ours, settings
from support.faults import SOON, Boom, agree, bits_of, every_mode, learn, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class After:
    """Calls `real`; once `armed`, the second call raises."""

    def __init__(self, error: Callable[[], BaseException], real: Callable[..., Any] = lambda *args: 0.0) -> None:
        self.error, self.real, self.armed, self.left = error, real, False, 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.armed:
            self.left -= 1
            if self.left < 0:
                raise self.error()
        return self.real(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        return self if owner is None else lambda *args, **kwargs: self(owner, *args, **kwargs)


@contextlib.contextmanager
def deadly(where: str, error: Callable[[], BaseException]) -> Iterator[After]:
    """What is made in here meets `error` at the second call of `where` after the fault was armed."""
    places = {
        "the step's end": (pipeline._Step, "end"), "the step's loop": (pipeline, "_next"),
        "the lane's loop": (host._Lane, "_carry_out"), "the copy": (host.HostCopy, "_move"),
    }  # fmt: skip
    if where == "a kernel":
        fault = After(error, lambda: None)
        with copies(None), kernels(fault, KERNELS):
            yield fault
        return
    owner, name = places[where]
    fault = After(error, getattr(owner, name))
    with copies(None), patch.object(owner, name, fault):
        yield fault


PLACES = ("a kernel", "the step's end", "the step's loop", "the lane's loop", "the copy")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit("injected"), "MemoryError": lambda: MemoryError("injected"),
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", PLACES)
def test_whoever_comes_next_is_told_at_once(where: str, error: str, mode: str) -> None:
    """`timeout_s` is ten minutes: a wait for a thread that is gone would last as long."""
    data = batches()
    with deadly(where, ERRORS[error]) as fault:
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode, timeout_s=600.0))
        learn(model, optimizer, data, 1)
        optimizer.synchronize()
        fault.armed = True
        begin = time.monotonic()
        with pytest.raises(OffloadError, match=r"injected|has died"):
            learn(model, optimizer, data, 4)
            optimizer.synchronize()
        with pytest.raises(StateError, match=r"half stepped. Load the last checkpoint into a new optimizer"):
            optimizer.synchronize()
        with pytest.raises(StateError, match="half stepped"):
            optimizer.close()
        assert time.monotonic() - begin < SOON
    assert not ours() and optimizer.engine.placement.pinned_bytes == 0
    model(next(data)).backward()  # hooks are off, and another optimizer can be made
    again = optimizer_of(model, settings(mode))
    learn(model, again, data, 1)
    again.close()


@every_mode
def test_a_thread_that_is_simply_gone_is_noticed(mode: str) -> None:
    """It told nobody of anything."""
    with patch.object(pipeline, "_serve", lambda *args: None):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode, timeout_s=600.0))
        begin = time.monotonic()
        with pytest.raises(StateError, match=r"the step's thread has died.*Load the last checkpoint"):
            learn(model, optimizer, batches(), 2)
            optimizer.synchronize()
        with pytest.raises(StateError, match="has died"):
            optimizer.close()
    assert time.monotonic() - begin < SOON
    assert not ours() and optimizer.engine.placement.pinned_bytes == 0


def test_a_copy_whose_thread_is_simply_gone_is_noticed() -> None:
    memory = np.zeros(8, np.uint8)
    with patch.object(host._Lane, "work", lambda lane: None):
        transport = HostTransport(1, 64)
        copy = transport.to_host([Segment(memory.ctypes.data, 8, 0, memory)], 0, None)
        with pytest.raises(TransportError, match="the thread that was to make it has died"):
            copy.wait(600.0)
    transport.close()


def test_what_a_look_raises_is_for_the_thread_that_waits() -> None:
    """The thread that rings goes on: it is the step's, and others wait for it as well."""
    from hf_offload.transport import Bell

    bell, rung, looks = Bell(), threading.Event(), []

    def reached() -> bool:
        looks.append(threading.current_thread())
        if rung.is_set():
            raise Boom("injected")
        return False

    def ring() -> None:
        while not bell._boxes:
            time.sleep(1e-3)
        rung.set()
        bell.ring()
        looks.append("went on")  # type: ignore[arg-type]

    ringer = threading.Thread(target=ring)
    ringer.start()
    with pytest.raises(Boom):
        bell.wait(reached, SOON)
    ringer.join(SOON)
    assert ringer in looks and "went on" in looks and not bell._boxes


# ---- no thread to be had


@contextlib.contextmanager
def no_thread(name: str) -> Iterator[None]:
    """The system gives no thread of this name."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        real(thread)

    with patch.object(threading.Thread, "start", start):
        yield


TOLD = r"thread='hf_offload-\w+': the system gave this process no new thread.*ulimit -u"


@every_mode
@pytest.mark.parametrize("name", ["hf_offload-d2h", "hf_offload-h2d"])
def test_construction_without_a_thread_is_refused_and_leaves_nothing(name: str, mode: str) -> None:
    model = TinyLM()
    with no_thread(name), pytest.raises(TransportError, match=TOLD) as caught:
        optimizer_of(model, settings(mode))
    assert not ours(), "though the error, and all its frames, are still here"
    del caught
    optimizer = optimizer_of(model, settings(mode))
    learn(model, optimizer, batches(), 3)
    assert agree(bits_of(model, optimizer), undisturbed(mode, 3))
    optimizer.close()


@every_mode
def test_a_first_step_without_a_thread_can_be_tried_again(mode: str) -> None:
    """What was asked for before it still holds: the gradients and the clipping."""
    model, data = TinyLM(), batches()
    optimizer = optimizer_of(model, settings(mode))
    ids = next(data)
    with no_thread("hf_offload-step"), pytest.raises(TransportError, match=TOLD):
        model(ids).backward()  # streamed, this is where it is needed
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
    if not any(p.grad is not None for p in model.parameters()):
        model(ids).backward()
        optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    optimizer.zero_grad()
    found = bits_of(model, optimizer)
    optimizer.close()
    assert agree(found, one_step(mode, 0.01))


def one_step(mode: str, bound: float) -> Any:
    model = TinyLM()
    optimizer = optimizer_of(model, settings(mode))
    model(next(batches())).backward()
    optimizer.clip_grad_norm_(bound)
    optimizer.step()
    optimizer.zero_grad()
    found = bits_of(model, optimizer)
    optimizer.close()
    return found
