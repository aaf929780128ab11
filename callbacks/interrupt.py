"""`InterruptCallback`: the first Ctrl-C ends training between two steps, never in the middle of a checkpoint."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback


class InterruptCallback(TrainerCallback):
    """Raises KeyboardInterrupt at the next safe point once `asked` is set.

    Safe points are the ends of micro-batches, of steps and of evaluation batches: a checkpoint being written then is
    complete, and the one before it untouched.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self, say: Callable[[str], None]) -> Iterator[None]:
        """While open, the first SIGINT only asks, a second one interrupts at once as usual."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.asked:
                signal.default_int_handler(number, frame)
            self.asked = True
            say("Stopping after this micro-batch (Ctrl-C again: at once).")

        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before or signal.default_int_handler)

    def _stop(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt

    on_step_begin = on_substep_end = on_optimizer_step = on_prediction_step = _stop


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
