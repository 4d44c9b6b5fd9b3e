"""A comparison from its description to its outcome: settings chosen, runs made, table and curves kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedrax import files
from fedrax.errors import FedraxError
from fedrax.escaping import settings_in_words
from fedrax.experiments import backends, comparison, experiment, jobs
from fedrax.experiments.comparison import Comparison, OtherExperimentError, RunJob
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ComparisonWatcher, Executors, ProgressWatcher, TaskAndFederation, WorkerPool
from fedrax.experiments.output_dir import check_ours
from fedrax.experiments.search import grid as grids_of
from fedrax.experiments.search import trials
from fedrax.report import comparison_table, curves, search_plots
from fedrax.report.runs import (
    COMPARISON,
    MethodRuns,
    MethodSummary,
    SavedRun,
    main_metric,
    read_comparison,
    summarize,
    target_of,
)
from fedrax.simulation import use_all_cores
from fedrax.simulation.results.progress import progress_is_visible
from fedrax.tuning.selection import SearchResult


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """What came of a comparison."""

    comparison: Comparison
    directory: Path
    """Where the runs are, and beside them table.md, comparison.json, the curves and the picture of the search."""
    methods: tuple[MethodRuns, ...]
    choices: Mapping[str, SearchResult]
    """What the search said of each method that has a grid, by label."""

    @property
    def metric(self) -> str:
        """What methods are compared by."""
        return main_metric(self.methods)

    @property
    def _runs(self) -> list[SavedRun]:
        return [run for method in self.methods for run in method.runs]

    @property
    def target(self) -> float | None:
        """The target accuracy of the costs in the table.

        The comparison's own target, that of its runs, or 95 % of the best method's final accuracy.
        """
        return self._target[0]

    @property
    def _target(self) -> tuple[float | None, bool]:
        return target_of(self.methods, self.comparison.target)

    @property
    def rows(self) -> list[MethodSummary]:
        """The table, a row a method."""
        target, metric = self.target, self.metric
        return [summarize(method, target, metric) for method in self.methods]

    @property
    def diverged(self) -> bool:
        """Whether a run of a method, with the settings that it has in the end, diverged."""
        return any(method.failure is not None for method in self.methods)

    def lines(self) -> list[str]:
        """What the table does not say: how settings were chosen, and what its target is."""
        spec = self.comparison
        how = (spec.search.validation, spec.search_seeds, spec.search.trials)
        said = search_plots.lines(self.choices, *how) if self.choices else []
        legend = comparison_table.legend(*self._target, self.rows)
        return said + [legend] * bool(legend)

    def summary(self) -> dict[str, Any]:
        """Everything as numbers and words, for JSON."""
        spec = self.comparison
        found: dict[str, Any] = {
            "name": spec.name,
            "seeds": list(spec.seeds),
            "metric": self.metric,
            "target": self.target,
            "target_is_default": not self._target[1],
            "methods": comparison_table.values(self.rows),
            "places": sorted({run.directory.parent.relative_to(self.directory).as_posix() for run in self._runs}),
        }
        if self.choices:
            how = {"validation": spec.search.validation, "seeds": list(spec.search_seeds), "trials": spec.search.trials}
            said = search_plots.lines(self.choices, *how.values())
            found["search"] = {**how, "methods": search_plots.values(self.choices), "lines": said}
        return found

    @property
    def pictures(self) -> list[Path]:
        """The curves and, where settings were searched, what was tried, as PNG; each is there as SVG, too."""
        return [self.directory / f"{name}.png" for name in ["curves", *["grid"] * bool(self.choices)]]

    def save(self) -> None:
        """Write table.md, comparison.json and the pictures, as :func:`compare` does."""
        out, name = self.directory, self.comparison.name
        files.write_text(out / COMPARISON, json.dumps(self.summary(), indent=2) + "\n")
        files.write_text(out / "table.md", comparison_table.markdown(self.rows, self.target, self.metric))
        curves.save_curves(curves.draw_curves(self.methods, self.target, self.metric, name), out / "curves")
        if self.choices:
            curves.save_curves(search_plots.draw_grids(self.choices, name), out / "grid")

    def __repr__(self) -> str:
        """The table, and what it does not say."""
        return "\n".join([comparison_table.markdown(self.rows, self.target, self.metric), *self.lines()])

    def _repr_markdown_(self) -> str:
        return repr(self)


def read_file(path: str | Path) -> Experiment | Comparison:
    """What a TOML file describes: an :class:`Experiment`, or a :class:`Comparison` where it has ``[[compare]]`` tables.

    What :func:`fedrax.simulate` takes is ``experiment.build(found)`` and ``found.run``; a comparison goes to
    :func:`fedrax.compare`, and its ``methods`` are experiments. Raises FedraxError for a file that is neither.
    """
    path = Path(path)
    if "compare" not in experiment.read_file(path):
        return experiment.read(path)
    found = comparison.read([path])
    found.check()
    return found


def compare(
    source: Comparison | str | Path | Sequence[str | Path],
    *,
    grid: Mapping[str, Any] | None = None,
    trials: int | None = None,
    seeds: Sequence[int] = (),
    target: float | None = None,
    directory: str | Path | None = None,
    data_dir: str | Path | None = None,
    executor: Executors | str | None = None,
    watcher: ComparisonWatcher | None = None,
    progress: bool = True,
) -> ComparisonResult:
    """Choose each method's settings, run it with every seed, and keep runs, table and curves: ``fedrax compare``.

    source: the file of a comparison, files with a method each, or a :class:`Comparison`. grid: in place of the file's
    grids, for all methods: ``{"algorithm.local.lr": [0.01, 0.1]}``. trials: how many settings of each method Optuna is
    to try in place of the whole grid, which may then have ranges: ``{"algorithm.local.lr": "0.001..1:log"}``. seeds,
    target: in place of the file's. directory:
    by default the first of runs/NAME, runs/NAME-2, ... that is free or this comparison's own; what is finished there
    is not run again. executor: whose workers run it, in place of this process: a ``concurrent.futures.Executor`` or a
    function that makes one, called again where an executor broke with a lost worker; or the address of a scheduler,
    ``"dask://HOST:PORT"`` or ``"ray://HOST:PORT"``. Workers share the file system.
    progress: show it in terminals and notebooks, on standard error. watcher: who hears of it in place of that.

    The numbers are the same wherever runs are made, on equal devices.

    Raises FedraxError for a comparison that is none, and KeyboardInterrupt after Ctrl-C: call it again to go on.
    """
    spec = source if isinstance(source, Comparison) else comparison.read(_paths(source))
    changes: dict[str, Any] = {}
    if grid is not None:
        mine = grids_of.from_table(_with_lists(grid), "the grid")
        changes["grids"] = {method.name: mine for method in spec.methods}
    changes |= {"search": dataclasses.replace(spec.search, trials=trials)} if trials is not None else {}
    changes |= {"seeds": tuple(seeds)} if seeds else {}
    changes |= {"target": target} if target is not None else {}
    spec = dataclasses.replace(spec, **changes)
    spec.check()
    if isinstance(executor, str):
        executor = backends.engine(executor)
    out = default_directory(spec) if directory is None else Path(directory)
    check_ours(spec, out)  # before anything runs
    if watcher is None:
        use_all_cores()
        watcher = ProgressWatcher() if progress and progress_is_visible() else ComparisonWatcher()
    with contextlib.ExitStack() as at_end:
        at_end.callback(watcher.close)
        workers = None if executor is None else WorkerPool(executor)
        if workers is not None:
            at_end.callback(workers.close)
        outcome = _run(spec, out, data_dir, workers, watcher)
        outcome.save()
        return outcome


def _paths(source: str | Path | Sequence[str | Path]) -> list[Path]:
    paths: Iterable[str | Path] = [source] if isinstance(source, str | Path) else source
    found = [Path(path) for path in paths]
    if not found:
        raise FedraxError("there is nothing to compare: give the file of a comparison.")
    return found


def _with_lists(grid: Mapping[str, Any]) -> dict[str, Any]:
    """The grid with lists in place of tuples, ranges and arrays."""
    one = (str, Mapping)
    return {path: list(v) if isinstance(v, Iterable) and not isinstance(v, one) else v for path, v in grid.items()}


def default_directory(spec: Comparison) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that is free or holds runs of this comparison.

    FedraxError where one of them cannot be read.
    """
    stem = Path("runs") / comparison.safe_name(spec.name)
    number = 1
    while True:
        out = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with contextlib.suppress(OtherExperimentError):
            check_ours(spec, out)
            return out
        number += 1


def _run(
    spec: Comparison, out: Path, data_dir: Any, workers: WorkerPool | None, watcher: ComparisonWatcher
) -> ComparisonResult:
    use_all_cores()
    first = spec.methods[0]
    federation = experiment.load_federation(first, data_dir)
    task = experiment.make_task(first, federation)
    for note in (*federation.notes, *task.notes):
        watcher.say(note)

    @cache
    def held() -> TaskAndFederation:
        return task, experiment.held_out(dataclasses.replace(first, validation=spec.search.validation), federation)

    if len(spec.methods) > 1:  # what is wrong with a single one its own run says as soon
        decided = [job for job in spec.runs({}) if job.spec.name not in spec.grids]
        jobs.check_all(decided, out, lambda: (task, federation))
    choices = {}
    if spec.grids:
        choices = trials.search(spec, out, task, held, watcher, workers, data_dir)
    chosen = {label: dict(choice.best.point) for label, choice in choices.items()}
    runs = spec.runs(chosen)
    _say_which(runs, out)
    jobs.check_kept(runs, out, lambda: (task, federation))
    if workers is None:
        jobs.run_here(runs, out, lambda: (task, federation), watcher)
    else:
        jobs.run_on(workers, runs, out, data_dir, watcher)
    return ComparisonResult(spec, out, tuple(_labeled(spec, out, chosen)), choices)


def _say_which(jobs: Sequence[RunJob], out: Path) -> None:
    """Let what is kept of an earlier search speak of the runs that are to come: those of other settings are its own."""
    with contextlib.suppress(FedraxError):
        kept = read_comparison(out)
        if kept:
            places = sorted({job.place.parent.as_posix() for job in jobs})
            files.write_text(out / COMPARISON, json.dumps({**kept, "places": places}, indent=2) + "\n")


def _labeled(spec: Comparison, out: Path, chosen: Mapping[str, dict[str, Any]]) -> list[MethodRuns]:
    """The methods with what sets them apart: settings that were chosen, and those of their runs."""
    found = []
    for method in comparison.methods_in(spec, out, chosen):
        run = next(one.run for one in spec.methods if one.name == method.label)
        names = (f.name for f in dataclasses.fields(run) if f.name != "seed")
        own = {f"run.{name}": getattr(run, name) for name in names if getattr(run, name) != getattr(spec.run, name)}
        own |= chosen.get(method.label, {})
        found.append(dataclasses.replace(method, settings=settings_in_words(own)))
    return found
