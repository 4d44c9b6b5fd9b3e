"""``fedrax show``: finished or running runs as a table and curves."""

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

DIR is a run, or holds runs (such as a comparison's directory); they may still be running. Runs that differ in their
seeds only make one line: mean ± standard deviation."""


@dataclass
class ShowOptions:
    """Arguments of ``fedrax show``."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """Run directories, or directories that hold some."""
    target: float | None = None
    """Accuracy to reach; by default that at which all runs end, or 95 % of the best final accuracy."""
    curves: Path | None = None
    """Also draw curves, to this file name with .png and .svg."""
    markdown: bool = False
    """Print the table as Markdown."""
    json: bool = False
    """Print the table as JSON."""


def main(args: list[str]) -> int:
    """Read, print, draw."""
    options = parse(ShowOptions, args, "fedrax show", DESCRIPTION)
    if not options.directories:
        raise FedraxError("which runs? fedrax show DIR...")
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
