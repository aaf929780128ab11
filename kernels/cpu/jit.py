"""How the kernels are compiled and run: the one place that knows Numba's options, its threads and its quirks."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event

from hf_offload.errors import UnsupportedError, explain
from hf_offload.kernels.cpu.cache import find_cache_dir, numba_caches_in

log = logging.getLogger("hf_offload")
config: Any = numba.config

# Elements below which a kernel runs in the calling thread. Measured on 2 cores: a step of this many takes 24 us in one
# thread and 18 in two that are awake; waking two that sleep costs tens, and milliseconds where other programs run.
PARALLEL_FROM = 32_768

OPTIONS: dict[str, Any] = {
    # The training thread and the copy threads go on meanwhile.
    "nogil": True,
    # Division as in C. Numba's default raises ZeroDivisionError, and the check keeps LLVM from vectorising.
    "error_model": "numpy",
    # Strict IEEE: no reassociation and no contraction to FMA, so that an element's result does not depend on whether
    # the vector body or the scalar tail computed it, nor on where a range was split. The NumPy twins are bit-equal.
    "fastmath": False,
    # Sizes are checked once per call, by the Python function in front of each kernel.
    "boundscheck": False,
}

CACHE_DIR = find_cache_dir()
_with_cache: list[Any] = []


def helper(function: Callable[..., Any]) -> Any:
    """For what kernels call: compiled into each of them, so it needs no cache entry of its own."""
    return numba.njit(**OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """For the body of a kernel: works on the range lo..hi in the thread that calls it."""
    return _cached(function)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """For the driver of a kernel: one `numba.prange` over tasks, each calling the body on its share."""
    return _cached(function, parallel=True)


def _cached(function: Callable[..., Any], **more: Any) -> Any:
    if CACHE_DIR is not None:
        try:
            with numba_caches_in(CACHE_DIR):
                dispatcher = numba.njit(cache=True, **OPTIONS, **more)(function)
                _with_cache.append(dispatcher)
                return dispatcher
        except RuntimeError as error:  # "no locator available": the folder went away, or NUMBA_CACHE_LOCATOR_CLASSES
            log.warning("hf_offload: compiled kernels will not be cached: %s", error)
    return numba.njit(**OPTIONS, **more)(function)


@helper
def share(size, t, tasks):  # type: ignore[no-untyped-def]
    """Where the share of task t begins, of `tasks` equal ones of `size` elements; t = tasks gives the end.

    Multiples of 64 elements (128 or 256 bytes), so that no two tasks write the same cache line.
    """
    if t == tasks:
        return size
    return size * t // tasks // 64 * 64


class _Notice(event.Listener):
    """Says once that kernels are being compiled. Numba tells of compilation only, never of a load from its cache."""

    given = False

    def on_start(self, compiling: Any) -> None:
        dispatcher = compiling.data["dispatcher"]
        if self.given or not dispatcher.py_func.__module__.startswith(__package__ or ""):
            return
        self.given = True
        where = (
            f"once; cached in {CACHE_DIR}"
            if CACHE_DIR
            else "no folder to cache them in is writable: set NUMBA_CACHE_DIR"
        )
        log.warning("hf_offload: compiling CPU kernels (about 5 s, %s)", where)

    def on_end(self, compiled: Any) -> None:
        pass


event.register("numba:compile", _Notice())


class _Pool:
    """Numba's thread pool, used by one caller at a time: its workqueue layer aborts the process on concurrent calls."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started_in: int | None = None
        self.warned = False

    def usable(self) -> bool:
        """False in a process forked after the pool started: GNU OpenMP and TBB abort or hang there."""
        if self.started_in in (None, os.getpid()) or numba.threading_layer() == "workqueue":
            return True
        if not self.warned:
            self.warned = True
            log.warning("hf_offload: this process was forked after the kernels' thread pool started; using one thread")
        return False

    def after_fork(self) -> None:
        self.lock = threading.Lock()  # the thread that held it does not exist here

    def call(self, parallel: Any, args: tuple[Any, ...], tasks: int) -> Any:
        with self.lock:
            before = numba.get_num_threads()
            numba.set_num_threads(tasks)
            try:
                return _call(parallel, *args, tasks)
            finally:
                numba.set_num_threads(before)
                self.started_in = os.getpid()


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.after_fork)


def max_threads() -> int:
    """Threads the kernels may use in this process: NUMBA_NUM_THREADS where it is set, else the CPUs of its affinity.

    OMP_NUM_THREADS, which launchers set to 1, does not count.
    """
    configured = int(config.NUMBA_NUM_THREADS)
    if "NUMBA_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return configured
    # Numba read the affinity at import; accelerate and numactl-like tools may have narrowed it since.
    return max(1, min(configured, len(os.sched_getaffinity(0))))


def run(
    body: Any, driver: Any, args: tuple[Any, ...], size: int, threads: int, parallel_from: int = PARALLEL_FROM
) -> None:
    """Runs a kernel over 0..size: `body(*args, 0, size)` in this thread, or `driver(*args, tasks)` in the pool.

    Args:
        threads: wanted; 1 to `max_threads()` are used.
        parallel_from: sizes below it stay in this thread.
    """
    if config.DISABLE_JIT:
        raise UnsupportedError(
            explain("NUMBA_DISABLE_JIT", 1, "the kernels work on bits that only compiled code can reach", "Unset it")
        )
    tasks = max(1, min(threads, max_threads()))
    if tasks == 1 or size < parallel_from or not _pool.usable():
        _call(body, *args, 0, size)
    else:
        _pool.call(driver, args, tasks)


def _call(dispatcher: Any, *args: Any) -> Any:
    """Calls a kernel. Only Numba's cache does I/O, before anything runs: a full disk, a quota, a broken file."""
    try:
        return dispatcher(*args)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        log.warning("hf_offload: the cache of compiled kernels in %s cannot be used: %s", CACHE_DIR, error)
        for cached in _with_cache:  # all of them: a driver's failure may be that of the body it calls
            cached._cache.disable()
        return dispatcher(*args)
