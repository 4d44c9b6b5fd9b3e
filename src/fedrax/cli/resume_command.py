"""``fedrax resume``: resume a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.cli.run_command import ReportingOptions, run
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.report import doctor
from fedrax.report.runs import how_to_resume
from fedrax.simulation import use_all_cores
from fedrax.simulation.persistence import run_description
from fedrax.simulation.persistence.checkpoint import check_format
from fedrax.simulation.persistence.run_description import EXPERIMENT
from fedrax.simulation.persistence.run_directory import CHECKPOINT

DESCRIPTION = """Resume an interrupted run from its last checkpoint: `fedrax resume DIR`.

The results are those of an uninterrupted run. --run.rounds 200 continues a finished run to 200 rounds; its final
evaluation then stays among the events. --run.epsilon-budget 8 continues a private run that its budget ended. A run with
your own Python code needs --trust."""


@dataclass
class ResumeOptions:
    """Arguments of ``fedrax resume``."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="DIR")]
    """Run directory."""
    options: Annotated[ReportingOptions, tyro.conf.arg(name="")]
    rounds: Annotated[int | None, tyro.conf.arg(name="run.rounds")] = None
    """Total number of rounds, to continue a finished run; by default the run's own."""
    eval_every: Annotated[int | None, tyro.conf.arg(name="run.eval-every")] = None
    """Rounds between evaluations from here on; by default the run's own."""
    epsilon_budget: Annotated[float | None, tyro.conf.arg(name="run.epsilon-budget")] = None
    """Largest epsilon of the whole run, its finished rounds included; by default the run's own."""
    trust: bool = False
    """Run the Python code that the directory's experiment names. Read it first if someone else sent the directory."""


def main(args: list[str]) -> int:
    """Parse, prepare, resume."""
    parsed = parse(ResumeOptions, args, "fedrax resume", DESCRIPTION)
    file = parsed.directory / EXPERIMENT
    if not file.is_file() and (parsed.directory / run_description.FILE).is_file():
        raise FedraxError(f"{parsed.directory} is not a run of an experiment file: {how_to_resume(parsed.directory)}.")
    if not file.is_file():
        below = doctor.runs_below(parsed.directory)
        other = f"; {below}; resume a comparison with the command that started it" if below else ""
        raise FedraxError(f"{parsed.directory} is not a run directory: it has no experiment.toml{other}.")
    check_format(parsed.directory / CHECKPOINT)  # before its experiment.toml, whose names may be of that version too
    spec = experiment.read(file, "typed" if parsed.trust else "none")
    if parsed.rounds is not None and parsed.rounds < spec.run.rounds:
        raise FedraxError(f"the run has {spec.run.rounds} rounds: --run.rounds must be larger, not {parsed.rounds}.")
    given = {name: getattr(parsed, name) for name in ("rounds", "eval_every", "epsilon_budget")}
    changed = {name: value for name, value in given.items() if value is not None}
    spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, **changed))
    spec.check()
    use_all_cores()
    return run(spec, experiment.build(spec, parsed.options.data_dir), parsed.directory, parsed.options, resume=True)
