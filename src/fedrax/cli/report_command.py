"""``fedrax report``: runs and comparisons as one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError

DESCRIPTION = """One page of HTML about runs: `fedrax report DIR...`.

DIR is a run, or holds runs (such as a comparison's directory); they may still be running. Runs that differ in their
seeds only are one method. The page holds curves, the table, how settings were chosen, the spread over clients, the
partition, what differs between methods, settings and machines. It loads nothing, so that it can be kept, sent and read
anywhere."""


@dataclass
class ReportOptions:
    """Arguments of ``fedrax report``."""

    directories: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """Run directories, or directories that hold some."""
    out: Path | None = None
    """The page; by default report.html in DIR, or here where there are several."""
    title: str | None = None
    """Its title; by default what the comparisons or runs are called."""
    target: float | None = None
    """Accuracy to reach; by default the comparison's, that at which all runs end, or 95 % of the best final."""


def main(args: list[str]) -> int:
    """Read, write."""
    options = parse(ReportOptions, args, "fedrax report", DESCRIPTION)
    if not options.directories:
        raise FedraxError("which runs? fedrax report DIR...")
    if options.target is not None and not 0 < options.target <= 1:
        raise FedraxError(f"the target is an accuracy in (0, 1], not {options.target}.")
    from fedrax.report.html import write_report

    path = write_report(options.directories, options.out, target=options.target, title=options.title)
    print(f"report: {path}")
    return 0
