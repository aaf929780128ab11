"""YAML read strictly: no duplicate keys, errors with their line, and values checked against type hints."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hf_offload.errors import RecipeError, cut, explain, nearest, said_by, shown

T = TypeVar("T")

MOST_BYTES = 1 << 18
"""Of a document; the recipes that ship have 2,000."""
MOST_NODES = 20_000
"""Values in a document, those that an alias or a merge repeats counted again: nine lines of `[*a, *a, ...]` can stand
for a billion."""
DEEPEST = 40
"""Brackets within brackets."""
LONGEST_NUMBER = 60
"""Characters of a whole number: longer ones take time that grows as their square, and no float can hold them."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader keeps the last of two equal keys and says nothing; this one refuses them. And it refuses
    what a few bytes can blow up."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= DEEPEST:  # PyYAML takes a minute for a thousand open brackets
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Keys that come in through a merge (<<) may be overridden, so only the keys written here are compared.
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping: refused below
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise _refused(f"the key {shown(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > LONGEST_NUMBER:
            raise _refused(f"a whole number of {len(node.value)} characters", node)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refused(cause: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, cause, node.start_mark)


def _check_size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """How many values `node` stands for; 0 in `sizes` marks those that are being counted.

    Raises:
        ConstructorError: too many, or a node that holds itself.
    """
    if node in sizes:
        if not sizes[node]:
            raise _refused("this value holds itself", node)
        return sizes[node]
    sizes[node], size = 0, 1
    if isinstance(node, yaml.CollectionNode):
        for item in node.value:
            size += sum(_check_size(part, sizes) for part in (item if isinstance(item, tuple) else (item,)))
    if size > MOST_NODES:
        raise _refused(f"stands for more than {MOST_NODES:,} values", node)
    sizes[node] = size
    return size


def read_text(path: Path) -> str:
    """The text of a recipe's file.

    Raises:
        RecipeError: it cannot be read, is longer than a recipe can be, or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            held = file.read(MOST_BYTES + 1)
        if len(held) > MOST_BYTES:
            cause = f"longer than the {MOST_BYTES:,} bytes that a recipe can have"
            raise RecipeError(explain("recipe", str(path), cause, "Give a recipe, not its data"))
        return held.decode("utf-8")
    except OSError as error:
        cause = f"cannot be read: {error.strerror or error}"
        raise RecipeError(explain("recipe", str(path), cause, "Give a file that you may read")) from None
    except UnicodeDecodeError as error:
        raise RecipeError(explain("recipe", str(path), f"not UTF-8 text ({error})", "Save it as UTF-8")) from None


def parse(text: str, source: str) -> Any:
    """The value of a YAML document.

    Args:
        source: what the text is, for the error: a file's path, or an override.

    Raises:
        RecipeError: it does not parse; the message begins with `source:line:column`.
    """
    if len(text) > MOST_BYTES:
        raise RecipeError(f"{source}: has {len(text):,} characters; a recipe has {MOST_BYTES:,} at most. Shorten it.")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        cause = cut(error.problem or error.context or "not valid YAML")
        raise RecipeError(f"{where}: does not parse as YAML: {cause}. Correct this line.") from None
    except RecursionError:
        raise RecipeError(f"{source}: does not parse as YAML: nested too deeply. Write it flatter.") from None
    except (yaml.YAMLError, ValueError) as error:
        cause = said_by(error)
        raise RecipeError(f"{source}: does not parse as YAML: {cause}. Correct the file.") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError):  # PyYAML's own, on `!!int ""`, `!!bool maybe` ...
        cause = "a value that is not of the type its tag (`!!...`) names"
        raise RecipeError(f"{source}: does not parse as YAML: {cause}. Take the tag out.") from None


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
        if float in options and (number := _number(value)) is not None:
            return number
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


def _number(given: str | int) -> float | None:
    try:
        return float(given)
    except (ValueError, OverflowError):
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
