"""`TimelineCallback`: a few steps of a training run as a timeline, for Perfetto and for `hf-offload timeline`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from hf_offload.callbacks.summary import offload_optimizer
from hf_offload.errors import ConfigError, explain
from hf_offload.timeline import Timeline


class TimelineCallback(TrainerCallback):
    """Records a window of optimizer steps, and writes it when it has passed, or when training ends.

    Recording goes on until the step after the window is about to be taken: till then the window's last host step runs
    behind the next forward.

    Args:
        path: the file, a Chrome trace; its folder must be there.
        first_step: the first step recorded, counted from 1 at the start of this `train()`.
        steps: how many.
        say: called once, with the line that names the file.

    Raises:
        ConfigError: `path` cannot be written, or a count below 1; when training begins: the optimizer is not
            `offload_adam`.
    """

    def __init__(
        self, path: str, first_step: int = 3, steps: int = 5, say: Callable[[str], None] | None = None
    ) -> None:
        for name, value in (("first_step", first_step), ("steps", steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(explain(name, value, "not a count", "Give a whole number from 1 on"))
        Timeline(path)  # a path that does not work is said now, not after hours of training
        self._path = path
        self._first, self._steps = first_step, steps
        self._say = say or print
        self._begun = 0  # steps of this train() that have begun
        self._recording = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun, self._recording = 0, False
        if offload_optimizer(kwargs.get("optimizer")) is None:
            cause, remedy = (
                "there is nothing to record without offload_adam",
                "Set optim='offload_adam', or leave it out",
            )
            raise ConfigError(explain("callbacks", type(self).__name__, cause, remedy))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun += 1
        if self._begun == self._first:
            _ours(kwargs["optimizer"]).start_timeline(self._path)
            self._recording = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recording and self._begun == self._first + self._steps:
            self._stop(state, kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recording:
            _ours(kwargs["optimizer"]).synchronize()  # the last step's host work belongs to it
            self._stop(state, kwargs["optimizer"])
        elif self._begun < self._first and state.is_world_process_zero:
            self._say(f"No timeline: training ended after {self._begun} steps, before step {self._first}.")

    def _stop(self, state: Any, optimizer: Any) -> None:
        self._recording = False
        _ours(optimizer).stop_timeline()
        if state.is_world_process_zero:
            self._say(f"Timeline: {self._path} (open it in https://ui.perfetto.dev, or: hf-offload timeline FILE)")


def _ours(optimizer: Any) -> Any:
    found = offload_optimizer(optimizer)
    assert found is not None, "checked when training began"
    return found
