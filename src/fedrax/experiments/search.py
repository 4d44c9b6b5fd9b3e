"""Choosing a method's settings by validation data: the runs of its grid, kept below ``search``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedrax.contract.task import Task
from fedrax.errors import FedraxError
from fedrax.experiments.comparison import Comparison, Job, state_of
from fedrax.experiments.running import Executors, ExperimentFile, Problem, Watcher, run_here, run_on, unfinished
from fedrax.simulation import Result, checkpoint, sweep, use_all_cores
from fedrax.simulation.directory import FAILURE
from fedrax.simulation.evaluate import is_lower_better
from fedrax.simulation.events import EventFile
from fedrax.simulation.process import write_environment
from fedrax.simulation.sweep import pays
from fedrax.simulation.tuning import Choice, alike, metric_of, trial_of


def run_trials(comparison: Comparison, out: Path, problem: Callable[[], Problem], watcher: Watcher) -> None:
    """Every run of every grid that is not finished; those of a method that differ in floats alone together, where
    that is faster."""
    for method in comparison.methods:
        jobs = comparison.trials(method.name)
        fresh = [job for job in unfinished(jobs, out) if not (out / job.place / "experiment.toml").exists()]
        for group in _together(fresh, comparison.search_seeds):
            task, federation = problem()
            algorithms = [jobs_of_point[0].spec.algorithm for jobs_of_point in group]
            settings = group[0][0].spec.run
            if not pays(algorithms, task, federation, settings):
                continue
            watcher.say(f"{method.name}: {len(group)} points of its grid in one program")
            results = sweep(
                algorithms, task, federation, comparison.search_seeds, settings, mode="together", progress=False
            )
            for jobs_of_point, runs in zip(group, results, strict=True):
                for job, result in zip(jobs_of_point, runs, strict=True):
                    _keep(job, out, result)
        run_here(jobs, out, problem, watcher)


def _together(left: Sequence[Job], seeds: Sequence[int]) -> list[list[list[Job]]]:
    """Points with all of their runs to do, in groups that one program can run; of each point its jobs."""
    points: dict[Path, list[Job]] = {}
    for job in left:
        points.setdefault(job.place.parent, []).append(job)
    whole = [jobs for jobs in points.values() if len(jobs) == len(seeds)]
    groups: dict[str, list[list[Job]]] = {}
    for jobs in whole:
        groups.setdefault(repr(jobs[0].spec.run), []).append(jobs)
    return [
        [group[i] for i in positions]
        for group in groups.values()
        for positions in alike([jobs[0].spec.algorithm for jobs in group])
        if len(positions) > 1
    ]


def _keep(job: Job, out: Path, result: Result) -> None:
    """A run of several together as a directory like any other; its experiment, by which it is known, comes last."""
    directory = out / job.place
    directory.mkdir(parents=True, exist_ok=True)
    if result.stopped == "diverged":
        said = f"{job.title}: a number is not finite in round {len(result.events) + 1}"
        checkpoint.save(directory / FAILURE, (), {"error": said})
    EventFile(directory, result.events).close()
    write_environment(directory)
    ExperimentFile(job.spec, directory).start(None)


def search(
    comparison: Comparison,
    out: Path,
    task: Task,
    problem: Callable[[], Problem],
    watcher: Watcher,
    executors: Executors | None = None,
    data_dir: Path | str | None = None,
) -> dict[str, Choice]:
    """The best settings of every method that has a grid, by label. ``problem``: the task with the rows held out."""
    use_all_cores()
    metric_of(task, comparison.search.metric)  # before anything runs
    if executors is None:
        run_trials(comparison, out, problem, watcher)
    else:
        jobs = [job for method in comparison.methods for job in comparison.trials(method.name)]
        run_on(executors, jobs, out, data_dir, watcher)
    return {label: chosen(comparison, label, out, task) for label in comparison.grids}


def chosen(comparison: Comparison, label: str, out: Path, task: Task) -> Choice:
    """What the finished runs of a method's grid say."""
    metric = metric_of(task, comparison.search.metric)
    points: dict[Path, list[Job]] = {}
    for job in comparison.trials(label):
        points.setdefault(job.place.parent, []).append(job)
    trials = []
    for jobs in points.values():
        runs = [run for job in jobs if (run := state_of(job.spec, out / job.place)) is not None]
        if len(runs) < len(jobs):
            raise FedraxError(f"the search of {label} is not finished.")
        trials.append(trial_of(jobs[0].point, [(run.events, run.failure is not None) for run in runs], metric))
    return Choice(metric, is_lower_better(task, metric), tuple(trials))
