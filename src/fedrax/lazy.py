"""Lazy public namespaces: names are imported when they are first used."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach_stub(package: str, init_file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Export the names that the stub file ``__init__.pyi`` of a package imports, without importing them.

    The stub is the only list of a namespace's names: editors and type checkers read it, and so does this function.
    Lazy imports keep ``import fedrax`` fast and let a namespace export wrappers that import its own modules.

    Args:
        package: ``__name__`` of the package.
        init_file: ``__file__`` of the package.

    Returns:
        ``__getattr__``, ``__dir__`` and ``__all__`` of the package.
    """
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    home = {name.name: str(node.module) for node in imports for name in node.names}

    def get_attribute(name: str) -> Any:
        if name not in home:
            near = difflib.get_close_matches(name, home, n=1) or [
                other for other in home if other.lower() == name.lower()
            ]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module = home[name]
        if module == package or f"{module}.{name}" in sys.modules:
            value = importlib.import_module(f"{module}.{name}")
        else:
            value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute, lambda: sorted(home), list(home)
