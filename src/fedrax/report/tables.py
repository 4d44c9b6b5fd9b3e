"""Tables of a comparison: for the terminal, as Markdown, and as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrax.report.runs import Row, Statistic
from fedrax.text import for_markdown, plain

COLUMNS = ("accuracy", "loss", "epsilon", "epsilon_paper", "rounds", "megabytes", "seconds")
_TO_TARGET = ("rounds", "megabytes", "seconds")
_HIGHER_IS_BETTER = ("accuracy",)


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough for any table where there is none.

    It shows text as it is: names with brackets or colons are no markup.
    """
    options: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}
    console = Console(**options)
    return console if console.is_terminal else Console(**options, width=200)


def headings(target: float | None, metric: str = "test_accuracy") -> dict[str, str]:
    """The heading of each column."""
    to = "" if target is None else f" to {'accuracy' if metric == 'test_accuracy' else 'loss'} {target:g}"
    return {
        "accuracy": "test accuracy",
        "loss": "test loss",
        "epsilon": "epsilon",
        "epsilon_paper": "epsilon by the paper",
        "rounds": f"rounds{to}",
        "megabytes": f"MB{to}",
        "seconds": f"s{to}",
    }


def best(rows: Sequence[Row], column: str) -> set[str]:
    """Labels of the methods with the best mean in a column, among those that did not diverge."""
    means = {
        row.label: s.mean for row in rows if (s := getattr(row, column)) is not None and "diverged" not in row.state
    }
    if len(means) < 2 or "epsilon" in column:  # a promise, not a result
        return set()
    top = max(means.values()) if column in _HIGHER_IS_BETTER else min(means.values())
    return {label for label, mean in means.items() if mean == top}


def _shown(rows: Sequence[Row], target: float | None) -> list[str]:
    known = [c for c in COLUMNS if c in _TO_TARGET or any(getattr(row, c) is not None for row in rows)]
    return [c for c in known if target is not None or c not in _TO_TARGET]


def _cell(row: Row, column: str) -> str:
    value: Statistic | None = getattr(row, column)
    if value is None:
        return f"{row.reached} of {row.seeds} seeds" if column == "rounds" and row.reached else "–"
    digits = {"accuracy": ".4f", "loss": ".4f", "rounds": ".0f"}.get(column, ".4g")
    spread = {"rounds": ".1f"}.get(column, digits if column in ("accuracy", "loss") else ".2g")
    return f"{value.mean:{digits}}" + ("" if value.std is None else f" ± {value.std:{spread}}")


def terminal(rows: Sequence[Row], target: float | None, metric: str = "test_accuracy", title: str = "") -> Table:
    """The table for rich, the best of each column bold and starred."""
    heads, columns = headings(target, metric), _shown(rows, target)
    table = Table(
        title=plain(title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(heads[column], justify="right", no_wrap=True)
    table.add_column("seeds", justify="right")
    table.add_column("state", no_wrap=True)
    stars = {column: best(rows, column) for column in columns}
    for row in rows:
        cells = [_cell(row, c) for c in columns]
        marked = [
            Text(f"{t} *", "bold green") if row.label in stars[c] else f"{t}  "
            for c, t in zip(columns, cells, strict=True)
        ]
        table.add_row(plain(row.label), *marked, str(row.seeds), plain(row.state))
    return table


def markdown(rows: Sequence[Row], target: float | None, metric: str = "test_accuracy") -> str:
    """The same table as Markdown, the best of each column bold."""
    heads, columns = headings(target, metric), _shown(rows, target)
    lines = ["| method | " + " | ".join(heads[c] for c in columns) + " | seeds | state |"]
    lines.append("|---|" + "---:|" * len(columns) + "---:|---|")
    stars = {column: best(rows, column) for column in columns}
    for row in rows:
        cells = [f"**{_cell(row, c)}**" if row.label in stars[c] else _cell(row, c) for c in columns]
        lines.append(
            " | ".join([f"| {for_markdown(row.label)}", *cells, str(row.seeds), f"{for_markdown(row.state)} |"])
        )
    return "\n".join(lines) + "\n"


def values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The table's numbers, for JSON."""
    return [dataclasses.asdict(row) for row in rows]
