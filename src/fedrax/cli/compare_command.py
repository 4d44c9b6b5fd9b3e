"""``fedrax compare``: several algorithms, several seeds, one partition."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.cli import tell
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.run_command import ReportingOptions, make_trackers
from fedrax.errors import FedraxError
from fedrax.escaping import plain
from fedrax.experiments import comparison
from fedrax.experiments.comparison import SHARED, Comparison, RunJob
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ProgressWatcher
from fedrax.experiments.run_comparison import ComparisonResult, compare
from fedrax.experiments.search import grid
from fedrax.experiments.serialization import ALGORITHM, replaced_by
from fedrax.report import comparison_table
from fedrax.simulation import Interrupted

DESCRIPTION = """Compare algorithms with several seeds on one partition: `fedrax compare FILE.toml... [flags]`.

A file holds a [[compare]] table for each method, or several files hold one method each; without a file, --algorithms
names them. --grid algorithm.local.lr=0.01,0.03,0.1 tries settings of each method on validation data, held out of the
clients' training rows, and compares every method at its own best; with --trials 30 Optuna chooses the settings to try,
also of ranges (algorithm.local.lr=0.001..1:log). --algorithm.local.lr 0.1 sets one for all methods. With --on
dask://HOST:PORT the runs are made on a cluster.

Prints a table (mean ± standard deviation over seeds; rounds, megabytes and seconds to the target accuracy; the best
of each column marked *), draws curves (PNG and SVG), and keeps table.md and comparison.json beside the runs. Finished
runs are not run again, interrupted ones go on: type the same command again. The exit status is 1 where a method
diverged."""
DIVERGED = 1


@dataclass
class CompareOptions(ReportingOptions):
    """Options of ``fedrax compare``."""

    algorithms: tuple[str, ...] = ()
    """Further methods, by name and with their default settings."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default the file's, or 0 1 2."""
    target: float | None = None
    """Accuracy to reach; by default the file's, that at which all runs end, or 95 % of the best final accuracy."""
    grid: tuple[str, ...] = ()
    """Settings to choose for each method, in place of the file's grids: PATH=VALUE,VALUE,..., one or several."""
    validation: float | None = None
    """Share of each client's training rows to choose by; by default the file's, or 0.2."""
    search_seeds: tuple[int, ...] = ()
    """Seeds of the runs to choose by; by default the file's, or the first of the seeds."""
    trials: int | None = None
    """Settings of each method that Optuna tries in place of the whole grid, whose values may then be ranges:
    algorithm.local.lr=0.001..1:log; by default the file's, or every point."""
    metric: str | None = None
    """What to choose by; by default the file's, or accuracy, or the loss where there is none."""
    on: str | None = None
    """Whose workers make the runs: dask://HOST:PORT or ray://HOST:PORT; by default they are made here."""
    out: Path | None = None
    """Directory of the comparison; by default runs/NAME."""
    json: bool = False
    """Print the table as JSON instead."""


def main(args: list[str]) -> int:
    """Parse, run what is not finished, report."""
    spec, options = read_arguments(args)
    try:
        places = {"directory": options.out, "data_dir": options.data_dir, "executor": options.on}
        outcome = compare(spec, **places, watcher=CommandWatcher(options))
    except KeyboardInterrupt as stop:
        tell("fedrax: interrupted; the same command goes on from here")
        return 128 + (stop.signal if isinstance(stop, Interrupted) else signal.SIGINT)
    report(outcome, options, args)
    return DIVERGED if outcome.diverged else 0


def read_arguments(args: list[str]) -> tuple[Comparison, CompareOptions]:
    """The comparison of the files, with what the flags change."""
    _refuse_flags_of_one_run(args)
    common, args = take_settings(gathered(args, "--grid"))
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    files = [Path(arg) for arg in args[:count]]
    rest = args[:1] * bool(files) + args[count:]
    parsed = parse_experiment(CompareOptions, rest, "fedrax compare", DESCRIPTION, (*SHARED, "run"))
    options = parsed.options
    spec = comparison.read(files) if files else Comparison("comparison", (), (0, 1, 2), None)
    known = {method.name.casefold() for method in spec.methods}
    twice = next((name for name in options.algorithms if name.casefold() in known), None)
    if twice is not None:
        raise FedraxError(
            f"--algorithms adds methods, with their default settings, to those of {files[0]}: leave {twice!r} out,"
            " which is there already."
        )
    of_rows = {part: getattr(spec.methods[0], part) for part in comparison.OF_ROWS} if spec.methods else {}
    added = [
        Experiment(name=cls.__name__ if ":" in name else name, algorithm=cls(), run=spec.run, **of_rows)
        for name, cls in ((name, ALGORITHM.find(name, Path.cwd(), "typed")) for name in options.algorithms)
    ]
    shared = {part: getattr(parsed.experiment, part) for part in SHARED}
    of_runs = _settings_of_runs(args)
    run = {name: getattr(parsed.experiment.run, name) for name in (path.split(".")[1] for path in of_runs)}
    methods = tuple(
        grid.changed(
            dataclasses.replace(method, run=dataclasses.replace(method.run, **run), **shared),
            common,
            f"{method.name}, from the flags",
        )
        for method in (*spec.methods, *added)
    )
    name = spec.name if parsed.experiment.name in ("experiment", spec.name) else parsed.experiment.name
    spec = dataclasses.replace(spec, name=name, methods=methods, run=dataclasses.replace(spec.run, **run))
    spec = with_options(spec, options)
    _refuse_what_grids_have(spec, [*common, *of_runs])
    return spec, options


def _refuse_flags_of_one_run(args: list[str]) -> None:
    """Flags that would be taken for settings that all methods share, and be without effect."""
    for flag, instead in (("--algorithm", "--algorithms adds methods"), ("--run.seed", "--seeds gives several")):
        if any(arg == flag or arg.startswith(f"{flag}=") for arg in args):
            raise FedraxError(f"{flag} is for a single run: {instead} to a comparison.")


def _settings_of_runs(args: list[str]) -> list[str]:
    """The paths of settings among ``args``: ``--run.rounds=5`` is about run.rounds, ``--run.no-per-client`` too."""
    flags = [arg[2:].partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--run.")]
    return [f"run.{flag.removeprefix('run.').removeprefix('no_')}" for flag in flags]


def _refuse_what_grids_have(spec: Comparison, flags: Sequence[str]) -> None:
    """Flags for all methods that would be without effect on any, since grids try other values."""
    lost = set(flags)
    for method in spec.methods:
        tried = [path for path, _ in spec.grids[method.name].axes] if method.name in spec.grids else []
        lost &= {*tried, *(replaced_by(path, method) for path in tried)}
    if lost and spec.methods:
        raise FedraxError(
            f"--{min(lost)} would be without effect, for the grid of {spec.methods[0].name} tries values of its own:"
            " leave it out, or give another --grid."
        )


def with_options(spec: Comparison, options: CompareOptions) -> Comparison:
    """The comparison with what its own options change."""
    changes: dict[str, Any] = {"seeds": options.seeds} if options.seeds else {}
    changes |= {"target": options.target} if options.target is not None else {}
    if options.grid:
        changes["grids"] = dict.fromkeys((method.name for method in spec.methods), grid.from_flags(options.grid))
    given = {"validation": options.validation, "seeds": options.search_seeds or None, "metric": options.metric}
    given |= {"trials": options.trials}
    search = {name: value for name, value in given.items() if value is not None}
    if options.on is not None and (options.tensorboard or options.wandb or options.mlflow):
        raise FedraxError("trackers see the runs that are made here: leave --on out, or --tensorboard and the like.")
    spec = dataclasses.replace(spec, **changes, search=dataclasses.replace(spec.search, **search))
    if search and not spec.grids:
        raise FedraxError("there is nothing to choose by validation data: give --grid PATH=VALUE,VALUE,...")
    return spec


def gathered(args: list[str], flag: str) -> list[str]:
    """``args`` with all words of a flag that is given several times behind its first one."""
    words, rest, place = [], [], None
    tokens = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    inside = False
    for token in tokens:
        if token.startswith("-") or (not inside):
            inside = token == flag
            if not inside:
                rest.append(token)
            elif place is None:
                place = len(rest)
        else:
            words.append(token)
    return rest if place is None else [*rest[:place], flag, *words, *rest[place:]]


def take_settings(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of all methods among ``args`` (``--algorithm.local.lr 0.1``), and the other arguments."""
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
    """The progress of a comparison as far as the options ask for it, and trackers for runs on test data."""

    def __init__(self, options: CompareOptions):
        super().__init__()
        self._options, self._silent = options, options.quiet or options.json

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Any]:
        """The line, and what the options ask for."""
        seen = [] if self._silent else super().sinks(job, directory, number, of)
        if job.spec.validation:
            return seen
        return seen + make_trackers(job.spec, directory, str(job.place), self._options)

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """A line; of a run that diverged also where the numbers alone are wanted."""
        if not self._silent:
            super().done(job, directory, error and f"fedrax: {error}")
        elif error is not None and not self._options.quiet:
            tell(f"fedrax: {error}")

    def say(self, text: str) -> None:
        """A line."""
        if not self._silent:
            super().say(text)


def report(outcome: ComparisonResult, options: CompareOptions, args: list[str]) -> None:
    """Table, JSON, where everything is kept; what to try next."""
    spec, out = outcome.comparison, outcome.directory
    if options.json:
        print(json.dumps(outcome.summary()))
    elif not options.quiet:
        console = comparison_table.wide_console()
        comparison_table.show(console, outcome.rows, outcome.target, outcome.metric, spec.name)
        for line in outcome.lines():
            console.print(plain(line))
        shown = " and ".join(str(picture) for picture in outcome.pictures)
        console.print(f"curves: {shown}, and .svg; table: {out / 'table.md'}; numbers: {out / 'comparison.json'}")
        console.print(next_step(spec, args))


def next_step(spec: Comparison, args: list[str]) -> str:
    """A command that shows something new: the one that was typed, changed."""
    if not spec.grids:
        again = shlex.join(without(args, "--out"))
        return f"try next: fedrax compare {again} --grid algorithm.local.lr=0.01,0.03,0.1,0.3    (own step sizes)"
    again = shlex.join(without(args, "--out", "--partition"))
    clients = f"--partition.clients {getattr(spec.methods[0].partition, 'clients', None) or 10}"
    if type(spec.methods[0].partition).__name__ != "Iid":
        return f"try next: fedrax compare {again} --partition iid {clients}    (what is left where clients are alike?)"
    return f"try next: fedrax compare {again} --partition shards {clients} --partition.per-client 1    (clients differ)"


def without(args: list[str], *flags: str) -> list[str]:
    """``args`` without some flags, those that begin like them, and their values."""
    kept, inside = [], False
    for arg in args:
        if arg.startswith("-"):
            name = arg.split("=")[0]
            inside = any(name == flag or name.startswith(f"{flag}.") for flag in flags)
        if not inside:
            kept.append(arg)
    return kept
