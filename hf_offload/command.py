"""What every command of `hf-offload` shares: its exit codes, its common options, and how it says what went wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_offload.errors import ConfigError, HostMemoryError, OffloadError, UnsupportedError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed while running, 2 refused (a wrong argument, recipe or setting, or a machine that "
    "cannot do it), 130 interrupted."
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOut = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]


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
