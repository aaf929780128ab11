"""Whose state is whose: torch's optimizers number their parameters, and the weights' files name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hf_offload.checkpoint import manifest
from hf_offload.checkpoint.adam_state import AdamState
from hf_offload.checkpoint.weights import Weight
from hf_offload.errors import CheckpointError, explain


class Model(Protocol):
    """What is known of the model that a checkpoint is of, beside its files."""

    def groups(self) -> Sequence[Sequence[str]] | None:
        """Names of the parameters in each param group that transformers' Trainer makes; None: it cannot be told."""

    def split(self, names: Sequence[str]) -> Sequence[Sequence[str]] | None:
        """`names` in those groups, in their order; None: it cannot be told."""


class Unknown:
    """A `Model` of which nothing is known."""

    def groups(self) -> Sequence[Sequence[str]] | None:
        return None

    def split(self, names: Sequence[str]) -> Sequence[Sequence[str]] | None:
        return None


UNKNOWN = Unknown()


def named(folder: Path, state: AdamState, listed: Mapping[str, Weight], model: Model) -> AdamState | None:
    """The state with the names of its parameters: its own, the manifest's, or the model's if all shapes fit.

    Raises:
        CheckpointError: the manifest is damaged, or says other parameters than the state has.
    """
    if state.named:
        return state
    written = manifest.read(folder)
    if written is not None and written.optimizer is not None:
        found, shapes = _table(folder, written.optimizer)
        if all(isinstance(name, str) for group in found for name in group):
            if not state.fits(found, shapes):
                cause = f"the optimizer's state has other parameters than {manifest.NAME} says"
                raise CheckpointError(explain("checkpoint", str(folder), cause, manifest.remedy_for(folder)))
            return state.with_names(found)
    guess = model.groups()
    here = {name: weight_of(name, listed) for group in guess or () for name in group}
    shapes = {name: weight.shape for name, weight in here.items() if weight is not None}
    return state.with_names(guess) if guess is not None and state.fits(guess, shapes) else None


def weight_of(parameter: str, listed: Mapping[str, Weight]) -> Weight | None:
    """A parameter's weight."""
    return listed.get(parameter) or listed.get(in_file(parameter))


def in_file(parameter: str) -> str:
    """A parameter's name in PEFT's files, which leave out the adapter's own name ("default")."""
    return parameter.replace(".modules_to_save.default.", ".").replace(".default.", ".")


def _table(folder: Path, table: Mapping[str, object]) -> tuple[list[list[str]], dict[str, tuple[int, ...]]]:
    try:
        rows = [group["parameters"] for group in table["groups"]]  # type: ignore[attr-defined]
        names = [[row["name"] for row in group] for group in rows]
        return names, {row["name"]: tuple(row["shape"]) for group in rows for row in group}
    except (KeyError, TypeError, AttributeError) as error:
        cause, remedy = f"its table of parameters is damaged: {error!r}", manifest.remedy_for(folder)
        raise CheckpointError(explain("file", str(folder / manifest.NAME), cause, remedy)) from None
