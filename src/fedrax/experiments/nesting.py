"""Shared settings of methods, some of which are wrappers: a setting that a wrapper lacks is set on its inner method."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from fedrax.config.annotations import fields_of
from fedrax.errors import FedraxError
from fedrax.experiments.serialization import ALGORITHM, Reader, TomlTable, defaults_of


def shared_by(shared: Mapping[str, Any], own: Mapping[str, Any], reader: Reader) -> TomlTable:
    """Move the settings of all methods to the levels of nesting where one method has them.

    For a wrapper that has no ``local``, ``[algorithm.local]`` becomes ``[algorithm.inner.local]``. A key that no method
    has stays at the top, where the reader raises an error for it.

    Args:
        shared: The table of all methods.
        own: The table of this method.
        reader: Finds classes by name.

    Returns:
        The shared table, nested as this method is.
    """
    placed: TomlTable = {"inner": copy.deepcopy(shared["inner"])} if "inner" in shared else {}
    for key in shared.keys() - {"inner"}:
        table = placed
        for _ in range(_depth(key, {**shared, **own}, reader)):
            table["inner"] = table = _as_table(table.get("inner", {}))
        table[key] = shared[key]
    return placed


def with_tables(method: Mapping[str, Any]) -> TomlTable:
    """A method's table with names of inner methods replaced by tables."""
    inner = method.get("inner")
    return {**method, "inner": with_tables(_as_table(inner))} if isinstance(inner, str | Mapping) else dict(method)


def _depth(key: str, method: Mapping[str, Any], reader: Reader) -> int:
    """Number of wrappers around the method that has this setting; 0 if none has it.

    If an inner value is not a method, its depth is returned, and the reader raises an error for it.
    """
    depth, cls = 0, _class_of(method, reader)
    while cls is not None and key != "name":
        fields = fields_of(cls)
        if key in fields:
            return depth
        inner = method.get("inner", {})
        if "inner" not in fields:
            return 0
        if not isinstance(inner, str | Mapping):
            return depth + 1
        method, depth = _as_table(inner), depth + 1
        default = defaults_of(cls)["inner"]
        cls = _class_of(method, reader) if "name" in method else type(default)
        cls = cls if dataclasses.is_dataclass(cls) else None
    return depth


def _class_of(method: Mapping[str, Any], reader: Reader) -> type | None:
    """The class that a method's table names, None without a valid name."""
    name = method.get("name")
    try:
        return ALGORITHM.find(name, reader.folder, reader.trust) if isinstance(name, str) else None
    except FedraxError:
        return None


def _as_table(method: str | Mapping[str, Any]) -> TomlTable:
    """The table of a method that may be given by name."""
    return {"name": method} if isinstance(method, str) else dict(method)


def path_for(path: str, algorithm: Any) -> str:
    """The path of a setting in the method that has it: ``algorithm.inner.local.lr`` for ``algorithm.local.lr``."""
    first, key, *rest = path.split(".")
    inside: list[str] = []
    while first == "algorithm" and key != "name" and key not in fields_of(type(algorithm)):
        algorithm = getattr(algorithm, "inner", None)
        if not dataclasses.is_dataclass(algorithm):
            return path
        inside.append("inner")
    return ".".join([first, *inside, key, *rest])
