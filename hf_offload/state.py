"""Loading optimizer state: checked whole before anything changes, then copied into the host state."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_offload.engine.formats import MOMENTS, StateFormat
from hf_offload.engine.hyper import check_group
from hf_offload.engine.moments import CODES, FLOATS, INT8_NAMES, clear, fill, names_in, scale_fits
from hf_offload.errors import OffloadError, StateError, explain, shown

if TYPE_CHECKING:
    from hf_offload.engine import Engine
    from hf_offload.optimizer import OffloadAdam

logger = logging.getLogger(__name__)

_REMEDY = "Load the state of an Adam or AdamW"


class LiveEntry(dict[str, Tensor]):
    """A parameter's entry of `optimizer.state`. Whoever reads it waits for the step under way first.

    Attributes:
        edited: whether a key was ever set or taken out; writing into the tensors does not count.
    """

    def __init__(self, views: Mapping[str, Tensor], engine: Engine) -> None:
        super().__init__(views)
        self._engine = weakref.ref(engine)
        self.edited = False

    def show(self, views: Mapping[str, Tensor]) -> None:
        """From now on the state is in `views`."""
        dict.update(self, views)

    def _settle(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.settle_state()

    def __getitem__(self, name: str) -> Tensor:
        self._settle()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._settle()
        return super().get(name, default)

    def items(self) -> Any:
        self._settle()
        return super().items()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def __reduce__(self) -> Any:
        self._settle()
        return dict, (dict(self),)


def _edits(name: str) -> Any:
    def edit(self: LiveEntry, *args: Any, **kwargs: Any) -> Any:
        self.edited = True
        return getattr(dict, name)(self, *args, **kwargs)

    return edit


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(LiveEntry, _name, _edits(_name))


def plain_entry(entry: Any) -> Any:
    """The entry as a plain dict, which every reader of a checkpoint knows. The state must have been settled.

    State that stays on a GPU is copied to the host: so a checkpoint is the same whichever share stays there.
    """
    if not isinstance(entry, LiveEntry):
        return entry
    return {name: t.cpu() if isinstance(t, Tensor) else t for name, t in dict.items(entry)}


def shows(entry: Any, views: Mapping[str, Tensor]) -> bool:
    """Whether an entry of `optimizer.state` still has the very tensors that show the host state."""
    return isinstance(entry, dict) and all(dict.get(entry, name) is view for name, view in views.items())


@dataclass(frozen=True)
class Loadable:
    """A state dict that fits an optimizer.

    Attributes:
        groups: the settings of each group, without its parameters.
        entries: `step` (a float), `exp_avg`, `exp_avg_sq` (or what int8 state has) and, if saved, `master` of each
            parameter that has state.
    """

    groups: list[dict[str, Any]]
    entries: dict[Tensor, dict[str, Any]]


def load(optimizer: OffloadAdam, state_dict: Any) -> None:
    """What `OffloadAdam.load_state_dict` does, with torch's load hooks around it."""
    if not isinstance(state_dict, Mapping):
        raise StateError(explain("state_dict", type(state_dict).__name__, "not a dict", "Pass what state_dict() gave"))
    given: Any = copy(state_dict)  # shallow, as torch does: hooks may replace its entries
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(optimizer, given)
        given = given if changed is None else changed
    fits = _checked(optimizer, given)
    engine = optimizer.engine
    for arena in engine.arenas:
        arena.check_unchanged(range(len(arena.params)))
    bound_before = {p for p in optimizer._parameters() if engine.is_bound(p)}
    if fits.entries:
        engine.bind_trainable()
        engine.bind(fits.entries)
    for group, new in zip(optimizer.param_groups, fits.groups):
        # In place: who holds a group (a scheduler, the optimizer this one took over from) goes on holding it, settings
        # keep their order (a resumed run saves the very bytes of one that never stopped), and none is missing,
        # wherever an interrupt falls.
        group.update(new)
        for name in group.keys() - new.keys() - {"params"}:
            del group[name]
    _fill(optimizer, fits.entries, bound_before)
    optimizer._fill_state()
    optimizer._pending.clear()
    _say_conversions(fits.entries, engine.kind)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


@torch.no_grad()
def _fill(optimizer: OffloadAdam, entries: Mapping[Tensor, Mapping[str, Any]], bound_before: set[Tensor]) -> None:
    """Copy checked entries into the host state; a parameter without an entry starts anew."""
    engine = optimizer.engine
    bound = {p: engine.state_views(p) for p in optimizer._parameters() if engine.is_bound(p)}
    sources = {p: _apart(optimizer, entry, bound[p]) for p, entry in entries.items()}
    for p, views in bound.items():
        entry = sources.get(p, {})
        if "master" in entry:
            views["master"].copy_(entry["master"])
        elif p in bound_before:  # else seeding has just set it, perhaps from fp32 values that waited for this
            views["master"].copy_(p)
        if entry:
            fill(views, entry, p)
        else:
            clear(views)
        views["step"].fill_(entry.get("step", 0.0))
    engine.watch.suspect_all()


def _say_conversions(entries: Mapping[Tensor, Mapping[str, Any]], kind: StateFormat) -> None:
    """Which state was held in another dtype than here."""
    found = Counter(
        (name, held, here)
        for entry in entries.values()
        for name, held in _dtypes(entry).items()
        if held != (here := "float32" if name == "master" else kind.name)
    )
    for (name, held, here), count in sorted(found.items()):
        rounded = held == "float64" or here == "int8" or (here == "bfloat16" and held != "int8")
        logger.warning(
            "hf_offload: %s of %d parameters was %s in the loaded state and is %s here: %s.", name, count, held, here,
            "rounded to it" if rounded else "the values are the same",
        )  # fmt: skip


def _dtypes(entry: Mapping[str, Any]) -> dict[str, str]:
    """In what each of `exp_avg`, `exp_avg_sq` and `master` is held."""
    codes = dict.fromkeys(MOMENTS, "int8") if names_in(entry) == INT8_NAMES else {}
    floats = {name: str(entry[name].dtype).removeprefix("torch.") for name in (*MOMENTS, "master") if name in entry}
    return {**codes, **floats}


def _apart(optimizer: OffloadAdam, entry: Mapping[str, Any], views: Mapping[str, Tensor]) -> dict[str, Any]:
    """`entry`, with a copy of what is another parameter's live state: it would be overwritten before it is read."""

    def safe(value: Any, view: Tensor | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if view is not None and (value.data_ptr(), value.stride()) == (view.data_ptr(), view.stride()):
            return value
        return value.clone() if any(arena.holds(value) for arena in optimizer.engine.arenas) else value

    return {name: safe(value, views.get(name)) for name, value in entry.items()}


# ---- the check


def _checked(optimizer: OffloadAdam, state_dict: Any) -> Loadable:
    """The settings and state in `state_dict`, if all of it fits.

    Raises:
        StateError: something else than a state dict, other groups or sizes, AMSGrad state, another mode of weight
            decay, a setting outside its range, or entries that are missing, too many or of another shape or type.
    """
    saved_groups, state = _parts(state_dict)
    groups = optimizer.param_groups
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved_groups]
    if sizes != saved_sizes:
        raise StateError(
            explain("state_dict", f"groups of {saved_sizes} parameters", f"this optimizer has groups of {sizes}",
                    "Load it into an optimizer made for the same model with the same groups")
        )  # fmt: skip
    found: dict[Tensor, dict[str, Any]] = {}
    numbered: dict[Any, Tensor] = {}
    for group, saved in zip(groups, saved_groups):
        for p, key in zip(group["params"], saved["params"]):
            if numbered.setdefault(key, p) is not p:
                raise StateError(
                    explain("state_dict['param_groups']", key, "two parameters have this number",
                            "Load the state as state_dict() gave it")
                )  # fmt: skip
            entry = state.get(key)
            if entry is not None and not (isinstance(entry, Mapping) and not entry):
                found[p] = _entry(p, key, entry)
    strangers = [key for key in state if key not in numbered]
    if strangers:
        raise StateError(
            explain("state_dict['state']", strangers[:5], "no group has parameters of these numbers",
                    "Load the state as state_dict() gave it (JSON, for one, turns numbers into text)")
        )  # fmt: skip
    return Loadable([_settings(optimizer, g, s) for g, s in zip(groups, saved_groups)], found)


def _parts(state_dict: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    whole = state_dict if isinstance(state_dict, Mapping) else {}
    groups, state = whole.get("param_groups"), whole.get("state")
    if not isinstance(groups, (list, tuple)) or not isinstance(state, Mapping):
        cause = "a state dict has a list 'param_groups' and a dict 'state'"
        raise StateError(explain("state_dict", sorted(map(str, whole)), cause, "Pass what state_dict() gave"))
    for i, group in enumerate(groups):
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, (list, tuple)) or not all(map(_hashable, params)):
            raise StateError(
                explain(f"state_dict['param_groups'][{i}]", group, "a group is a dict with a list 'params' of numbers",
                        "Pass what state_dict() gave")
            )  # fmt: skip
    return list(groups), state


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:  # also of a tuple with a list in it, which passes for Hashable
        return False
    return True


def _settings(optimizer: OffloadAdam, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings after loading: the saved ones, and ours where none were saved."""
    amsgrad = saved.get("amsgrad")
    if amsgrad is not None and amsgrad is not False:
        cause = "the saved state is AMSGrad's" if amsgrad is True else "not a bool"
        raise StateError(explain("amsgrad", amsgrad, cause, "Load a state without amsgrad"))
    ours = group["decoupled_weight_decay"]
    theirs = saved.get("decoupled_weight_decay", ours)
    if not isinstance(theirs, bool) or theirs != ours:
        raise StateError(
            explain("decoupled_weight_decay", theirs, f"the saved state's decay is of another kind than here ({ours})",
                    f"Make the optimizer with decoupled_weight_decay={shown(theirs)}")
        )  # fmt: skip
    kept = {name: value for name, value in group.items() if name in optimizer.defaults or name == "param_names"}
    new = {**kept, **_copied(saved)}
    try:
        check_group(new)
    except OffloadError as error:
        raise StateError(f"state_dict['param_groups']: {error}") from error
    return new


def _copied(saved: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in saved.items() if name != "params"}
    try:
        return deepcopy(settings)
    except Exception as error:  # whatever the __deepcopy__ of a value raises
        cause = f"a value in it cannot be copied ({type(error).__name__}: {error})"
        raise StateError(explain("state_dict['param_groups']", settings, cause, "Take it out of the group")) from error


def _entry(p: Tensor, key: Any, entry: Any) -> dict[str, Any]:
    """One parameter's state, checked."""
    where = f"state_dict['state'][{shown(key)}]"
    if not isinstance(entry, Mapping):
        raise StateError(explain(where, entry, "not a dict", "Pass what state_dict() gave"))
    if "max_exp_avg_sq" in entry:
        raise StateError(explain(where, "max_exp_avg_sq", "this is AMSGrad's state", "Load one without amsgrad"))
    names = names_in(entry)
    missing = [name for name in ("step", *names) if name not in entry]
    if missing:
        raise StateError(explain(where, sorted(map(str, entry)), f"{', '.join(missing)} missing", _REMEDY))
    if names == INT8_NAMES and any(name in entry for name in MOMENTS):
        raise StateError(explain(where, sorted(map(str, entry)), "exp_avg is there twice, as floats and as int8 codes",
                                 "Take one of them out"))  # fmt: skip
    whole = (*(CODES if names == INT8_NAMES else MOMENTS), "master")
    tensors = {name: _tensor(f"{where}[{name!r}]", entry[name], p, (torch.uint8,) if name in CODES else FLOATS)
               for name in whole if name in entry}  # fmt: skip
    scales = {name: _scale(f"{where}[{name!r}]", entry[name], p) for name in names if name not in whole}
    return {"step": _step(f"{where}['step']", entry["step"]), **tensors, **scales}


def _scale(where: str, value: Any, p: Tensor) -> Tensor:
    if not scale_fits(p, value):
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"{value.dtype}{list(value.shape)}" + " on meta" * value.is_meta
            what += "" if value.layout == torch.strided else f" {value.layout}"
        cause = f"an int8 state has one uint8 for each 128 of the parameter's {p.numel()} elements"
        raise StateError(explain(where, what, cause, "Load the state of this very model"))
    return value


def _tensor(where: str, value: Any, p: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    whole = isinstance(value, Tensor) and value.layout == torch.strided and not hasattr(value, "device_mesh")
    if not whole or value.dtype not in dtypes or value.is_meta:
        what = f"{value.dtype} {value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        cause = f"not a plain tensor of {'floats' if dtypes == FLOATS else 'uint8'}"
        raise StateError(explain(where, what, cause, _REMEDY))
    if value.shape != p.shape:
        remedy = "Load the state of this very model"
        raise StateError(explain(where, tuple(value.shape), f"the parameter is {tuple(p.shape)}", remedy))
    return value


def _step(where: str, value: Any) -> float:
    """A count of steps: an int, or a tensor as torch has it since 1.12."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    if plain and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value != int(value):
        raise StateError(explain(where, value, "not a count of steps", _REMEDY))
    return float(value)
