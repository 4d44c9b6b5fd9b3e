"""``fedrax profile``: the time of a round by its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fedrax import files
from fedrax.cli.arguments import parse_experiment
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import use_all_cores
from fedrax.simulation.persistence.run_directory import CHECKPOINT
from fedrax.simulation.results.events import FILE

DESCRIPTION = """Show the time of a round by its parts: `fedrax profile [FILE.toml] [flags]`.

Runs some rounds of the experiment for a few seconds, with the flags of `fedrax run`. Reports the time of each part of a
round (gathering batches, gradients, local steps, aggregation, evaluation, the host), the heaviest operations by layer
with their rates relative to this machine's measured limits, and advice. Nothing is stored without --out or --trace. The
[[compare]] tables of a file are ignored: the method is that of [algorithm] or --algorithm."""


@dataclass
class ProfileOptions:
    """Options of ``fedrax profile``."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    rounds: int | None = None
    """Number of rounds to time; by default as many as take about two seconds."""
    json: bool = False
    """Print the profile as JSON."""
    out: Path | None = None
    """Save profile.json and experiment.toml in this directory."""
    trace: Path | None = None
    """Save the raw trace in this directory, for TensorBoard, XProf or Perfetto."""


def main(args: list[str]) -> int:
    """Parse, profile, print, save."""
    parsed = parse_experiment(ProfileOptions, args, "fedrax profile", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    if options.rounds is not None and not 1 <= options.rounds < 2**31:
        raise FedraxError(f"--rounds must be 1 or more and fit into 32 bits, not {options.rounds}")
    if options.out is not None and any((options.out / name).exists() for name in (FILE, CHECKPOINT)):
        raise FedraxError(f"{options.out} holds a run, whose experiment.toml would be replaced: choose another --out.")
    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    from fedrax.profiling import profile, rendering

    made = profile(algorithm, task, federation, spec.run, rounds=options.rounds, keep_trace=options.trace)
    if options.json:
        print(json.dumps(made.to_dict()))
    else:
        rendering.show(made, wide_console())
    if options.out is not None:
        experiment.write(spec, options.out / "experiment.toml")
        files.write_text(options.out / "profile.json", json.dumps(made.to_dict(), indent=1) + "\n")
    for what, where in (("profile", options.out), ("trace", options.trace)):
        if where is not None and not options.json:
            print(f"{what} saved in {where}")
    return 0
