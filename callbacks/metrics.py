"""`OffloadMetricsCallback`: what offloading costs, beside the loss in whatever `report_to` names."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from hf_offload.callbacks.summary import offload_optimizer

logger = logging.getLogger("hf_offload")

PREFIX = "offload/"
Stats = Any
_WIRE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class OffloadMetricsCallback(TrainerCallback):
    """Adds `offload/...` figures to every log entry that holds a training loss, and to `state.log_history`.

    They are of the steps that have finished since the entry before; with an overlapped schedule the newest step is
    still under way when the Trainer logs, so it counts towards the next entry. An entry before the first finished
    step has none, but for the count of skipped steps where there are any.

    | key | unit |
    |---|---|
    | `offload/hidden_fraction` | 0 to 1: 1 - exposed / (d2h + host_step + h2d) |
    | `offload/exposed_seconds` | seconds a step |
    | `offload/d2h_gb_s`, `offload/h2d_gb_s` | 1e9 bytes a second of copying, gradients down and weights up |
    | `offload/host_step_gparam_s` | 1e9 parameters a second of host step |
    | `offload/host_bytes`, `offload/pinned_bytes` | bytes of host memory in all, and the pinned part of them |
    | `offload/skipped_steps` | count since the optimizer was made |

    Give it to the trainer like any other, `callbacks=[OffloadMetricsCallback()]`. A Trainer calls the reports that
    `report_to` names before the callbacks it was given; with `offload_adam` this one is put first when training begins.
    """

    before_reports = True
    """Wants to be called before the reports; see `add_to`."""

    def __init__(self) -> None:
        self._waiting: dict[int, Stats] = {}  # finished steps that no entry has told of yet
        self._told = 0
        self._skipped = 0
        self._warned = False

    def add_to(self, trainer: Any) -> None:
        """Put this callback first among the trainer's, wherever it was. Call it before `trainer.train()`."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._waiting.clear()
        self._told = 0
        optimizer = offload_optimizer(kwargs.get("optimizer"))
        if optimizer is not None:  # a second train() goes on with the optimizer of the first
            self._told = optimizer.stats().step
        elif not self._warned:
            self._warned = True
            logger.warning("hf_offload: OffloadMetricsCallback has nothing to tell: the optimizer is not offload_adam.")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read(kwargs.get("optimizer"))  # the step before: only now is all of its waiting behind it

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        self._read(kwargs.get("optimizer"))
        figures = self._figures()
        logs.update(figures)
        if state.log_history and "loss" in state.log_history[-1]:  # a copy of `logs` that was made before this call
            state.log_history[-1].update(figures)

    def _figures(self) -> dict[str, float | int]:
        """Of the steps that have finished since the last entry, and how many were skipped until now."""
        steps = [self._waiting[number] for number in sorted(self._waiting)]
        self._waiting.clear()
        figures: dict[str, float | int] = {}
        if steps:
            self._told = steps[-1].step
            figures = metrics(steps)
        if steps or self._skipped:  # where all are skipped none finishes: then above all this must be seen
            figures[PREFIX + "skipped_steps"] = self._skipped
        return figures

    def _read(self, optimizer: Any) -> None:
        optimizer = offload_optimizer(optimizer)
        if optimizer is not None:
            stats = optimizer.stats()
            self._skipped = stats.skipped_steps
            if stats.step > self._told:
                self._waiting[stats.step] = stats


def metrics(steps: list[Stats]) -> dict[str, float | int]:
    """The figures over some finished steps, all measured; a rate whose phase did not run is left out.

    Args:
        steps: what `optimizer.stats()` gave for each, the newest last; one or more.
    """
    last = steps[-1]
    busy = {phase: sum(s.seconds[phase] for s in steps) for phase in ("d2h", "host_step", "h2d")}
    amounts = {
        "d2h_gb_s": ("d2h", sum(s.d2h_bytes for s in steps)),
        "h2d_gb_s": ("h2d", sum(s.h2d_bytes for s in steps)),
        "host_step_gparam_s": ("host_step", sum(_stepped(s) for s in steps)),
    }
    figures: dict[str, float | int] = {
        "hidden_fraction": sum(s.hidden_fraction for s in steps) / len(steps),
        "exposed_seconds": sum(s.exposed_seconds for s in steps) / len(steps),
        **{name: amount / busy[phase] / 1e9 for name, (phase, amount) in amounts.items() if busy[phase] > 0},
        "host_bytes": sum(last.host_bytes.values()),
        "pinned_bytes": last.host_bytes.get("pinned", 0),
        "skipped_steps": last.skipped_steps,
    }
    return {PREFIX + name: value for name, value in figures.items()}


def _stepped(stats: Stats) -> float:
    """Parameters that the step changed: those whose weights went up. All of them where the wire's dtype is mixed."""
    size = _WIRE_BYTES.get(stats.wire_dtype)
    return stats.h2d_bytes / size if size else stats.params
