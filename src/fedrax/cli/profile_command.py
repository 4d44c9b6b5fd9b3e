"""``fedrax profile``: where a round's time goes."""

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

DESCRIPTION = """Where a round's time goes: `fedrax profile [FILE.toml] [flags]`.

Some rounds of the experiment run for a few seconds, with the flags of `fedrax run`. The report parts a round's time
(gathering batches, gradients, local steps, aggregation, evaluation, the host), compares the heaviest operations of the
model's layers with what this machine can do, measured on the spot, and says what bounds the round and what helps.
Nothing is kept that is not asked for. Of a comparison's file the [algorithm] is profiled, or the one of --algorithm."""


@dataclass
class ProfileOptions:
    """Options of ``fedrax profile``."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    rounds: int | None = None
    """Rounds to time; by default as many as take about two seconds."""
    json: bool = False
    """Print the profile as JSON."""
    out: Path | None = None
    """Keep the profile in this directory: profile.json, profile.png, profile.svg and experiment.toml."""
    trace: Path | None = None
    """Keep the raw trace in this directory, for TensorBoard, XProf or Perfetto."""


def main(args: list[str]) -> int:
    """Parse, profile, print, keep."""
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
        for kind in ("png", "svg"):
            rendering.save(made, options.out / f"profile.{kind}")
    for what, where in (("profile", options.out), ("trace", options.trace)):
        if where is not None and not options.json:
            print(f"{what} kept in {where}")
    return 0
