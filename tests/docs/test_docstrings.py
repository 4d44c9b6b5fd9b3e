"""Public docstrings describe every argument, return value and field, and their examples run."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.method_pages import field_docstrings
from docs.reference_pages import NAMESPACES

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|References|Note):$", re.MULTILINE)


def exported(namespace: str) -> dict[str, Any]:
    """Classes and functions of a namespace by name."""
    module = importlib.import_module(namespace)
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == namespace and name[0] != "_"
    ]
    values = {name: getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}


def sections(docstring: str) -> dict[str, str]:
    """Text of each section of a Google-style docstring."""
    parts = SECTION.split(docstring)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(section: str) -> set[str]:
    """Names that an ``Args`` or ``Attributes`` section describes."""
    lines = textwrap.dedent(section.strip("\n")).splitlines()
    heads = [re.match(r"([*\w, ]+?)(?: \([^)]*\))?:(?: |$)", line) for line in lines]
    return {name.strip(" *") for head in heads if head for name in head[1].split(",")}


def problems_of_function(function: Callable, name: str, *, example: bool) -> Iterator[str]:
    docstring = inspect.getdoc(function) or ""
    if not docstring:
        yield f"{name} has no docstring"
        return
    found, signature = sections(docstring), inspect.signature(function)
    arguments = [p for p in signature.parameters if p not in ("self", "cls") and not p.startswith("_")]
    if missing := set(arguments) - described(found.get("Args", "")):
        yield f"{name}: Args lacks {', '.join(sorted(missing))}"
    returns = signature.return_annotation not in ("None", None, "NoReturn", inspect.Signature.empty)
    if returns and not {"Returns", "Yields"} & found.keys():
        yield f"{name}: no Returns"
    if example and not {"Example", "Examples"} & found.keys():
        yield f"{name}: no Example"


def problems_of_class(cls: type, name: str) -> Iterator[str]:
    docstring = vars(cls).get("__doc__") or ""
    found = sections(inspect.cleandoc(docstring))
    if not docstring:
        yield f"{name} has no docstring"
    if not {"Example", "Examples"} & found.keys():
        yield f"{name}: no Example"
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    fields += getattr(cls, "_fields", ())
    known = described(found.get("Attributes", "")) | described(found.get("Args", "")) | field_docstrings(cls).keys()
    if missing := {field for field in fields if not field.startswith("_")} - known:
        yield f"{name}: no docstring of the fields {', '.join(sorted(missing))}"
    if "__init__" in vars(cls) and not fields and str(vars(cls)["__init__"].__module__).startswith("fedrax"):
        arguments = set(inspect.signature(cls).parameters) - known
        if missing := {one for one in arguments if not one.startswith("_")}:
            yield f"{name}: Args lacks {', '.join(sorted(missing))}"
    for method, value in vars(cls).items():
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        inherited = any(method in vars(base) for base in cls.__mro__[1:] if base.__module__.startswith("fedrax"))
        if method.startswith("_") or inherited or not inspect.isfunction(value):
            continue
        yield from problems_of_function(value, f"{name}.{method}", example=False)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_public_docstrings_are_complete(namespace: str) -> None:
    found: list[str] = []
    for name, value in exported(namespace).items():
        if not value.__module__.startswith("fedrax"):
            continue
        if inspect.isclass(value):
            found += problems_of_class(value, f"{namespace}.{name}")
        else:
            found += problems_of_function(value, f"{namespace}.{name}", example=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_examples_of_docstrings_run(namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    seen = importlib.import_module("fedrax")
    names = {"fedrax": seen, "np": importlib.import_module("numpy"), "jnp": importlib.import_module("jax.numpy")}
    names["jax"] = importlib.import_module("jax")
    for name, value in exported(namespace).items():
        methods = [m for k, m in vars(value).items() if inspect.isfunction(m) and k[0] != "_"]
        for one in [value, *(methods if inspect.isclass(value) else [])]:
            for test in finder.find(one, name, globs=dict(names)):
                runner.run(test)
    assert not runner.failures
