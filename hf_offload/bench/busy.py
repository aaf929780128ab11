"""Whether other programs run: figures of a busy machine are worth little. Stdlib only."""

from __future__ import annotations

import os
import time


class BusyCores:
    """How many cores other programs kept busy since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float | None:
        """None where the system cannot tell (no /proc/stat)."""
        if self._start is None or (now := self._now()) is None:
            return None
        machine, own, wall = (b - a for a, b in zip(self._start, now))
        return max(0.0, machine - own) / wall if wall > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds all cores were busy (stolen ones too), this process's CPU seconds, the time."""
        try:
            with open("/proc/stat", encoding="ascii") as lines:
                # user nice system idle iowait irq softirq steal, in ticks (man 5 proc)
                ticks = [int(word) for word in lines.readline().split()[1:9]]
            machine = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        return machine, time.process_time(), time.perf_counter()
