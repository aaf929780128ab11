"""What every command of `hf-offload` shares: its exit codes, its common options, and how it says what went wrong."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_offload.errors import ConfigError, HostMemoryError, OffloadError, UnsupportedError, explain

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed while running, 2 refused (a wrong argument, recipe or setting, or a machine that "
    "cannot do it), 130 interrupted."
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOut = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


def check_output(option: str, file: Path | None) -> None:
    """Before minutes of measuring: raises ConfigError where their figures could not be written."""
    if file is None:
        return
    if file.is_dir():
        cause, remedy = "a folder", "Give the name of a file in it"
    elif not file.parent.is_dir():
        cause, remedy = f"there is no folder {str(file.parent)!r}", "Give a file in a folder that is there"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        cause, remedy = "not writable", "Give a file you may write to"
    else:
        return
    raise ConfigError(explain(option, str(file), cause, remedy))


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors become one line on stderr and an exit code; with `debug` they are raised as they are."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            saved = " Checkpoints saved before are complete." if command.__name__ == "train" else ""
            complain(f"Interrupted.{saved}", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
        except (OffloadError, OSError) as error:
            if kwargs.get("debug"):
                raise
            complain(f"Error: {error}")
            refused = isinstance(error, (ConfigError, UnsupportedError, HostMemoryError))
            user_path = isinstance(error, OSError) and error.filename is not None
            raise typer.Exit(REFUSED if refused or user_path else FAILED) from None
        except typer.Exit:
            raise
        except Exception as error:
            if kwargs.get("debug"):
                raise
            complain(f"Error: {type(error).__name__}: {error}")
            complain("Run it again with --debug to see where.", style="")
            raise typer.Exit(FAILED) from None

    return run


def complain(text: str, style: str = "red") -> None:
    """One message on stderr, as it is: no markup, no line breaks of ours."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
