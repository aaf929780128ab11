"""As many threads for every contender: Numba's are asked for at each call, OpenMP's and torch's are set here."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from hf_offload.engine.step_threads import step_threads
from hf_offload.errors import ConfigError, explain

_OPENMP = ("libgomp", "libomp", "libiomp")


def chosen(threads: int | None) -> int:
    """`threads`, or all that this process may use. Raises ConfigError: fewer than 1, or more than those."""
    if threads is None:
        return step_threads().most
    if threads < 1:
        raise ConfigError(explain("threads", threads, "below 1", "Give a number of at least 1"))
    return step_threads(threads).count


@contextlib.contextmanager
def everywhere(threads: int) -> Iterator[None]:
    """In here torch and every OpenMP library that is loaded by now run `threads` threads."""
    before = torch.get_num_threads()
    libraries = [ctypes.CDLL(path) for path in _loaded()]
    counts = [int(library.omp_get_max_threads()) for library in libraries]
    try:
        for library in libraries:
            library.omp_set_num_threads(threads)
        torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        for library, count in zip(libraries, counts):
            library.omp_set_num_threads(count)


def _loaded() -> list[str]:
    """Files of the OpenMP libraries in this process; none where the system does not tell (no /proc)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            paths = {line.split(maxsplit=5)[-1].strip() for line in lines if "/" in line}
    except OSError:
        return []
    return sorted(p for p in paths if p.rpartition("/")[2].startswith(_OPENMP))
