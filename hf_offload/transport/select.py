"""Which transport a configuration and a device ask for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from hf_offload.config import OffloadConfig
from hf_offload.errors import ConfigError, UnsupportedError, explain
from hf_offload.transport.base import Transport
from hf_offload.transport.host import HostTransport


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice depends on; asked of torch by the engine, so that this layer need not import it.

    Attributes:
        kind: type of the parameters' device: "cpu", "cuda", ...
        gpu: whether torch can use a GPU.
        cuda_version: the CUDA version torch was built with ("13.0"), None for a CPU build.
        index: which of the devices of that kind, as torch counts.
    """

    kind: str
    gpu: bool
    cuda_version: str | None
    index: int = 0


def transport_kind(config: OffloadConfig, facts: DeviceFacts) -> str:
    """`host` or `cuda`, or an error that says why neither can serve.

    Raises:
        ConfigError: the settings do not fit the parameters' device, CuPy is missing, or there is no GPU.
        UnsupportedError: a device no transport exists for.
    """
    if facts.kind not in ("cpu", "cuda"):
        raise UnsupportedError(
            explain(
                "device", facts.kind, "hf_offload moves parameters that are on a CPU or an NVIDIA GPU only",
                "Move the model to one of these before making the optimizer",
            )
        )  # fmt: skip
    if config.transport == "cuda":
        _require_cuda(facts, config.transport)
        if facts.kind == "cpu":
            cause = "the parameters are on the CPU"
            raise ConfigError(explain("transport", "cuda", cause, "Move the model to the GPU, or use 'auto'"))
    if facts.kind == "cuda":
        _refuse_host_settings(config)
    return "cuda" if facts.kind == "cuda" else "host"


def _refuse_host_settings(config: OffloadConfig) -> None:
    if config.transport == "host":
        cause = "the parameters are on a GPU, which it cannot reach"
        raise ConfigError(explain("transport", "host", cause, "Use transport='auto'"))
    for name in ("link_gb_s", "link_latency_us"):
        if getattr(config, name):
            cause = "a link can only be emulated over the host transport, and the parameters are on a GPU"
            raise ConfigError(explain(name, getattr(config, name), cause, "Leave it out, or train on the CPU"))


def make_transport(
    config: OffloadConfig, facts: DeviceFacts, slot_bytes: int, current_stream: Callable[[], int] = lambda: 0
) -> Transport:
    """The transport for `config`, its ring reserved.

    Args:
        current_stream: gives the calling thread's current stream on the device, a cudaStream_t as int. 0: the default.

    Raises as `transport_kind` and the transports do.
    """
    if transport_kind(config, facts) == "host":
        return HostTransport(
            config.ring_slots, slot_bytes, link_gb_s=config.link_gb_s, link_latency_us=config.link_latency_us,
            timeout_s=config.timeout_s,
        )  # fmt: skip
    _require_cuda(facts, config.transport)
    from hf_offload.transport.cuda import CudaTransport  # only where there is a GPU

    return CudaTransport(
        config.ring_slots, slot_bytes, facts.index, current_stream=current_stream, timeout_s=config.timeout_s
    )


def cupy_command(cuda_version: str | None) -> str:
    """The pip command for the CuPy that fits the CUDA version torch was built with; both where torch has none."""
    major = (cuda_version or "").split(".")[0]
    commands = {m: f"pip install 'hf-offload[cuda{m}]'" for m in ("12", "13")}
    if major in commands:
        return commands[major]
    return f"{commands['12']} (CUDA 12) or {commands['13']} (CUDA 13)"


def _require_cuda(facts: DeviceFacts, value: str) -> None:
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(
            explain("transport", value, "CuPy is not installed", f"Install it: {cupy_command(facts.cuda_version)}")
        )
    if not facts.gpu:
        built = f"CUDA {facts.cuda_version}" if facts.cuda_version else "no CUDA"
        raise ConfigError(
            explain(
                "transport", value, f"torch sees no GPU (it was built with {built})",
                "Use transport='auto', or run where torch.cuda.is_available() is True",
            )
        )  # fmt: skip
