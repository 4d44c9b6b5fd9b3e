"""The reference, written as users call things: signatures and types as the source has them, and fields listed once.

Sphinx reads annotations after Python has resolved them, so that ``lr: Positive`` would become a bound object's repr.
Here they are taken from the source's text.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REFERENCE = Path(__file__).parent / "reference"
RETURNED = {
    "ClientData", "Cohort", "Diagnosis", "Heavy", "Heterogeneity", "Limits", "LocalResult", "Outcome", "Part",
    "Partition", "Point", "Profile", "Reconstruction", "RecordedExchange", "RecordedUpload", "Result", "RunInfo",
    "Score", "SearchResult", "Seen", "Snapshot", "Spent", "Step", "Trial", "TuningResult", "Verdict",
}  # fmt: skip
"""Classes whose objects fedrax makes: how is not shown."""
CALLED_BY_FEDRAX = ("check", "tree_flatten", "tree_flatten_with_keys", "tree_unflatten")


class Field(NamedTuple):
    """A field of a dataclass or a named tuple."""

    name: str
    type: str
    default: str | None
    text: str


@functools.cache
def documented() -> tuple[str, ...]:
    """The full names of what the reference holds, page by page."""
    directive = re.compile(r"^\.\. (?:auto(?:class|exception|function)|py:data):: (\S+)\n(?:   :module: (\S+))?", re.M)
    found = [match for page in sorted(REFERENCE.glob("*.md")) for match in directive.findall(page.read_text())]
    return tuple(f"{module}.{name}" if module else name for name, module in found)


@functools.cache
def homes() -> dict[str, str]:
    """The full name of each short one; fedrax's own come first."""
    known = sorted(documented(), key=lambda name: name.count(".") == 1)
    return {name.rpartition(".")[2]: name for name in known} | {"Tree": "fedrax.tree.Tree"}


@functools.cache
def body_of(module: str) -> list[ast.stmt]:
    """The statements of a module."""
    return ast.parse(inspect.getsource(importlib.import_module(module))).body


@functools.cache
def alias(module: str, name: str) -> tuple[ast.expr, str] | None:
    """What a name stands for in a module, and where that is written, if it is short for a union, choices or a call."""
    for node in body_of(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return (node.value, module) if isinstance(node.value, ast.BinOp | ast.Subscript) else None
        if not isinstance(node, ast.ImportFrom) or name not in (item.name for item in node.names):
            continue
        if (node.module or "").startswith("fedrax."):
            return alias(str(node.module), name)
    return None


def _is_same(module: str, name: str, full: str) -> bool:
    """Whether a module means by a name what has this full one; names that only type checkers see are taken to."""
    home, _, short = full.rpartition(".")
    meant = vars(importlib.import_module(module)).get(name)
    return meant is None or meant is getattr(importlib.import_module(home), short)


class _Public(ast.NodeTransformer):
    """Documented names in full, which Sphinx links and shows short; other short names as what they stand for."""

    def __init__(self, module: str):
        self.module = module

    def visit_Name(self, node: ast.Name) -> ast.AST:
        full, found = homes().get(node.id), alias(self.module, node.id)
        if full and _is_same(self.module, node.id, full):
            return ast.parse(full, mode="eval").body
        return _Public(found[1]).visit(copy.deepcopy(found[0])) if found else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr)  # np.ndarray, pl.DataFrame

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        if isinstance(node.value, ast.Name) and node.value.id == "Literal":
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self.visit(ast.parse(node.value, mode="eval").body) if isinstance(node.value, str) else node


def type_text(annotation: ast.expr | None, module: str) -> str:
    """An annotation in a module as its source has it."""
    return "" if annotation is None else ast.unparse(_Public(module).visit(annotation))


def default_text(value: ast.expr | None) -> str | None:
    """A default: of ``field(default_factory=list)`` what the list's class makes."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = given.get("default_factory")
        if factory is None:
            return default_text(given.get("default"))
        if isinstance(factory, ast.Lambda):  # a choice by name, which the text of the class tells
            return "..."
        return f"{ast.unparse(factory)}()"
    return None if value is None else ast.unparse(value)


def source_of(thing: Any) -> ast.AST | None:
    """The definition of a class or function in the source; None where there is none."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None


def own_fields(cls: type) -> Iterator[Field]:
    """The fields that a class itself declares."""
    body = getattr(source_of(cls), "body", [])
    for node, following in zip_longest(body, body[1:]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        text = inspect.cleandoc(str(following.value.value)) if told else ""  # type: ignore[union-attr]
        yield Field(node.target.id, type_text(node.annotation, cls.__module__), default_text(node.value), text)


@functools.cache
def fields(cls: type) -> tuple[Field, ...]:
    """The fields of a dataclass or named tuple that are not private, its bases' first."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.init]
    else:
        names = list(getattr(cls, "_fields", ()))
    known = {field.name: field for base in reversed(cls.__mro__) for field in own_fields(base)}
    return tuple(known[name] for name in names if name in known and not name.startswith("_"))


def call_text(function: Any, is_method: bool) -> str | None:
    """A function's parameters, a method's first one and private ones apart."""
    node = source_of(function)
    if not isinstance(node, ast.FunctionDef):
        return None
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    shown = functools.partial(_parameter, function.__module__)
    pairs = list(zip(positional, defaults, strict=True))[is_method and not _is_static(node) :]
    parts = [shown(*pair) for pair in pairs if not pair[0].arg.startswith("_")]
    if given.vararg or given.kwonlyargs:
        parts.append(f"*{shown(given.vararg, None)}" if given.vararg else "*")
    parts += [shown(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append(f"**{shown(given.kwarg, None)}")
    return f"({', '.join(parts)})"


def _is_static(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)


def _parameter(module: str, argument: ast.arg, default: ast.expr | None) -> str:
    kind = type_text(argument.annotation, module)
    value = "" if default is None else f" = {ast.unparse(default)}" if kind else f"={ast.unparse(default)}"
    return argument.arg + (f": {kind}" if kind else "") + value


def class_text(cls: type) -> str:
    """How an object is made, without the types, which stand with the fields; empty for what fedrax itself makes."""
    made_elsewhere = cls.__name__ in RETURNED or getattr(cls, "_is_protocol", False)
    if made_elsewhere or inspect.isabstract(cls):
        return ""
    if fields(cls):
        given = ", ".join(field.name + (f"={field.default}" if field.default else "") for field in fields(cls))
        return f"({given})"
    own = vars(cls).get("__init__")
    return (call_text(own, is_method=True) if own else None) or "()"


def signature(app: Any, what: str, name: str, obj: Any, options: Any, given: str, returns: str) -> Any:
    """Sphinx's hook: what stands in brackets after a name, and after the arrow."""
    if what == "class":
        return class_text(obj), None
    if what not in ("function", "method"):
        return None
    function = inspect.unwrap(getattr(obj, "__func__", obj))
    text, node = call_text(function, what == "method"), source_of(function)
    return None if text is None else (text, type_text(getattr(node, "returns", None), function.__module__) or None)


def docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's hook: what parameters mean as a list, the fields of a class below its text, and norms as norms."""
    if what in ("function", "method"):
        lines[:] = _listed(lines, set(getattr(inspect.signature(obj), "parameters", ())))
    _escape_norms(lines)
    if what in ("class", "exception"):
        for field in fields(obj):
            told = field.text.splitlines()
            _escape_norms(told)
            lines += ["", f".. py:attribute:: {field.name}", *([f"   :type: {field.type}"] * bool(field.type)), ""]
            lines += [f"   {line}" for line in told]
        lines.append("")


def _listed(lines: list[str], names: set[str]) -> list[str]:
    """``lr: the step size. steps: how many.`` as a list, where a paragraph begins so."""
    if not names:
        return lines
    entry = re.compile(rf"(?:^|(?<=[.;)] ))({'|'.join(map(re.escape, sorted(names)))}): ")
    found: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        text = " ".join(paragraph.split("\n"))
        starts = list(entry.finditer(text))
        if not starts or starts[0].start() > 0:
            found += [paragraph, ""]
            continue
        ends = [start.start() for start in starts[1:]] + [len(text)]
        found += [f":param {m[1]}: {text[m.end() : end].strip()}" for m, end in zip(starts, ends, strict=True)] + [""]
    return "\n".join(found).split("\n")


def _escape_norms(lines: list[str]) -> None:
    """|d| is a norm in the docstrings, not reStructuredText's substitution."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        lines[i] = "".join(part if part.startswith("``") else part.replace("|", "\\|") for part in parts)


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Sphinx's hook: members that are not shown: fields, which :func:`docstring` lists, and what only fedrax calls."""
    is_member = inspect.isroutine(obj) or isinstance(obj, property | functools.cached_property)
    return True if what == "class" and (name in CALLED_BY_FEDRAX or not is_member) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook into Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
