"""``fedrax show``: the table and curves of runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError
from fedrax.report import comparison_table
from fedrax.report.runs import find_runs, group, main_metric, summarize, target_of

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
    json: bool = False
    """Print the table as JSON."""


def main(args: list[str]) -> int:
    """Read the runs, print the table, draw curves."""
    options = parse(ShowOptions, args, "fedrax show", DESCRIPTION)
    if not options.directories:
        raise FedraxError("no directory given: fedrax show DIR...")
    if options.target is not None and not 0 < options.target <= 1:
        raise FedraxError(f"the target is an accuracy in (0, 1], not {options.target}.")
    found = {run.directory.resolve(): run for path in options.directories for run in find_runs(path)}
    methods = group(list(found.values()))
    metric = main_metric(methods)
    target, given = target_of(methods, options.target)
    rows = [summarize(method, target, metric) for method in methods]
    if options.json:
        print(json.dumps({"metric": metric, "target": target, "methods": comparison_table.values(rows)}))
    elif options.markdown:
        print(comparison_table.markdown(rows, target, metric), end="")
    else:
        console = comparison_table.wide_console()
        comparison_table.show(console, rows, target, metric)
        console.print(comparison_table.legend(target, given, rows))
    if options.curves is not None:
        from fedrax.report.curves import draw_curves, save_curves

        path = options.curves.with_suffix("") if options.curves.suffix in (".png", ".svg") else options.curves
        pictures = save_curves(draw_curves(methods, target, metric), path)
        if not options.json:
            print(f"curves: {pictures[0]} and .svg")
    return 0
