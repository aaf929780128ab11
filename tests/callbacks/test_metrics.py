"""`OffloadMetricsCallback`: its keys reach the reports and the log history, and are what `stats()` said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from hf_offload.callbacks.metrics import OffloadMetricsCallback, metrics
from hf_offload.engine.stats import Stats

KEYS = {
    "offload/hidden_fraction",
    "offload/exposed_seconds",
    "offload/d2h_gb_s",
    "offload/h2d_gb_s",
    "offload/host_step_gparam_s",
    "offload/host_bytes",
    "offload/pinned_bytes",
    "offload/skipped_steps",
}


class FakeReport(TrainerCallback):
    """Stands where TensorBoard's or W&B's callback would, and keeps what it is told."""

    entries: list[tuple[int, dict[str, Any]]]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.entries.append((state.global_step, dict(logs)))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """What `report_to="fake"` is told: (step, logs)."""
    entries: list[tuple[int, dict[str, Any]]] = []
    report = type("Report", (FakeReport,), {"entries": entries})
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "fake", report)
    return entries


def step_stats(number: int, **given: Any) -> Stats:
    shape: dict[str, Any] = {
        "params": 1000,
        "wire_dtype": "bfloat16",
        "schedule": "overlapped",
        "transport": "host",
        "device_bytes": {},
        "host_bytes": {"master": 4000, "exp_avg": 4000, "exp_avg_sq": 4000, "pinned": 512, "store": 0, "shadow": 0},
        "d2h_bytes": 2000,
        "h2d_bytes": 2000,
        "seconds": {"compute": 1.0, "d2h": 1e-6, "host_step": 2e-6, "h2d": 4e-6, "wait": 0.0},
        "exposed_seconds": 0.5,
        "hidden_fraction": 0.75,
        "step": number,
        "steps": number,
        "skipped_steps": 0,
    }
    return Stats(**{**shape, **given})


# ------------------------------------------------------------------------------------------------ the figures


def test_the_figures_by_hand() -> None:
    assert metrics([step_stats(1)]) == pytest.approx(
        {
            "offload/hidden_fraction": 0.75,
            "offload/exposed_seconds": 0.5,
            "offload/d2h_gb_s": 2.0,
            "offload/h2d_gb_s": 0.5,
            "offload/host_step_gparam_s": 0.5,
            "offload/host_bytes": 12512,
            "offload/pinned_bytes": 512,
            "offload/skipped_steps": 0,
        }
    )


def test_rates_of_several_steps_are_all_bytes_over_all_seconds() -> None:
    slow = {"compute": 1.0, "d2h": 3e-6, "host_step": 6e-6, "h2d": 0.0, "wait": 0.0}
    steps = [step_stats(1), step_stats(2, seconds=slow, hidden_fraction=0.25, exposed_seconds=1.5, skipped_steps=1)]
    figures = metrics(steps)
    assert figures["offload/d2h_gb_s"] == pytest.approx(4000 / 4e-6 / 1e9)
    assert figures["offload/host_step_gparam_s"] == pytest.approx(2000 / 8e-6 / 1e9)
    assert (figures["offload/hidden_fraction"], figures["offload/exposed_seconds"]) == (0.5, 1.0)
    assert figures["offload/skipped_steps"] == 1


def test_a_phase_that_did_not_run_has_no_rate() -> None:
    idle = {"compute": 1.0, "d2h": 0.0, "host_step": 0.0, "h2d": 0.0, "wait": 0.0}
    figures = metrics([step_stats(1, seconds=idle)])
    assert not {"offload/d2h_gb_s", "offload/h2d_gb_s", "offload/host_step_gparam_s"} & figures.keys()


@pytest.mark.parametrize(("dtype", "stepped"), [("bfloat16", 500), ("float32", 250), ("mixed", 1000)])
def test_only_stepped_parameters_count_where_the_wire_tells(dtype: str, stepped: int) -> None:
    figures = metrics([step_stats(1, wire_dtype=dtype, h2d_bytes=1000)])
    assert figures["offload/host_step_gparam_s"] == pytest.approx(stepped / 2e-6 / 1e9)


# -------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("schedule", ["in_order", "overlapped"])
def test_the_keys_reach_the_report_and_the_history(make_trainer: Callable[..., Any], told: Any, schedule: str) -> None:
    trainer = make_trainer(report_to=["fake"], optim_args=f"threads=1,bucket_bytes=4096,schedule={schedule}")
    OffloadMetricsCallback().add_to(trainer)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    reported = {step: logs for step, logs in told if "loss" in logs}
    assert sorted(reported) == [1, 2, 3, 4, 5]
    for step in range(2, 6):  # the first step may still be under way when it is logged
        assert reported[step].keys() >= KEYS
        assert {"loss", "grad_norm", "learning_rate", "epoch"} <= reported[step].keys()
    history = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert all(history[step].items() >= logs.items() for step, logs in reported.items())
    stats = optimizer.stats()
    assert reported[5]["offload/pinned_bytes"] == stats.host_bytes["pinned"] > 0
    assert reported[5]["offload/host_bytes"] == sum(stats.host_bytes.values())
    assert 0.0 <= reported[5]["offload/hidden_fraction"] <= 1.0
    assert all(isinstance(v, (int, float)) for logs in reported.values() for k, v in logs.items() if k in KEYS)


def test_the_last_entry_is_the_last_steps_figures(make_trainer: Callable[..., Any], told: Any) -> None:
    trainer = make_trainer(report_to=["fake"], optim_args="threads=1,schedule=in_order")
    OffloadMetricsCallback().add_to(trainer)
    trainer.train()
    figures = metrics([trainer.optimizer.optimizer.stats()])
    last = [logs for _, logs in told if "loss" in logs][-1]
    assert {key: last[key] for key in KEYS} == figures


def test_each_step_counts_in_one_entry(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    from hf_offload.callbacks import metrics as module

    real = module.metrics
    monkeypatch.setattr(module, "metrics", lambda steps: seen.append([s.step for s in steps]) or real(steps))
    trainer = make_trainer(max_steps=6, logging_steps=2, optim_args="threads=1,schedule=in_order")
    OffloadMetricsCallback().add_to(trainer)
    trainer.train()
    assert seen == [[1, 2], [3, 4], [5, 6]]


def test_evaluation_entries_stay_as_they_are(make_trainer: Callable[..., Any], told: Any) -> None:
    # steps have finished that no entry with a loss has told of, when step 2 is evaluated and when training ends
    trainer = make_trainer(report_to=["fake"], eval_strategy="steps", eval_steps=2, logging_steps=3)
    OffloadMetricsCallback().add_to(trainer)
    trainer.train()
    others = [logs for _, logs in told if "loss" not in logs]
    assert any("eval_loss" in logs for logs in others) and any("train_runtime" in logs for logs in others)
    assert not any(key.startswith("offload/") for logs in others for key in logs)


def test_losses_are_those_of_a_run_without_it(make_trainer: Callable[..., Any]) -> None:
    plain, watched = make_trainer(), make_trainer()
    OffloadMetricsCallback().add_to(watched)
    losses = []
    for trainer in (plain, watched):
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_adding_it_twice_leaves_one(make_trainer: Callable[..., Any]) -> None:
    callback = OffloadMetricsCallback()
    trainer = make_trainer(callbacks=[callback])
    callback.add_to(trainer)
    callbacks = trainer.callback_handler.callbacks
    assert callbacks[0] is callback and callbacks.count(callback) == 1


def test_another_optimizer_is_said_once(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    callback = OffloadMetricsCallback()
    trainer = make_trainer(optim="adamw_torch", optim_args=None)
    callback.add_to(trainer)
    with caplog.at_level(logging.WARNING, logger="hf_offload"):
        trainer.train()
        trainer.train()
    assert caplog.text.count("the optimizer is not offload_adam") == 1
    assert not any(key.startswith("offload/") for entry in trainer.state.log_history for key in entry)


def test_given_like_any_other_callback_it_still_comes_before_the_reports(
    make_trainer: Callable[..., Any], told: Any
) -> None:
    trainer = make_trainer(callbacks=[OffloadMetricsCallback()], report_to=["fake"])
    trainer.train()
    last = [logs for _, logs in told if "loss" in logs][-1]
    assert "offload/hidden_fraction" in last and "offload/host_bytes" in last


class Bad(TrainerCallback):
    """Makes the gradients of some steps NaN."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in self._steps:
            handle = next(model.parameters()).register_hook(lambda grad: (handle.remove(), grad * float("nan"))[1])


@pytest.mark.parametrize("stream", ["", ",stream_gradients=true"])
@pytest.mark.parametrize("bad", [(0, 1, 2, 3, 4), (2,)])
def test_skipped_steps_are_reported_also_where_no_step_was_taken(
    make_trainer: Callable[..., Any], told: Any, bad: tuple[int, ...], stream: str
) -> None:
    trainer = make_trainer(
        callbacks=[Bad(*bad)], report_to=["fake"], optim_args=f"threads=1,schedule=overlapped{stream}"
    )
    OffloadMetricsCallback().add_to(trainer)
    trainer.train()
    counts = [logs.get("offload/skipped_steps") for _, logs in told if "loss" in logs]
    assert counts[-1] == len(bad) == trainer.optimizer.optimizer.stats().skipped_steps
    if len(bad) == 5:
        assert counts == [1, 2, 3, 4, 5]
    history = [e.get("offload/skipped_steps") for e in trainer.state.log_history if "loss" in e]
    assert history == counts
