"""``fedrax run``: one experiment."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.cli import forget_output, tell
from fedrax.cli.arguments import parse_experiment
from fedrax.errors import FedraxError
from fedrax.escaping import plain
from fedrax.experiments import experiment
from fedrax.experiments.comparison import safe_name
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ExperimentFile
from fedrax.report import sinks
from fedrax.report.comparison_table import wide_console
from fedrax.report.runs import finite, summary_line
from fedrax.simulation import Event, Interrupted, Result, simulate, use_all_cores
from fedrax.simulation.process import stop_runs
from fedrax.simulation.results.progress import ProgressSink

DESCRIPTION = """Run one experiment: `fedrax run [FILE.toml] [flags]`.

Every key of the file is a flag (--algorithm.local.lr 0.05 --run.rounds 20), and names choose what it is made of
(--algorithm scaffold --data mnist --partition shards --model 2nn); without a file the defaults below hold. A method
of your own runs by `fedrax run file.py:MyMethod`, once it takes and returns what it must; that it is pure, also in
float64 and whatever the order of clients, fedrax.check_algorithm(MyMethod) checks, in half a minute. The run is kept in
a directory: experiment.toml, events.jsonl, checkpoint/, environment.json, clients.json."""


@dataclass
class ReportingOptions:
    """What does not change the numbers."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    quiet: bool = False
    """Print nothing."""
    json: bool = False
    """Print each round's event, then a summary, as lines of JSON."""
    tensorboard: bool = False
    """Also log for TensorBoard, in the run directory."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases."""
    mlflow: str | None = None
    """Also log to this experiment of MLflow."""


@dataclass
class RunOptions(ReportingOptions):
    """Options of ``fedrax run``."""

    out: Path | None = None
    """Run directory; by default runs/NAME-ALGORITHM-seedN, with a number behind it if that exists."""


def main(args: list[str]) -> int:
    """Parse, prepare, run, report."""
    parsed = parse_experiment(RunOptions, args, "fedrax run", DESCRIPTION)
    spec, options = parsed.experiment, parsed.options
    directory = new_directory(spec, options.out)
    use_all_cores()
    problem = experiment.build(spec, options.data_dir)
    if not options.quiet:
        say_notes([*not_of_one_run(parsed.left_out, spec), *problem[2].notes, *problem[1].notes], options.json)
    return run(spec, problem, directory, options, resume=False)


def run(spec: Experiment, problem: tuple, directory: Path, options: ReportingOptions, resume: bool) -> int:
    """Simulate with the sinks asked for, and say how it went."""
    try:
        seen = make_sinks(spec, directory, options)
        algorithm, task, federation = problem
        result = simulate(
            algorithm, task, federation, spec.run, directory=directory, resume=resume, sinks=seen, progress=False
        )
    except Interrupted as stop:
        tell(f"fedrax: interrupted; go on with: fedrax resume {directory}")
        return 128 + stop.signal
    report(spec, result, directory, options)
    return 0


def not_of_one_run(keys: Sequence[str], spec: Experiment) -> list[str]:
    """What the file says beside, and one run does not do."""
    if not keys:
        return []
    said = f"{' and '.join(keys)} in the file {'is' if len(keys) == 1 else 'are'} for fedrax compare"
    return [f"{said}; this is one run, with seed {spec.run.seed}"]


def say_notes(notes: Sequence[str], warnings_only: bool) -> None:
    """What the reader of the data wants known, on standard error; where programs listen, warnings alone."""
    for note in notes:
        if note.startswith("warning: ") or not warnings_only:
            tell(plain(note))


class JsonLinesSink(sinks.JsonSink):
    """Events as lines of JSON. The run stops where their reader leaves, as by Ctrl-C."""

    def event(self, event: Event) -> None:
        """Write the line."""
        try:
            super().event(event)
        except BrokenPipeError:
            forget_output()
            stop_runs(signal.SIGPIPE)


def make_sinks(spec: Experiment, directory: Path, options: ReportingOptions) -> list[Any]:
    """The experiment's file, and the sinks that the options ask for."""
    made: list[Any] = [ExperimentFile(spec, directory)]
    if options.json:
        made.append(JsonLinesSink())
    elif not options.quiet:
        made.append(ProgressSink(spec.method_name))
    return made + make_trackers(spec, directory, directory.name, options)


def make_trackers(spec: Experiment, directory: Path, name: str, options: ReportingOptions) -> list[Any]:
    """The loggers that the options ask for, of a run that they know as ``name``."""
    made: list[Any] = []
    if options.tensorboard:
        made.append(sinks.TensorBoardSink(directory / "tensorboard"))
    if options.wandb is not None:
        made.append(sinks.WandbSink(options.wandb, name, experiment.to_table(spec), directory))
    if options.mlflow is not None:
        made.append(sinks.MlflowSink(options.mlflow, name, experiment.to_table(spec)))
    return made


def report(spec: Experiment, result: Result, directory: Path, options: ReportingOptions) -> None:
    """The last word on a run."""
    if options.json:
        import json

        last = {
            "directory": str(directory),
            "plan": result.plan,
            "stopped": result.stopped,
            "rounds": len(result.events),
        }
        if result.spent is not None:
            last["privacy"] = finite(dataclasses.asdict(result.spent))
        print(json.dumps(last))
    elif not options.quiet:
        console = wide_console()
        console.print(f"{spec.method_name}: {summary_line(result.events)}")
        if result.spent is not None:
            console.print(str(result.spent))
        if result.stopped == "budget":
            budget = f"{spec.run.epsilon_budget:g} at delta {spec.run.delta:g}"
            console.print(f"stopped: round {len(result.events) + 1} would exceed the budget of epsilon {budget}")
        console.print(f"plan {result.plan}")
        console.print(f"kept in {directory}; see it with: fedrax show {directory}")


def new_directory(spec: Experiment, out: Path | None) -> Path:
    """A directory that holds no run yet."""
    if out is not None:
        if (out / "experiment.toml").exists() or (out / "events.jsonl").exists():
            raise FedraxError(f"{out} holds a run already: choose another --out, or go on with: fedrax resume {out}")
        return out
    stem = Path("runs") / f"{safe_name(spec.name)}-{spec.method_name.lower()}-seed{spec.run.seed}"
    number = 1
    while (directory := stem if number == 1 else stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return directory
