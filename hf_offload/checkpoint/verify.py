"""Is a checkpoint whole? Every byte against the manifest where there is one; else what the files themselves tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_offload.checkpoint import adam_state, deepspeed, held, inspect, manifest, torch_file, weights
from hf_offload.checkpoint.adam_state import AdamState
from hf_offload.checkpoint.held import parts
from hf_offload.checkpoint.manifest import Damage
from hf_offload.checkpoint.names import UNKNOWN, Model, named, weight_of
from hf_offload.checkpoint.weights import Weight
from hf_offload.errors import CheckpointError, explain


@dataclass
class Verdict:
    """What was found.

    Attributes:
        damages: files that are missing or not as they were written.
        checked: what was compared, in words.
        notes: what is strange and yet no damage, or could not be checked.
        siblings: whole checkpoints beside this one, newest first; looked for if it is damaged.
    """

    folder: str
    damages: list[Damage] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    siblings: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.damages

    def as_json(self) -> dict[str, Any]:
        return {"whole": self.whole, **asdict(self)}


def verify(folder: Path, told: Callable[[int], None] | None = None, model: Model = UNKNOWN) -> Verdict:
    """Look at every file. Nothing is executed, and no file is held in memory whole.

    Args:
        told: called with a number of bytes whenever so many more have been read.
        model: for checkpoints that do not say to which parameter a state belongs.

    Raises:
        FileNotFoundError: it is no checkpoint.
    """
    inspect.check_folder(folder)
    verdict = check_files(folder, told)
    if verdict.whole:
        try:
            _inside(folder, verdict, model)
        except CheckpointError as error:
            verdict.damages.append(Damage("the checkpoint", str(error)))
    if not verdict.whole:
        verdict.siblings = manifest.whole_siblings(folder)
    return verdict


def bytes_to_read(folder: Path) -> int:
    """About how many bytes `verify` will tell of."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


# ---- file by file


def check_files(folder: Path, told: Callable[[int], None] | None = None) -> Verdict:
    """Each file against the manifest, or without one against itself."""
    verdict = Verdict(str(folder))
    try:
        written = manifest.read(folder)
    except CheckpointError as error:
        verdict.damages.append(Damage(manifest.NAME, str(error)))
        return verdict
    if written is not None:
        verdict.damages.extend(manifest.damages(folder, written, told=told))
        total = sum(d.bytes for d in written.files.values())
        verdict.checked.append(f"size and SHA-256 of {len(written.files)} files, {total} bytes ({written.writer})")
        extra = sorted(set(_names_in(folder)) - set(written.files) - {manifest.NAME})
        if extra:
            verdict.notes.append(f"{len(extra)} files were put here later, and nothing vouches for them: "
                                 f"{', '.join(extra[:5])}")  # fmt: skip
        return verdict
    verdict.notes.append(
        "There is no manifest: only what the files say of themselves could be checked (CRC-32 of torch files, length "
        "of safetensors files, JSON). Bytes changed inside a safetensors file would not be noticed, and a missing "
        "file may not be."
    )
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        try:
            _file(path)
        except CheckpointError as error:
            verdict.damages.append(Damage(name, str(error)))
        if told is not None:
            told(path.stat().st_size)
    try:
        missing = [path.name for path in weights.files(folder) if not path.is_file()]
        verdict.damages.extend(Damage(name, "is missing") for name in missing)
    except CheckpointError:
        pass  # the index, which was named above
    verdict.checked.append("what the files say of themselves")
    return verdict


def _names_in(folder: Path) -> Iterator[str]:
    return (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _file(path: Path) -> None:
    """What a file can tell of itself."""
    if path.suffix in (".pt", ".pth", ".bin"):
        if path.stat().st_size == 0:
            raise CheckpointError(explain("file", str(path), "it is empty", manifest.remedy_for(path.parent)))
        torch_file.check_zip(path)
        if path.name in (inspect.SCALER, inspect.SCHEDULER, *adam_state.FILES):
            torch_file.read(path)
    elif path.suffix == ".safetensors":
        weights.header(path)
    elif path.suffix == ".json" and path.name in (inspect.TRAINER_STATE, weights.INDEX, "config.json"):
        inspect.read_json(path)


# ---- what is in them


def _inside(folder: Path, verdict: Verdict, model: Model) -> None:
    listed = weights.listed(folder)
    state = _state(folder, verdict)
    if state is None:
        return
    _finite(state, verdict)
    known = named(folder, state, listed, model)
    if known is None:
        verdict.notes.append("Whose state is whose cannot be told here (the checkpoint has no names of parameters), so "
                             "weights and state were not compared.")  # fmt: skip
        return
    _compare(known, listed, verdict)


def _state(folder: Path, verdict: Verdict) -> AdamState | None:
    path = adam_state.find(folder)
    if path is not None:
        saved = torch_file.read(path)
        try:
            return adam_state.parse(str(path), saved)
        except CheckpointError as error:
            verdict.notes.append(f"The optimizer's state could be read but not checked: {error}")
            return None
    if deepspeed.folder_of(folder) is not None:
        return deepspeed.read(folder).state
    verdict.notes.append("It has no optimizer state that can be read here: a resume would start Adam anew, at step 0.")
    return None


def _finite(state: AdamState, verdict: Verdict) -> None:
    found: Counter[str] = Counter()
    negative = unmade = 0
    for p in state.parameters():
        found.update(held.not_finite(p.entry))
        negative += held.negative(p.entry)
        unmade += held.unmade_scales(p.entry)
    for what, count in found.items():
        if count:
            verdict.notes.append(f"{count} values of {what} are not finite: training had diverged before it was saved.")
    if negative:
        verdict.notes.append(f"{negative} values of exp_avg_sq are negative, which Adam cannot give.")
    if unmade:
        verdict.notes.append(f"{unmade} scales of int8 blocks are between 1 and {held.LEAST_SCALE - 1}, which is never "
                             "written: the blocks are read as if they were the smallest.")  # fmt: skip
    verdict.checked.append("that the state is finite")


def _compare(state: AdamState, listed: Mapping[str, Weight], verdict: Verdict) -> None:
    """Every parameter has a weight of its shape, and every master rounds to it."""
    missing, differ, parameters = [], 0, 0
    for p in state.parameters():
        assert p.name is not None
        weight = weight_of(p.name, listed)
        if weight is None:
            missing.append(p.name)
            continue
        if p.shape is not None and p.shape != weight.shape:
            what = f"its state has the shape {p.shape} and its weight {weight.shape}"
            verdict.damages.append(Damage(p.name, what))
            continue
        if "master" in p.entry:
            changed = unlike(p.entry["master"], weight.read())
            differ += changed
            parameters += bool(changed)
    count = sum(1 for _ in state.parameters())
    verdict.checked.append(f"{count} parameters with state against {len(listed)} weights")
    if missing and listed:
        verdict.notes.append(f"{len(missing)} parameters have no weight of their name here: {', '.join(missing[:3])}")
    if differ:
        verdict.notes.append(
            f"{differ} masters in {parameters} parameters do not round to the weight beside them; a resume follows the "
            "weights there. Were the weights changed after training?"
        )
    elif state.has_masters:
        verdict.checked.append("that every master rounds to its weight")


def unlike(master: Tensor, weight: Tensor) -> int:
    """How many elements of a master do not round to the weight; NaN equals NaN."""
    count = 0
    for high, low in zip(parts(master), parts(weight)):
        rounded = high.to(low.dtype)
        count += int(((rounded != low) & ~(torch.isnan(rounded) & torch.isnan(low))).sum())
    return count
