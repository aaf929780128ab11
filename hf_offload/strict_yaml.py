"""YAML read strictly: no duplicate keys, errors with their line, and values checked against type hints."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml

from hf_offload.errors import RecipeError, explain, nearest

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader keeps the last of two equal keys and says nothing; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Keys that come in through a merge (<<) may be overridden, so only the keys written here are compared.
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is given twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def parse(text: str, source: str) -> Any:
    """The value of a YAML document.

    Args:
        source: what the text is, for the error: a file's path, or an override.

    Raises:
        RecipeError: it does not parse; the message begins with `source:line:column`.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        cause = error.problem or error.context or "not valid YAML"
        raise RecipeError(f"{where}: does not parse as YAML: {cause}. Correct this line.") from None
    except (yaml.YAMLError, ValueError) as error:
        cause = str(error).strip().replace("\n", " ")
        raise RecipeError(f"{source}: does not parse as YAML: {cause}. Correct the file.") from None


def build(cls: type[T], given: Any, where: str) -> T:
    """An instance of the dataclass `cls` from a parsed mapping; null means the field's default.

    Args:
        where: dotted path of this mapping in the recipe, for messages; "" at the top.

    Raises:
        RecipeError: an unknown key (with the nearest valid one), a missing one, or a value of another type.
    """
    values = typed_fields(cls, given, where)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not optional and field.name not in values:
            raise RecipeError(f"{_join(where, field.name)}: missing. Add this key.")
    return cls(**values)


def typed_fields(cls: type, given: Any, where: str) -> dict[str, Any]:
    """`given` checked against the fields of `cls` by name and type, without building it. Nulls are left out."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise RecipeError(explain(where or "recipe", given, "not a mapping", "Write `key: value` lines under it"))
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    values = {}
    for key, value in given.items():
        if key not in known:
            raise RecipeError(explain(_join(where, key), value, "unknown key", suggest(str(key), known)))
        if value is not None:
            values[key] = coerce(value, hints[key], _join(where, key))
    return values


def coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint` asks for.

    Two things YAML 1.1 does are undone: `1e-3` (no dot) is text to it, and `no` is false. So text that reads as a
    number is taken where a float is wanted, and false becomes "no" where an enum that can be given as text is.

    Raises:
        RecipeError: a value of another type.
    """
    options = _options(hint)
    if Any in options or (value is None and type(None) in options):
        return value
    if isinstance(value, bool):
        if bool in options:
            return value
        if value is False and any(_is_enum(option) for option in options):
            return "no"
    elif isinstance(value, int):
        if int in options:
            return value
        if float in options:
            return float(value)
    elif isinstance(value, float):
        if float in options:
            return value
    elif isinstance(value, str):
        if str in options or any(_is_enum(option) for option in options):
            return value
        if float in options and (number := _number(value)) is not None:
            return number
    else:
        for option in options:
            origin = typing.get_origin(option) or option
            if isinstance(value, dict) and origin in (dict, Mapping):
                return value
            if isinstance(value, list) and origin in (list, tuple):
                inner = (typing.get_args(option) or (Any,))[0]
                return origin(coerce(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
    raise RecipeError(explain(where, value, f"is {_kind(value)}, not {_wanted(options)}", _remedy(options, value)))


def suggest(name: str, known: Sequence[str]) -> str:
    """`errors.nearest`, but of a long list only the names that come close: 120 names help nobody."""
    if len(known) <= 40:
        return nearest(name, known)
    close = difflib.get_close_matches(name, known, n=3)
    return f"Perhaps it is {' or '.join(map(repr, close))}" if close else "No known name comes close: check it"


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(option for part in typing.get_args(hint) for option in _options(part))
    return (hint,)


def _is_enum(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, enum.Enum)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}


def _wanted(options: tuple[Any, ...]) -> str:
    names = []
    for option in options:
        origin = typing.get_origin(option) or option
        if origin is type(None):
            continue
        if origin in (list, tuple):
            names.append("a list")
        else:
            names.append(_NAMES.get(origin, "text" if _is_enum(option) else getattr(origin, "__name__", str(origin))))
    return " or ".join(dict.fromkeys(names))


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return _NAMES.get(type(value), type(value).__name__)


def _remedy(options: tuple[Any, ...], value: Any) -> str:
    if str in options and not isinstance(value, (list, dict)):
        return "Put it in quotes if it is meant as text"
    return f"Give {_wanted(options)}"


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
