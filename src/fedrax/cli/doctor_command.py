"""``fedrax doctor``: checks the files of a run directory, and repairs what can be repaired."""

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
from fedrax.escaping import printable_line
from fedrax.report import doctor
from fedrax.simulation.persistence.run_directory import lock_directory

DESCRIPTION = """Check a run directory: `fedrax doctor DIR`.

Reads every byte of the experiment, the events, the last checkpoint and the one before it, and verifies checksums.
Reports whether the run can be resumed, and the possible repairs. --repair makes them; in a terminal the command also
asks. Damaged files are renamed, never deleted. The exit status is 0 if all files are intact afterwards, 1 otherwise."""


@dataclass
class DoctorOptions:
    """Arguments of ``fedrax doctor``."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="DIR")]
    """Run directory."""
    repair: bool = False
    """Make the possible repairs without asking."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Check, report, repair."""
    options = parse(DoctorOptions, args, "fedrax doctor", DESCRIPTION)
    directory = options.directory
    if not directory.is_dir():
        raise FedraxError(f"{directory} is not a directory.")
    if not doctor.is_run_directory(directory):
        below = doctor.runs_below(directory)
        raise FedraxError(f"{directory} is not a run directory{below and f'; {below}'}")
    with lock_directory(directory, resume=True):
        found = doctor.examine(directory)
        if not options.json:
            show(found)
        if found.repairs and (options.repair or (not options.json and confirm())):
            doctor.apply_repairs(found)
            found = doctor.examine(directory)
            if not options.json:
                print("repaired; now:")
                show(found)
    if options.json:
        files = [dataclasses.asdict(file) for file in found.files]
        repairs = [repair.description for repair in found.repairs]
        print(json.dumps({"intact": found.intact, "files": files, "repairs": repairs, "conclusion": found.conclusion}))
    return 0 if found.intact else 1


def show(found: doctor.Examination) -> None:
    """Print the state of each file, the possible repairs, and whether the run can be resumed."""
    width = max((len(file.name) for file in found.files), default=0)
    for file in found.files:
        print(f"{file.name:<{width}}  {printable_line(file.state)}")
    for repair in found.repairs:
        print(f"--repair would {printable_line(repair.description)}")
    print(printable_line(found.conclusion))


def confirm() -> bool:
    """Ask in a terminal whether to repair; False without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input("repair now? [y/N] ").strip().casefold() in ("y", "yes")
