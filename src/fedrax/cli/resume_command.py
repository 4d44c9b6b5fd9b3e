"""``fedrax resume``: go on with a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.cli.run_command import Reporting, run
from fedrax.errors import FedraxError
from fedrax.experiments import experiment, user_code
from fedrax.report import doctor
from fedrax.simulation import use_all_cores
from fedrax.simulation.persistence.checkpoint import check_format
from fedrax.simulation.persistence.run_directory import CHECKPOINT

DESCRIPTION = """Go on with an interrupted run from its last checkpoint: `fedrax resume DIR`.

The numbers are those that the uninterrupted run would have had. --run.rounds 200 lets a finished run go on; the
evaluation at its end then stays among the others."""


@dataclass
class ResumeOptions:
    """Arguments of ``fedrax resume``."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="DIR")]
    """Run directory."""
    options: Annotated[Reporting, tyro.conf.arg(name="")]
    rounds: Annotated[int | None, tyro.conf.arg(name="run.rounds")] = None
    """Rounds in all, to go on with a finished run; by default the run's own."""
    trust: bool = False
    """Run the Python code that the directory's experiment names, although you did not make it on this machine."""


def main(args: list[str]) -> int:
    """Parse, prepare, go on."""
    parsed = parse(ResumeOptions, args, "fedrax resume", DESCRIPTION)
    file = parsed.directory / "experiment.toml"
    if not file.is_file():
        below = doctor.runs_below(parsed.directory)
        other = f"; {below}; a comparison goes on by the command that began it" if below else ""
        raise FedraxError(f"{parsed.directory} is not a run directory: it has no experiment.toml{other}.")
    check_format(parsed.directory / CHECKPOINT)  # before its experiment.toml, whose names may be of that version too
    trusted = parsed.trust or user_code.is_sealed(parsed.directory)
    spec = experiment.read(file, "typed" if trusted else "none")
    if parsed.rounds is not None:
        if parsed.rounds < spec.run.rounds:
            raise FedraxError(f"a run of {spec.run.rounds} rounds cannot go on to {parsed.rounds}: give more of them.")
        spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, rounds=parsed.rounds))
    use_all_cores()
    return run(spec, experiment.build(spec, parsed.options.data_dir), parsed.directory, parsed.options, resume=True)
