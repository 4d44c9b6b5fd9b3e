"""Configuration objects from tables (what a TOML file holds) and back, for any nested dataclasses.

Reading is strict: an unknown key or name, or a value of the wrong type, is refused in a sentence that names the
file, the table and the key. Writing is complete: reading what was written gives an equal object. A field that
may be an object of several classes is a table whose key ``name`` chooses the class; ``"none"`` stands for None.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fedrax.algorithms import algorithms
from fedrax.contract.algorithm import Algorithm, is_algorithm
from fedrax.errors import FedraxError, unknown

Table = dict[str, Any]
_SCALARS = (bool, int, float, str, Path, type(None))


@dataclass(frozen=True)
class Choice:
    """A field whose value is an object of one of several classes, chosen by name."""

    kind: str
    """What the classes are, for messages: "algorithm"."""
    classes: Callable[[], Mapping[str, type]]
    """Name -> class."""
    adapt: Callable[[Any], type] | None = None
    """Makes a class of what the user's own ``file.py:name`` holds; None where only known names are allowed."""
    keep: bool = False
    """Whether another name, given on the command line, keeps those of the file's keys that it knows too."""

    def find(self, name: str, folder: Path) -> type:
        """The class called ``name``; case, "-" and "_" do not matter. The user's own lie relative to ``folder``."""
        classes = self.classes()
        if self.adapt is not None and ":" in name:
            where, found = import_named(name, folder)
            return _remember(self.adapt(found), where)
        plain = {_squeezed(known): known for known in classes}
        if _squeezed(name) not in plain:
            raise unknown(self.kind, name, classes)
        return classes[plain[_squeezed(name)]]

    def name_of(self, value: Any) -> str:
        """The name under which ``find`` gives the class of ``value``."""
        for name, known in self.classes().items():
            if type(value) is known:
                return name
        if type(value) in _OWN:
            return _OWN[type(value)]
        raise FedraxError(f"{type(value).__name__} cannot be written to a file: it is not a known {self.kind}.")


_OWN: dict[type, str] = {}


def _remember(cls: type, name: str) -> type:
    _OWN[cls] = name
    return cls


def _squeezed(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


def snake_case(name: str) -> str:
    """``StepDecay`` -> ``step_decay``, ``SGD`` -> ``sgd``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def own_algorithm(found: Any) -> type:
    """What ``file.py:Class`` must be to serve as an algorithm."""
    if not is_algorithm(found):
        raise FedraxError(f"{getattr(found, '__name__', found)!r} is not a subclass of fedrax.Algorithm.")
    return found


ALGORITHM = Choice("algorithm", algorithms, own_algorithm, keep=True)


def choice_of(hint: Any, kind: str) -> Choice | None:
    """The choice that a field of this type offers, or None: marked so, an algorithm, or a union of dataclasses."""
    if typing.get_origin(hint) is Annotated:
        marks = [mark for mark in typing.get_args(hint)[1:] if isinstance(mark, Choice)]
        return marks[0] if marks else choice_of(typing.get_args(hint)[0], kind)
    if hint is Algorithm:
        return ALGORITHM
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if isinstance(part, type) and dataclasses.is_dataclass(part)]
        classes = {snake_case(part.__name__): part for part in parts}
        plain = {name: part for name, part in classes.items() if all(map(_is_plain, _hints(part).values()))}
        if plain:
            return Choice(kind.replace("_", " "), lambda: plain)
    return None


def _is_plain(hint: Any) -> bool:
    """Whether a file can hold a value of this type."""
    if typing.get_origin(hint) is Annotated:
        return any(isinstance(mark, Choice) for mark in typing.get_args(hint)) or _is_plain(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_plain(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) in (tuple, Literal):
        return True
    return hint in _SCALARS or dataclasses.is_dataclass(hint)


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _defaults(cls: type, base: Any) -> dict[str, Any]:
    """The value of each field where a table leaves it out: that of ``base`` if it is a ``cls``, else the class's."""
    if type(base) is cls:
        return {field.name: getattr(base, field.name) for field in dataclasses.fields(cls)}
    made = {}
    for field in dataclasses.fields(cls):
        made[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    return made


@dataclass(frozen=True)
class Reader:
    """Makes objects of tables. ``source`` opens every message; paths in the file are relative to ``folder``.

    ``missing`` stands for values that a table must hold and does not; without it they are refused.
    """

    source: str
    folder: Path
    missing: Any = None

    def error(self, path: str, message: str) -> FedraxError:
        """The error about the table or key at ``path``."""
        return FedraxError(f"{self.source}: {path + ': ' if path else ''}{message}")

    def fields(self, cls: type, table: Any, path: str, base: Any = None, skip: Collection[str] = ()) -> Any:
        """A ``cls`` from ``table``; what the table leaves out is as in ``base``, or as the class says."""
        if not isinstance(table, Mapping):
            raise self.error(path, f"a table of settings is needed here, not {table!r}.")
        hints, defaults = _hints(cls), _defaults(cls, base)
        values = {}
        for key, value in table.items():
            if key in skip:
                continue
            if key not in hints:
                raise self.error(f"[{path}]" if path else "", str(unknown("key", key, hints)))
            at = f"{path}.{key}" if path else key
            values[key] = self.value(hints[key], value, at, defaults[key])
        values = defaults | values
        missing = [name for name, value in values.items() if value is MISSING]
        if self.missing is not None:
            values |= dict.fromkeys(missing, self.missing)
        elif missing:
            raise self.error(f"[{path}]", f"the key {missing[0]!r} is missing.")
        return cls(**values)

    def choice(self, choice: Choice, table: Any, path: str, base: Any = None) -> Any:
        """An object of the class that the table's ``name`` chooses, or of base's class if there is no name."""
        if isinstance(table, str):
            table = {"name": table}
        if not isinstance(table, Mapping):
            raise self.error(path, f"a table with a name is needed here, not {table!r}.")
        if "name" in table:
            if not isinstance(table["name"], str):
                raise self.error(f"{path}.name", f"must be a string, not {table['name']!r}.")
            try:
                cls = choice.find(table["name"], self.folder)
            except FedraxError as error:
                raise self.error(f"[{path}]", str(error)) from error
        elif dataclasses.is_dataclass(base):
            cls = type(base)
        else:
            raise self.error(f"[{path}]", f"the key 'name' is missing; known are: {', '.join(choice.classes())}.")
        skip = () if "name" in _hints(cls) else ("name",)
        return self.fields(cls, table, path, base, skip)

    def value(self, hint: Any, value: Any, path: str, base: Any = None) -> Any:
        """``value`` as the type ``hint`` asks, with whole numbers accepted as floats and strings as paths."""
        parts = _parts(hint)
        if value == "none" and type(None) in parts:
            return None
        choice = choice_of(hint, path.rpartition(".")[2])
        if choice is not None:
            return self.choice(choice, value, path, base)
        for part in parts:
            if dataclasses.is_dataclass(part):
                return self.fields(typing.cast(type, part), value, path, base)
            fits, converted = self._scalar(part, value)
            if fits:
                return converted
        raise self.error(path, f"must be {' or '.join(filter(None, map(_wanted, parts)))}, not {value!r}.")

    def _scalar(self, hint: Any, value: Any) -> tuple[bool, Any]:
        """Whether ``value`` is of this type, and the value so converted."""
        if typing.get_origin(hint) is Literal:
            return value in typing.get_args(hint), value
        if typing.get_origin(hint) is tuple:
            return self._tuple(typing.get_args(hint), value)
        if hint is Path and isinstance(value, str):
            return True, self.folder / Path(value).expanduser()
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return True, float(value)
        return type(value) is hint, value

    def _tuple(self, parts: tuple, value: Any) -> tuple[bool, Any]:
        if not isinstance(value, list | tuple):
            return False, value
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else list(parts)
        if len(kinds) != len(value):
            return False, value
        checked = [self._scalar(_parts(kind)[0], item) for kind, item in zip(kinds, value, strict=True)]
        return all(fits for fits, _ in checked), tuple(item for _, item in checked)


def _parts(hint: Any) -> list[Any]:
    """The alternatives of a type, annotations taken off; paths before strings."""
    if typing.get_origin(hint) is Annotated:
        return _parts(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for alternative in typing.get_args(hint) for part in _parts(alternative)]
        return sorted(parts, key=lambda part: part is not Path)
    return [hint]


def _wanted(hint: Any) -> str:
    """A type in words."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        count = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"a list of {count}{'whole numbers' if _parts(parts[0])[0] is int else 'numbers'}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    return words.get(hint, "")


def table_of(value: Any, base: Any = None, skip: Collection[str] = ()) -> Table:
    """The complete table of a dataclass instance; ``base`` as when it is read back."""
    defaults, table = _defaults(type(value), base), {}
    for name, hint in _hints(type(value)).items():
        item, default = getattr(value, name), defaults[name]
        if name in skip or (item is None and default is None):
            continue
        choice = choice_of(hint, name)
        if item is None:
            table[name] = "none"
        elif choice is not None:
            table[name] = {"name": choice.name_of(item), **table_of(item, default)}
        elif dataclasses.is_dataclass(item):
            table[name] = table_of(item, default)
        else:
            table[name] = _plain_value(item)
    return table


def _plain_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, bool | int | float | str):
        return value
    return value.item()  # a scalar of NumPy or JAX


def import_named(name: str, folder: Path) -> tuple[str, Any]:
    """What ``path/to/file.py:attribute`` or ``module:attribute`` names, and that name with the path made absolute.

    The path is relative to ``folder``. Importing runs the user's code.
    """
    source, _, attribute = name.rpartition(":")
    try:
        if source.endswith(".py"):
            path = (folder / Path(source).expanduser()).resolve()
            source, module = str(path), _import_file(path)
        else:
            module = importlib.import_module(source)
    except FedraxError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise FedraxError(f"{source} cannot be imported: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise unknown(f"name in {source}:", attribute, public)
    return f"{source}:{attribute}", getattr(module, attribute)


@cache
def _import_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise FedraxError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"fedrax_own_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise FedraxError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def options_class(function: Callable, given: Collection[str], method: str) -> type:
    """A frozen dataclass of a function's options: its parameters but for those ``given`` by the caller.

    Its method of the name ``method`` calls the function with its options and those of the given arguments that
    the function takes.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    fields = []
    for name, parameter in parameters.items():
        if name not in given and parameter.kind is not parameter.VAR_KEYWORD:
            default = dataclasses.field() if parameter.default is parameter.empty else parameter.default
            fields.append((name, hints.get(name, str), default))

    def call(self: Any, **arguments: Any) -> Any:
        options = {name: getattr(self, name) for name, *_ in fields}
        return function(**{k: v for k, v in arguments.items() if k in parameters}, **options)

    namespace = {"__doc__": function.__doc__ or function.__name__, method: call}
    made = [(n, h, d if isinstance(d, dataclasses.Field) else dataclasses.field(default=d)) for n, h, d in fields]
    cls = dataclasses.make_dataclass(function.__name__, made, frozen=True, namespace=namespace)
    cls.__module__ = function.__module__
    return cls
