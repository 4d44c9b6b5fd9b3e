"""Fingerprints of user code: keys of the caches of traces and compiled programs, which change with an edit."""

from __future__ import annotations

import dataclasses
import dis
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

_LIBRARY_DIRS = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
_LIBRARY_PATHS = tuple(
    path.rstrip(os.sep) + os.sep
    for path in (str(Path(__file__).parents[1]), *_LIBRARY_DIRS, *site.getsitepackages(), site.getusersitepackages())
)
"""Directories of library code."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
"""Types of values that are compared by value."""
_CONTAINERS = (list, dict, set)
_MAX_OBJECTS, _MAX_ITEMS = 5_000, 100
"""Most objects that are visited, and most items of one container. User methods refer to a handful of objects."""
_WRAPPED_ATTRIBUTES = ("__wrapped__", "fun", "jvp", "fwd", "bwd")
"""Attributes in which decorators and JAX's transformations store the functions that they wrap."""


def is_library_code(path: str) -> bool:
    """Whether a file belongs to an installed package or the standard library."""
    return path.startswith(_LIBRARY_PATHS) or "site-packages" in path or "dist-packages" in path


def closure_values(function: types.FunctionType) -> list[Any]:
    """The values in a function's closure."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return found


class CodeFingerprint:
    """Hashable fingerprint of the user code that is reachable from some objects: functions, classes and constants.

    Two fingerprints are equal if no code was edited in between. If a notebook cell redefines a helper function, the
    method that calls it, its class and its shapes stay the same, but traces with the old helper are invalid. The
    content of lists, dictionaries and objects is not part of the fingerprint, since it may change during a run (counts,
    histories); JAX does not trace such changes either. A different container under the same name is an edit. Fields of
    a method are not part of it either: they are arguments of compiled programs.

    Args:
        roots: objects to start from.
    """

    def __init__(self, *roots: Any):
        found, seen, waiting = [], {}, list(roots)
        while waiting and len(seen) < _MAX_OBJECTS:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value  # kept alive, so that its ID is not reused
                try:
                    waiting += _children(value, found)
                except Exception:  # attribute access may run user code
                    continue
        self._parts = tuple(found)
        self._hash = hash(self._parts)

    def describe(self) -> str:
        """Text that is equal in another process with the same version of Python; arrays and objects are left out."""
        return repr([_describe(part) for part in self._parts if not isinstance(part, _Identity)])

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodeFingerprint) and self._hash == other._hash and self._parts == other._parts


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """An array or object that a function refers to, compared by identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def _describe(part: Any) -> Any:
    """Text, or nested tuples of text, of a part of a fingerprint."""
    if isinstance(part, types.CodeType):
        return part.co_name, part.co_code, part.co_names, [_describe(value) for value in part.co_consts]
    return sorted(map(repr, part)) if isinstance(part, frozenset) else repr(part)


def _children(value: Any, found: list) -> Iterable[Any]:
    """Objects reachable from ``value`` in one step; code and constants are added to ``found``."""
    match value:
        case types.FunctionType():
            return _function_children(value, found)
        case types.MethodType():
            return [value.__func__, value.__self__]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget]
        case functools.partial():
            return [value.func, *_record_values([*value.args, *value.keywords.values()], found)]
        case functools.cached_property():
            return [value.func]
        case type():
            own = [cls for cls in value.__mro__ if _is_user_module(sys.modules.get(cls.__module__))]
            constants = [v for cls in own for name, v in vars(cls).items() if not name.startswith("__")]
            special = [v for cls in own for name, v in vars(cls).items() if name.startswith("__") and callable(v)]
            return _record_values(constants, found) + special
        case tuple() | frozenset():
            return _record_values(list(islice(value, _MAX_ITEMS)), found)
        case list() | set():
            return filter(callable, islice(value, _MAX_ITEMS))
        case dict() | types.MappingProxyType():
            return filter(callable, islice(value.values(), _MAX_ITEMS))
    if dataclasses.is_dataclass(value) or _is_user_module(sys.modules.get(type(value).__module__)):
        return [type(value), *_non_scalars(islice(getattr(value, "__dict__", {}).values(), _MAX_ITEMS))]
    return _non_scalars(getattr(value, name, None) for name in _WRAPPED_ATTRIBUTES) if callable(value) else []


def _function_children(function: types.FunctionType, found: list) -> list[Any]:
    """:func:`_children` of a function: its defaults, closure and the globals that it uses."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *closure_values(function)]
    code = function.__code__
    if not is_library_code(code.co_filename):
        found.append(code)
        names, attributes = _referenced_names(code)
        named = [function.__globals__[name] for name in names if name in function.__globals__]
        named += _module_attributes(named, attributes)
        found += [_Identity(value) for value in named if _is_mutable(value)]
        held += named
    return _record_values(held, found)


def _module_attributes(values: Sequence[Any], attributes: Sequence[str]) -> list[Any]:
    """Values that ``module.name`` may refer to in a function, for user modules and their submodules."""
    found, modules = [], [value for value in values if isinstance(value, types.ModuleType) and _is_user_module(value)]
    for module in modules:
        inside = [vars(module)[name] for name in attributes if name in vars(module)]
        modules += [
            one for one in inside if isinstance(one, types.ModuleType) and _is_user_module(one) and one not in modules
        ]
        found += inside
    return found


@functools.lru_cache(1024)
def _referenced_names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """(names of globals, names of attributes) that a function and its inner functions use."""
    globals_ = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            inner = _referenced_names(part)
            globals_.update(inner[0])
            attributes.update(inner[1])
    return sorted(globals_), sorted(attributes)


def _record_values(values: list[Any], found: list) -> list[Any]:
    """Add plain values, arrays and names of callables to ``found``; returns the values that may refer to functions."""
    for value in values:
        if isinstance(value, _PLAIN):
            found.append((type(value), repr(value)))
        elif isinstance(value, jax.Array | np.ndarray):
            found.append(_Identity(value))
        elif callable(value):
            module = str(getattr(value, "__module__", ""))
            # user modules have another name in another process, and their code is part of the fingerprint itself
            library = "" if _is_user_module(sys.modules.get(module)) else module
            found.append((library, str(getattr(value, "__qualname__", ""))))
    return _non_scalars(values)


def _non_scalars(values: Iterable[Any]) -> list[Any]:
    """The values that may refer to functions."""
    return [value for value in values if not isinstance(value, (*_PLAIN, jax.Array, np.ndarray, types.ModuleType))]


def _is_mutable(value: Any) -> bool:
    """Whether a value may change in place: a container, or an instance of a user class."""
    return isinstance(value, _CONTAINERS) or (
        not isinstance(value, type | types.FunctionType) and _is_user_module(sys.modules.get(type(value).__module__))
    )


def _is_user_module(module: Any) -> bool:
    """Whether a module is user code: a notebook, a script, a file outside of installed packages."""
    if getattr(module, "__name__", None) == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not is_library_code(file)
