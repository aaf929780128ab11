"""Where the parameters are, which transport serves them, and whether the host's memory suffices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hf_offload.config import OffloadConfig
from hf_offload.engine.budget import Budget
from hf_offload.engine.device_memory import memory_of
from hf_offload.engine.resident import state_bytes
from hf_offload.engine.share import likely_to_stay
from hf_offload.engine.tensors import check_apart, check_parameter
from hf_offload.errors import ConfigError, UnsupportedError, explain
from hf_offload.numa import home_of, kept_to
from hf_offload.preflight import allocating
from hf_offload.transport import Transport, make_transport
from hf_offload.transport.select import DeviceFacts, transport_kind


class Placement:
    """The transport of one engine. It follows the parameters if they are moved before the first step.

    Args:
        threads: of the host step.

    Attributes:
        memory: the device's.

    Raises:
        UnsupportedError, ConfigError: a parameter, device or transport that cannot work; nothing was reserved.
        HostMemoryError: the state and the ring do not fit; nothing was allocated.
    """

    def __init__(self, config: OffloadConfig, params: Sequence[Tensor], threads: int) -> None:
        self._config = config
        self._threads = threads
        self.budget = Budget(config)
        self.device = self._device_of(params)
        trainable = [p for p in params if p.requires_grad]
        check_apart(trainable)
        staying = likely_to_stay(config.device_state_bytes, trainable)
        self.budget.check_construction(_without(trainable, staying), _on_cpu(self.device, staying))
        self._transport: Transport | None = self._make(self.device)
        self.memory = memory_of(self.device)

    @property
    def kind(self) -> str:
        """Type of the device: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @property
    def transport(self) -> Transport:
        assert self._transport is not None
        return self._transport

    @property
    def kind_of_transport(self) -> str:
        return "cuda" if self.kind == "cuda" else "host"

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.pinned_bytes

    def settle(self, fresh: Sequence[Tensor], staying: Sequence[Tensor], bound: bool, taken: int) -> None:
        """Before state for `fresh` is allocated: check device and budget.

        Args:
            staying: those of `fresh` whose state stays on the device.
            bound: whether other parameters have state.
            taken: bytes of ours that exist on the host.

        Raises as the class.
        """
        device = self._device_of(fresh)
        if device != self.device and bound:
            raise UnsupportedError(
                explain("device", device, f"other parameters of this optimizer are on {self.device}",
                        "Keep all trainable parameters on one device")
            )  # fmt: skip
        self.budget.check_binding(_without(fresh, staying), taken, _on_cpu(device, staying))
        if device != self.device:
            moved = self._make(device)
            self.close()
            self.device, self._transport, self.memory = device, moved, memory_of(device)
        self._check_device(state_bytes(staying))

    def _check_device(self, need: int) -> None:
        room = self.memory.room_bytes() if need else None
        if room is not None and need > room:
            cause = f"the state that is to stay takes {need} bytes, and {self.device} has {room} left"
            remedy = f"Give at most {room}, less what forward and backward take, or 'auto'"
            raise ConfigError(explain("device_state_bytes", self._config.device_state_bytes, cause, remedy))

    def near(self) -> AbstractContextManager[None]:
        """Around what reserves memory or starts threads: both stay on the NUMA node of the device, if that helps."""
        return _near(self.device, self._threads)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _make(self, device: str) -> Transport:
        where = torch.device(device)
        with allocating(self.budget.fixed), _near(device, self._threads):
            return make_transport(
                self._config, _facts(device), self.budget.slot_bytes,
                lambda: torch.cuda.current_stream(where).cuda_stream,
            )  # fmt: skip

    def _device_of(self, params: Sequence[Tensor]) -> str:
        for i, p in enumerate(params):
            check_parameter(p, i)
        devices = sorted({str(p.device) for p in params})
        if len(devices) > 1:
            raise UnsupportedError(
                explain("device", devices, "the parameters are spread over several devices",
                        "Put the model on one device (no device_map='auto', no model parallelism)")
            )  # fmt: skip
        device = devices[0] if devices else "cpu"
        transport_kind(self._config, _facts(device))
        return device


def _facts(device: str) -> DeviceFacts:
    where = torch.device(device)
    return DeviceFacts(where.type, torch.cuda.is_available(), torch.version.cuda, where.index or 0)


def _near(device: str, threads: int) -> AbstractContextManager[None]:
    where = torch.device(device)
    if where.type != "cuda":
        return kept_to(frozenset())
    gpu: Any = torch.cuda.get_device_properties(where)
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:  # a torch that does not tell
        return kept_to(frozenset())
    return kept_to(home_of(address, threads))


def _without(params: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    left_out = set(map(id, others))
    return [p for p in params if id(p) not in left_out]


def _on_cpu(device: str, staying: Sequence[Tensor]) -> int:
    """Bytes of the host's memory that the state of `staying` takes where it is."""
    return state_bytes(staying) if device == "cpu" else 0
