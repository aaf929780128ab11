"""Whether other programs run: figures of a busy machine are worth little. Stdlib only."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hf_offload.cpus import affinity

STAT = Path("/proc/stat")


class BusyCores:
    """How many cores other programs kept busy since this was made, of those that this process may use."""

    def __init__(self) -> None:
        self._cpus = {f"cpu{number}" for number in affinity(0)}
        self._start = self._now()

    def others(self) -> float | None:
        """None where the system cannot tell (no /proc/stat)."""
        if self._start is None or (now := self._now()) is None:
            return None
        machine, own, wall = (b - a for a, b in zip(self._start, now))
        return max(0.0, machine - own) / wall if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds its cores were busy (stolen ones too), this process's CPU seconds, the time."""
        try:
            # name user nice system idle iowait irq softirq steal, in ticks (man 5 proc); "cpu" is all of them
            rows = {words[0]: words[1:9] for line in STAT.read_text("ascii").splitlines() if (words := line.split())}
            names = self._cpus & rows.keys() or {"cpu"}
            ticks = [[int(word) for word in rows[name]] for name in names]
            busy = sum(sum(row) - sum(row[3:5]) for row in ticks) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, KeyError):
            return None
        return busy, time.process_time(), time.perf_counter()
