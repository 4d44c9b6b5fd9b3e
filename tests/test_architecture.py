"""Imports between packages have one direction, given by the table in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedrax"
TEMPLATE = PACKAGE / "cli" / "template"
"""The project that `fedrax new` writes, which imports as user code does."""
FILES = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(TEMPLATE)}


def module_of(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)


MODULES = {module_of(path) for path in FILES}


def levels() -> dict[str, int]:
    """Row in the table of each package, by module name."""
    rows = re.findall(r"^\| (`.+`) \|", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.MULTILINE)
    names = ((level, name) for level, row in enumerate(rows) for name in re.findall(r"`([\w.]+)`", row))
    return {"fedrax" if name == "fedrax" else f"fedrax.{name}": level for level, name in names}


LEVELS = levels()


def package_of(module: str) -> str:
    """The innermost package of the table that contains a module; ``fedrax`` contains only its own file."""
    while module not in LEVELS:
        module = module.rpartition(".")[0]
        assert module not in ("", "fedrax"), "a module has no package in docs/architecture.md"
    return module


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and module of each import of fedrax in a file, including local imports."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [name.name for name in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            inside = (f"{node.module}.{name}" for name in names)
            names = [name if name in MODULES else str(node.module) for name in inside]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "fedrax")


def violations(module: str, source: str) -> list[str]:
    """Imports of a file from the same or a higher level, as messages."""
    package = package_of(module)
    return [
        f"{module}, line {line}: {package} imports {name}"
        for line, name in imported(source)
        if package_of(name) != package and LEVELS[package_of(name)] <= LEVELS[package]
    ]


def test_table_lists_every_package():
    assert LEVELS.keys() <= MODULES and len(LEVELS) > 15
    assert {package_of(module) for module in MODULES} == LEVELS.keys()


def test_imports_have_one_direction():
    assert not [line for path, source in FILES.items() for line in violations(module_of(path), source)]


def test_imports_in_the_wrong_direction_are_detected():
    lazily = "if TYPE_CHECKING:\n    from fedrax import report, tree\n\ndef f():\n    import fedrax\n"
    assert violations("fedrax.contract.task", lazily) == [
        "fedrax.contract.task, line 2: fedrax.contract imports fedrax.report",
        "fedrax.contract.task, line 5: fedrax.contract imports fedrax",
    ]
    assert violations("fedrax.analysis.rendering", "from fedrax.profiling.rendering import draw")
    assert violations("fedrax.privacy.ledger", "from fedrax.privacy.audit.game import observe_client")
    assert not violations("fedrax.privacy.audit.game", "from fedrax.privacy.ledger import Ledger")


def test_page_names_existing_modules():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    paths = re.findall(r"`([a-z_]+/[\w/]+\.py)`", page)
    missing = [path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert len(paths) > 20 and not missing
