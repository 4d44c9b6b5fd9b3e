"""``fedrax run``: runs one experiment."""

from __future__ import annotations

import dataclasses
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.cli import discard_output, tell, when_interrupted
from fedrax.cli.arguments import parse_experiment
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line
from fedrax.experiments import experiment, user_code
from fedrax.experiments.comparison import safe_name
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ExperimentFile
from fedrax.privacy.ledger import NOT_COVERED
from fedrax.report import sinks
from fedrax.report.comparison_table import wide_console
from fedrax.report.runs import finite, summary_line
from fedrax.signals import stop_runs
from fedrax.simulation import Event, Result, simulate, use_all_cores
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import FAILURE
from fedrax.simulation.results.events import rounds_done
from fedrax.simulation.results.progress import ProgressSink

DESCRIPTION = """Run one experiment: `fedrax run [FILE.toml] [flags]`.

Every key of the file is also a flag (--algorithm.local.lr 0.05 --run.rounds 20); names select the parts of an
experiment (--algorithm scaffold --data mnist --partition shards --model 2nn). Without a file the defaults below apply.
`fedrax run file.py:MyMethod` runs your own method; in Python, fedrax.check_algorithm(MyMethod) tests it. The run
directory holds experiment.toml, events.jsonl, model.safetensors, checkpoint/, environment.json and clients.json."""


@dataclass
class ReportingOptions:
    """Options of the output, without effect on results."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    quiet: bool = False
    """Print nothing."""
    json: bool = False
    """Print the event of each round and then a summary as lines of JSON."""
    tensorboard: bool = False
    """Also write a TensorBoard log in the run directory."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases."""
    mlflow: str | None = None
    """Also log to this experiment of MLflow."""


@dataclass
class RunOptions(ReportingOptions):
    """Options of ``fedrax run``."""

    out: Path | None = None
    """Run directory; by default runs/NAME-ALGORITHM-seedN, numbered if that exists."""


def main(args: list[str]) -> int:
    """Parse, prepare, run, report."""
    parsed = parse_experiment(RunOptions, args, "fedrax run", DESCRIPTION)
    spec, options = parsed.experiment, parsed.options
    directory = new_directory(spec, options.out, options.data_dir)
    use_all_cores()
    problem = experiment.build(spec, options.data_dir)
    if not options.quiet:
        print_notes([*ignored_keys_note(parsed.ignored_keys, spec), *problem[2].notes, *problem[1].notes], options.json)
    return run(spec, problem, directory, options, resume=False)


def run(spec: Experiment, problem: tuple, directory: Path, options: ReportingOptions, resume: bool) -> int:
    """Simulate with the sinks of the options, and report."""
    when_interrupted(lambda: resume_command(directory, options.data_dir))
    seen = make_sinks(spec, directory, options)
    algorithm, task, federation = problem
    result = simulate(
        algorithm, task, federation, spec.run, directory=directory, resume=resume, sinks=seen, progress=False
    )
    report(spec, result, directory, options)
    return 0


def resume_command(directory: Path, data_dir: Path | None) -> str:
    """How to resume a run that is interrupted now; empty if there is nothing to resume, or it has diverged."""
    if checkpoint.exists(directory / FAILURE) or not (directory / "experiment.toml").exists():
        return ""
    return f"resume with: {_resume_words(directory, data_dir)}"


def _resume_words(directory: Path, data_dir: Path | None) -> str:
    """The command that resumes a run with the code and the data directory of this one."""
    options = ["--trust"] * user_code.was_imported() + ([] if data_dir is None else ["--data-dir", str(data_dir)])
    return shlex.join(["fedrax", "resume", str(directory), *options])


def ignored_keys_note(keys: Sequence[str], spec: Experiment) -> list[str]:
    """A note about keys of a comparison file that a single run ignores."""
    if not keys:
        return []
    ignored = f"{' and '.join(keys)} in the file {'is' if len(keys) == 1 else 'are'} for fedrax compare"
    return [f"{ignored}; this is one run, with seed {spec.run.seed}"]


def print_notes(notes: Sequence[str], warnings_only: bool) -> None:
    """Print notes of the data reader on standard error; only warnings with JSON output."""
    for note in notes:
        if note.startswith("warning: ") or not warnings_only:
            tell(printable_line(note))


class JsonLinesSink(sinks.JsonSink):
    """Prints events as lines of JSON; a closed pipe stops the run as Ctrl-C does."""

    def event(self, event: Event) -> None:
        """Print the event."""
        try:
            super().event(event)
        except BrokenPipeError:
            discard_output()
            stop_runs(signal.SIGPIPE)


def make_sinks(spec: Experiment, directory: Path, options: ReportingOptions) -> list[Any]:
    """The sinks of a run: the experiment's file and those of the options."""
    made: list[Any] = [ExperimentFile(spec, directory)]
    if options.json:
        made.append(JsonLinesSink())
    elif not options.quiet:
        made.append(ProgressSink(spec.method_name))
    return made + make_trackers(spec, directory, directory.name, options)


def make_trackers(spec: Experiment, directory: Path, name: str, options: ReportingOptions) -> list[Any]:
    """The trackers of the options, for a run called ``name``."""
    made: list[Any] = []
    if options.tensorboard:
        made.append(sinks.TensorBoardSink(directory / "tensorboard"))
    if options.wandb is not None:
        made.append(sinks.WandbSink(options.wandb, name, experiment.to_table(spec), directory))
    if options.mlflow is not None:
        made.append(sinks.MlflowSink(options.mlflow, name, experiment.to_table(spec)))
    return made


def report(spec: Experiment, result: Result, directory: Path, options: ReportingOptions) -> None:
    """Print the outcome of a run."""
    if options.json:
        import json

        last = {
            "directory": str(directory),
            "plan": result.plan,
            "stopped": result.stopped,
            "rounds": rounds_done(result.events),
        }
        if result.spent is not None:
            last["privacy"] = finite(dataclasses.asdict(result.spent))
        print(json.dumps(last))
    elif not options.quiet:
        console = wide_console()
        console.print(f"{spec.method_name}: {summary_line(result.events)}")
        if result.spent is not None:
            console.print(str(result.spent))
            console.print(NOT_COVERED)
        console.print(f"plan {result.plan}")
        console.print(f"saved in {directory}; show it with: fedrax show {directory}")


def new_directory(spec: Experiment, out: Path | None, data_dir: Path | None) -> Path:
    """A directory without a run."""
    if out is not None:
        if (out / "experiment.toml").exists() or (out / "events.jsonl").exists():
            resume = _resume_words(out, data_dir)
            raise FedraxError(f"{out} holds a run already: choose another --out, or resume it with: {resume}")
        return out
    stem = Path("runs") / f"{safe_name(spec.name)}-{spec.method_name.lower()}-seed{spec.run.seed}"
    number = 1
    while (directory := stem if number == 1 else stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return directory
