"""Where the parameters are, which transport serves them, and whether the host's memory suffices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_offload.config import OffloadConfig
from hf_offload.engine.masters import waiting_bytes
from hf_offload.engine.tensors import check_apart, check_parameter
from hf_offload.errors import HostMemoryError, UnsupportedError, explain
from hf_offload.hostmem import check_host_budget
from hf_offload.transport import Transport, make_transport
from hf_offload.transport.select import DeviceFacts, transport_kind


class Placement:
    """The transport of one engine. It follows the parameters if they are moved before the first step.

    Raises:
        UnsupportedError, ConfigError: a parameter, device or transport that cannot work; nothing was reserved.
        HostMemoryError: the state and the ring do not fit; nothing was allocated.
    """

    def __init__(self, config: OffloadConfig, params: Sequence[Tensor]) -> None:
        self._config = config
        self.device = self._device_of(params)
        trainable = [p for p in params if p.requires_grad]
        check_apart(trainable)
        self._budget(trainable, {"pinned ring": self.ring_bytes}, 0, config.shadow_bytes)
        self._transport: Transport | None = self._make(self.device)

    @property
    def kind(self) -> str:
        """Type of the device: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    @property
    def ring_bytes(self) -> int:
        return 2 * self._config.ring_slots * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        return max(self._config.bucket_bytes, 4)  # one fp32 element at least

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

    def settle(self, fresh: Sequence[Tensor], taken: int) -> None:
        """Before state for `fresh` is allocated: check device and budget; `taken`: bytes of ours that exist.

        Raises as the class.
        """
        device = self._device_of(fresh)
        if device != self.device and taken:
            raise UnsupportedError(
                explain("device", device, f"other parameters of this optimizer are on {self.device}",
                        "Keep all trainable parameters on one device")
            )  # fmt: skip
        self._budget(fresh, {}, taken + self.ring_bytes, 0 if taken else self._config.shadow_bytes)
        if device != self.device:
            moved = self._make(device)
            self.close()
            self.device, self._transport = device, moved

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _make(self, device: str) -> Transport:
        where = torch.device(device)
        return make_transport(
            self._config, _facts(device), self._slot_bytes, lambda: torch.cuda.current_stream(where).cuda_stream
        )

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

    def _budget(self, params: Sequence[Tensor], more: dict[str, int], taken: int, shadow: int) -> None:
        """Compare what is about to be allocated with what the machine has, and all that is ours with the cap."""
        state = 4 * sum(p.numel() for p in params)
        need = {"master": state, "exp_avg": state, "exp_avg_sq": state, **more}
        if self._config.stream_gradients:
            need["gradient store"] = store_bytes(params, self._config.accumulate_dtype)
        self._check(need, taken, params)
        if shadow:
            try:
                self._check({**need, "shadow": shadow}, taken, params)
            except HostMemoryError as error:
                cause = "everything else fits, but not with this much shadow"
                remedy = "Lower shadow_bytes (14 bytes cover one parameter), or set it to 0"
                raise HostMemoryError(explain("shadow_bytes", shadow, cause, remedy) + f"\n{error}") from None

    def _check(self, need: dict[str, int], taken: int, params: Sequence[Tensor]) -> None:
        cap = self._config.max_host_bytes
        if cap is not None and sum(need.values()) + taken > cap:
            check_host_budget({"taken already": taken, **need} if taken else need, cap)
        # Values that wait to become masters are freed one by one while the masters' memory is filled.
        check_host_budget({**need, "master": need["master"] - waiting_bytes(params)}, None)


def store_bytes(params: Sequence[Tensor], accumulate_dtype: str) -> int:
    """Host memory of the streamed gradients of `params`: as on the wire, or 4 bytes each where added up in fp32."""
    return sum(p.numel() * (p.element_size() if accumulate_dtype == "wire" else 4) for p in params)


def _facts(device: str) -> DeviceFacts:
    where = torch.device(device)
    return DeviceFacts(where.type, torch.cuda.is_available(), torch.version.cuda, where.index or 0)
