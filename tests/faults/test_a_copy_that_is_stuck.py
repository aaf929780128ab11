"""A copy that never ends: the wait names it after `timeout_s`, and close(), del and a new optimizer do not hang."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest

from hf_offload.errors import OffloadError, StateError, WaitTimeout
from support.engine import Hold, TinyLM, batches, copies, optimizer_of, ours, settings
from support.faults import learn, most_modes

TIMEOUT_S = 0.5


@pytest.fixture(scope="module", autouse=True)
def kernels_are_loaded() -> None:
    """The first call of a compiled kernel reads it from a file, which can take as long as a copy may here."""
    for mode in ("in_order", "streamed", "small shadow"):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode))
        learn(model, optimizer, batches(), 3)
        optimizer.close()


@pytest.mark.parametrize("end", ["close", "del"])
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@most_modes
def test_it_is_named_and_nobody_hangs(
    direction: str, end: str, mode: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    hold, data = Hold(direction), batches()
    request.addfinalizer(hold.release)  # nothing stays stuck for the tests that follow, whatever fails here
    with copies(hold):
        model = TinyLM()
        optimizer = optimizer_of(model, settings(mode, timeout_s=TIMEOUT_S))
    learn(model, optimizer, data, 1)
    optimizer.synchronize()
    hold.close()
    with pytest.raises(OffloadError, match=r"timeout_s=0\.5") as caught:
        learn(model, optimizer, data, 4)
        optimizer.synchronize()
    assert isinstance(caught.value, (WaitTimeout, StateError))
    del caught
    with caplog.at_level(logging.ERROR, "hf_offload"):
        if end == "close":
            with pytest.raises(OffloadError):
                optimizer.close()
            assert optimizer.engine.placement.pinned_bytes == 0
        else:
            gone = weakref.ref(optimizer.engine)
            del optimizer
            gc.collect()
            assert gone() is None
    assert f"hf_offload-{direction} did not end in 0.5 s" in caplog.text
    model.zero_grad()  # streamed, what is left stands for gradients that nobody has
    again = optimizer_of(model, settings(mode))  # while the other's thread still hangs
    learn(model, again, data, 1)
    again.close()
    stuck = ours()
    hold.release()
    for thread in stuck:
        thread.join(30.0)
    assert not ours(), "a thread that comes loose ends"
