"""The `hf-offload` command. Nothing heavy is imported before a command needs it, so that `--help` and plans are quick.

Exit codes: 0 done; 1 training or another command failed while it ran; 2 refused: a wrong argument, recipe or setting,
or a machine that cannot do it; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from hf_offload import __version__, bench_cli, predict_cli
from hf_offload.checkpoint_cli import checkpoint_app
from hf_offload.command import EXIT_CODES, REFUSED, Debug, JsonOut, complain, guarded
from hf_offload.errors import ConfigError

app = typer.Typer(
    name="hf-offload",
    help="Fine-tune Hugging Face models with Adam's state in host memory: the GPU holds 4 bytes per parameter instead "
    "of 16, with the same loss curve.\n\n"
    "Begin with [bold]hf-offload train quickstart[/]: a minute, no GPU, no network. "
    "[bold]hf-offload plan --model NAME[/] says what a model needs. "
    "[bold]hf-offload run SCRIPT[/] makes --optim offload_adam known to your own script.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="The recipes that ship with hf-offload: list, show, copy.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipes_app, name="recipes")
bench_app = typer.Typer(
    help="Measurements of this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
bench_cli.add_to(bench_app)
app.add_typer(checkpoint_app, name="checkpoint")


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:3] in (["bench", "pipeline"], ["bench", "predict"]):
        from hf_offload.bench import streaming_copies

        streaming_copies.start_anew()
    app()


def _console() -> Console:
    return Console()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-offload {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def _recipe_names(incomplete: str) -> list[str]:
    from hf_offload import recipe

    return [name for name in recipe.shipped() if name.startswith(incomplete)]


RecipeArgument = typer.Argument(
    metavar="RECIPE", help="A recipe's file, or the name of a shipped one.", autocompletion=_recipe_names
)
OverridesArgument = typer.Argument(
    metavar="KEY=VALUE",
    help="Changes to the recipe: dotted keys with YAML values, as training.max_steps=20. The last one wins.",
)


@app.command(epilog=EXIT_CODES)
@guarded
def train(
    recipe: Annotated[str, RecipeArgument],
    overrides: Annotated[Optional[list[str]], OverridesArgument] = None,  # noqa: UP045 (typer on Python 3.10)
    output_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where the model, checkpoints and figures go. Wins over training.output_dir."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a recipe, and write what was measured to OUTPUT_DIR/offload_summary.json.

    For example: [bold]hf-offload train quickstart training.max_steps=20 --output-dir out[/]
    """
    from hf_offload import recipe as recipes
    from hf_offload import report

    spec = recipes.load(recipe, overrides or (), None if output_dir is None else str(output_dir))
    console = _console()
    with console.status("Loading torch and transformers ..."):
        from hf_offload import training

        args = training.arguments(spec)
    outcome = training.run(spec, args, console)
    model_dir = None if outcome.model_dir is None else str(outcome.model_dir)
    report.print_outcome(console, outcome.summary, str(outcome.summary_path), model_dir)


@app.command(
    options_metavar="SCRIPT [ARGS]... | -m MODULE [ARGS]...",
    epilog="Under accelerate: accelerate launch -m hf_offload.cli run SCRIPT ...",
    no_args_is_help=True,
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run(context: typer.Context) -> None:
    """Run a training script, or a module, that then knows [bold]--optim offload_adam[/].

    The script needs no change, and gets ARGS untouched, as from python. For example:

    hf-offload run run_clm.py --optim offload_adam --optim_args "schedule=overlapped" ...

    hf-offload run -m trl.scripts.sft --optim offload_adam ...
    """
    from hf_offload import launch

    try:
        launch.run(context.args)
    except ConfigError as error:
        if not launch.started():
            complain(f"Error: {error}")
            raise typer.Exit(REFUSED) from None
        raise


@app.command(epilog=EXIT_CODES)
@guarded
def plan(
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="RECIPE", help="A recipe's file or name.", autocompletion=_recipe_names),
    ] = None,
    overrides: Annotated[Optional[list[str]], OverridesArgument] = None,  # noqa: UP045
    params: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Number of parameters, as 7e9, 7B or 135M.", metavar="N"),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A model's folder or hub id. Only its config is read, no weights.", metavar="MODEL"),
    ] = None,
    trainable: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="How many of them are trained (LoRA: the adapters); default: all.", metavar="N"),
    ] = None,
    weight_bytes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Bytes of a trained weight on the GPU: 2 (bf16, fp16) or 4 (fp32). Default: 2.", metavar="N"),
    ] = None,
    batch: Annotated[Optional[int], typer.Option(help="Rows in a micro-batch.", min=1, metavar="N")] = None,  # noqa: UP045
    seq_len: Annotated[Optional[int], typer.Option(help="Tokens in a row.", min=1, metavar="N")] = None,  # noqa: UP045
    accumulation: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Micro-batches in an optimizer step.", min=1, metavar="N"),
    ] = None,
    checkpointing: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Whether activations are checkpointed (computed again in the backward)."),
    ] = None,
    link_gb_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Link between host and GPU, 1e9 bytes/s each way. PCIe 4.0 x16 reaches about 25.", metavar="X"
        ),
    ] = None,
    host_bw_gb_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Bandwidth of host memory, 1e9 bytes/s.", metavar="X"),
    ] = None,
    tflops: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="What the GPU reaches in training, 1e12 operations/s.", metavar="X"),
    ] = None,
    gpu_gb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="GPU memory, 1e9 bytes. Default: the first GPU's here.", metavar="X"),
    ] = None,
    host_gb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Host memory, 1e9 bytes. Default: what is available here.", metavar="X"),
    ] = None,
    state_dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="How m and v are held: float32, bfloat16 or int8. Default: as in the recipe.", metavar="NAME"
        ),
    ] = None,
    stream_gradients: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Whether gradients leave during backward. Default: as in the recipe, else no."),
    ] = None,
    device_state_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="State that stays on the GPU, bytes as 40e9, or auto. Default: as in the recipe, else 0.", metavar="N"
        ),
    ] = None,
    ranks_per_node: Annotated[
        int, typer.Option(help="Processes, a GPU each, that share the host's memory.", min=1, metavar="N")
    ] = 1,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine with the model, store that, and predict step times."),
    ] = False,
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where the calibration is kept. Default: in the user's cache.", metavar="FILE"),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Draw predicted step time against batch size: png, svg, pdf ...", metavar="FILE"),
    ] = None,
    as_json: JsonOut = False,
    debug: Debug = False,
) -> None:
    """Say what a model needs: memory on GPU and host, link traffic, and what can hide behind the GPU's work.

    The model comes from --params, from --model or from a recipe. For example:

    hf-offload plan --params 7e9 --link-gb-s 16 --gpu-gb 80

    hf-offload plan qwen2.5_7b_sft --batch 4

    hf-offload plan quickstart --calibrate --plot steps.png
    """
    from hf_offload import planning

    asked = planning.Asked(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        params=params,
        model=model,
        trainable=trainable,
        weight_bytes=weight_bytes,
        batch=batch,
        seq_len=seq_len,
        accumulation=accumulation,
        checkpointing=checkpointing,
        link_gb_s=link_gb_s,
        host_bw_gb_s=host_bw_gb_s,
        tflops=tflops,
        gpu_gb=gpu_gb,
        host_gb=host_gb,
        state_dtype=state_dtype,
        stream_gradients=stream_gradients,
        device_state_bytes=device_state_bytes,
        ranks_per_node=ranks_per_node,
    )
    answer = planning.answer(asked)
    told = predict_cli.told(asked, answer, calibrate, calibration, plot)
    if as_json:
        typer.echo(json.dumps({**planning.as_json(answer), **told.as_json()}, indent=2))
        return
    from hf_offload import report

    report.print_plan(_console(), answer.plan, answer.source, answer.assumed, answer.notes)
    told.print(_console())


@recipes_app.command("list")
@guarded
def list_recipes(debug: Debug = False) -> None:
    """List the recipes that ship with hf-offload."""
    from hf_offload import recipe, report

    titles = {}
    for name, path in recipe.shipped().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        titles[name] = first.lstrip("# ").rstrip()
    report.print_recipes(_console(), titles)


@recipes_app.command("show")
@guarded
def show_recipe(name: Annotated[str, RecipeArgument], debug: Debug = False) -> None:
    """Print a recipe."""
    from hf_offload import recipe, strict_yaml

    typer.echo(strict_yaml.read_text(recipe.find(name)).rstrip())


@recipes_app.command("copy")
@guarded
def copy_recipe(
    name: Annotated[str, RecipeArgument],
    destination: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="DEST", help="A file or a folder. Default: NAME.yaml here."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    debug: Debug = False,
) -> None:
    """Copy a recipe, with the data it uses, to change it."""
    from hf_offload import recipe

    for path in recipe.copy(name, destination, force=force):
        typer.echo(f"Wrote {path}")


@app.command("timeline", epilog=EXIT_CODES)
@guarded
def draw_timeline(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What a run with offload.timeline=FILE wrote.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", help="The picture: png, svg, pdf ... Default: FILE with .png.", metavar="FILE"),
    ] = None,
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="First and last step to show. Default: three from the middle.", metavar="A:B"),
    ] = None,
    ms: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Part of these steps to show, milliseconds from their start.", metavar="A:B"),
    ] = None,
    width: Annotated[int, typer.Option(help="Pixels.", metavar="N")] = 1600,
    debug: Debug = False,
) -> None:
    """Draw a timeline: compute, gradients down, host step and weights up, and where training waited.

    The same file opens in https://ui.perfetto.dev. For example:

    hf-offload train quickstart offload.timeline=trace.json

    hf-offload timeline trace.json -o trace.png
    """
    from hf_offload import timeline_plot

    picture = output or file.with_suffix(".png")
    window = timeline_plot.draw(file, picture, steps, width, ms)
    hidden = "" if window.hidden_fraction is None else f", {timeline_plot.percent(window.hidden_fraction)} hidden"
    shown = f"step {window.first}" if window.first == window.last else f"steps {window.first} to {window.last}"
    typer.echo(f"Wrote {picture}: {shown}{hidden}")


@bench_app.command("pipeline", epilog=EXIT_CODES)
@guarded
def bench_pipeline(
    blocks: Annotated[int, typer.Option(help="Blocks of the model.", metavar="N")] = 24,
    params_per_block: Annotated[
        str, typer.Option(help="Parameters of a block. Embedding and head hold 7 % of all each.", metavar="N")
    ] = "2.8e6",
    tensors_per_block: Annotated[int, typer.Option(help="Tensors of a block.", metavar="N")] = 12,
    link_gb_s: Annotated[float, typer.Option(help="Emulated link, 1e9 bytes/s each way.", metavar="X")] = 16.0,
    forward_ms: Annotated[float, typer.Option(help="Forward of a block, milliseconds.", metavar="X")] = 4.0,
    backward_ms: Annotated[float, typer.Option(help="Backward of a block, milliseconds.", metavar="X")] = 8.0,
    edge_ms: Annotated[
        float, typer.Option(help="Forward of the embedding, and of the head; backward is twice that.", metavar="X")
    ] = 0.0,
    steps: Annotated[int, typer.Option(help="Measured steps of a schedule in a round.", metavar="N")] = 6,
    rounds: Annotated[int, typer.Option(help="Rounds; the schedules take turns in each.", metavar="N")] = 3,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Threads of the host step. Default: all cores but one or two.", metavar="N"),
    ] = None,
    bucket_bytes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="As the setting of that name.", metavar="N"),
    ] = None,
    schedules: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Some only, as in_order,overlapped. Default: all.", metavar="NAMES"),
    ] = None,
    as_json: JsonOut = False,
    debug: Debug = False,
) -> None:
    """Measure what each schedule hides behind an emulated device, and compare it with the least that is possible.

    The model waits instead of computing; engine, kernel and copies are real. About two minutes. For example:

    hf-offload bench pipeline --forward-ms 8 --backward-ms 16
    """
    from hf_offload import planning

    params = planning.parse_count("--params-per-block", params_per_block)
    console = Console(stderr=True)
    with console.status("Loading torch ..."):
        from hf_offload.bench import pipeline, report

    given = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    setting = pipeline.Setting(
        blocks=blocks,
        params_per_block=params,
        tensors_per_block=tensors_per_block,
        link_gb_s=link_gb_s,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        edge_ms=edge_ms,
        steps=steps,
        rounds=rounds,
        threads=threads,
        schedules=tuple(name.strip() for name in (schedules or "").split(",") if name.strip()),
        **given,
    )
    with console.status("") as status:
        result = pipeline.run(setting, status.update)
    if as_json:
        typer.echo(json.dumps(report.as_json(result), indent=2))
    else:
        report.print_result(_console(), result)


bench_app.command("predict", epilog=EXIT_CODES)(predict_cli.bench_predict)


@app.command()
@guarded
def env(as_json: JsonOut = False, debug: Debug = False) -> None:
    """Print versions, GPU, memory, cores and settings of this machine: for a bug report."""
    from hf_offload import environment, report

    facts = environment.facts()
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(report.environment_lines(facts)))


if __name__ == "__main__":
    main()
