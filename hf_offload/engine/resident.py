"""State that stays on the device: an arena of its own kind, which no ring, schedule or store knows of.

Its parameters are stepped in place, gradients read where backward left them, weights written where forward reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.engine.arena import Arena
from hf_offload.engine.masters import drop_master, give_back_master, waiting_master
from hf_offload.engine.tensors import WIRE, flat, host_array, like_layout
from hf_offload.engine.work import BucketWork, DeviceGradients, StepWork
from hf_offload.kernels import cpu
from hf_offload.planner import STATE_BYTES
from hf_offload.transport import Event
from hf_offload.transport.in_place import DeviceAdam, StatePiece

WHOLE = 1 << 62
"""More bytes than any bucket has: none is cut for the ring's sake, since nothing of it travels."""
_CHUNK = 1 << 24  # elements: bounds the temporaries of a comparison on a GPU to some 100 MB


class ResidentArena(Arena):
    """12 bytes of the device's memory per element; a bucket is all of one unit and wire dtype, but for the
    first unit, see `plan.LEAD_BUCKETS`.

    Args:
        adam: who steps it.

    Attributes:
        state: as an Arena's where the device is the CPU; on a GPU tensors of the same sizes.

    Raises:
        torch.OutOfMemoryError: the device has no memory left.
    """

    resident = True
    state: tuple[Any, ...]

    def __init__(self, params: Sequence[Tensor], units: Sequence[int], number: int, adam: DeviceAdam) -> None:
        super().__init__(params, units, WHOLE, number)
        self.adam = adam

    def _allocate(self, arrays: Sequence[tuple[int, np.dtype]]) -> tuple[Any, ...]:
        device = self.params[0].device
        if device.type == "cpu":
            return super()._allocate(arrays)
        with torch.inference_mode(False):
            return tuple(torch.zeros(count, dtype=torch.float32, device=device) for count, _ in arrays)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Master, exp_avg and exp_avg_sq, float32[plan.numel], on the device."""
        return tuple(_tensor(a) for a in self.state)

    @property
    def nbytes(self) -> dict[str, int]:
        return dict.fromkeys(super().nbytes, 0)

    @property
    def device_bytes(self) -> int:
        return STATE_BYTES * self.plan.numel

    def state_views(self, index: int) -> dict[str, Tensor]:
        """As an Arena's: live views, on the device."""
        at, p = self.slice_of(index), self.params[index]
        names = ("master", "exp_avg", "exp_avg_sq")
        parts = (_tensor(a[at]) for a in self.state)  # of a CPU's, each of its own storage: torch.save writes it whole
        views = {name: torch.as_strided(t, p.shape, p.stride(), t.storage_offset()) for name, t in zip(names, parts)}
        return {"step": self._steps[index], "exp_avg": views["exp_avg"], "exp_avg_sq": views["exp_avg_sq"],
                "master": views["master"]}  # fmt: skip

    def holds(self, t: Tensor) -> bool:
        spans = ((a.data_ptr(), a.nbytes) for a in self.tensors)
        return any(start <= t.data_ptr() < start + nbytes for start, nbytes in spans)

    def reseed(self, indices: set[int], threads: int) -> int:
        """Where a weight of these differs from its rounded master, the master becomes the weight. Returns how many
        elements did."""
        return sum(_follow(self.params[i], self._master_of(i), threads) for i in sorted(indices))

    @contextmanager
    def seeded(self, threads: int) -> Iterator[None]:
        """As `seeding.seeded_masters`."""
        waited: list[int] = []
        try:
            for i, p in enumerate(self.params):
                values, master = waiting_master(p), self._master_of(i)
                if values is not None and values.shape == p.shape:
                    master.copy_(flat(like_layout(values, p)))
                    waited.append(i)
                drop_master(p)
                if i in waited:
                    _follow(p, master, threads)
                else:
                    _widen(p, master, threads)
            yield
        except BaseException:
            for i in waited:
                give_back_master(self.params[i], self.state_views(i)["master"].cpu())
            raise

    def pieces(self, work: BucketWork) -> list[StatePiece]:
        """What of a bucket is stepped."""
        bucket, whole = work.bucket, work.work
        gradients = whole.gradients
        assert isinstance(gradients, DeviceGradients)
        master, m, v = (t.data_ptr() + 4 * bucket.start for t in self.tensors)
        size, grads, weights = bucket.itemsize, gradients.pointers, whole.weight_pointers
        return [
            StatePiece(
                master + 4 * p.offset, m + 4 * p.offset, v + 4 * p.offset, grads[p.param] + p.start * size,
                weights[p.param] + p.start * size, p.length, bucket.wire, row,
            )
            for row, p in zip(work.coefficients(), bucket.pieces)
            if whole.weights[p.param] is not None
        ]  # fmt: skip

    def _master_of(self, index: int) -> Tensor:
        return _tensor(self.master)[self.slice_of(index)]


def state_bytes(params: Sequence[Tensor]) -> int:
    """What the state of `params` takes, wherever it is."""
    return STATE_BYTES * sum(p.numel() for p in params)


def step_in_place(step: StepWork, stream: int, posted: Callable[[int, Event], None]) -> int:
    """Step what stays on the device, before anything travels. Called on the step's thread.

    Args:
        stream: the device stream on which gradients are complete and forward will run.
        posted: as a schedule's.

    Returns:
        How many of the delivered buckets these were; they are the first.
    """
    mine, delivered = _resident(step.buckets), _resident(step.delivered)
    exact = step.delivered is step.buckets
    for k, work in enumerate(delivered):
        work.check_weights_unwritten()
        adam, pieces = _of(work).adam, _of(work).pieces(work)
        event = adam.step(pieces, stream) if exact else adam.write_weights(pieces, stream)
        if exact:
            _let_go_of_gradients(work)  # before it is posted: then the training loop may add to them
        posted(k, event)
    for work in () if exact else mine:
        _of(work).adam.step_state(_of(work).pieces(work), stream)
        _let_go_of_gradients(work)
    return len(delivered)


def _let_go_of_gradients(work: BucketWork) -> None:
    work.check_gradients_unchanged()
    work.let_go_of_gradients()


def _resident(works: Sequence[BucketWork]) -> list[BucketWork]:
    return [work for work in works if work.resident]


def _of(work: BucketWork) -> ResidentArena:
    arena = work.work.arena
    assert isinstance(arena, ResidentArena)
    return arena


def _tensor(array: np.ndarray | Tensor) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def _widen(p: Tensor, master: Tensor, threads: int) -> None:
    if p.device.type == "cpu":
        cpu.widen(host_array(p), master.numpy(), WIRE[p.dtype], threads)
    else:
        master.copy_(flat(p))


def _follow(p: Tensor, master: Tensor, threads: int) -> int:
    """Where the weight is not its rounded master, it becomes the master. Returns how many elements did."""
    if p.device.type == "cpu":
        return cpu.reseed(host_array(p), master.numpy(), WIRE[p.dtype], threads)
    return follow_by_torch(p, master)


def follow_by_torch(p: Tensor, master: Tensor) -> int:
    """`cpu.reseed` in torch operations, on any device. `master`: float32[p.numel()], in the memory order of `p`."""
    bits, changed = torch.int32 if p.dtype == torch.float32 else torch.int16, 0
    for weight, mine in zip(flat(p).split(_CHUNK), master.split(_CHUNK)):
        other = mine.to(p.dtype).view(bits) != weight.view(bits)
        mine.copy_(torch.where(other, weight.float(), mine))
        changed += int(other.sum())
    return changed
