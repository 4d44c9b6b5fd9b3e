"""What functions of one's own are made of: by it a trace is known again, or not, after a line of them was edited."""

from __future__ import annotations

import dataclasses
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

FOREIGN = (str(Path(__file__).parents[1]), *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
"""Where code lies that is nobody's own."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST = 5_000
"""Objects that are looked at; what a method of one's own names is a handful."""


class Code:
    """The functions in some objects that belong to no package, with all functions, classes and numbers that they name.

    Equal where nothing was edited. A notebook's cell that is run again makes a helper anew while the method, its class
    and its shapes stay the same: what was traced with the old helper must not be found.
    """

    def __init__(self, *roots: Any):
        found, seen, waiting = [], {}, list(roots)
        while waiting and len(seen) < _MOST:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value  # held, so that nothing else takes its place in memory
                waiting += _inside(value, found)
        self._parts = tuple(found)
        self._hash = hash(self._parts)

    def described(self) -> str:
        """The same in words, which another process with the same Python gives alike; without arrays."""
        return repr([_described(part) for part in self._parts if not isinstance(part, _Held)])

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code) and self._hash == other._hash and self._parts == other._parts


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """An array that a function names: the same one, or another."""

    array: Any

    def __hash__(self) -> int:
        return id(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.array is other.array


def _described(part: Any) -> Any:
    if isinstance(part, types.CodeType):
        return part.co_name, part.co_code, part.co_names, [_described(value) for value in part.co_consts]
    return sorted(map(repr, part)) if isinstance(part, frozenset) else repr(part)


def _inside(value: Any, found: list) -> Iterable[Any]:
    """What to look at next; a function's own code and the numbers that it names go into ``found``."""
    match value:
        case types.FunctionType():
            return _named(value, found)
        case types.MethodType():
            return [value.__func__, value.__self__]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget]
        case functools.partial():
            return [value.func, *_noted([*value.args, *value.keywords.values()], found)]
        case functools.cached_property():
            return [value.func]
        case type():
            own = [cls for cls in value.__mro__ if _is_own(sys.modules.get(cls.__module__))]
            constants = [v for cls in own for name, v in vars(cls).items() if not name.startswith("__")]
            special = [v for cls in own for name, v in vars(cls).items() if name.startswith("__") and callable(v)]
            return _noted(constants, found) + special
        case tuple() | list() | set() | frozenset():
            return _objects(value)
        case dict() | types.MappingProxyType():
            return _objects(value.values())
    if callable(value) and isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return [wrapped]  # jax.jit's, functools.cache's
    if dataclasses.is_dataclass(value) or _is_own(sys.modules.get(type(value).__module__)):
        return [type(value), *_objects(getattr(value, "__dict__", {}).values())]
    return []


def _named(function: types.FunctionType, found: list) -> list[Any]:
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not yet, or no longer there
            continue
    code = function.__code__
    if not code.co_filename.startswith(FOREIGN):
        found.append(code)
        names = _names(code)
        named = [function.__globals__[name] for name in names if name in function.__globals__]
        modules = [value for value in named if isinstance(value, types.ModuleType) and _is_own(value)]
        held += named + [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return _noted(held, found)


def _names(code: types.CodeType) -> list[str]:
    """The names in a function and in those inside it."""
    inside = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return sorted({*code.co_names, *inside})


def _noted(values: list[Any], found: list) -> list[Any]:
    """``values`` without numbers, words and arrays, which go into ``found``."""
    for value in values:
        if isinstance(value, _PLAIN):
            found.append((type(value), repr(value)))
        elif isinstance(value, jax.Array | np.ndarray):
            found.append(_Held(value))
    return _objects(values)


def _objects(values: Iterable[Any]) -> list[Any]:
    """Those that may hold functions. What is in lists, dictionaries and objects changes while a program runs (counts,
    histories), and the numbers of a method's fields are known to JAX: they are no edits."""
    return [value for value in values if not isinstance(value, (*_PLAIN, jax.Array, np.ndarray, types.ModuleType))]


def _is_own(module: types.ModuleType | None) -> bool:
    """Whether a module belongs to no package: a notebook, a script, a file of one's own."""
    if module is None or module.__name__ == "__main__":
        return module is not None
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith(FOREIGN)
