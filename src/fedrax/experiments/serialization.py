"""Conversion of nested dataclasses to TOML tables and back.

Reading is strict: an unknown key or name, or a value of the wrong type, raises an error that names the file, the table
and the key. Writing is complete: reading a written table gives an equal object. A field that may have one of several
classes is a table whose key ``name`` chooses the class; ``"none"`` stands for None.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedrax.config.annotations import (
    Field,
    LazyClasses,
    as_float,
    fields_of,
    has_shared_methods,
    infer_type,
    snake_case,
    type_hints,
)
from fedrax.config.hyperparameters import check_class_definition
from fedrax.contract.algorithm import Algorithm
from fedrax.errors import FedraxError, plain_name, unknown
from fedrax.experiments.method_registry import KNOWN_AS, algorithms
from fedrax.experiments.user_code import Trust, import_named
from fedrax.files import resolve_path

TomlTable = dict[str, Any]
"""A table of a TOML file."""
METHODS = ("algorithm", "inner")
"""Keys of tables of methods, whose settings are kept when the name changes, because methods share them."""


@dataclass(frozen=True)
class ClassChoice:
    """A field whose value is an object of one of several classes, chosen by name."""

    kind: str
    """What the classes are, for messages: "algorithm"."""
    classes: Callable[[], Mapping[str, type]]
    """Returns the classes by name."""
    adapt: Callable[[Any], type] | None = None
    """Makes a class from the object at a user's ``file.py:name``; None if only known names are allowed."""
    keep: bool = False
    """Whether a name on the command line keeps the file's keys that the new class has, too."""
    known_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For names of the literature what to write instead."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For suffixes of files the name of the class that reads them."""

    def find(self, name: str, folder: Path, trust: Trust = "beside") -> type:
        """The class called ``name``, ignoring case, "-" and "_".

        Args:
            name: The name, or ``file.py:name`` of user code.
            folder: Folder to which paths of user code are relative.
            trust: Which user code may be imported.

        Returns:
            The class; raises FedraxError for an unknown one.
        """
        classes = self.classes()
        if self.adapt is not None and ":" in name:
            where, found = import_named(name, folder, trust)
            cls = self.adapt(found)
            if dataclasses.is_dataclass(cls) and any(field.name == "name" for field in dataclasses.fields(cls)):
                raise FedraxError(
                    f"{where} has a parameter or field called name, the key that chooses the {self.kind}: rename it."
                )
            _USER_CLASSES[cls] = where
            return cls
        plain = {plain_name(known): known for known in classes}
        if plain_name(name) in self.known_as:
            raise FedraxError(f"the {self.kind} {name!r} is here {self.known_as[plain_name(name)]}")
        if plain_name(name) not in plain:
            raise self._unknown(name, classes)
        return classes[plain[plain_name(name)]]

    def _unknown(self, name: str, classes: Mapping[str, type]) -> FedraxError:
        """The error for an unknown name, which may be the name of a file."""
        suffix = Path(name).suffix.lower()
        if suffix in self.files:
            return FedraxError(f"{name!r} is a file: the {self.kind} is {self.files[suffix]!r}, and its path {name!r}")
        if self.adapt is not None and suffix == ".py":
            return FedraxError(f"{name!r} is a file: write {name}:NAME with the name of the {self.kind} in it")
        return unknown(self.kind, name, classes)

    def knows(self, name: Any) -> bool:
        """Whether ``name`` is the name of a class."""
        return isinstance(name, str) and plain_name(name) in map(plain_name, self.classes())

    def name_of(self, value: Any) -> str:
        """The name for which ``find`` returns the class of ``value``."""
        for name, known in self.classes().items():
            if type(value) is known:
                return name
        user_name = user_class_name(type(value))
        if user_name is not None:
            return user_name
        raise FedraxError(f"{type(value).__name__} cannot be written to a file: it is not a known {self.kind}.")


_USER_CLASSES: dict[type, str] = {}
"""User classes that were imported, with their ``file.py:name``."""
_NAME_SYNONYMS = ("class", "kind", "method", "type")
"""Keys that files of other libraries use for ``name``."""


def user_class_name(cls: type) -> str | None:
    """The ``file.py:name`` of a user class, with an absolute path; None for classes of the library."""
    return _USER_CLASSES.get(cls)


def names_another(base: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Whether both tables name a class, and not the same one."""
    first, second = base.get("name"), table.get("name")
    return isinstance(first, str) and isinstance(second, str) and plain_name(first) != plain_name(second)


def user_algorithm(found: Any) -> type:
    """Check a user's object for an algorithm class."""
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise FedraxError(f"{getattr(found, '__name__', found)!r} is not a subclass of fedrax.Algorithm.")
    check_class_definition(found)
    return found


ALGORITHM = ClassChoice("algorithm", algorithms, user_algorithm, keep=True, known_as=KNOWN_AS)
"""The choice of a method."""


def choice_of(field: Field) -> ClassChoice | None:
    """The choice of a field that is marked with one, is an algorithm, or has several (or optional) dataclasses."""
    marks = [mark for mark in field.metadata if isinstance(mark, ClassChoice)]
    if marks:
        return marks[0]
    if field.classes == (Algorithm,):
        return ALGORITHM
    concrete = [cls for cls in field.classes if not inspect.isabstract(cls)]
    known = {snake_case(cls.__name__): cls for cls in concrete if all(map(fits_file, fields_of(cls).values()))}
    if known and (len(field.types) > 1 or field.optional):
        kind = field.name.replace("_", " ")
        alike = len(field.classes) > 1 and has_shared_methods(field.classes[0], field.classes)
        more = next((mark.classes for mark in field.metadata if isinstance(mark, LazyClasses)), dict)
        return ClassChoice(
            kind, lambda: known | dict(more()), partial(_user_class, kind, field.classes) if alike else None
        )
    return None


def _user_class(kind: str, classes: tuple[type, ...], found: Any) -> type:
    """Check a user's object for a class with the interface that ``classes`` share."""
    if not (isinstance(found, type) and has_shared_methods(found, classes)):
        known = ", ".join(sorted(cls.__name__ for cls in classes))
        raise FedraxError(
            f"{getattr(found, '__name__', found)!r} cannot be the {kind}: write a class with the decorator"
            f" @hyperparameters and the methods that {known} have."
        )
    check_class_definition(found)
    return found


FROM_PYTHON = "give it from Python, or as a default of your own algorithm"
"""Remedy in messages about values that no file can hold."""


def fits_file(field: Field) -> bool:
    """Whether a file can hold a value of the field."""
    return field.serializable or field.optional or choice_of(field) is not None


def is_serializable(cls: type) -> bool:
    """Whether a file can hold all fields of a class."""
    return all(map(fits_file, fields_of(cls).values()))


def defaults_of(cls: type, base: Any = None) -> dict[str, Any]:
    """The default of each field: its value in ``base`` if that is a ``cls``, otherwise the default of the class."""
    if type(base) is cls:
        return {field.name: getattr(base, field.name) for field in dataclasses.fields(cls)}
    made = {}
    for field in dataclasses.fields(cls):
        made[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    return made


@dataclass(frozen=True)
class Reader:
    """Makes objects from tables."""

    source: str
    """Prefix of messages."""
    folder: Path
    """Folder to which paths in the table are relative."""
    missing: Any = None
    """Value of fields without a default that the table does not have; None raises an error for them."""
    trust: Trust = "beside"
    """Which user code the table may name."""
    also_known: Sequence[str] = ()
    """Keys at the top of the file that are read elsewhere, for messages about unknown keys."""

    def error(self, path: str, message: str) -> FedraxError:
        """The error about the table or key at ``path``."""
        return FedraxError(f"{self.source}: {path + ': ' if path else ''}{message}")

    def fields(self, cls: type, table: Any, path: str, base: Any = None) -> Any:
        """A ``cls`` from ``table``; other fields are those of ``base``, or the defaults of the class."""
        if not isinstance(table, Mapping):
            raise self.error(path, f"a table of settings is needed here, not {table!r}.")
        fields, defaults = fields_of(cls), defaults_of(cls, base)
        values = {}
        for key, value in table.items():
            if key not in fields:
                raise self.error(
                    f"[{path}]" if path else "",
                    _unknown_key(key, [*fields, *(() if path else self.also_known)], defaults),
                )
            at = f"{path}.{key}" if path else key
            values[key] = self.value(fields[key], value, at, defaults[key])
        # a field that replaces another, such as steps and epochs, unsets the default of the other
        instead = {other: None for name, other in getattr(cls, "_instead", {}).items() if name in values}
        values = defaults | instead | values
        missing = [name for name, value in values.items() if value is MISSING]
        if self.missing is not None:
            values |= dict.fromkeys(missing, self.missing)
        elif missing:
            raise self.error(f"[{path}]", f"the key {missing[0]!r} is missing.")
        return cls(**values)

    def choice(self, choice: ClassChoice, table: Any, path: str, base: Any = None) -> Any:
        """An object of the class that the table's ``name`` chooses; by default that of ``base``, or the only class."""
        if isinstance(table, str):
            table = {"name": table}
        if not isinstance(table, Mapping):
            raise self.error(path, f"a table with a name is needed here, not {table!r}.")
        if "name" in table:
            if not isinstance(table["name"], str):
                raise self.error(f"{path}.name", f"must be a string, not {table['name']!r}.")
            try:
                cls = choice.find(table["name"], self.folder, self.trust)
            except FedraxError as error:
                raise self.error(f"[{path}]", str(error)) from error
        elif dataclasses.is_dataclass(base) or len(choice.classes()) == 1:
            cls = type(base) if dataclasses.is_dataclass(base) else next(iter(choice.classes().values()))
            for key, value in table.items():
                is_name = isinstance(value, str) and (key in _NAME_SYNONYMS or choice.knows(value))
                if is_name and key not in fields_of(cls):
                    raise self.error(f"[{path}]", f"the key that chooses the {choice.kind} is 'name', not {key!r}.")
        else:
            raise self.error(f"[{path}]", f"the key 'name' is missing; known are: {', '.join(choice.classes())}.")
        return self.fields(cls, {key: value for key, value in table.items() if key != "name"}, path, base)

    def value(self, field: Field, value: Any, path: str, base: Any = None) -> Any:
        """``value`` converted to the type of ``field``: integers to floats, strings to paths, tables to objects."""
        if value == "none" and field.optional:
            return None
        choice = choice_of(field)
        if choice is not None:
            return self.choice(choice, value, path, base)
        if field.classes:
            cls = field.classes[0]
            if type(base) is not cls and not is_serializable(cls):
                raise self.error(path, f"no file can describe {cls.__name__}: {FROM_PYTHON}.")
            return self.fields(cls, value, path, base)
        made = self._plain(field, value)
        if made is MISSING:
            wanted = f"must be {field.description}" if field.description else "cannot be set in a file"
            raise self.error(path, f"{wanted}, not {value!r}.")
        problem = field.problem(made)
        if problem:
            raise self.error("", f"{path} {problem}, not {value!r}.")
        return made

    def _plain(self, field: Field, value: Any) -> Any:
        """``value`` converted to the first type of ``field`` that it fits, paths before strings; MISSING if none."""
        for option in sorted(field.types, key=lambda option: option.type is not Path):
            if option.type is Path and isinstance(value, str):
                return resolve_path(self.folder, value)
            if isinstance(value, str) and value in option.members:
                return option.members[value]
            if option.description and option.accepts(value):
                if option.items:
                    items = [self._plain(f, item) for f, item in option.item_fields(value)]
                    return items if option.type is list else tuple(items)
                return as_float(value) if option.type is float else value
        return MISSING


def _unknown_key(key: str, fields: Sequence[str], defaults: Mapping[str, Any]) -> str:
    """The message about an unknown key, with the paths of nested tables that have such a key."""
    inside = " or ".join(map(repr, _nested_paths(key, defaults)))
    return f"unknown key {key!r}; did you mean {inside}?" if inside else str(unknown("key", key, fields))


def _nested_paths(key: str, values: Mapping[str, Any]) -> list[str]:
    """The paths of a key in nested tables, those at the smallest depth."""
    objects = {name: v for name, v in values.items() if dataclasses.is_dataclass(v) and not isinstance(v, type)}
    tables = {name: {f.name: getattr(v, f.name) for f in dataclasses.fields(v)} for name, v in objects.items()}
    here = [f"{name}.{key}" for name, table in tables.items() if key in table]
    return here or [f"{name}.{path}" for name, table in tables.items() for path in _nested_paths(key, table)]


def replaced_by(path: str, value: Any) -> str | None:
    """The path of the field that the one at ``path`` replaces: ``local.epochs`` for ``local.steps``."""
    *parents, last = path.split(".")
    for parent in parents:
        value = getattr(value, parent, None)
    other = getattr(type(value), "_instead", {}).get(last)
    return None if other is None else ".".join((*parents, other))


def table_of(value: Any, base: Any = None, folder: Path | None = None) -> TomlTable:
    """The complete table of a dataclass instance; ``base`` as when it is read back.

    Paths are absolute, or relative to ``folder``, the one of the file in which the table will be.
    """
    defaults, table = defaults_of(type(value), base), {}
    for name, field in fields_of(type(value)).items():
        item, default = getattr(value, name), defaults[name]
        choice = choice_of(field)
        if item is default and (item is None or not (choice or field.serializable)):
            continue  # no file can hold it, and reading gives the default
        if item is None:
            table[name] = "none"
        elif dataclasses.is_dataclass(item):
            chosen = {} if choice is None else {"name": _name_in(folder, choice.name_of(item))}
            table[name] = chosen | table_of(item, default, folder) | chosen
        else:
            table[name] = plain(item, folder)
    return table


def _name_in(folder: Path | None, name: str) -> str:
    """The name of a class in a file of a folder: the path of user code is relative to it."""
    source, _, attribute = name.rpartition(":")
    return f"{os.path.relpath(source, folder)}:{attribute}" if folder is not None and os.path.isabs(source) else name


def plain(value: Any, folder: Path | None = None) -> Any:
    """A scalar, path or list as a TOML value; a path is absolute, or relative to ``folder``."""
    if isinstance(value, Path):
        return str(value.resolve()) if folder is None else os.path.relpath(value.resolve(), folder)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(item, folder) for item in value]
    if isinstance(value, bool | int | float | str):
        return value
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or JAX
        return value.item()
    raise FedraxError(f"{value!r} cannot be written to a file.")


@cache
def options_class(function: Callable, given: tuple[str, ...], method: str) -> type:
    """A frozen dataclass of a function's options: its parameters except those ``given`` by the caller.

    The type of a parameter without annotation is that of its default. The method called ``method`` of the class calls
    the function with the options and those of the given arguments that the function has.
    """
    hints = type_hints(function)
    parameters = inspect.signature(function).parameters
    fields = []
    for name, parameter in parameters.items():
        if name not in given and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = MISSING if parameter.default is parameter.empty else parameter.default
            factory = MISSING if default is MISSING else lambda default=default: default  # a default may be a list
            fields.append((name, hints.get(name, infer_type(default)), dataclasses.field(default_factory=factory)))

    def call(self: Any, **arguments: Any) -> Any:
        options = {name: getattr(self, name) for name, *_ in fields}
        return function(**{k: v for k, v in arguments.items() if k in parameters}, **options)

    namespace = {"__doc__": function.__doc__ or function.__name__, method: call}
    cls = dataclasses.make_dataclass(function.__name__, fields, frozen=True, namespace=namespace)
    cls.__module__ = function.__module__
    return cls
