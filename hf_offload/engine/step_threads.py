"""How many threads step, and why: as many as were asked for, else this process's share of the cores."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

from hf_offload.cpus import find_cpus
from hf_offload.errors import ConfigError, explain
from hf_offload.kernels import cpu

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepThreads:
    """Attributes:
    count: threads of the host step.
    most: as many as this process may use.
    reason: what `most` and an unasked `count` come from.
    """

    count: int
    most: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} ({self.reason})"


def step_threads(asked: int | None = None) -> StepThreads:
    """The threads of the host step in this process, as things are now.

    NUMBA_NUM_THREADS, where it is set, is somebody's own decision: it is what may be used, and is not shared.

    Args:
        asked: the setting `threads`; None: this rank's share of what the process may use.

    Raises:
        ConfigError: more were asked for than this process may use.
    """
    kernels, cpus = cpu.max_threads(), find_cpus()
    if "NUMBA_NUM_THREADS" in os.environ:
        most, share, reason = kernels, kernels, f"NUMBA_NUM_THREADS={kernels}"
        wider = "unset or raise NUMBA_NUM_THREADS"
    else:
        most = min(kernels, cpus.most)
        share, reason = min(most, cpus.share), cpus.reason()
        wider = "widen its affinity mask or its quota"
    if asked is not None and asked > most:
        remedy = f"Set threads={most} or fewer, or leave it out to take this process's share; or {wider}"
        raise ConfigError(explain("threads", asked, f"this process may use {most} ({reason})", remedy))
    if asked is not None:
        reason = f"threads={asked}; {reason}"
    return StepThreads(asked or share, most, reason)


def usable_threads(asked: int | None) -> int:
    """`step_threads(asked).count`; the choice and its reason go to the log, once. Raises as it does."""
    threads = step_threads(asked)
    _tell_once(str(threads))
    return threads.count


@functools.cache
def _tell_once(threads: str) -> None:
    logger.info("hf_offload: threads of the host step: %s", threads)
