"""Facts that the documentation build adds to each page of ``docs/methods``.

The front matter of a page names its classes (``methods``), the entries of ``docs/references.bib`` (``cite``) and, where
no table names the methods, the folders of ``papers`` with their results (``papers``). Below the prose the build appends
an example, the hyper-parameters, the cost, the results with all tables that name the methods, the code and the
citations. A block ``{round}`` of the prose is the pseudocode of a round; ``ranges.toml`` has sensible values of
hyper-parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from docs import method_table
from fedrax.config.annotations import fields_of
from fedrax.experiments.method_registry import algorithms
from papers.items import read, sentence

FOLDER = Path(__file__).parent / "methods"
PAPERS = Path(__file__).parent.parent / "papers"
REFERENCES = Path(__file__).parent / "references.bib"
RANGES = tomllib.loads((FOLDER / "ranges.toml").read_text(encoding="utf-8"))
"""Sensible values by class and field: ``from`` and ``to`` with their ``source``, or ``advice`` where no range holds."""
ROUND = re.compile(r"^```\{round\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FINDINGS = 4
"""The most findings of a paper on a page; [](papers.md) has all of them."""
TITLES = {"losac": "LoSAC", "episode": "EPISODE", "upcycled": "Upcycled-FL", "gradma": "GradMA"}


def front_matter(text: str) -> dict[str, list[str]]:
    """The lists of names at the top of a page."""
    head = re.match(r"---\n(.*?)^---\n", text, re.DOTALL | re.MULTILINE)
    lines = head[1].splitlines() if head else []
    entries = (re.fullmatch(r"(\w+): \[(.*)\]", line) for line in lines)
    return {entry[1]: [name.strip() for name in entry[2].split(",")] for entry in entries if entry}


def references(text: str) -> dict[str, str]:
    """Entries of a BibTeX file by key."""
    entries = re.findall(r"^(@\w+\{([\w-]+),.*?^\})", text, re.DOTALL | re.MULTILINE)
    return {key: entry for entry, key in entries}


def facts(text: str) -> str:
    """What is appended to a page with this text."""
    matter = front_matter(text)
    kinds = {kind.__name__: (name, kind) for name, kind in algorithms().items()}
    found = [kinds[name] for name in matter["methods"]]
    parts = [] if "```python" in text else ["## Example", *(example(kind) for _, kind in found)]
    parts += ["## Hyper-parameters", *(hyperparameters(name, kind) for name, kind in found)]
    rows = "".join(method_table.row(name, kind) for name, kind in found)
    parts += ["## Cost", "Sizes are multiples of the size of the parameters; [](index.md) says how it is measured."]
    parts.append(method_table.HEAD + rows)
    tables = tables_naming(text)
    if papers := [name for name in TITLES if name in tables or name in matter.get("papers", [])]:
        links = [f"[{TITLES[name]}](../_generated/papers/{name}.md)" for name in papers]
        parts += ["## Results", f"In the reproduced experiments of {', '.join(links)}.", findings(text, papers)]
        for name, found_in in tables.items():
            shown = ", ".join(f"[{table}](#papers-{name}-{table})" for table in found_in)
            parts.append(f"Tables and figures of {TITLES[name]} with this method: {shown}.")
    parts += ["## Code", *(code(kind) for _, kind in found)]
    if keys := matter.get("cite"):
        entries = references(REFERENCES.read_text(encoding="utf-8"))
        parts += ["## Citation", "```bibtex\n" + "\n".join(entries[key] for key in keys) + "\n```"]
    return "\n\n".join(parts) + "\n"


def naming(text: str) -> re.Pattern[str]:
    """A pattern of the names of the methods of a page: those of its title and of its classes."""
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert title is not None
    names = {*re.split(r", | and |: | \(|\)", title[1]), *front_matter(text)["methods"]} - {""}
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])", re.IGNORECASE)


def tables_naming(text: str) -> dict[str, list[str]]:
    """For each paper the tables of its results that have a method of a page in a cell."""
    named, found = naming(text), {}
    for paper in TITLES:
        files = sorted((PAPERS / paper / "results").glob("*.md"))
        tables = {file.stem: re.findall(r"^\|.*$", file.read_text(encoding="utf-8"), re.MULTILINE) for file in files}
        if having := [name for name, lines in tables.items() if any(map(named.search, lines))]:
            found[paper] = having
    return found


def findings(text: str, papers: list[str]) -> str:
    """What reproductions measured of the methods of a page: the claims and items that name them, claims first."""
    named, lines = naming(text), []
    for paper in (read(name) for name in papers):
        about = [entry for entry in (*paper.claims, *paper.items) if entry.values and named.search(entry.found)]
        for entry in about[:FINDINGS]:
            tables = [Path(file).stem for file in entry.results if re.fullmatch(r"results/[\w-]+\.md", file)]
            shown = ", ".join(f"[{table}](#papers-{paper.name}-{table})" for table in tables)
            found = sentence(paper.name, entry.found, entry.values)
            lines.append(f"- {entry.item} ({TITLES[paper.name]}, *{entry.status}*): {found} {shown}".rstrip())
    return "\n".join(lines)


def example(kind: type) -> str:
    """The example of the docstring."""
    text = inspect.getdoc(kind) or ""
    lines = text.split("Example:\n", 1)[1] if "Example:\n" in text else ""
    return f"```pycon\n{textwrap.dedent(lines).rstrip()}\n```"


def hyperparameters(name: str, kind: Any) -> str:
    """Table of the fields of a class, with the name of the class in experiment files."""
    meanings = field_docstrings(kind)
    rows = []
    for field in dataclasses.fields(kind):
        described = fields_of(kind)[field.name]
        bounds = [str(bound) for one in described.types for bound in map(interval, one.bounds)]
        accepted = described.description + (f", {' and '.join(bounds)}" if bounds else "")
        default = "" if field.default is dataclasses.MISSING else f"`{short(field.default)}`"
        values = RANGES.get(kind.__name__, {}).get(field.name) or RANGES["all"].get(field.name, {})
        cells = (f"`{field.name}`", default, sensible(values), meanings.get(field.name, ""), accepted)
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    head = "| field | default | sensible values | meaning | accepts |\n|---|---|---|---|---|\n"
    return f"`{kind.__name__}`, in experiment files `{name}`:\n\n" + head + "\n".join(rows)


def sensible(values: dict[str, Any]) -> str:
    """Sensible values of a field in words, with their source."""
    if "from" not in values:
        return values.get("advice", "")
    return f"{values['from']:g} to {values['to']:g} ({values['source']})"


def interval(bound: Any) -> str:
    """Bounds in words."""
    limits = ((">", bound.gt), ("≥", bound.ge), ("<", bound.lt), ("≤", bound.le))
    return " and ".join(f"{sign} {value:g}" for sign, value in limits if value is not None)


def short(value: Any) -> str:
    """A default: of a nested object its class alone."""
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def field_docstrings(kind: type) -> dict[str, str]:
    """The docstrings of fields, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("fedrax"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[field.target.id] = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(str(text.value.value)))  # type: ignore[attr-defined]
    return found


def code(kind: type) -> str:
    """The source of a class, without its docstring."""
    source = textwrap.dedent(inspect.getsource(kind))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    text, lines = body.body[0], source.splitlines()
    if isinstance(text, ast.Expr):
        del lines[text.lineno - 1 : text.end_lineno]
    path = "/".join(kind.__module__.split("."))
    return f"`src/{path}.py`:\n\n```{{code-block}} python\n" + "\n".join(lines).strip() + "\n```"


def typeset_round(block: re.Match[str]) -> str:
    """The pseudocode of a round: one box for each stretch of lines of one side, server or client.

    A line is ``side: text``, with ``- `` before the text of a line within a loop, or ``title: text`` of a method.
    """
    lines = [line.split(": ", 1) for line in block[1].splitlines() if line]
    parts = ["::::{container} round"]
    for side, group in itertools.groupby(lines, key=lambda line: line[0]):
        texts = [text for _, text in group]
        if side == "title":
            parts.append(f"**{texts[0]}**\n")
            continue
        items = (f"  {text}" if text.startswith("- ") else f"- {text}" for text in texts)
        parts += [f":::{{container}} side {side}", f"{side}\n", *items, ":::"]
    return "\n".join([*parts, "::::"])


def append_facts(app: Sphinx, docname: str, source: list[str]) -> None:
    """Hook of Sphinx: complete the pages of methods."""
    if docname.startswith("methods/") and front_matter(source[0]):
        added = facts(source[0])
        source[0] = ROUND.sub(typeset_round, source[0]) + "\n" + added


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hook."""
    app.connect("source-read", append_facts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
