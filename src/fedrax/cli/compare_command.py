"""``fedrax compare``: compares several algorithms with several seeds on one partition."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.cli import tell, when_interrupted
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.run_command import ReportingOptions, make_trackers
from fedrax.cli.show_command import chosen_format, print_table
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line
from fedrax.experiments import comparison
from fedrax.experiments.comparison import SHARED, Comparison, RunJob
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ProgressWatcher
from fedrax.experiments.run_comparison import ComparisonResult, compare
from fedrax.experiments.search import grid
from fedrax.experiments.serialization import ALGORITHM, replaced_by
from fedrax.report import comparison_table
from fedrax.simulation.persistence.client_summary import read_client_summary

DESCRIPTION = """Compare algorithms with several seeds on one partition: `fedrax compare FILE.toml... [flags]`.

A file holds a [[compare]] table for each method, or several files hold one method each; without a file, --algorithms
names them. --grid algorithm.local.lr=0.01,0.03,0.1 selects settings of each method on validation data, held out from
the clients' training rows, and compares the methods at their best settings. With --trials 30 Optuna selects the
settings to try, also from ranges (algorithm.local.lr=0.001..1:log). --algorithm.local.lr 0.1 sets a value for all
methods. With --on dask://HOST:PORT the runs are executed on a cluster.

Prints a table (mean ± standard deviation over seeds; rounds, megabytes and seconds to the target accuracy; the best of
each column marked *), or only the trials on validation data if a best value is at an end of its grid. Draws curves (PNG
and SVG), and saves table.md and comparison.json beside the runs. The same command resumes an interrupted comparison;
finished runs are not repeated. The exit status is 1 if a method diverged."""
DIVERGED = 1
"""Exit status where a method of the comparison diverged."""


@dataclass
class CompareOptions(ReportingOptions):
    """Options of ``fedrax compare``."""

    algorithms: tuple[str, ...] = ()
    """Additional methods by name, with their default settings."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default the file's, or 0 1 2."""
    target: float | None = None
    """Target accuracy; by default the file's, the one at which all runs stop, or 95 % of the best final accuracy."""
    grid: tuple[str, ...] = ()
    """Settings to select for each method, instead of the file's grids: one or more PATH=VALUE,VALUE,..."""
    validation: float | None = None
    """Share of each client's training rows held out as validation data; by default the file's, or 0.2."""
    search_seeds: tuple[int, ...] = ()
    """Seeds of the search; by default the file's, or the first seed."""
    trials: int | None = None
    """Number of settings of each method that Optuna tries instead of the whole grid, which may then have ranges:
    algorithm.local.lr=0.001..1:log; by default the file's, or every point."""
    metric: str | None = None
    """Metric of the search; by default the file's, or accuracy, or the loss without it."""
    on: str | None = None
    """Scheduler of a cluster that executes the runs: dask://HOST:PORT or ray://HOST:PORT. By default this process
    does."""
    out: Path | None = None
    """Directory of the comparison; by default runs/NAME."""
    markdown: bool = False
    """Print the table in Markdown instead."""
    latex: bool = False
    """Print the table for LaTeX instead, with the package booktabs."""
    csv: bool = False
    """Print the table as CSV instead: means, and standard deviations in columns of their own."""
    json: bool = False
    """Print the table as JSON instead."""

    @property
    def format(self) -> str | None:
        """The format of the table other than for the terminal."""
        return chosen_format(self, ("markdown", "latex", "csv", "json"))


def main(args: list[str]) -> int:
    """Parse, run what is unfinished, report."""
    spec, options = read_arguments(args)
    when_interrupted(lambda: "the same command resumes the comparison")
    arguments = {"directory": options.out, "data_dir": options.data_dir, "executor": options.on}
    outcome = compare(spec, **arguments, watcher=CommandWatcher(options))
    report(outcome, options, args)
    return DIVERGED if outcome.diverged else 0


def read_arguments(args: list[str]) -> tuple[Comparison, CompareOptions]:
    """The comparison of the files, changed by the flags."""
    _check_flags(args)
    common, args = take_method_settings(merge_repeated(args, "--grid"))
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    files = [Path(arg) for arg in args[:count]]
    rest = args[:1] * bool(files) + args[count:]
    parsed = parse_experiment(CompareOptions, rest, "fedrax compare", DESCRIPTION, (*SHARED, "run"))
    options = parsed.options
    spec = comparison.read(files) if files else Comparison("comparison", (), (0, 1, 2), None)
    known = {method.name.casefold() for method in spec.methods}
    duplicate = next((name for name in options.algorithms if name.casefold() in known), None)
    if duplicate is not None:
        raise FedraxError(
            f"--algorithms adds methods, with their default settings, to those of {files[0]}: leave {duplicate!r} out,"
            " which the file has already."
        )
    samples = {key: getattr(spec.methods[0], key) for key in comparison.SAMPLE_KEYS} if spec.methods else {}
    added = [
        Experiment(name=cls.__name__ if ":" in name else name, algorithm=cls(), run=spec.run, **samples)
        for name, cls in ((name, ALGORITHM.find(name, Path.cwd(), "typed")) for name in options.algorithms)
    ]
    shared = {part: getattr(parsed.experiment, part) for part in SHARED}
    run_paths = _run_settings(args)
    run = {name: getattr(parsed.experiment.run, name) for name in (path.split(".")[1] for path in run_paths)}
    methods = tuple(
        grid.with_settings(
            dataclasses.replace(method, run=dataclasses.replace(method.run, **run), **shared),
            common,
            f"{method.name}, from the flags",
        )
        for method in (*spec.methods, *added)
    )
    name = spec.name if parsed.experiment.name in ("experiment", spec.name) else parsed.experiment.name
    spec = dataclasses.replace(spec, name=name, methods=methods, run=dataclasses.replace(spec.run, **run))
    spec = apply_options(spec, options)
    _check_effect(spec, [*common, *run_paths])
    return spec, options


def _check_flags(args: list[str]) -> None:
    """Raise FedraxError for flags of a single run, which would have no effect here."""
    for flag, instead in (("--algorithm", "--algorithms adds methods"), ("--run.seed", "--seeds gives several")):
        if any(arg == flag or arg.startswith(f"{flag}=") for arg in args):
            raise FedraxError(f"{flag} is for a single run: {instead} to a comparison.")


def _run_settings(args: list[str]) -> list[str]:
    """Paths of the run settings in ``args``: ``--run.rounds=5`` sets run.rounds, ``--run.no-per-client`` per_client."""
    flags = [arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--run.")]
    return [f"run.{flag.removeprefix('run.').removeprefix('no_')}" for flag in flags]


def _check_effect(spec: Comparison, flags: Sequence[str]) -> None:
    """Raise FedraxError for a setting of all methods that the grids of all of them replace."""
    ignored = set(flags)
    for method in spec.methods:
        paths = [path for path, _ in spec.grids[method.name].axes] if method.name in spec.grids else []
        ignored &= {*paths, *(replaced_by(path, method) for path in paths)}
    if ignored and spec.methods:
        raise FedraxError(
            f"--{min(ignored)} is ignored, because the grid of {spec.methods[0].name} has values for it:"
            " leave it out, or give another --grid."
        )


def apply_options(spec: Comparison, options: CompareOptions) -> Comparison:
    """The comparison changed by its own options."""
    changes: dict[str, Any] = {"seeds": options.seeds} if options.seeds else {}
    changes |= {"target": options.target} if options.target is not None else {}
    if options.grid:
        changes["grids"] = dict.fromkeys((method.name for method in spec.methods), grid.from_flags(options.grid))
    given = {"validation": options.validation, "seeds": options.search_seeds or None, "metric": options.metric}
    given |= {"trials": options.trials}
    search = {name: value for name, value in given.items() if value is not None}
    if options.on is not None and (options.tensorboard or options.wandb or options.mlflow):
        raise FedraxError("loggers work for local runs only: leave out --on, or --tensorboard, --wandb and --mlflow.")
    spec = dataclasses.replace(spec, **changes, search=dataclasses.replace(spec.search, **search))
    if search and not spec.grids:
        raise FedraxError("there is no grid to search on validation data: give --grid PATH=VALUE,VALUE,...")
    return spec


def merge_repeated(args: list[str], flag: str) -> list[str]:
    """``args`` with the values of all occurrences of a flag behind the first one."""
    values, rest, position = [], [], None
    tokens = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    inside = False
    for token in tokens:
        if token.startswith("-") or (not inside):
            inside = token == flag
            if not inside:
                rest.append(token)
            elif position is None:
                position = len(rest)
        else:
            values.append(token)
    return rest if position is None else [*rest[:position], flag, *values, *rest[position:]]


def take_method_settings(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of all methods in ``args`` (``--algorithm.local.lr 0.1``), and the other arguments."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    path = None
    for arg in args:
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            path = flag[2:].replace("-", "_") if flag.startswith("--algorithm.") else None
            if path is not None:
                found[path] = [grid.value_of(value)] if equals else []
                continue
        if path is None:
            rest.append(arg)
        else:
            found[path].append(grid.value_of(arg))
    for path, values in found.items():
        if not values:
            raise FedraxError(f"--{path} needs a value.")
    return {path: values[0] if len(values) == 1 else values for path, values in found.items()}, rest


class CommandWatcher(ProgressWatcher):
    """Shows the progress that the options ask for, and adds trackers to runs on test data."""

    def __init__(self, options: CompareOptions):
        super().__init__()
        self._options, self._silent = options, options.quiet or options.format is not None

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Any]:
        """The progress line, and the trackers of the options."""
        made = [] if self._silent else super().sinks(job, directory, number, of)
        if job.spec.validation:
            return made
        return made + make_trackers(job.spec, directory, str(job.path), self._options)

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """Print the result of a run; only that it diverged if the table is not for the terminal."""
        if not self._silent:
            super().done(job, directory, error and f"fedrax: {error}")
        elif error is not None and not self._options.quiet:
            tell(f"fedrax: {error}")

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._silent:
            super().say(text)


def report(outcome: ComparisonResult, options: CompareOptions, args: list[str]) -> None:
    """Print the table or JSON, where files are saved, and what to try next."""
    spec, out = outcome.comparison, outcome.directory
    if options.format == "json":
        print(json.dumps(outcome.summary()))
    elif options.format is not None:
        print_table(outcome, options.format)
        for line in outcome.warnings():
            tell(printable_line(line))
    elif not options.quiet:
        console = comparison_table.wide_console()
        if not outcome.at_end:
            comparison_table.show(console, outcome.rows, outcome.target, outcome.metric, spec.name)
        for line in outcome.validation_lines() if outcome.at_end else outcome.lines():
            console.print(printable_line(line), highlight=False, markup=False)
        shown = " and ".join(str(picture) for picture in outcome.pictures)
        console.print(f"curves: {shown}, and .svg; table: {out / 'table.md'}; numbers: {out / 'comparison.json'}")
        if not outcome.at_end:
            console.print(next_step(spec, args, number_of_clients(outcome)))


def number_of_clients(outcome: ComparisonResult) -> int | None:
    """The number of clients of the runs, None if none of them has it on disk."""
    runs = (run for method in outcome.methods for run in method.runs)
    found = (read_client_summary(run.directory) for run in runs)
    return next((summary.clients for summary in found if summary is not None), None)


def next_step(spec: Comparison, args: list[str], clients: int | None) -> str:
    """A suggested next command, a change of the one that was typed."""
    if not spec.searched:
        again = shlex.join(without_flags(args, "--out"))
        return f"try next: fedrax compare {again} --grid algorithm.local.lr=0.01,0.03,0.1,0.3    (tune each method)"
    again = shlex.join(without_flags(args, "--out", "--partition"))
    as_many = "" if clients is None else f" --partition.clients {clients}"
    if type(spec.methods[0].partition).__name__ != "Iid":
        return f"try next: fedrax compare {again} --partition iid{as_many}    (the same on as many IID clients)"
    shards = f"--partition shards{as_many} --partition.per-client 1"
    return f"try next: fedrax compare {again} {shards}    (the same on non-IID clients)"


def without_flags(args: list[str], *flags: str) -> list[str]:
    """``args`` without some flags, the flags of settings inside them (``--partition.clients``), and their values."""
    kept, inside = [], False
    for arg in args:
        if arg.startswith("-"):
            name = arg.split("=")[0]
            inside = any(name == flag or name.startswith(f"{flag}.") for flag in flags)
        if not inside:
            kept.append(arg)
    return kept
