from __future__ import annotations

import platform
import sys

import pytest

from hf_offload.bench import streaming_copies
from hf_offload.bench.streaming_copies import THRESHOLD, TUNABLES, wanted

glibc = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="a tunable of glibc on x86-64",
)


@glibc
def test_the_tunable_is_added_once_and_others_stay() -> None:
    first = wanted({})
    assert first == f"{THRESHOLD}=0x40000"
    assert wanted({TUNABLES: "glibc.malloc.check=1"}) == f"glibc.malloc.check=1:{THRESHOLD}=0x40000"
    assert wanted({TUNABLES: first}) is None


@glibc
def test_the_command_starts_itself_anew_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.delenv(TUNABLES, raising=False)
    monkeypatch.setattr(sys, "argv", ["hf-offload", "bench", "pipeline", "--json"])
    monkeypatch.setattr(streaming_copies.os, "execv", lambda path, argv: calls.append((path, argv)))
    streaming_copies.start_anew()
    assert calls == [(sys.executable, [sys.executable, "-m", "hf_offload.cli", "bench", "pipeline", "--json"])]
    assert streaming_copies.described() == "streaming stores"
    streaming_copies.start_anew()
    assert len(calls) == 1
    monkeypatch.delenv(TUNABLES)
