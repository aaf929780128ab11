"""The fake CuPy has what the transport and `kernels/cuda` use of it, and the real CuPy has the same, with the same
arguments."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_offload.kernels.cuda import adam, reduce
from hf_offload.transport import cuda_pack
from support.fake_cupy import FakeCupy

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *sorted((ROOT / "hf_offload" / "transport").glob("cuda*.py")),
    *sorted((ROOT / "kernels" / "cuda").glob("*.py")),
]
FAKE = FakeCupy().cuda.runtime


@pytest.fixture(scope="module")
def cupy() -> Any:
    """The real one; it needs no GPU to be imported. Not in the `test` extra: it is 200 MB."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed (pip install cupy-cuda13x)")
    return pytest.importorskip("cupy")


def used() -> set[str]:
    """Names of cupy.cuda.runtime in these files."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("runtime"):
                found.add(node.attr)
    return found


FUNCTIONS = sorted(n for n in used() if inspect.ismethod(getattr(FAKE, n, None)))
CONSTANTS = sorted(n for n in used() if isinstance(getattr(FAKE, n, None), int))


def arguments(function: Any) -> list[str]:
    """Names of the arguments: Cython leaves them in the first line of the docstring."""
    inside = (function.__doc__ or "").split("(", 1)[1].split(")", 1)[0]
    return [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]


def test_the_fake_has_all_that_is_used() -> None:
    assert used() == {*FUNCTIONS, *CONSTANTS, "CUDARuntimeError"}
    assert {"memcpyAsync", "eventRecord", "streamWaitEvent", "hostAlloc"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", [*FUNCTIONS, "launchHostFunc"])
def test_functions_take_the_same_arguments(cupy: Any, name: str) -> None:
    real = getattr(cupy.cuda.runtime, name)
    assert arguments(real) == list(inspect.signature(getattr(FAKE, name)).parameters)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_have_the_same_values(cupy: Any, name: str) -> None:
    assert getattr(FAKE, name) == getattr(cupy.cuda.runtime, name)


def test_errors_carry_their_status(cupy: Any) -> None:
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert error.status == 2 and isinstance(error, RuntimeError)
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)


def test_queries_return_a_status_and_the_rest_raises(cupy: Any) -> None:
    """A look at an event must not raise where it is only not reached yet."""
    runtime = cupy.cuda.runtime
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        assert runtime.eventQuery(0) == runtime.streamQuery(0) == error.status
        for name in set(FUNCTIONS) - {"eventQuery", "streamQuery"}:
            function = getattr(runtime, name)
            with pytest.raises(runtime.CUDARuntimeError):
                function(*[0] * len(arguments(function)))
    else:
        pytest.skip("with a GPU the race tests show it")


def test_streams_and_kernels_are_made_as_the_transport_makes_them(cupy: Any) -> None:
    assert {"null", "non_blocking"} <= set(arguments(cupy.cuda.Stream.__init__))
    assert {"__enter__", "__exit__"} <= set(dir(cupy.cuda.Stream))
    assert isinstance(inspect.getattr_static(cupy.RawKernel, "compile"), object)
    assert "device" in arguments(cupy.cuda.Device) and {"__enter__", "__exit__"} <= set(dir(cupy.cuda.Device))
    kernel = cupy.RawKernel(cuda_pack.SOURCE, cuda_pack.NAME)
    assert kernel.code == cuda_pack.SOURCE


def test_the_table_can_travel_as_an_argument(cupy: Any) -> None:
    """CuPy passes a NumPy array of size one by value; a kernel's arguments are 4096 bytes at most."""
    for dtype, itemsize, others in (
        (cuda_pack._TABLE, 16 * cuda_pack.ROWS, 8 + 4),
        (reduce._TABLE, 24 * reduce.ROWS, 4 + 8 + 4),
        (adam._TABLE, 104 * adam.ROWS, 4 + 4),
    ):
        table = np.zeros(1, dtype)
        assert cupy.cuda.function.CNumpyArray(table)
        assert table.size == 1 and table.itemsize == itemsize and table.itemsize + others + 8 <= 4096


def test_arguments_are_read_from_the_docstring() -> None:
    assert arguments(SimpleNamespace(__doc__="f(intptr_t a, size_t b=0) -> int")) == ["a", "b"]
    assert arguments(SimpleNamespace(__doc__="f()")) == []
