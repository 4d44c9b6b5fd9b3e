"""``fedrax compare``: several algorithms, several seeds, one partition."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax import files
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.run_command import ExperimentFile
from fedrax.errors import FedraxError
from fedrax.experiments import comparison, experiment
from fedrax.experiments.comparison import SHARED, Comparison
from fedrax.experiments.config import ALGORITHM
from fedrax.experiments.experiment import Experiment
from fedrax.report import curves, sinks, tables
from fedrax.report.runs import Method, default_target, main_metric, read_run, summarise, summary_line
from fedrax.simulation import Interrupted, NonFiniteError, checkpoint, simulate, use_all_cores
from fedrax.simulation.directory import CHECKPOINT
from fedrax.simulation.run import check_same
from fedrax.text import plain

DESCRIPTION = """Compare algorithms with several seeds on one partition: `fedrax compare FILE.toml... [flags]`.

A file holds a [[compare]] table for each method, or several files hold one method each; without a file, --algorithms
names them. Prints a table (mean ± standard deviation over seeds; rounds, megabytes and seconds to the target
accuracy; the best of each column marked *), draws curves (PNG and SVG), and keeps table.md and comparison.json
beside the runs. Finished runs are not run again, interrupted ones go on: type the same command again."""


@dataclass
class CompareOptions:
    """Options of ``fedrax compare``."""

    algorithms: tuple[str, ...] = ()
    """Further methods, by name and with their default settings."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default the file's, or 0 1 2."""
    target: float | None = None
    """Accuracy to reach; by default the file's, or 95 % of the best method's final accuracy."""
    out: Path | None = None
    """Directory of the comparison; by default runs/NAME."""
    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    quiet: bool = False
    """Print nothing."""
    json: bool = False
    """Print the table as JSON instead."""


def main(args: list[str]) -> int:
    """Parse, run what is not finished, report."""
    spec, options = read_arguments(args)
    out = options.out or default_directory(spec)
    planned = spec.planned()
    for run, place in planned:  # before anything runs: all directories must be ours
        comparison.state_of(run, out / place)
    use_all_cores()
    _, task, federation = experiment.build(planned[0][0], options.data_dir)
    check_kept(planned, task, federation, out)
    try:
        run_all(planned, task, federation, out, options)
    except KeyboardInterrupt as stop:
        print("fedrax: interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + (stop.signal if isinstance(stop, Interrupted) else signal.SIGINT)
    report(spec, comparison.methods_in(spec, out), out, options, args)
    return 0


def check_kept(planned: list[tuple[Experiment, Path]], task: Any, federation: Any, out: Path) -> None:
    """Refuse, before anything runs, runs that were made of other data, another program or another version."""
    for spec, place in planned:
        run = comparison.state_of(spec, out / place)
        if run is None or not (run.finished or checkpoint.exists(out / place / CHECKPOINT)):
            continue
        try:
            check_same(spec.algorithm, task, federation, spec.run, out / place)
        except FedraxError as error:
            raise FedraxError(f"{error}: choose another --out for a comparison of what there is now") from error


def read_arguments(args: list[str]) -> tuple[Comparison, CompareOptions]:
    """The comparison of the files, with what the flags change."""
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    files = [Path(arg) for arg in args[:count]]
    parsed = parse_experiment(
        CompareOptions, args[:1] * bool(files) + args[count:], "fedrax compare", DESCRIPTION, SHARED
    )
    options = parsed.options
    spec = comparison.read(files) if files else Comparison("comparison", (), (0, 1, 2), None)
    added = [
        Experiment(name=name, algorithm=ALGORITHM.find(name, Path.cwd(), "typed")()) for name in options.algorithms
    ]
    changes = {part: getattr(parsed.experiment, part) for part in SHARED}
    methods = tuple(dataclasses.replace(method, **changes) for method in (*spec.methods, *added))
    given = {"seeds": options.seeds or spec.seeds, "target": spec.target if options.target is None else options.target}
    name = spec.name if parsed.experiment.name in ("experiment", spec.name) else parsed.experiment.name
    spec = dataclasses.replace(spec, name=name, methods=methods, **given)
    spec.check()
    return spec, options


def default_directory(spec: Comparison) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that is free or holds runs of this comparison."""
    stem = Path("runs") / comparison.safe_name(spec.name)
    number = 1
    while True:
        out = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with contextlib.suppress(FedraxError):
            for run, place in spec.planned():
                comparison.state_of(run, out / place)
            return out
        number += 1


@contextlib.contextmanager
def shown_progress(options: CompareOptions) -> Iterator[Any]:
    """A progress bar for all runs, or None."""
    if options.quiet or options.json:
        yield None
        return
    with sinks.progress_bar() as bar:
        yield bar


def run_all(
    planned: list[tuple[Experiment, Path]], task: Any, federation: Any, out: Path, options: CompareOptions
) -> None:
    """Every run that is not finished; one that diverges is noted in its directory and does not stop the others."""
    with shown_progress(options) as bar:
        for number, (spec, place) in enumerate(planned, 1):
            directory = out / place
            run = comparison.state_of(spec, directory)
            if run is not None and run.finished:
                continue
            title = f"{spec.name}, seed {spec.run.seed} ({number}/{len(planned)})"
            seen: list[Any] = [ExperimentFile(spec, directory)]
            if bar is not None:
                seen.append(sinks.ProgressSink(title, bar))
            resume = run is not None
            try:
                simulate(
                    spec.algorithm,
                    task,
                    federation,
                    spec.run,
                    directory=directory,
                    resume=resume,
                    sinks=seen,
                    keep_clients=False,
                )
            except NonFiniteError as error:
                if not options.quiet:
                    print(f"fedrax: {error}", file=sys.stderr)
            if bar is not None:
                for task_id in bar.task_ids:
                    bar.remove_task(task_id)
                bar.console.print(
                    f"{plain(title)}: {summary_line(read_run(directory).events)}", highlight=False, markup=False
                )


def report(spec: Comparison, methods: list[Method], out: Path, options: CompareOptions, args: list[str]) -> None:
    """Table, curves, JSON; what to try next."""
    metric = main_metric(methods)
    target = spec.target if spec.target is not None else default_target(methods)
    rows = [summarise(method, target, metric) for method in methods]
    pictures = curves.save_curves(curves.draw_curves(methods, target, metric, spec.name), out / "curves")
    summary = {
        "name": spec.name,
        "seeds": list(spec.seeds),
        "metric": metric,
        "target": target,
        "methods": tables.values(rows),
    }
    files.write_text(out / "comparison.json", json.dumps(summary, indent=2) + "\n")
    files.write_text(out / "table.md", tables.markdown(rows, target, metric))
    if options.json:
        print(json.dumps(summary))
    elif not options.quiet:
        console = tables.wide_console()
        console.print(tables.terminal(rows, target, metric, spec.name))
        console.print(f"curves: {pictures[0]} and .svg; table: {out / 'table.md'}; numbers: {out / 'comparison.json'}")
        console.print(next_step(spec, args))


def next_step(spec: Comparison, args: list[str]) -> str:
    """A command that shows something new."""
    files = shlex.join(itertools.takewhile(lambda arg: not arg.startswith("-"), args))
    again = (
        f"fedrax compare {files}"
        if files
        else f"fedrax compare --algorithms {shlex.join(m.algorithm_name for m in spec.methods)}"
    )
    if type(spec.methods[0].partition).__name__ != "Iid":
        return f"try next: {again} --partition iid    (what is left of the differences when all clients are alike?)"
    return f"try next: {again} --partition shards --partition.per-client 1    (clients that differ)"
