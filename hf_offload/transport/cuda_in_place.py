"""Adam's step for state that stays on a GPU: the kernel, in the order of torch's own stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_offload.errors import ConfigError, TransportError, WaitTimeout, explain
from hf_offload.kernels.cuda import STEP, STEP_STATE, WRITE_WEIGHTS, AdamSteps, CompileError
from hf_offload.transport.base import Event
from hf_offload.transport.cuda_device import CudaDevice, DeviceMemoryError, Mark, as_ours, too_late, until
from hf_offload.transport.in_place import StatePiece

_WHAT = "the step of the state on the device"


class InPlace:
    """The `Event` of work on one of torch's streams."""

    nbytes = 0

    def __init__(self, device: CudaDevice, mark: Mark) -> None:
        self._device = device
        self._mark: Mark | None = mark

    def done(self) -> bool:
        """Raises TransportError where the device failed."""
        if self._mark is not None and not self._device.closed:
            with self._device.current():
                if not _told(lambda: self._device.reached(self._mark.event)):  # type: ignore[union-attr]
                    return False
        self._mark = None
        return True

    def wait(self, timeout_s: float) -> None:
        if not until(self.done, timeout_s):
            raise WaitTimeout(too_late(_WHAT, timeout_s))

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0

    def join(self) -> None:
        """Let the calling thread's current stream wait for it."""
        mark = self._mark
        if mark is not None and not self._device.closed:
            with self._device.current():
                _told(lambda: self._device.hold(self._device.current_stream(), mark.event))


class CudaAdam:
    """`DeviceAdam` on a GPU.

    Raises:
        ConfigError: the kernel cannot be compiled.
        DeviceMemoryError: the device has no memory left.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        try:
            self._steps = AdamSteps(device.index, device.cupy)
        except CompileError as error:
            cause = f"the kernel that steps state on the device cannot be compiled ({error})"
            remedy = "Install the NVRTC of the CUDA that CuPy was built for, or set device_state_bytes=0"
            raise ConfigError(explain("device_state_bytes", "above 0", cause, remedy)) from error
        except Exception as error:
            known = "out of memory" in str(error)  # in the kernel's own words, or CuPy's
            raise DeviceMemoryError(str(error)) if known else as_ours(error, _WHAT) from error

    def close(self) -> None:
        """Nothing is stepped any more."""
        self._steps.close()

    def step(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        return self._run(pieces, STEP, stream)

    def step_state(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        return self._run(pieces, STEP_STATE, stream)

    def write_weights(self, pieces: Sequence[StatePiece], stream: int) -> Event:
        return self._run(pieces, WRITE_WEIGHTS, stream)

    def _run(self, pieces: Sequence[StatePiece], mode: int, stream: int) -> Event:
        self._device.check_process(_WHAT)
        if self._device.closed:
            raise TransportError(f"{_WHAT}: the transport is closed. Make a new optimizer.")
        with self._device.current():
            _told(lambda: self._steps.run(pieces, mode, stream))
            return InPlace(self._device, _told(lambda: self._device.mark(stream)))


def _told(call: Any) -> Any:
    """What the device says, as an error of ours."""
    try:
        return call()
    except Exception as error:
        ours = as_ours(error, _WHAT)
        if ours is not error:
            raise ours from error
        raise TransportError(f"{_WHAT} failed: {error}") from error
