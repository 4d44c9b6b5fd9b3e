"""``fedrax doctor``: what a run's directory holds, what is damaged, what can be saved."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError
from fedrax.escaping import plain
from fedrax.report import doctor
from fedrax.simulation.persistence.run_directory import owned

DESCRIPTION = """Examine a run's directory: `fedrax doctor DIR`.

Every byte is read and held against what was written: the experiment, the events, the last checkpoint and the one before
it. Says whether the run can go on, and what would help; --save does that, and asks first in a terminal. A damaged
file is kept under another name. The status is 0 where nothing is wrong (any more), 1 otherwise."""


@dataclass
class DoctorOptions:
    """Arguments of ``fedrax doctor``."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="DIR")]
    """Run directory."""
    save: bool = False
    """Do what helps."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Examine, say so, save."""
    options = parse(DoctorOptions, args, "fedrax doctor", DESCRIPTION)
    directory = options.directory
    if not directory.is_dir():
        raise FedraxError(f"{directory} is no directory.")
    if not doctor.of_run(directory):
        raise FedraxError(
            f"{directory} is the directory of no run; {doctor.runs_below(directory) or 'one can be made in it'}"
        )
    with owned(directory, resume=True):
        found = doctor.examine(directory)
        if not options.json:
            show(found)
        if found.remedies and (options.save or (not options.json and asked())):
            doctor.save(found)
            found = doctor.examine(directory)
            if not options.json:
                print("saved; now:")
                show(found)
    if options.json:
        findings = [dataclasses.asdict(finding) for finding in found.findings]
        helps = [remedy.words for remedy in found.remedies]
        print(json.dumps({"sound": found.sound, "findings": findings, "helps": helps, "verdict": found.verdict}))
    return 0 if found.sound else 1


def show(found: doctor.Examination) -> None:
    """A line for each file, what helps, and whether the run can go on."""
    width = max((len(finding.name) for finding in found.findings), default=0)
    for finding in found.findings:
        print(f"{finding.name:<{width}}  {plain(finding.state)}")
    for remedy in found.remedies:
        print(f"--save would {plain(remedy.words)}")
    print(plain(found.verdict))


def asked() -> bool:
    """Whether somebody at a terminal says yes."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input("do that now? [y/N] ").strip().casefold() in ("y", "yes")
