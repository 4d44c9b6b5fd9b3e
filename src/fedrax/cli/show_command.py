"""``fedrax show``: the table and curves of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedrax.cli import tell
from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line, printable_lines
from fedrax.report import comparison_table
from fedrax.report.results import MethodResults, read_results

DESCRIPTION = """Show runs: `fedrax show DIR...`.

DIR is a run directory or a directory of runs, such as that of a comparison; runs may be unfinished. Runs that differ
only in their seeds are one row: mean ± standard deviation."""


@dataclass
class ShowOptions:
    """Arguments of ``fedrax show``."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """Run directories, or directories of runs."""
    target: float | None = None
    """Target accuracy; by default the one at which all runs stop, or 95 % of the best final accuracy."""
    curves: Path | None = None
    """Also draw curves, to this file name with .png and .svg."""
    markdown: bool = False
    """Print the table as Markdown."""
    latex: bool = False
    """Print the table for LaTeX, with the package booktabs."""
    csv: bool = False
    """Print the table as CSV: means, and standard deviations in columns of their own."""
    json: bool = False
    """Print the table as JSON."""


def main(args: list[str]) -> int:
    """Read the runs, print the table, draw curves."""
    options = parse(ShowOptions, args, "fedrax show", DESCRIPTION)
    if not options.directories:
        raise FedraxError("no directory given: fedrax show DIR...")
    if options.target is not None and not 0 < options.target <= 1:
        raise FedraxError(f"the target is an accuracy in (0, 1], not {options.target}.")
    text = chosen_format(options, ("markdown", "latex", "csv", "json"))
    results = read_results(*options.directories, target=options.target)
    if text == "json":
        table = comparison_table.values(results.rows)
        print(json.dumps({"metric": results.metric, "target": results.target, "methods": table}))
    elif text is not None:
        print_table(results, text)
        for line in results.warnings():
            tell(printable_line(line))
    else:
        console = comparison_table.wide_console()
        comparison_table.show(console, results.rows, results.target, results.metric)
        for line in (results.legend(), *results.warnings()):
            console.print(printable_line(line))
    if options.curves is not None:
        from fedrax.report.curves import draw_curves, save_curves

        path = options.curves.with_suffix("") if options.curves.suffix in (".png", ".svg") else options.curves
        pictures = save_curves(draw_curves(results.methods, results.target, results.metric), path)
        if text is None:
            print(f"curves: {pictures[0]} and .svg")
    return 0


def chosen_format(options: Any, formats: Sequence[str]) -> str | None:
    """The one format that is set; raises FedraxError for several."""
    chosen = [name for name in formats if getattr(options, name)]
    if len(chosen) > 1:
        raise FedraxError(f"--{chosen[0]} and --{chosen[1]} are both given: choose one.")
    return chosen[0] if chosen else None


def print_table(results: MethodResults, text: str) -> None:
    """Print the table in a text format."""
    made = {"markdown": results.to_markdown, "latex": results.to_latex, "csv": lambda: results.table().write_csv()}
    print(printable_lines(made[text]()), end="")
