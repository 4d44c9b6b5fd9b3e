"""Run a comparison: select settings, run the methods, save the table and the curves."""

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
from fedrax.config.arguments import checked_arguments
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError, each_warning_once
from fedrax.escaping import format_settings
from fedrax.experiments import backends, comparison, experiment, jobs
from fedrax.experiments.comparison import Comparison, RunJob
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ComparisonWatcher, Executors, ProgressWatcher, TaskAndFederation, WorkerPool
from fedrax.experiments.output_dir import choose_output
from fedrax.experiments.search import grid as grids_of
from fedrax.experiments.search import trials
from fedrax.report import comparison_table, curves, search_plots
from fedrax.report.results import MethodResults
from fedrax.report.runs import (
    COMPARISON,
    MethodRuns,
    SavedRun,
    read_comparison,
    target_of,
)
from fedrax.simulation import use_all_cores
from fedrax.simulation.results.progress import progress_is_visible
from fedrax.tuning.selection import SearchResult, is_at_end


@dataclass(frozen=True, repr=False)
class ComparisonResult(MethodResults):
    """The outcome of a comparison.

    Example:
        >>> method = fedrax.experiments.Experiment(run=fedrax.Settings(rounds=1, cohort_size=2))
        >>> comparison = fedrax.experiments.Comparison("one round", (method,), seeds=(0,), target=None)
        >>> result = fedrax.experiments.compare(comparison, directory="outcome", progress=False)
        >>> [row.label for row in result.rows], result.diverged
        (['experiment'], False)
    """

    comparison: Comparison
    """The comparison."""
    directory: Path
    """Directory of the runs, table.md, comparison.json, the curves and the figure of the search."""
    methods: Sequence[MethodRuns]
    """The runs of each method."""
    search_results: Mapping[str, SearchResult]
    """Search results of the methods whose grids have several points, by label."""

    @property
    def _runs(self) -> list[SavedRun]:
        """The runs of all methods."""
        return [run for method in self.methods for run in method.runs]

    @property
    def _target(self) -> tuple[float | None, bool]:
        """The comparison's target, or what `target_of` takes in its place; and whether it was given."""
        return target_of(self.methods, self.comparison.target)

    @property
    def diverged(self) -> bool:
        """Whether a run with the selected settings diverged."""
        return any(method.failure is not None for method in self.methods)

    @property
    def at_end(self) -> bool:
        """Whether a selected value is at an end of its grid, so that the search should go on in a larger one."""
        return is_at_end(self.search_results)

    def validation_lines(self) -> list[str]:
        """What is shown instead of the table while the search should go on, for which test data must not be seen.

        Returns:
            The best trials of each method on validation data, how settings were selected, and how to see the table.
        """
        return [
            *search_plots.trial_lines(self.search_results),
            *self._selected(),
            "the metrics on test data are not printed while a best value is at an end of its grid, because settings"
            f" must not be chosen by them; they are in the table and the curves, and in fedrax show {self.directory}",
        ]

    def warnings(self) -> list[str]:
        """Why the table may be unfair: best values at an end of a grid, and different numbers of trials.

        Returns:
            Lines; none without a search.
        """
        return search_plots.warnings(self.search_results, self._not_searched)

    @property
    def _not_searched(self) -> list[str]:
        """The labels of the methods without a search."""
        return [method.name for method in self.comparison.methods if method.name not in self.search_results]

    def _selected(self) -> list[str]:
        """How settings were selected; empty without a search."""
        if not self.search_results:
            return []
        spec = self.comparison
        search = (spec.search.validation, spec.search_seeds, spec.search.trials)
        return search_plots.lines(self.search_results, *search, self._not_searched)

    def lines(self) -> list[str]:
        """How settings were selected and what the target is.

        Returns:
            Lines to print below the table.
        """
        legend = self.legend()
        return self._selected() + [legend] * bool(legend)

    def summary(self) -> dict[str, Any]:
        """The table and the search as JSON values.

        Returns:
            The content of comparison.json.
        """
        spec = self.comparison
        found: dict[str, Any] = {
            "name": spec.name,
            "seeds": list(spec.seeds),
            "metric": self.metric,
            "target": self.target,
            "target_is_default": not self._target[1],
            "methods": comparison_table.values(self.rows),
            "directories": sorted({run.directory.parent.relative_to(self.directory).as_posix() for run in self._runs}),
        }
        if self.search_results:
            search = {"validation": spec.search.validation, "seeds": list(spec.search_seeds)}
            search |= {"trials": spec.search.trials}
            values = search_plots.values(self.search_results)
            found["search"] = {**search, "methods": values, "lines": self._selected()}
        return found

    @property
    def pictures(self) -> list[Path]:
        """PNG files of the curves and of the search, each with an SVG file beside it."""
        return [self.directory / f"{name}.png" for name in ["curves", *["grid"] * bool(self.search_results)]]

    def save(self) -> None:
        """Write table.md, comparison.json and the figures, as :func:`compare` does."""
        out, name = self.directory, self.comparison.name
        files.write_text(out / COMPARISON, json.dumps(self.summary(), indent=2) + "\n")
        files.write_text(out / "table.md", self.to_markdown())
        curves.save_curves(curves.draw_curves(self.methods, self.target, self.metric, name), out / "curves")
        if self.search_results:
            curves.save_curves(search_plots.draw_grids(self.search_results, name), out / "grid")

    def _repr_markdown_(self) -> str:
        """The same for notebooks."""
        return "```text\n" + repr(self) + "\n```" if self.at_end else super()._repr_markdown_()

    def __repr__(self) -> str:
        """The table in Markdown and the lines below it, or the trials of a search that should go on."""
        return "\n".join(self.validation_lines() if self.at_end else [self.to_markdown(), *self.lines()])


@checked_arguments
def read_file(path: str | Path) -> Experiment | Comparison:
    """Read an experiment or a comparison from a TOML file.

    Args:
        path: The file.

    Returns:
        A :class:`Comparison` for a file with ``[[compare]]`` tables, otherwise an :class:`Experiment`.

    Raises:
        FedraxError: For a file that is neither.

    Example:
        >>> fedrax.experiments.experiment.write(fedrax.experiments.Experiment(), "first.toml")
        >>> fedrax.experiments.read_file("first.toml").run.rounds
        100
    """
    path = Path(path)
    if "compare" not in experiment.read_file(path):
        return experiment.read(path)
    found = comparison.read([path])
    found.check()
    return found


@checked_arguments
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
    """Select the settings of each method, run it with every seed, and save runs, table and curves.

    The Python form of ``fedrax compare``. Results do not depend on where runs are executed, on equal devices.

    Args:
        source: The file of a comparison, files with a method each, or a :class:`Comparison`.
        grid: Replaces the grids of all methods: ``{"algorithm.local.lr": [0.01, 0.1]}``. A grid of one point is not
            searched: the methods are run with it.
        trials: Number of settings of each method that Optuna tries instead of the whole grid, which may then have
            ranges: ``{"algorithm.local.lr": "0.001..1:log"}``.
        seeds: Replaces the seeds of the file.
        target: Replaces the target of the file.
        directory: Where to save; by default the first of runs/NAME, runs/NAME-2, ... that does not belong to another
            comparison. Finished runs in it are not repeated; if the settings of a method have changed, its new runs are
            in a directory LABEL-2 beside the earlier ones.
        data_dir: Directory of data files; by default $FEDRAX_DATA.
        executor: Runs on the workers of a ``concurrent.futures.Executor``, of a function that makes one (called again
            after a lost worker broke the executor), or of a scheduler, ``"dask://HOST:PORT"`` or
            ``"ray://HOST:PORT"``. Workers need the same file system. By default runs are executed in this process.
        watcher: Receives the progress instead of the display.
        progress: Show progress on standard error, in terminals and notebooks.

    Returns:
        The runs, their table and the search results.

    Raises:
        FedraxError: For an invalid comparison.
        KeyboardInterrupt: After Ctrl-C; the same call resumes.

    Example:
        >>> method = fedrax.experiments.Experiment(run=fedrax.Settings(rounds=1, cohort_size=2))
        >>> comparison = fedrax.experiments.Comparison("one round", (method,), seeds=(0,), target=None)
        >>> result = fedrax.experiments.compare(comparison, directory="compared", progress=False)
        >>> sorted(path.name for path in result.directory.glob("*.md"))
        ['table.md']
    """
    spec = source if isinstance(source, Comparison) else comparison.read(_paths(source))
    changes: dict[str, Any] = {}
    if grid is not None:
        replacement = grids_of.from_table(_with_lists(grid), "the grid")
        changes["grids"] = {method.name: replacement for method in spec.methods}
    changes |= {"search": dataclasses.replace(spec.search, trials=trials)} if trials is not None else {}
    changes |= {"seeds": tuple(seeds)} if seeds else {}
    changes |= {"target": target} if target is not None else {}
    spec = dataclasses.replace(spec, **changes)
    with contextlib.ExitStack() as at_end:
        at_end.enter_context(each_warning_once())
        spec.check()
        if isinstance(executor, str):
            executor = backends.executor_factory(executor)
        spec, out, notes = choose_output(spec, None if directory is None else Path(directory))
        if watcher is None:
            use_all_cores()
            watcher = ProgressWatcher() if progress and progress_is_visible() else ComparisonWatcher()
        at_end.callback(watcher.close)
        workers = None if executor is None else WorkerPool(executor)
        if workers is not None:
            at_end.callback(workers.close)
        for note in notes:
            watcher.say(note)
        outcome = _run(spec, out, data_dir, workers, watcher)
        outcome.save()
        return outcome


def _paths(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """One or more files as a list of paths."""
    paths: Iterable[str | Path] = [source] if isinstance(source, str | Path) else source
    found = [Path(path) for path in paths]
    if not found:
        raise FedraxError("there is nothing to compare: give the file of a comparison.")
    return found


def _with_lists(grid: Mapping[str, Any]) -> dict[str, Any]:
    """A grid with lists instead of tuples, ranges and arrays."""
    one = (str, Mapping)
    return {path: list(v) if isinstance(v, Iterable) and not isinstance(v, one) else v for path, v in grid.items()}


def _run(
    spec: Comparison, out: Path, data_dir: Any, workers: WorkerPool | None, watcher: ComparisonWatcher
) -> ComparisonResult:
    """Load the data, search, and execute the runs."""
    use_all_cores()
    first = spec.first_candidate
    federation = experiment.load_federation(first, data_dir)
    tasks: dict[str, Task] = {}

    def task_of(one: Experiment) -> Task:
        """One task for all experiments with the same model."""
        key = repr((one.model, one.finetuning))
        if key not in tasks:
            tasks[key] = experiment.make_task(one, federation, data_dir)
        return tasks[key]

    task = task_of(first)
    for note in (*federation.notes, *task.notes):
        watcher.say(note)

    @cache
    def held() -> Federation:
        return experiment.with_validation(dataclasses.replace(first, validation=spec.search.validation), federation)

    def problem(one: Experiment) -> TaskAndFederation:
        return task_of(one), federation

    if len(spec.methods) > 1:  # a single method is checked by its own run
        without_search = [job for job in spec.runs(spec.fixed) if job.spec.name not in spec.searched]
        jobs.check_methods(without_search, out, problem)
    search_results = {}
    if spec.searched:
        search_results = trials.search(spec, out, task, lambda one: (task_of(one), held()), watcher, workers, data_dir)
        watcher.searched(search_results)
    chosen = spec.fixed | {label: dict(choice.best.point) for label, choice in search_results.items()}
    runs = spec.runs(chosen)
    _update_places(runs, out)
    jobs.check_saved_runs(runs, out, problem)
    if workers is None:
        jobs.run_here(runs, out, problem, watcher)
    else:
        jobs.run_on(workers, runs, out, data_dir, watcher)
    return ComparisonResult(spec, out, tuple(_with_settings(spec, out, chosen)), search_results)


def _update_places(jobs: Sequence[RunJob], out: Path) -> None:
    """Update the run directories in an existing comparison.json, so that reports ignore runs with other settings."""
    with contextlib.suppress(FedraxError):
        saved = read_comparison(out)
        if saved:
            directories = sorted({job.path.parent.as_posix() for job in jobs})
            files.write_text(out / COMPARISON, json.dumps({**saved, "directories": directories}, indent=2) + "\n")


def _with_settings(spec: Comparison, out: Path, chosen: Mapping[str, dict[str, Any]]) -> list[MethodRuns]:
    """The runs of each method, described by its selected settings and its own run settings."""
    found = []
    for method in comparison.saved_methods(spec, out, chosen):
        run = next(one.run for one in spec.methods if one.name == method.label)
        names = (f.name for f in dataclasses.fields(run) if f.name != "seed")
        own = {f"run.{name}": getattr(run, name) for name in names if getattr(run, name) != getattr(spec.run, name)}
        own |= chosen.get(method.label, {})
        found.append(dataclasses.replace(method, settings=format_settings(own)))
    return found
