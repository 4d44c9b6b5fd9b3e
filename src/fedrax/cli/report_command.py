"""``fedrax report``: an HTML page about runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError

DESCRIPTION = """Write an HTML page about runs: `fedrax report DIR...`.

DIR is a run directory or a directory of runs, such as that of a comparison; runs may be unfinished. Runs that differ
only in their seeds are one method. The page has curves, the table, the search, the distribution over clients, the
partition, the settings that differ between methods, all others, and the machines. It is one self-contained file."""


@dataclass
class ReportOptions:
    """Arguments of ``fedrax report``."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """Run directories, or directories of runs."""
    out: Path | None = None
    """File to write; by default report.html in DIR, or in the working directory for several."""
    title: str | None = None
    """Title; by default the names of the comparisons or runs."""
    target: float | None = None
    """Target accuracy; by default the comparison's, the one at which all runs stop, or 95 % of the best final one."""


def main(args: list[str]) -> int:
    """Read the runs and write the page."""
    options = parse(ReportOptions, args, "fedrax report", DESCRIPTION)
    if not options.directories:
        raise FedraxError("no directory given: fedrax report DIR...")
    if options.target is not None and not 0 < options.target <= 1:
        raise FedraxError(f"the target is an accuracy in (0, 1], not {options.target}.")
    from fedrax.report.html import write_report

    path = write_report(options.directories, options.out, target=options.target, title=options.title)
    print(f"report: {path}")
    return 0
