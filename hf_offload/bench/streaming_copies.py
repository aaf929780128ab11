"""Copies that do not go through the cache, as those of a GPU's copy engines. Stdlib only.

glibc's memcpy writes through the cache up to a size that depends on the cache, and streams past it from there on. The
copies of the emulated link are smaller than that. How much it helps depends on what else uses the cache: one core of an
AMD EPYC with AVX2 copied at 5.4 instead of 3.2 GB/s beside other programs, and at 6 to 8 either way on a quiet machine.
glibc reads the size at a process's start, so the process is started anew.
"""

from __future__ import annotations

import os
import platform
import sys

TUNABLES = "GLIBC_TUNABLES"
THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"
BYTES = 0x40000


def wanted(environment: dict[str, str]) -> str | None:
    """What to set TUNABLES to; None where it is set already, or would do nothing."""
    given = environment.get(TUNABLES, "")
    known = sys.platform == "linux" and platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"
    if not known or THRESHOLD in given:
        return None
    return ":".join(filter(None, (given, f"{THRESHOLD}={BYTES:#x}")))


def start_anew() -> None:
    """Start this very command again, with copies that stream, unless they do."""
    tunables = wanted(dict(os.environ))
    if tunables is not None:
        os.environ[TUNABLES] = tunables
        os.execv(sys.executable, [sys.executable, "-m", "hf_offload.cli", *sys.argv[1:]])


def described() -> str:
    """For the figures: how copies were made."""
    return "streaming stores" if THRESHOLD in os.environ.get(TUNABLES, "") else "as memcpy does"
