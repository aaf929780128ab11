"""`ProgressCallback`: the loss as lines, and a bar on a terminal. Replaces the Trainer's own."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

LINES = 20


class ProgressCallback(TrainerCallback):
    """Prints the loss as training goes.

    Args:
        console: where to; a bar if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: Any = None
        self._printed: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not self._console.is_terminal:
            return
        columns = (
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("train", total=state.max_steps, completed=state.global_step, loss="")
        self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if not state.is_world_process_zero or not ({"loss", "eval_loss"} & logs.keys()):
            return
        if self._progress is not None and "loss" in logs:
            self._progress.update(self._task, loss=f"loss {logs['loss']:.4f}")
        if self._worth_a_line(state, logs):
            self._printed = state.global_step
            self._console.print(_line(state, logs), highlight=False)

    def _worth_a_line(self, state: Any, logs: dict[str, float]) -> bool:
        """About LINES lines in a run, however often it logs; the first, the last and each evaluation always."""
        every = max(1, math.ceil(state.max_steps / LINES))
        due = self._printed is None or state.global_step - self._printed >= every
        return due or "eval_loss" in logs or state.global_step == state.max_steps

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away; also after an error, or the terminal's cursor stays hidden."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _line(state: Any, logs: dict[str, float]) -> str:
    parts = [f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"]
    for key, name, form in (
        ("loss", "loss", ".4f"),
        ("eval_loss", "eval loss", ".4f"),
        ("grad_norm", "grad norm", ".3g"),
        ("learning_rate", "lr", ".2e"),
    ):
        if key in logs:
            parts.append(f"{name} {float(logs[key]):{form}}")
    if logs.get("offload/skipped_steps"):
        parts.append(f"skipped {int(logs['offload/skipped_steps'])}")
    return "  ".join(parts)
