"""Tables of a comparison: for the terminal, as Markdown, and as JSON values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedrax.escaping import escape_latex, escape_markdown, printable_line
from fedrax.metrics import better, is_share
from fedrax.report.runs import MethodSummary, Statistic, finite

_TO_TARGET = ("rounds", "megabytes", "gradients", "seconds")
"""Columns of the cost to reach the target."""
COLUMNS = ("accuracy", "loss", "best", "epsilon", "epsilon_paper", "all_gradients", *_TO_TARGET)
"""Columns that are fields of `MethodSummary`, in the order of the table."""
_HIDDEN_FIRST = ("all_gradients", "gradients", "seconds", "epsilon_paper", "best", "loss", "megabytes")
"""Columns in the order in which a narrow terminal hides them, after other metrics and before the rest."""
_EXPONENT = re.compile(r"(-?\d+(?:\.\d+)?)e([-+]\d+)")
"""A number with an exponent, as Python formats it."""
_NO_RESULTS = ("epsilon", "epsilon_paper", "all_gradients")
"""Columns without a best value: guarantees, and the work of all rounds, which settings determine."""
_ROSE = 2.0
"""How many times its first value a test loss ends at for a warning: diverging, or overfitted."""
_OVER_CLIENTS = {
    "_worst_client": ", worst client",
    "_client_p10": ", 10th percentile of clients",
    "_client_p90": ", 90th percentile of clients",
}
"""Suffixes of metrics over clients, and their part of a heading."""


class _PipeConsole(Console):
    """A console that raises BrokenPipeError when its pipe is closed, as by ``head``."""

    def on_broken_pipe(self) -> None:
        """Raise the error, which the command line handles; rich would exit with status 1."""
        raise BrokenPipeError


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or 1,000 characters without a terminal.

    Text is printed literally: brackets and colons in names are not markup.
    """
    options: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}
    console = _PipeConsole(**options)
    return console if console.is_terminal else _PipeConsole(**options, width=1000)


def headings(target: float | None, metric: str = "test_accuracy") -> dict[str, str]:
    """The heading of each column."""
    name = "accuracy" if metric == "test_accuracy" else "loss"
    to = "" if target is None else f" to {target:g}"
    return {
        "accuracy": "test accuracy",
        "loss": "test loss",
        "best": f"best {name} (round)",
        "epsilon": "epsilon",
        "epsilon_paper": "epsilon by the paper",
        "all_gradients": "gradients",
        "rounds": f"rounds{to}",
        "megabytes": f"MB{to}",
        "gradients": f"gradients{to}",
        "seconds": f"s{to}",
    }


def legend(target: float | None, given: bool, rows: Sequence[MethodSummary]) -> str:
    """Explain the columns of the target and of the worst clients; ``given``: whether the user set the target."""
    parts = []
    if target is not None:
        name = "accuracy" if any(row.accuracy is not None for row in rows) else "loss"
        origin = "as given" if given else "95 % of the best method's final test accuracy, since none was given"
        parts.append(
            f"target {target:g}: {origin}. rounds, MB, gradients, s: until the test {name} first reached it; MB down"
            " and up of all clients, seconds without compilation"
            f"{', of a federation measured' * any(r.federation for r in rows)}."
        )
    work = {
        row.label: row.all_gradients.mean for row in rows if row.all_gradients is not None and row.all_gradients.mean
    }
    if work:
        most, least = (choose(work, key=lambda label: work[label]) for choose in (max, min))
        times = work[most] / work[least]
        more = f"; {most} computes {times:.3g} times those of {least}" if times >= 2 else ""
        parts.append(f"gradients: of single samples, by all clients{more}.")
    if any(row.best is not None and row.seeds > 1 for row in rows):
        parts.append("best, with its round: of each run the best evaluation, then means over seeds.")
    parts += _guarantees(rows)
    worst = [samples for row in rows for samples in row.worst_samples]
    if worst:
        few, many = min(worst), max(worst)
        parts.append(f"worst client: of {few:,}{f' to {many:,}' if many > few else ''} samples.")
    paired = [row for row in rows if row.difference is not None]
    if paired:
        name = "accuracy" if any(row.accuracy is not None for row in rows) else "loss"
        found = ", ".join(f"{row.label} {_signed(row.difference, name)}" for row in paired if row.difference)
        parts.append(f"test {name} minus that of {paired[0].paired_with}, paired by seed: {found}.")
    for row in rows:
        if row.loss is not None and row.first_loss is not None and row.loss.mean > _ROSE * row.first_loss.mean > 0:
            times = row.loss.mean / row.first_loss.mean
            parts.append(f"warning: the test loss of {row.label} ended at {times:.3g} times its first value.")
    return " ".join(parts)


def _guarantees(rows: Sequence[MethodSummary]) -> list[str]:
    """What the epsilon of each method bounds."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.guarantee is not None:
            found.setdefault(row.guarantee, []).append(row.label)
    if len(found) == 1:
        return [f"epsilon: {next(iter(found))}."]
    several = "; ".join(f"of {', '.join(labels)}: {guarantee}" for guarantee, labels in found.items())
    return [f"epsilon is of different guarantees, which cannot be ranked by it: {several}."] if found else []


def _signed(difference: Statistic, column: str) -> str:
    """A difference with its sign and deviation."""
    return "+" * (difference.mean > 0) + amount(difference, column)


def best(rows: Sequence[MethodSummary], column: str, metric: str = "test_accuracy") -> set[int]:
    """The rows with the best mean in a column as it is printed, among the methods that did not diverge."""
    means = {
        i: value.mean
        for i, row in enumerate(rows)
        if (value := _value(row, column)) is not None and "diverged" not in row.state
    }
    if len(means) < 2 or column in _NO_RESULTS:
        return set()
    wanted = better(metric_name(metric if column == "best" else column))
    if column.startswith(("test_", "train_")) and wanted is None:
        return set()
    higher = wanted == "higher"
    top = max(means.values()) if higher else min(means.values())
    shown = {i: amount(Statistic(mean, None), column, metric) for i, mean in means.items()}
    return {i for i, mean in means.items() if shown[i] == amount(Statistic(top, None), column, metric)}


def metric_name(column: str) -> str:
    """The name of the metric of a key in events: without the data set, the kind of model and the statistic."""
    for over in _OVER_CLIENTS:
        column = column.removesuffix(over)
    for part in ("test_", "train_", "personal_", "finetuned_"):
        column = column.removeprefix(part)
    return column


def _heading(column: str) -> str:
    """The heading of a metric."""
    for over, words in _OVER_CLIENTS.items():
        if column.endswith(over):
            return column.removesuffix(over).replace("_", " ") + words
    return column.replace("_", " ")


def _value(row: MethodSummary, column: str) -> Statistic | None:
    """The statistic in a column."""
    return row.others.get(column) if column.startswith(("test_", "train_")) else getattr(row, column)


def _columns(rows: Sequence[MethodSummary], target: float | None) -> list[str]:
    """The columns that any row has a value for; those of the target only with a target."""
    others = sorted({name for row in rows for name in row.others})
    rest = [c for c in COLUMNS[1:] if c not in _TO_TARGET]
    shown = [c for c in ("accuracy", *rest) if any(_value(row, c) is not None for row in rows)]
    columns = [c for c in ("accuracy", *others, *rest) if c in shown or c in others]
    return columns + (list(_TO_TARGET) if target is not None else [])


def amount(value: Statistic, column: str, metric: str = "test_accuracy") -> str:
    """Format a mean and its deviation: metrics in [0, 1] with four decimals, counts as integers, others to 4 digits."""
    if column == "rounds":
        mean, spread = ".0f", ".1f"
    elif column in ("gradients", "all_gradients"):
        mean, spread = ",.0f", ",.0f"
    elif is_share(metric_name(metric if column == "best" else column)):
        mean, spread = ".4f", ".4f"
    else:
        mean, spread = ".4g", ".2g"
    return f"{value.mean:{mean}}" + ("" if value.std is None else f" ± {value.std:{spread}}")


def _cell(row: MethodSummary, column: str, metric: str) -> str:
    """The text of a cell."""
    value = _value(row, column)
    if value is None and column in row.others:
        return "undefined"
    if value is None:
        return f"{row.reached} of {row.seeds} seeds" if column == "rounds" and row.reached else "–"
    if column == "best":
        if row.best_round is None:
            return "–"
        return f"{amount(Statistic(value.mean, None), column, metric)} ({row.best_round.mean:.0f})"
    return amount(value, column, metric)


@dataclass(frozen=True)
class TableCells:
    """The table as text."""

    headings: list[str]
    names: int
    """Number of columns on the left with names instead of numbers."""
    rows: list[list[tuple[str, bool]]]
    """The cells of each row, and whether each is the best of its column."""
    hidden_first: list[int]
    """The columns of numbers, those first that a narrow terminal hides first; never the first of them."""


def cells(rows: Sequence[MethodSummary], target: float | None, metric: str = "test_accuracy") -> TableCells:
    """The cells of the table; names are not escaped."""
    heads, columns = headings(target, metric), _columns(rows, target)
    others = {name for row in rows for name in row.others}
    settings = any(row.settings for row in rows)
    titles = ["method", *["settings"] * settings, *(heads.get(c, _heading(c)) for c in columns)]
    stars = {column: best(rows, column, metric) for column in columns}
    made = []
    for i, row in enumerate(rows):
        names = [(row.label, False), *[(row.settings, False)] * settings]
        values = [(_cell(row, c, metric), i in stars[c]) for c in columns]
        made.append([*names, *values, (str(row.seeds), False), (row.state, False)])
    ranks = [_HIDDEN_FIRST.index(c) if c in _HIDDEN_FIRST else -1 if c in others else len(COLUMNS) for c in columns]
    places = sorted(range(1, len(columns)), key=lambda place: (ranks[place], -place))
    return TableCells([*titles, "seeds", "state"], 1 + settings, made, [1 + settings + place for place in places])


def terminal(made: TableCells, title: str = "") -> Table:
    """The table for rich; the best of each column is bold and starred."""
    table = Table(
        title=printable_line(title) or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    seeds = len(made.headings) - 2  # the state is the last column
    for place, heading in enumerate(made.headings):
        words = place < made.names or place > seeds
        table.add_column(printable_line(heading), justify="left" if words else "right", no_wrap=place != seeds)
    for row in made.rows:
        blanks = ["  " * (made.names <= place < seeds) for place in range(len(row))]
        marked = [
            Text(f"{printable_line(t)} *", "bold green") if top else printable_line(t) + b
            for (t, top), b in zip(row, blanks, strict=True)
        ]
        table.add_row(*marked)
    return table


def show(
    console: Console,
    rows: Sequence[MethodSummary],
    target: float | None,
    metric: str = "test_accuracy",
    title: str = "",
) -> None:
    """Print the table: as many columns as fit, or one block for each method in a very narrow terminal."""
    made = cells(rows, target, metric)
    folded, hidden = _folded(made, lambda one: _fits(console, terminal(one, title)))
    if folded is not None:
        console.print(terminal(folded, title))
        if hidden:
            columns = ", ".join(map(printable_line, hidden))
            console.print(f"hidden columns, which --csv and a wider terminal show: {columns}")
        return
    if title:
        console.print(Text(printable_line(title), "bold"))
    for row in made.rows:
        block = Table(box=None, show_header=False, pad_edge=False)
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for heading, (text, top) in zip(made.headings[1:], row[1:], strict=True):
            block.add_row(
                f"  {printable_line(heading)}",
                Text(f"{printable_line(text)} *", "bold green") if top else printable_line(text),
            )
        console.print(Text(printable_line(row[0][0]), "bold"))
        console.print(block)


def _fits(console: Console, table: Table) -> bool:
    """Whether a table is no wider than the console."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def _folded(made: TableCells, fits: Callable[[TableCells], bool]) -> tuple[TableCells | None, list[str]]:
    """The table with as many columns of numbers as fit, and the headings of the hidden ones.

    Names, the first number, seeds and states are always shown; the table is None if these do not fit.
    """
    for count in range(len(made.hidden_first) + 1):
        hidden = sorted(made.hidden_first[:count])
        places = [i for i in range(len(made.headings)) if i not in hidden]
        headings, rows = [made.headings[i] for i in places], [[row[i] for i in places] for row in made.rows]
        if fits(one := TableCells(headings, made.names, rows, [])):
            return one, [made.headings[i] for i in hidden]
    return None, []


def markdown(rows: Sequence[MethodSummary], target: float | None, metric: str = "test_accuracy") -> str:
    """The table as Markdown; the best of each column is bold."""
    made = cells(rows, target, metric)
    ruler = ["---"] * made.names + ["---:"] * (len(made.headings) - made.names - 1) + ["---"]
    lines = [f"| {' | '.join(map(escape_markdown, made.headings))} |", f"|{'|'.join(ruler)}|"]
    for row in made.rows:
        shown = (f"**{escape_markdown(text)}**" if top else escape_markdown(text) for text, top in row)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def latex(rows: Sequence[MethodSummary], target: float | None, metric: str = "test_accuracy") -> str:
    """The table for LaTeX with the package booktabs; the best of each column is bold.

    The states are left out if all runs are finished.
    """
    made = cells(rows, target, metric)
    columns = len(made.headings) - all(row.state == "finished" for row in rows)
    right = len(made.headings) - made.names - 1  # numbers
    lines = [" & ".join(map(escape_latex, made.headings[:columns]))]
    for row in made.rows:
        texts = [_EXPONENT.sub(_power_of_ten, escape_latex(text)) for text, _ in row[:columns]]
        texts = [rf"\textbf{{{text}}}" if top else text for text, (_, top) in zip(texts, row, strict=False)]
        lines.append(" & ".join(texts))
    head, *body = (rf"{line} \\" for line in lines)
    rules = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    form = "l" * made.names + "r" * right + "l" * (columns - made.names - right)
    return "\n".join([rf"\begin{{tabular}}{{{form}}}  % \usepackage{{booktabs}}", *rules, r"\end{tabular}"]) + "\n"


def _power_of_ten(found: re.Match[str]) -> str:
    """A number with an exponent in LaTeX."""
    return rf"${found[1]} \times 10^{{{int(found[2])}}}$"


def data_frame(rows: Sequence[MethodSummary], metric: str = "test_accuracy") -> pl.DataFrame:
    """The table as numbers: a row for each method; of a mean over seeds its deviation is in the column NAME_std."""
    names = {"accuracy": "test_accuracy", "loss": "test_loss", "best": f"best_{metric}", "all_gradients": "gradients"}
    names |= {column: f"{column}_to_target" for column in _TO_TARGET}
    records, others = [], sorted({name for row in rows for name in row.others})
    for row in rows:
        record: dict[str, Any] = {"method": row.label, "settings": row.settings or None}
        record |= {"seeds": row.seeds, "state": row.state}
        for column in ("accuracy", *others, *COLUMNS[1:]):
            value, name = _value(row, column), names.get(column, column)
            record |= {name: None if value is None else value.mean, f"{name}_std": value and value.std}
            if column == "best":
                record["best_round"] = row.best_round and row.best_round.mean
        record |= {f"{metric}_difference": row.difference and row.difference.mean}
        record |= {f"{metric}_difference_std": row.difference and row.difference.std}
        records.append(record)
    table = pl.DataFrame(records, infer_schema_length=None)
    return table.select(column for column in table if column.name in others or column.null_count() < len(table))


def values(rows: Sequence[MethodSummary]) -> list[dict[str, Any]]:
    """The rows as JSON values."""
    return [finite(dataclasses.asdict(row)) for row in rows]
