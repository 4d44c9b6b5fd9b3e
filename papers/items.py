"""Items of the papers: the lists ``papers/*/items.toml``, and the figures that they take from result files.

Figures are not typed into a list: each is a value ``{ file, row, column }`` of a Markdown table written by a command,
or computed from such values. A missing file, row or column raises FedraxError, so that lists cannot become outdated.
"""

from __future__ import annotations

import re
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrax import FedraxError, files

ROOT = Path(__file__).parent.parent
PAPERS = ("losac", "episode", "upcycled", "gradma")
KINDS = ("table", "figure", "claim", "theorem", "method", "setting", "data")
STATUSES = ("reproduced", "differs", "stand-in", "not here")
VERDICTS = ("holds", "holds in part", "does not hold", "not tested")
TYPED = r"`[^`]*`|\([^()]*\)|(?:Theorem|Lemma|Corollary|Section|omega =|rate of|reports) \d+\.\d+"
"""Where numbers may be typed: settings, what the paper prints, and the paper's own numbering."""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.mean,
    "median": statistics.median,
    "median size": lambda values: statistics.median(map(abs, values)),
    "min": min,
    "max": max,
    "count": len,
}
"""What ``of`` may make of the rows that match, where it is not the value of the only one."""


@dataclass(frozen=True)
class Entry:
    """An item of a paper, a claim of its abstract, or a sentence of the README."""

    number: str = ""
    """Of an item: section and number, as 2.10."""
    kind: str = ""
    item: str = ""
    """What the paper has."""
    status: str = ""
    """Of an item one of STATUSES, of a claim one of VERDICTS."""
    results: tuple[str, ...] = ()
    """Files with the evidence: ``results/...`` beside the list, others from the root; FILE::name for a test."""
    printed: str = ""
    """What the paper reports."""
    found: str = ""
    """What we found; figures are {names} of values, with a format such as {lead:.1f}."""
    reason: str = ""
    """Why it differs, is a stand-in or is not here."""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """A parsed list."""

    name: str
    title: str
    items: tuple[Entry, ...]
    claims: tuple[Entry, ...]
    prose: tuple[Entry, ...]


def read(name: str) -> Paper:
    """Read the list of a paper; FedraxError for an unknown key, kind or status, and for a missing reason."""
    file = ROOT / "papers" / name / "items.toml"
    table = files.read_toml(file)
    if unknown := set(table) - {"title", "item", "claim", "prose"}:
        raise FedraxError(f"{file}: unknown {', '.join(sorted(unknown))}")
    entries = {kind: tuple(_entry(file, one) for one in table.get(kind, ())) for kind in ("item", "claim", "prose")}
    for one in entries["item"]:
        _one_of(file, one, one.kind, KINDS)
        _one_of(file, one, one.status, STATUSES)
        if one.status == "reproduced" and not one.results:
            raise FedraxError(f"{file}: {one.number} is reproduced without results")
        if one.status != "reproduced" and not one.reason:
            raise FedraxError(f"{file}: {one.number} is {one.status!r} without a reason")
    for one in entries["claim"]:
        _one_of(file, one, one.status, VERDICTS)
    return Paper(name, table["title"], entries["item"], entries["claim"], entries["prose"])


def _entry(file: Path, table: Mapping[str, Any]) -> Entry:
    unknown = set(table) - set(Entry.__dataclass_fields__)
    if unknown:
        raise FedraxError(f"{file}: {table.get('number', table.get('item', ''))} has unknown {', '.join(unknown)}")
    return Entry(**{key: tuple(value) if key == "results" else value for key, value in table.items()})


def _one_of(file: Path, entry: Entry, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise FedraxError(f"{file}: {entry.number or entry.item}: {value!r} is none of {', '.join(known)}")


def path_of(paper: str, result: str) -> Path:
    """Path of a result, relative to the root; FedraxError if it or the named test does not exist."""
    name, _, test = result.partition("::")
    path = Path("papers", paper, name) if name.startswith("results/") else Path(name)
    if not (ROOT / path).exists():
        raise FedraxError(f"papers/{paper}/items.toml: no file {path}")
    if test and not re.search(rf"\bdef {test}\b", (ROOT / path).read_text(encoding="utf-8")):
        raise FedraxError(f"papers/{paper}/items.toml: no test {test} in {path}")
    return path


def sentence(paper: str, text: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """``text`` with its figures inserted; FedraxError for typed figures, unused values and unknown names."""
    where = f"papers/{paper}/items.toml: {text[:60]!r}"
    parts = list(string.Formatter().parse(text))
    said = re.sub(TYPED, "", text)
    if re.search(r"\d\.\d", said):
        raise FedraxError(f"{where} has a figure that is in no result file: make a value of it")
    if unused := set(values) - used(values) - {name for _, name, *_ in parts if name}:
        raise FedraxError(f"{where} does not use {', '.join(sorted(unused))}")
    try:
        return text.format(**{name: value(paper, name, values) for _, name, *_ in parts if name})
    except (KeyError, ValueError, IndexError) as error:
        raise FedraxError(f"{where}: {error}") from error


def used(values: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Names of values from which others are computed."""
    return {name for one in values.values() for key in ("difference", "quotient") for name in one.get(key, ())}


def value(paper: str, name: str, values: Mapping[str, Mapping[str, Any]]) -> float:
    """A value: of one cell, of several cells, or the difference or quotient of two values."""
    one = values[name]
    if "difference" in one:
        first, second = (value(paper, other, values) for other in one["difference"])
        return first - second
    if "quotient" in one:
        first, second = (value(paper, other, values) for other in one["quotient"])
        return first / second
    file = ROOT / path_of(paper, one["file"])
    parts, found = _parts(one.get("row", "")), []
    for section, columns, cells in rows(file):
        if one["column"] not in columns or not _in_order(parts, cells):
            continue
        if cells[0].startswith(one.get("starts", "")) and one.get("section", section) == section:
            number = parse(cells[columns.index(one["column"])], one.get("deviation", False))
            found += [] if number is None else [(cells[: len(parts)] == parts, number)]
    found = [number for first, number in found if first] or [number for _, number in found]  # the row's first cells win
    if "of" in one:
        return STATISTICS[one["of"]](found) if found or one["of"] == "count" else _missing(file, one)
    return found[0] if len(found) == 1 else _missing(file, one, len(found))


def _missing(file: Path, one: Mapping[str, Any], found: int = 0) -> float:
    raise FedraxError(f"{file}: {found} numbers in column {one['column']!r} of rows with {one.get('row', '')!r}")


def _parts(row: str) -> list[str]:
    return [part.strip() for part in row.split("|")] if row else []


def _in_order(parts: Sequence[str], cells: Sequence[str]) -> bool:
    left = iter(cells)
    return all(part in left for part in parts)


def rows(file: Path) -> list[tuple[str, list[str], list[str]]]:
    """(section, column names, cells) of every row of a file's tables.

    The section is the preceding second-level heading, or empty. Repeated column names become "name 2", "name 3".
    """
    found, columns, section = [], [], ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip()
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if not columns:
            columns = [
                f"{name} {count + 1}" if (count := cells[:i].count(name)) else name for i, name in enumerate(cells)
            ]
        elif not all(re.fullmatch(r":?-{3,}:?", cell) for cell in cells):
            found.append((section, columns, cells))
    return found


def parse(cell: str, deviation: bool = False) -> float | None:
    """The number at the start of a cell, or the standard deviation after it; None if there is none."""
    pattern = r"[^±]*±\s*\+?" if deviation else r""
    match = re.match(pattern + r"([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)", cell)
    return float(match[1].replace(",", "")) if match else None
