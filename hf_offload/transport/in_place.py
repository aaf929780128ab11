"""Adam's step for state that stays on the device: no copy, no ring. What is asked for, and the CPU that stands for a
device, where the Numba kernel does it. On a GPU it is `hf_offload.transport.cuda_in_place`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hf_offload.kernels import cpu
from hf_offload.transport.base import Event

_HELD = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}


class StatePiece(NamedTuple):
    """A run of `numel` elements of one parameter, by device addresses.

    Attributes:
        master, exp_avg, exp_avg_sq: of float32[numel].
        grad: of wire[numel]; not looked at by `write_weights`.
        weight: of wire[numel]; not looked at by `step_state`.
        wire: bfloat16, float16 or float32.
        coefficients: float32[NUM_COEF], a row of `kernels.cpu.coefficients`.
    """

    master: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    weight: int
    numel: int
    wire: str
    coefficients: np.ndarray


class DeviceAdam(Protocol):
    """Steps state where it lies. `stream`: the device stream the work is put on, as `Transport.here` gives it; the
    event is that of its end.

    Raises:
        TransportError: the device fails, or has no memory left.
    """

    def step(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        """One step: state and weights, with the bits of `kernels.cpu.adam_step`."""
        ...

    def step_state(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        """One step of which no weight is written."""
        ...

    def write_weights(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        """Weights become the rounded masters."""
        ...


class Passed:
    """The `Event` of what has ended already."""

    nbytes = 0

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        return None

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0


class HostAdam:
    """Device memory is ordinary memory: the calling thread is done with it when it returns.

    Args:
        threads: of the kernel, at most.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._nowhere = np.empty(0, np.uint8)

    def step(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        for p in pieces:
            self._step(p, _view(p.weight, p.numel, _HELD[p.wire]))
        return Passed()

    def step_state(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        for p in pieces:
            nbytes = p.numel * np.dtype(_HELD[p.wire]).itemsize
            if self._nowhere.size < nbytes:
                self._nowhere = np.empty(nbytes, np.uint8)
            self._step(p, self._nowhere[:nbytes].view(_HELD[p.wire]))
        return Passed()

    def write_weights(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        for p in pieces:
            master, weight = _view(p.master, p.numel, np.float32), _view(p.weight, p.numel, _HELD[p.wire])
            cpu.narrow(master, weight, p.wire, self._threads)
        return Passed()

    def _step(self, p: StatePiece, weight: np.ndarray) -> None:
        state = (_view(at, p.numel, np.float32) for at in (p.master, p.exp_avg, p.exp_avg_sq))
        cpu.adam_step(
            *state, _view(p.grad, p.numel, _HELD[p.wire]), weight, np.array([0, p.numel]), p.coefficients[None],
            wire=p.wire, threads=self._threads,
        )  # fmt: skip


def _view(address: int, numel: int, dtype: Any) -> np.ndarray:
    nbytes = numel * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype)
