"""One reference page for each public namespace, written from the names that the namespace exports.

Sphinx's autodoc and napoleon read signatures and docstrings; this module only lists what to document, so that a new
public name needs no entry anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

GENERATED = Path(__file__).parent / "_generated" / "reference"
NAMESPACES = (
    "fedrax",
    "fedrax.algorithms",
    "fedrax.contract",
    "fedrax.optim",
    "fedrax.participation",
    "fedrax.compression",
    "fedrax.personalization",
    "fedrax.robust",
    "fedrax.privacy",
    "fedrax.data",
    "fedrax.models",
    "fedrax.metrics",
    "fedrax.simulation",
    "fedrax.tuning",
    "fedrax.experiments",
    "fedrax.report",
    "fedrax.analysis",
    "fedrax.profiling",
    "fedrax.attacks",
    "fedrax.flower",
    "fedrax.testing",
    "fedrax.tree",
)
"""The public namespaces, in the order of the reference; documentation and examples import from these alone."""

TYPE_ALIASES = (
    "Decay",
    "Fraction",
    "Info",
    "NonNegative",
    "NonNegativeInt",
    "Participation",
    "Positive",
    "PositiveInt",
    "Tree",
)
"""Annotated types and unions that signatures show by name instead of spelled out."""


def exports(namespace: str) -> dict[str, Any]:
    """The public names of a namespace and what they stand for, submodules apart."""
    module = importlib.import_module(namespace)
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == namespace and name[0] != "_"
    ]
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def directive(namespace: str, name: str, value: Any) -> str:
    """The directive of one name; of a dictionary the keys are listed, of an alias what it stands for."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, Exception) else "class"
        return f".. auto{kind}:: {namespace}.{name}\n" + ("" if kind == "exception" else "   :members:\n")
    if inspect.isroutine(value):
        return f".. autofunction:: {namespace}.{name}\n"
    if isinstance(value, dict):
        text = "Keys: " + ", ".join(f"``{key}``" for key in value)
    else:
        alias = re.sub(r"(?:fedrax|jax|typing|numpy|pathlib)(?:[.]\w+)*[.]", "", str(value))
        text = f"Type alias: ``{alias}``"
    return f".. py:data:: {name}\n   :module: {namespace}\n\n   {text}\n"


def write_pages(folder: Path = GENERATED) -> None:
    """Write ``<namespace>.md`` for every namespace, and ``index.md`` with their table of contents.

    A name that several namespaces export is described in the one that comes last, next to its relatives, and linked
    from the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    homes = {id(value): f"{namespace}.{name}" for namespace in NAMESPACES for name, value in exports(namespace).items()}
    for namespace in NAMESPACES:
        names = exports(namespace)
        own = [name for name, value in names.items() if homes[id(value)] == f"{namespace}.{name}"]
        links = [f"- {{py:obj}}`{homes[id(names[name])]}`" for name in names if name not in own]
        described = "\n".join(directive(namespace, name, names[name]) for name in own)
        blocks = [f"# {namespace}", "```{eval-rst}\n.. automodule:: " + namespace + "\n   :no-members:\n```"]
        if links:
            blocks.append("Also here:\n\n" + "\n".join(links))
        if described:
            blocks.append("```{eval-rst}\n" + described + "```")
        (folder / f"{namespace}.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    entries = "\n".join(NAMESPACES)
    text = f"# Reference\n\nOne page for each public namespace.\n\n```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    (folder / "index.md").write_text(text, encoding="utf-8")


def escape_norms(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Hook of autodoc: ``|d|`` is a norm in the docstrings, not a substitution of reStructuredText."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        lines[i] = "".join(part if part.startswith("``") else part.replace("|", "\\|") for part in parts)


def keep_colons(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Hook of autodoc: napoleon takes the text before a colon in an attribute's first line for its type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def skip_dataclass_plumbing(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Hook of autodoc: methods that JAX or the validation of fields calls are not part of the reference."""
    return True if name in ("check", "tree_flatten", "tree_flatten_with_keys", "tree_unflatten") else None


def setup(app: Any) -> dict[str, bool]:
    """Connect the hooks; called by Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", escape_norms)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon, whose priority is 500
    app.connect("autodoc-skip-member", skip_dataclass_plumbing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
