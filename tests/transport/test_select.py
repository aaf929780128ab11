"""Which transport is chosen, and how the choice is refused."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from hf_offload import OffloadConfig
from hf_offload.engine.placement import _facts
from hf_offload.errors import ConfigError, UnsupportedError
from hf_offload.transport import HostTransport, make_transport
from hf_offload.transport.cuda import CudaTransport
from hf_offload.transport.select import DeviceFacts, cupy_command, transport_kind
from support.fake_cupy import FakeCupy

CPU = DeviceFacts("cpu", gpu=False, cuda_version=None)
CUDA = DeviceFacts("cuda", gpu=True, cuda_version="13.0")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says whether CuPy can be found."""
    found = importlib.util.find_spec

    def set_to(installed: bool) -> None:
        answer = object() if installed else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: answer if name == "cupy" else found(name, *a))

    set_to(False)
    return set_to


@pytest.mark.parametrize("transport", ["auto", "host"])
def test_parameters_on_a_cpu_get_the_host_transport(transport: str) -> None:
    config = OffloadConfig(transport=transport, ring_slots=3, link_gb_s=1.0, link_latency_us=9.0)
    made = make_transport(config, CPU, 100)
    assert isinstance(made, HostTransport) and made.name == "host"
    assert len(made.down) == 3 and made.down[0].size == 128
    assert made._lanes[0]._seconds_per_byte == 1e-9 and made._lanes[1]._latency_s == pytest.approx(9e-6)
    made.close()


def test_parameters_on_a_gpu_get_the_cuda_transport_of_their_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy(True)
    fake = FakeCupy(devices=4)
    monkeypatch.setattr("hf_offload.transport.cuda._import_cupy", lambda: fake)
    facts = DeviceFacts("cuda", gpu=True, cuda_version="13.0", index=2)
    made = make_transport(OffloadConfig(ring_slots=3, timeout_s=7.0), facts, 100, lambda: 0)
    assert isinstance(made, CudaTransport) and made.name == "cuda"
    assert len(made.down) == 3 and made.down[0].size == 128
    assert {queue.device for queue in fake.handles.values()} == {2}
    assert made._parts._timeout_s == 7.0
    made.close()


def test_a_cupy_that_does_not_import_is_no_traceback(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy(True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="transport='cuda': CuPy is installed, but cannot be imported"):
        make_transport(OffloadConfig(), CUDA, 64)


def test_the_engine_asks_torch_which_device_it_is() -> None:
    assert _facts("cuda:3").index == 3 and _facts("cuda").index == _facts("cpu").index == 0
    assert _facts("cuda:3").kind == "cuda"


@pytest.mark.parametrize(
    ("version", "commands"),
    [
        ("12.8", ["pip install 'hf-offload[cuda12]'"]),
        ("12.1", ["pip install 'hf-offload[cuda12]'"]),
        ("13.0", ["pip install 'hf-offload[cuda13]'"]),
        (None, ["pip install 'hf-offload[cuda12]'", "pip install 'hf-offload[cuda13]'"]),
        ("11.8", ["pip install 'hf-offload[cuda12]'", "pip install 'hf-offload[cuda13]'"]),
    ],
)
@pytest.mark.parametrize("asked", ["cuda", "auto"])
def test_without_cupy_the_error_says_what_to_install(
    cupy: Any, version: str | None, commands: list[str], asked: str
) -> None:
    kind = "cuda" if version or asked == "auto" else "cpu"
    with pytest.raises(ConfigError, match=f"transport='{asked}': CuPy is not installed") as caught:
        make_transport(OffloadConfig(transport=asked), DeviceFacts(kind, bool(version), version), 64)
    text, all_commands = str(caught.value), [f"pip install 'hf-offload[cuda{n}]'" for n in (12, 13)]
    assert [c for c in all_commands if c in text] == commands
    assert cupy_command(version) in text


def test_without_a_gpu(cupy: Any) -> None:
    cupy(True)
    for version, built in (("12.8", "CUDA 12.8"), (None, "no CUDA")):
        with pytest.raises(ConfigError, match=f"transport='cuda': torch sees no GPU .*{built}"):
            transport_kind(OffloadConfig(transport="cuda"), DeviceFacts("cpu", False, version))


def test_the_transport_must_fit_the_device(cupy: Any) -> None:
    cupy(True)
    with pytest.raises(ConfigError, match="transport='host': the parameters are on a GPU"):
        transport_kind(OffloadConfig(transport="host"), CUDA)
    with pytest.raises(ConfigError, match="transport='cuda': the parameters are on the CPU"):
        transport_kind(OffloadConfig(transport="cuda"), DeviceFacts("cpu", True, "13.0"))
    assert transport_kind(OffloadConfig(), CUDA) == transport_kind(OffloadConfig(transport="cuda"), CUDA) == "cuda"


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "hpu"])
@pytest.mark.parametrize("transport", ["auto", "host", "cuda"])
def test_other_devices_are_refused_by_name(cupy: Any, device: str, transport: str) -> None:
    with pytest.raises(UnsupportedError, match=f"device='{device}'.*NVIDIA"):
        make_transport(OffloadConfig(transport=transport), DeviceFacts(device, False, None), 64)


@pytest.mark.parametrize("setting", [{"link_gb_s": 16.0}, {"link_latency_us": 10.0}])
def test_a_real_link_cannot_be_emulated(cupy: Any, setting: dict[str, float]) -> None:
    """Whether it was named, or follows from where the parameters are."""
    cupy(True)
    name = next(iter(setting))
    with pytest.raises(ConfigError, match=f"{name}=.*host transport"):
        OffloadConfig(transport="cuda", **setting)
    with pytest.raises(ConfigError, match=f"{name}=.*on a GPU"):
        transport_kind(OffloadConfig(**setting), CUDA)
