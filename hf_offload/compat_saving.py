"""Internals of transformers and accelerate that save and load checkpoints: `hf_offload.compat`'s second half.

Where an OffloadAdam is trained, a checkpoint folder appears whole or not at all, its files are hashed as they are
written, and they are compared with their hashes before anything is loaded. Optimizer state is mapped, not read into
memory, and never on its way to the device. All wrappers do nothing where no OffloadAdam is concerned.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_offload import optim_args
from hf_offload.checkpoint import manifest, table, torch_file
from hf_offload.checkpoint.digest import Digest
from hf_offload.checkpoint.staging import Staged
from hf_offload.errors import CheckpointError, HostMemoryError, OffloadError, explain

if TYPE_CHECKING:
    from hf_offload.optimizer import OffloadAdam

Method = Callable[..., Any]
OPTIMIZER, SCHEDULER, TRAINER_STATE = "optimizer.pt", "scheduler.pt", "trainer_state.json"

logger = logging.getLogger("hf_offload")

# Of this thread: another one may save or load a checkpoint of its own.
_saving: ContextVar[tuple[Path, dict[str, Digest]] | None] = ContextVar("hf_offload_saving", default=None)
_loading: ContextVar[Path | None] = ContextVar("hf_offload_loading", default=None)


# --------------------------------------------------------------------------------------------- torch.save, torch.load


def hashes_what_it_saves(original: Method) -> Method:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        name = None
        saving = _saving.get()
        if saving is not None:
            name = _name_below(f, saving[0])
        if saving is None or name is None:
            return original(obj, f, *args, **kwargs)

        def stream(obj: Any, file: Any) -> None:
            original(obj, file, *args, **kwargs)

        saving[1][name] = torch_file.write(obj, f, stream)
        return None

    return save


def maps_what_it_loads(original: Method) -> Method:
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        folder = _loading.get()
        name = None if folder is None else _name_below(f, folder)
        # Not on its way over the device, as transformers has it under several ranks: 12 bytes a parameter.
        if name is not None and name.startswith("optimizer"):
            return torch_file.read(f, original)
        return original(f, *args, **kwargs)

    return load


def _name_below(f: Any, folder: Path) -> str | None:
    if not isinstance(f, (str, os.PathLike)):
        return None
    try:
        return Path(os.path.realpath(f)).relative_to(folder).as_posix()
    except ValueError:
        return None


@contextmanager
def _hashing(folder: Path) -> Iterator[dict[str, Digest]]:
    """In here, what torch.save writes below `folder` is hashed; the digests are gathered."""
    known: dict[str, Digest] = {}
    token = _saving.set((folder, known))
    try:
        yield known
    finally:
        _saving.reset(token)


@contextmanager
def _mapping(folder: Path) -> Iterator[None]:
    """In here, torch.load maps the optimizer state that it reads from `folder`."""
    token = _loading.set(Path(os.path.realpath(folder)))
    try:
        yield
    finally:
        _loading.reset(token)


# -------------------------------------------------------------------------------------------------- Trainer: saving


def saves_whole_folders(original: Method) -> Method:
    from hf_offload.compat import offload_of

    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = offload_of(self.optimizer)
        if optimizer is None:
            return original(self, *args, **kwargs)
        trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
        run_dir = self._get_output_dir(trial=trial)
        target = Path(run_dir, f"checkpoint-{self.state.global_step}")
        with torch_file.writing(target), Staged(target, owner=self.args.should_save) as staged:
            self.accelerator.wait_for_everyone()
            with _hashing(staged.path) as known, _redirected(self, staged) as pushes:
                result = original(self, *args, **kwargs)
            _name_the_best(self, run_dir, staged)
            self.accelerator.wait_for_everyone()  # their random states are there
            if self.args.should_save:
                rows = None if self.args.save_only_model else _described(optimizer, self.model)
                manifest.write(staged.path, known, rows)
                staged.commit()
        self.accelerator.wait_for_everyone()
        if self.args.local_process_index == 0:
            staged.take_over()  # on a node that shares no disk with the one that saved
        _rotate(self, run_dir)
        for push in pushes:
            push(str(target))
        return result

    return _save_checkpoint


@contextmanager
def _redirected(trainer: Any, staged: Staged) -> Iterator[list[Callable[[str], Any]]]:
    """In here the trainer takes the temporary folder for its output folder. What it would push comes later."""
    pushes: list[Callable[[str], Any]] = []
    push = trainer._push_from_checkpoint
    trainer._get_output_dir = lambda trial=None: str(staged.root)
    trainer._push_from_checkpoint = lambda folder: pushes.append(push)
    try:
        yield pushes
    except (OSError, OffloadError):
        raise
    except Exception as error:
        full = _disk_error(error)
        if full is None:
            raise
        raise torch_file.cannot_write(staged.target, full) from error
    finally:
        del trainer._get_output_dir, trainer._push_from_checkpoint


def _disk_error(error: Exception) -> OSError | None:
    """What the disk said, where a library's own writer (safetensors') says it in its own exception."""
    text = str(error)
    for number in ("os error 28", "os error 27", "os error 122", "os error 5", "os error 30"):  # as Rust prints errno
        if number in text:
            code = int(number.rpartition(" ")[2])
            return OSError(code, os.strerror(code))
    return None


def _name_the_best(trainer: Any, run_dir: str, staged: Staged) -> None:
    """`best_model_checkpoint`, which the trainer looked for in the temporary folder, as it will be found."""
    state, args = trainer.state, trainer.args
    if not state.best_global_step or getattr(args.save_strategy, "value", args.save_strategy) == "no":
        return
    best = os.path.join(run_dir, f"checkpoint-{state.best_global_step}")
    if state.best_global_step == state.global_step or os.path.exists(best):
        state.best_model_checkpoint = best
        if args.should_save:
            state.save_to_json(str(staged.path / TRAINER_STATE))


def _rotate(trainer: Any, run_dir: str) -> None:
    if trainer.args.should_save:
        sys.modules["transformers.trainer"].rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


# ------------------------------------------------------------------------------------------------- Trainer: loading


def verifies_before_loading(original: Method) -> Method:
    from hf_offload.compat import asked, offload_of

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        if asked(self.args) or offload_of(self.optimizer) is not None:
            _check(self, Path(resume_from_checkpoint))
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return _load_from_checkpoint


def verifies_the_best_model(original: Method) -> Method:
    from hf_offload.compat import offload_of

    def _load_best_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if offload_of(self.optimizer) is not None and self.args.local_process_index == 0:
            manifest.verify(Path(self.state.best_model_checkpoint), table.model_files)
        return original(self, *args, **kwargs)

    return _load_best_model


def maps_optimizer_state(original: Method) -> Method:
    from hf_offload.compat import offload_of

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        if checkpoint is None or offload_of(self.optimizer) is None:
            return original(self, checkpoint, *args, **kwargs)
        with _mapping(Path(checkpoint)), _named(Path(checkpoint)):
            return original(self, checkpoint, *args, **kwargs)

    return _load_optimizer_and_scheduler


def _check(trainer: Any, folder: Path) -> None:
    """All that can be said against resuming from `folder`, before anything is loaded."""
    if not folder.is_dir():
        raise CheckpointError(
            explain("resume_from_checkpoint", str(folder), "no such folder", "Give a folder that the Trainer saved")
        )
    first = trainer.args.local_process_index == 0  # the others read the same files
    found = manifest.verify(folder) if first else manifest.read(folder)
    for name in (OPTIMIZER, SCHEDULER):
        if not (folder / name).is_file():
            raise CheckpointError(explain("checkpoint", str(folder), f"{name} is missing", _without_optimizer(folder)))
    if found is None:
        if first:
            for name in (OPTIMIZER, SCHEDULER):
                torch_file.check_zip(folder / name)
    elif found.optimizer is not None:
        _cast(trainer)  # else the weights are 16-bit only when the optimizer is made
        _say(folder, table.check_fits(folder, found.optimizer, trainer.model))


def _cast(trainer: Any) -> None:
    from hf_offload.compat import asked, cast_weights

    if asked(trainer.args):
        config = optim_args.parse(trainer.args.optim_args).config
        cast_weights(trainer.model, trainer.accelerator.mixed_precision, config)


def _say(folder: Path, conversions: list[str]) -> None:
    for conversion in conversions:
        logger.warning("hf_offload: %s: %s.", folder, conversion)


def _without_optimizer(folder: Path) -> str:
    """transformers would begin with a new Adam at step 0, and say nothing."""
    begin = "start a new run from its weights (model_name_or_path), without resume_from_checkpoint"
    if any(folder.glob("global_step*")) or (folder / "latest").is_file():
        return f"It is DeepSpeed's: hf-offload checkpoint convert {folder} --to offload_adam --output DIR; or {begin}"
    return f"Resume from a checkpoint that was saved with optimizer state (save_only_model=False), or {begin}"


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """What is wrong with optimizer state says which checkpoint it came from."""
    try:
        yield
    except (CheckpointError, HostMemoryError):
        raise
    except OffloadError as error:
        raise CheckpointError(f"checkpoint={str(folder)!r}: {error}") from error


# -------------------------------------------------------------------------------------------------------- accelerate


def saves_state(original: Method) -> Method:
    from hf_offload.compat import offloaded

    def save_state(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = offloaded(self)
        if not ours:
            return original(self, output_dir, *args, **kwargs)
        if output_dir is None or self.project_configuration.automatic_checkpoint_naming or not _is_new(output_dir):
            return _save_in_place(self, ours, original, output_dir, *args, **kwargs)
        target = Path(os.path.expanduser(output_dir))
        with torch_file.writing(target), Staged(target, owner=_saves(self)) as staged:
            self.wait_for_everyone()
            with _hashing(staged.path) as known:
                original(self, str(staged.path), *args, **kwargs)
            self.wait_for_everyone()
            if _saves(self):
                manifest.write(staged.path, known, _table_of(self, ours))
                staged.commit()
        self.wait_for_everyone()
        if self.is_local_main_process:
            staged.take_over()
        return target

    return save_state


def _saves(accelerator: Any) -> bool:
    """Whether this process writes what is one for all, as accelerate has it."""
    each = accelerator.project_configuration.save_on_each_node
    return bool(accelerator.is_local_main_process if each else accelerator.is_main_process)


def _is_new(output_dir: str) -> bool:
    """Whether a folder may be replaced as a whole: not where other things may lie in it."""
    folder = Path(os.path.expanduser(output_dir))
    if not folder.exists():
        return True
    try:
        found = manifest.read(folder)
    except CheckpointError:
        return False
    return found is not None and found.staged and not os.path.ismount(folder)


def _save_in_place(accelerator: Any, ours: list[Any], original: Method, output_dir: str | None, *args: Any,
                   **kwargs: Any) -> Any:  # fmt: skip
    """accelerate chooses the folder, or other things lie in it: it is whole once it has its manifest, written last."""
    given = output_dir or os.path.join(accelerator.project_dir or ".", "checkpoints")
    base = Path(os.path.realpath(os.path.expanduser(given)))
    before = _seen(base)
    with torch_file.writing(base), _hashing(base) as known:
        location = original(accelerator, output_dir, *args, **kwargs)
    accelerator.wait_for_everyone()
    if _saves(accelerator) and location:
        folder = Path(os.path.realpath(location))
        written = {path for path, stamp in _seen(base).items() if before.get(path) != stamp}
        names = {name: path for path in written if (name := _name_below(path, folder)) is not None}
        digests = {name: known[below] for name, path in names.items() if (below := _name_below(path, base)) in known}
        with torch_file.writing(folder):
            manifest.write(folder, digests, _table_of(accelerator, ours), only=names)
    return location


def _seen(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file in there was written to, and its size."""
    found = ((path, path.stat()) for path in folder.rglob("*") if path.is_file())
    return {path: (stat.st_mtime_ns, stat.st_size) for path, stat in found}


def _table_of(accelerator: Any, ours: list[Any]) -> dict[str, Any] | None:
    models = accelerator._models
    return _described(ours[0], models[0]) if len(ours) == 1 and len(models) == 1 else None


def _described(optimizer: OffloadAdam, model: Any) -> dict[str, Any]:
    return table.describe(optimizer.param_groups, model, optimizer.config.state_dtype)


def loads_state(original: Method) -> Method:
    from hf_offload.compat import offloaded

    def load_state(self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if not offloaded(self):
            return original(self, input_dir, *args, **kwargs)
        folder = Path(os.path.expanduser(input_dir)) if input_dir is not None else _newest(self)
        if folder is None or not folder.is_dir():
            return original(self, input_dir, *args, **kwargs)
        found = manifest.verify(folder) if self.is_local_main_process else manifest.read(folder)
        if found is not None and found.optimizer is not None and len(self._models) == 1:
            _say(folder, table.check_fits(folder, found.optimizer, self._models[0]))
        if found is None and input_dir is None and manifest.whole_siblings(folder):
            cause = "it has no manifest, as the others have: its saving was not brought to its end"
            raise CheckpointError(explain("checkpoint", str(folder), cause, manifest.remedy_for(folder)))
        with _mapping(folder), _named(folder):
            return original(self, input_dir, *args, **kwargs)

    return load_state


def _newest(accelerator: Any) -> Path | None:
    """The folder that accelerate's automatic naming would load."""
    folder = Path(accelerator.project_dir or ".", "checkpoints")
    if not folder.is_dir():
        return None
    found = [path for path in folder.iterdir() if path.name.rpartition("_")[2].isdigit()]
    return max(found, key=lambda path: int(path.name.rpartition("_")[2]), default=None)
