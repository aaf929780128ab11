"""Tables and sentences for people: what `hf-offload plan`, `train` and `env` print. Fits 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_offload.planner import STATE_BYTES, Plan

_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "master": "master weights",
    "exp_avg": "Adam m",
    "exp_avg_sq": "Adam v",
    "pinned_ring": "pinned ring",
    "shadow": "shadow",
    "checkpoint": "checkpoint peak",
    "frozen_weights": "frozen weights",
    "activations": "activations",
    "logits": "logits and loss",
    "cuda_context": "CUDA context",
}


def size(count: float) -> str:
    """Bytes as people read them: `84.0 GB`; 1 GB = 1e9 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.4g} {unit}" if count >= 1000 * factor else f"{_three(count / factor)} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as people read them: `1.75 s`, `12.3 ms`."""
    if seconds >= 1:
        return f"{_three(seconds)} s"
    return f"{_three(seconds * 1e3)} ms" if seconds >= 1e-3 or seconds == 0 else f"{_three(seconds * 1e6)} µs"


def _three(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_plan(console: Console, plan: Plan, source: str, assumed: Sequence[str], notes: Sequence[str]) -> None:
    """The plan as two tables and the sentences that say what they mean.

    Args:
        source: where the model was read from.
        assumed: options that were not given, as `--link-gb-s 16`.
        notes: what the figures leave out.
    """
    counts = plan.counts
    frozen = f" and {counts.frozen:,} frozen ones" if counts.frozen else ""
    _say(console, f"[bold]Plan for {source}[/]: {counts.trainable:,} trainable parameters{frozen}")
    console.print(_memory_table(plan))
    for sentence in _fit_sentences(plan):
        _say(console, sentence)
    console.print()
    console.print(_time_table(plan))
    for sentence in _time_sentences(plan):
        _say(console, sentence)
    for note in notes:
        _say(console, f"[yellow]Note:[/] {note}")
    if assumed:
        _say(console, f"[dim]Assumed, since not given: {', '.join(assumed)}. 1 GB is 1e9 bytes.[/]")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False)


def _memory_table(plan: Plan) -> Table:
    table = Table(title="Memory", title_justify="left", expand=False)
    table.add_column("", no_wrap=True)
    for heading in ("GPU without", "GPU with", "host with"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for line in plan.state:
        table.add_row(_NAMES[line.name], *_cells(line.gpu_without, line.gpu_with, line.host), line.note)
    state = plan.state
    table.add_section()
    table.add_row("training", *_cells(*_sums(state)), _per_parameter(plan), style="bold")
    table.add_section()
    for line in plan.other:
        table.add_row(_NAMES[line.name], *_cells(line.gpu_without, line.gpu_with, line.host), line.note)
    table.add_section()
    table.add_row("in all", *_cells(*_sums(state + plan.other)), "", style="bold")
    return table


def _sums(lines: Sequence[Any]) -> tuple[int, int, int]:
    without = sum(line.gpu_without for line in lines)
    return without, sum(line.gpu_with for line in lines), sum(line.host for line in lines)


def _cells(*counts: int) -> list[str]:
    return [size(count) if count else "-" for count in counts]


def _per_parameter(plan: Plan) -> str:
    parts = [f"{total / plan.counts.trainable:.3g}" for total in _sums(plan.state)]
    return f"{', '.join(parts)} B/param"


def _fit_sentences(plan: Plan) -> list[str]:
    fit, sentences = plan.fit, []
    if plan.shape is None:
        sentences.append("Activations and logits are not counted: they need --model or a recipe.")
    else:
        other = plan.activations["activations_full" if plan.workload.checkpointing else "activations_checkpointed"]
        how = "Without checkpointing" if plan.workload.checkpointing else "With checkpointing"
        sentences.append(f"{how} the activations would take {size(other)}.")
    if fit.gpu is None:
        sentences.append(f"The GPU needs {size(fit.gpu_need)}. No NVIDIA GPU was found here: give --gpu-gb to compare.")
        if fit.host_have is not None:
            context = sum(line.gpu_with for line in plan.other if line.name == "cuda_context")
            both = plan.ranks_per_node * (fit.gpu_need - context) + fit.host_need
            word = "fits" if both <= fit.host_have else "does not fit"
            sentences.append(f"On this machine's CPU both parts lie in host memory: {size(both)} {word}.")
    else:
        sentences.append(_verdict("GPU", fit.gpu_need, fit.gpu_have or 0, fit.gpu))
    ranks = plan.ranks_per_node
    if ranks > 1:
        sentences.append(f"{ranks} ranks on a node take {size(fit.host_need)} of its host memory together.")
    if fit.host_need > ranks * sum(line.host for line in plan.state + plan.other):
        sentences.append("The state begins on the host and may come back, so the host must have room for all of it.")
    if fit.host is not None:
        sentences.append(_verdict("host", fit.host_need, fit.host_have or 0, fit.host))
    return sentences


def _verdict(where: str, need: int, have: int, fits: bool) -> str:
    word = "[green]fits[/]" if fits else "[red]does not fit[/]"
    return f"The {where} needs {size(need)} and has {size(have)}: it {word}."


def _time_table(plan: Plan) -> Table:
    times, hide = plan.seconds, plan.hide
    table = Table(title="Time of one optimizer step", title_justify="left", expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("hides behind the next forward from", justify="right")
    table.add_column("behind backward and forward from", justify="right")
    for name, spent, key in (("link, both ways", times.link, "link"), ("host step", times.host_step, "host_step")):
        row = hide[key]
        table.add_row(name, duration(spent), _tokens(row.forward), _tokens(row.backward_and_forward))
    return table


def _tokens(count: float) -> str:
    return f"{_round(count):,} tokens"


def _round(count: float) -> int:
    """Three significant digits: more would promise what a bound cannot hold."""
    if count < 1000:
        return max(1, round(count))
    digits = len(str(int(count))) - 3
    return round(count / 10**digits) * 10**digits


def _time_sentences(plan: Plan) -> list[str]:
    times, work = plan.seconds, plan.workload
    stays = [_split_sentence(plan)] if plan.resident else []
    compute = duration(times.compute)
    sentences = [
        *stays,
        f"Each step moves {size(plan.link_bytes)} over the link, whatever the batch; where both directions run at "
        f"once it takes about half: {duration(times.link_full_duplex)}.",
        f"A micro-batch of {work.tokens:,} tokens computes for {duration(times.forward)} forward and "
        f"{duration(times.backward)} backward; {work.accumulation} of them: {compute} a step.",
    ]
    if times.exposed_overlapped > 0:
        share = times.exposed_overlapped / times.compute
        sentences.append(
            f"Overlapped, the next forward hides {duration(times.forward)} of it and "
            f"{duration(times.exposed_overlapped)} a step stay exposed: {duration(times.exposed_per_micro_batch)} per "
            f"accumulated micro-batch, {share:.0%} on top of the compute. More tokens or accumulation make it less."
        )
    else:
        sentences.append("Overlapped, the next forward is long enough to hide link and host step.")
    sentences.append(f"In order, nothing hides: {duration(times.exposed_in_order)} a step.")
    return sentences


def _split_sentence(plan: Plan) -> str:
    part, rest = plan.resident / plan.counts.trainable, plan.counts.trainable - plan.resident
    split = (
        f"The state of {plan.resident:,} parameters ({part:.0%}, {size(STATE_BYTES * plan.resident)}) stays on the GPU "
        f"and is stepped there, at the speed of its memory, for those that forward needs first: {part:.0%} of the step "
        "never wait for the host."
    )
    return split + (f" Link and host step are of the other {rest:,}." if rest else "")


def print_outcome(console: Console, summary: Mapping[str, Any], summary_path: str, model_dir: str | None) -> None:
    """The table at the end of a training run: measured figures, per parameter and per step."""
    params = summary["params"]
    table = Table(title="What it took, measured", title_justify="left", expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("per parameter", justify="right", no_wrap=True)
    for place, figures in (("device", summary["device_bytes"]), ("host", summary["host_bytes"])):
        for name, count in figures.items():
            if count:
                per = "bounded by the ring" if name == "pinned" else f"{count / params:.4g} B"
                table.add_row(f"{place}: {name}", size(count), per)
    table.add_section()
    step = summary["per_step"]
    for name, what in (("d2h_bytes", "a step: gradients down"), ("h2d_bytes", "a step: weights up")):
        table.add_row(what, size(step[name]), f"{step[name] / params:.4g} B")
    console.print(table)
    for sentence in _outcome_sentences(summary):
        _say(console, sentence)
    if model_dir is not None:
        _say(console, f"Model: {model_dir}")
    _say(console, f"Figures: {summary_path}")


def _outcome_sentences(summary: Mapping[str, Any]) -> list[str]:
    step, losses = summary["per_step"], summary["losses"]
    phases = ", ".join(f"{name} {duration(step[f'{name}_seconds'])}" for name in ("compute", "d2h", "host_step", "h2d"))
    sentences = [
        f"{summary['params']:,} parameters ({summary['wire_dtype']}), {summary['steps']} steps {summary['schedule']} "
        f"over the {summary['transport']} transport"
        + (f", and {summary['skipped_steps']} skipped." if summary["skipped_steps"] else "."),
        f"A step: {phases}; exposed {duration(step['exposed_seconds'])}, hidden {step['hidden_fraction']:.0%} of "
        "d2h + host_step + h2d.",
    ]
    if summary["tokens_per_second"]:
        sentences.append(f"Speed: {summary['tokens_per_second']:,.0f} tokens per second.")
    sentences += _prediction_sentences(summary.get("prediction", {}))
    values = losses["values"]
    if len(values) > 1 and values[0] > 0:
        few = min(5, len(values) // 2)  # one batch's loss tells little
        first, last = sum(values[:few]) / few, sum(values[-few:]) / few
        change = last / first - 1
        over = f", means of {few} steps" if few > 1 else ""
        evaluation = f"; evaluation loss {losses['eval_values'][-1]:.3f}" if losses["eval_values"] else ""
        sentences.append(f"[bold]Loss: {first:.3f} to {last:.3f} ({change:+.0%}{over})[/]{evaluation}.")
    return sentences


def _prediction_sentences(told: Mapping[str, Any]) -> list[str]:
    """Prediction beside measurement, or why there is none."""
    if "missing" in told:
        return [f"[dim]No prediction: {escape(told['missing'])}[/]"]
    if not told or not told["measured_seconds_per_step"]:
        return []
    return [
        f"Predicted {duration(told['seconds_per_step'])} a step, measured "
        f"{duration(told['measured_seconds_per_step'])}: the prediction is off by {told['error']:+.0%}."
    ]


def print_predictions(
    console: Console, steps: Mapping[str, Mapping[str, float]], hidden_from: Mapping[str, int | None], about: str
) -> None:
    """The step of each schedule, as a calibration predicts it.

    Args:
        steps: step_seconds, compute_seconds and exposed_seconds by schedule.
        hidden_from: tokens of a micro-batch from which on nothing much is exposed; None: more than was looked at.
        about: what it was calibrated with.
    """
    table = Table(title="One optimizer step, predicted from measurements", title_justify="left", expand=False)
    table.add_column("schedule", no_wrap=True)
    for heading in ("step", "compute", "exposed", "hidden from"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seconds in steps.items():
        cells = (duration(seconds[f"{what}_seconds"]) for what in ("step", "compute", "exposed"))
        tokens = hidden_from.get(name)
        table.add_row(name, *cells, "-" if tokens is None else f"{_tokens(tokens)}")
    console.print(table)
    _say(console, "Hidden from: the micro-batch from which on less than 5 % is added to the compute.")
    _say(console, f"[dim]{escape(about)}[/]")


def print_recipes(console: Console, recipes: Mapping[str, str]) -> None:
    """Names and first lines of the shipped recipes."""
    table = Table(expand=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it trains")
    for name, title in recipes.items():
        table.add_row(name, title)
    console.print(table)
    _say(console, "Run one: hf-offload train NAME. Make it yours: hf-offload recipes copy NAME.")


def environment_lines(facts: Mapping[str, Any]) -> list[str]:
    """`name: value` lines without borders or colours, to be copied into a bug report."""
    width = max(len(name) for name in facts) + 1
    return [f"{name + ':':<{width}} {value}" for name, value in facts.items()]
