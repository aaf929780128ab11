"""`SummaryCallback`: collects each step's figures from `optimizer.stats()` and each logged loss, and averages them."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

WARMUP_STEPS = 2
"""Steps left out of the means: the first binds and allocates, the second still meets cold caches."""

Stats = Any


def offload_optimizer(optimizer: Any) -> Any | None:
    """The `OffloadAdam` inside what the Trainer hands out (accelerate wraps it), or None."""
    while optimizer is not None and not hasattr(optimizer, "stats"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


class SummaryCallback(TrainerCallback):
    """Figures of a training run, in the schema of `offload_summary.json`.

    A step is read when the next one is about to begin: only then is all of its waiting behind it. `finish()` reads
    the last.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Stats] = {}
        self._losses: list[tuple[int, float]] = []
        self._eval_losses: list[tuple[int, float]] = []
        self._durations: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._optimizer: Any = None
        self._began = 0.0
        self._tokens_before = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read(kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._durations[state.global_step] = time.perf_counter() - self._began
        seen = int(state.num_input_tokens_seen)
        self._tokens[state.global_step] = seen - self._tokens_before
        self._tokens_before = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens_before = int(state.num_input_tokens_seen)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read(kwargs.get("optimizer"))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        for key, losses in (("loss", self._losses), ("eval_loss", self._eval_losses)):
            if key in logs:
                losses.append((state.global_step, float(logs[key])))

    def finish(self) -> None:
        """Read the last step. Call it after training, when its weights have arrived, and before `close()`."""
        self._read(self._optimizer)

    def _read(self, optimizer: Any) -> None:
        self._optimizer = offload_optimizer(optimizer)
        if self._optimizer is not None:
            stats = self._optimizer.stats()
            if stats.step:  # the step these figures are of; a newer one may be under way
                self._steps[stats.step] = stats

    @property
    def last(self) -> Stats | None:
        """The newest step's stats, None before the first."""
        return self._steps[max(self._steps)] if self._steps else None

    def summary(self) -> dict[str, Any]:
        """The figures, all measured: `per_step` are means over the steps after the second, the rest as at the end.

        Bytes a step are the same in each step, and integers here too. `tokens_per_second` counts tokens without
        padding over the time from a step's begin to its end, evaluation and saving left out; None if not counted.

        Raises:
            ValueError: no step was taken.
        """
        if self.last is None:
            raise ValueError("no optimizer step was taken, so there is nothing to sum up")
        measured = [s for n, s in sorted(self._steps.items()) if n > WARMUP_STEPS] or list(self._steps.values())
        last = self.last
        return {
            "params": last.params,
            "wire_dtype": last.wire_dtype,
            "schedule": last.schedule,
            "transport": last.transport,
            "device_bytes": _peak([s.device_bytes for s in self._steps.values()]),
            "host_bytes": _peak([s.host_bytes for s in self._steps.values()]),
            "per_step": _means(measured),
            "steps": last.steps,
            "skipped_steps": last.skipped_steps,
            "speculation_hits": last.speculation_hits,
            "speculation_misses": last.speculation_misses,
            "measured_steps": len(measured),
            **self._speed(),
            "losses": self._loss_figures(),
        }

    def _speed(self) -> dict[str, float | None]:
        """Tokens per second and seconds per step. Step numbers are the Trainer's, which a resumed run continues."""
        numbers = sorted(self._durations)
        numbers = numbers[WARMUP_STEPS:] or numbers
        spent = sum(self._durations[n] for n in numbers)
        tokens = sum(self._tokens[n] for n in numbers)
        return {
            "tokens_per_second": tokens / spent if tokens and spent else None,
            "seconds_per_step": spent / len(numbers) if numbers else None,
        }

    def _loss_figures(self) -> dict[str, Any]:
        losses = [loss for _, loss in self._losses]
        return {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "steps": [step for step, _ in self._losses],
            "values": losses,
            "eval_steps": [step for step, _ in self._eval_losses],
            "eval_values": [loss for _, loss in self._eval_losses],
        }


def _means(steps: list[Stats]) -> dict[str, float | int]:
    figures: dict[str, float | int] = {
        "d2h_bytes": _mean_count([s.d2h_bytes for s in steps]),
        "h2d_bytes": _mean_count([s.h2d_bytes for s in steps]),
    }
    for phase in steps[0].seconds:
        figures[f"{phase}_seconds"] = sum(s.seconds[phase] for s in steps) / len(steps)
    figures["exposed_seconds"] = sum(s.exposed_seconds for s in steps) / len(steps)
    figures["hidden_fraction"] = sum(s.hidden_fraction for s in steps) / len(steps)
    return figures


def _mean_count(counts: list[int]) -> int | float:
    """The mean, an integer where all counts are equal, as they are unless parameters went without a gradient."""
    return counts[0] if len(set(counts)) == 1 else sum(counts) / len(counts)


def _peak(samples: list[Any]) -> dict[str, int]:
    return {key: max(int(sample.get(key, 0)) for sample in samples) for key in samples[-1]}
