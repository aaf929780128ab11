"""The norm of gradients on a GPU has the bits of the norm of the same gradients on the host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_offload.engine import norm
from hf_offload.kernels.cuda import CompileError, SquareSums
from support.fake_cupy import FakeCupy
from support.transport import needs_gpu

DEVICE = 1
CUDA = torch.device("cuda", DEVICE)
SHAPES = ((), (0, 3), (3, 5), (257, 300), (1 << 20,), (3,), (1 << 16, 17))


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Whatever a test makes is not kept for the next."""
    before = dict(norm._KERNELS)
    norm._KERNELS.clear()
    yield
    norm._KERNELS.clear()
    norm._KERNELS.update(before)


def gradients(seed: int = 0) -> list[Tensor]:
    """Of all dtypes and many magnitudes; one is transposed: dense, and not contiguous."""
    dice = torch.Generator().manual_seed(seed)
    found = []
    for k, shape in enumerate(SHAPES):
        sizes = 10.0 ** torch.randint(-3, 3, shape, generator=dice)
        dtype = (torch.bfloat16, torch.float16, torch.float32)[k % 3]
        found.append((torch.randn(shape, generator=dice) * sizes).to(dtype))
    return [*found, torch.randn(40, 30, generator=dice).t()]


def over(fake: FakeCupy) -> SquareSums:
    return SquareSums(DEVICE, fake.current_stream(DEVICE), fake)


def on_host(grads: list[Tensor]) -> float:
    return norm.gradient_norm(grads, 2)


def test_the_bits_of_the_host_with_one_transfer() -> None:
    grads, fake = gradients(), FakeCupy()
    assert norm.norm_of_sums(norm.device_sums(grads, over(fake))) == on_host(grads)
    assert fake.calls["memcpyAsync"] == fake.calls["launch"] == 1


def test_torchs_own_sum_is_the_same_number_in_other_bits_at_most() -> None:
    grads = gradients()
    assert norm.norm_of_sums(norm.device_sums(grads, None)) == pytest.approx(on_host(grads), rel=1e-13)


def test_a_gradient_with_gaps_is_read_element_by_element() -> None:
    """The step will refuse it; nothing beyond its memory is read before."""
    fake = FakeCupy()
    grads = [torch.ones(1).expand(5), torch.arange(10.0)[::2]]
    assert norm.device_sums(grads, over(fake)) == [5.0, 0.0 + 4.0 + 16.0 + 36.0 + 64.0]


def test_it_waits_for_whoever_writes_the_gradient() -> None:
    fake, gate = FakeCupy(), threading.Event()
    grad = torch.zeros(4)
    fake.run_on(DEVICE, 0, lambda: gate.wait(30.0))
    fake.run_on(DEVICE, 0, lambda: grad.fill_(2.0))
    threading.Timer(0.05, gate.set).start()
    assert norm.device_sums([grad], over(fake)) == [16.0]


def test_one_kernel_a_device_made_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(index: int, stream: object) -> SquareSums:
        made.append(index)
        return over(FakeCupy())

    monkeypatch.setattr(norm, "SquareSums", make)
    found = [norm.kernel_of(torch.device("cuda", i)) for i in (0, 1, 0, 1)]
    assert made == [0, 1]
    assert found[0] is found[2] is not None and found[1] is found[3] is not found[0]
    assert norm.kernel_of(torch.device("cpu")) is None and made == [0, 1]


def test_without_a_compiler_torch_computes_it_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCupy()
    fake.compiles = OSError("no libnvrtc.so")
    monkeypatch.setattr(norm, "SquareSums", lambda index, stream: SquareSums(index, stream, fake))
    with caplog.at_level(logging.WARNING, "hf_offload"):
        assert [norm.kernel_of(CUDA), norm.kernel_of(CUDA)] == [None, None]
    (record,) = caplog.records
    assert "no libnvrtc.so" in record.getMessage() and "torch computes the norm" in record.getMessage()
    assert not fake.handles, "nothing was made before the compiler was asked"


class NoMemory(Exception):
    """cupy_backends.cuda.api.driver.CUDADriverError, CUDA_ERROR_OUT_OF_MEMORY."""

    status = 2


def test_a_device_too_full_for_the_kernel_is_no_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    fake.compiles = NoMemory("CUDA_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(norm, "SquareSums", lambda index, stream: SquareSums(index, stream, fake))
    with pytest.raises(RuntimeError, match=r"CUDA out of memory\.") as caught:
        norm.kernel_of(CUDA)
    assert not isinstance(caught.value, CompileError)
    fake.compiles = None
    assert norm.kernel_of(CUDA) is not None, "the next step tries again"


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("seed", range(3))
    def test_the_bits_of_the_host(self, seed: int) -> None:
        grads = gradients(seed)
        assert norm.gradient_norm([g.to("cuda:0") for g in grads], 1) == on_host(grads)

    def test_a_gradient_still_being_written_on_another_stream(self) -> None:
        grad = torch.zeros(1 << 22, device="cuda:0")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            grad.fill_(2.0)
            assert norm.gradient_norm([grad], 1) == 2.0 * 2.0**11
