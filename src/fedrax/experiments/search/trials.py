"""Choosing a method's settings by validation data: the runs of its grid, kept below ``search``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.escaping import settings_in_words
from fedrax.experiments.comparison import Comparison, RunJob, state_of
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import (
    ComparisonWatcher,
    ExperimentFile,
    TaskAndFederation,
    WorkerPool,
    run_here,
    run_on,
    titled,
    unfinished,
)
from fedrax.experiments.search.grid import SettingPoint
from fedrax.experiments.search.optuna import OptunaStudy, unlike
from fedrax.files import inside, read_json, write_text
from fedrax.simulation import Result, use_all_cores
from fedrax.simulation.evaluation import is_lower_better
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE, owned
from fedrax.simulation.persistence.run_identity import difference, of_data
from fedrax.simulation.process import write_environment
from fedrax.simulation.results.events import EventFile
from fedrax.tuning import sweep
from fedrax.tuning.selection import SearchResult, Trial, group_by_structure, make_trial, selection_metric
from fedrax.tuning.sweeps import program_keys, should_vectorize


def run_trials(
    comparison: Comparison,
    jobs: Sequence[RunJob],
    out: Path,
    problem: Callable[[], TaskAndFederation],
    watcher: ComparisonWatcher,
) -> None:
    """Run all unfinished trials; those that differ in floats alone as one vectorized sweep where that is faster.

    Of a group of which only some were kept all run once more: alone the others would differ by rounding.
    """
    left = {job.place for job in unfinished(jobs, out)}
    alone = {job.place for job in jobs if checkpoint.exists(job.inside(out) / CHECKPOINT)}
    for group in _together([job for job in jobs if job.place not in alone], comparison.search_seeds):
        if not any(job.place in left for jobs_of_point in group for job in jobs_of_point):
            continue
        task, federation = problem()
        algorithms = [jobs_of_point[0].spec.algorithm for jobs_of_point in group]
        settings = group[0][0].spec.run
        if not should_vectorize(algorithms, task, federation, settings, len(comparison.search_seeds)):
            continue
        watcher.say(f"{group[0][0].spec.name}: {len(group)} points of its grid in one program")
        results = sweep(
            algorithms, task, federation, comparison.search_seeds, settings, mode="vectorized", progress=False
        )
        for jobs_of_point, runs in zip(group, results, strict=True):
            for job, result in zip(jobs_of_point, runs, strict=True):
                if job.place in left:
                    _keep(job, out, result)
    run_here(jobs, out, problem, watcher)


def _together(jobs: Sequence[RunJob], seeds: Sequence[int]) -> list[list[list[RunJob]]]:
    """Points with all of their runs, in groups that one program can run; of each point its jobs."""
    points: dict[Path, list[RunJob]] = {}
    for job in jobs:
        points.setdefault(job.place.parent, []).append(job)
    whole = [jobs for jobs in points.values() if len(jobs) == len(seeds)]
    groups: dict[str, list[list[RunJob]]] = {}
    for jobs in whole:
        groups.setdefault(f"{jobs[0].spec.name} {jobs[0].spec.run!r}", []).append(jobs)
    return [
        [group[i] for i in positions]
        for group in groups.values()
        for positions in group_by_structure([jobs[0].spec.algorithm for jobs in group])
        if len(positions) > 1
    ]


def _keep(job: RunJob, out: Path, result: Result) -> None:
    """A run of several together as a directory like any other. Cut short anywhere, it is one that is not finished."""
    directory = job.inside(out)
    with owned(directory, resume=True):
        if not unfinished([job], out):
            return  # another process was faster
        write_environment(directory)
        ExperimentFile(job.spec, directory).start(None)
        if result.stopped == "diverged":
            said = f"{job.title}: a number is not finite in round {len(result.events) + 1}"
            checkpoint.save(directory / FAILURE, (), {"error": said})
        EventFile(directory, result.events).close()


def _check_known(comparison: Comparison, out: Path, task: Task, federation: Federation) -> None:
    """Reject stored trials of other samples or programs: vectorized runs have no checkpoint that would tell."""
    path, now = inside(out, Path("search")) / ".rows.json", of_data(federation)
    programs = _programs(comparison, task, federation)
    kept: Any = read_json(path) if path.exists() else None
    if next(path.parent.glob("*/*/*/experiment.toml"), None) is not None:
        differs = difference(kept, now)
        for label, known in programs.items() if differs is None else ():
            if any(kept.get(name, digest) != digest for name, digest in known.items()):
                differs = f"the program of {label} differs"
        if differs:
            raise FedraxError(
                f"{path.parent} holds the runs of a search, and {differs}: choose another --out for a comparison of"
                " what there is now."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {name: digest for of_label in programs.values() for name, digest in of_label.items()}
    write_text(path, json.dumps((kept if isinstance(kept, dict) else {}) | now | known))


def _programs(comparison: Comparison, task: Task, federation: Federation) -> dict[str, dict[str, str]]:
    """For every label with a grid, the identity of the runs at the first of points that differ in floats alone.

    The name describes the settings. Raises for points that the data, the model or the cohorts do not fit.
    """
    found: dict[str, dict[str, str]] = {}
    for label in comparison.grids:
        firsts: dict[str, tuple[SettingPoint, Experiment]] = {}
        for point, spec in comparison.candidates[label]:
            firsts.setdefault(f"{_without_numbers(spec.algorithm)} {spec.run!r}", (point, spec))
        found[label] = {}
        for point, spec in firsts.values():
            run = dataclasses.replace(spec.run, seed=comparison.search_seeds[0])
            with titled(f"{label} ({settings_in_words(dict(point))})"):
                name, digests = program_keys(spec.algorithm, task, federation, run)
            found[label][f"program of {label}: {name}"] = digests
    return found


def _without_numbers(algorithm: Algorithm) -> str:
    """A method's form but for whole numbers: a grid of them has many, and each takes a while to trace."""
    return re.sub(r"\d+", "", str(jax.tree.structure(algorithm)))


def search(
    comparison: Comparison,
    out: Path,
    task: Task,
    problem: Callable[[], TaskAndFederation],
    watcher: ComparisonWatcher,
    workers: WorkerPool | None = None,
    data_dir: Path | str | None = None,
) -> dict[str, SearchResult]:
    """The best settings of every method that has a grid, by label. ``problem``: the task with the rows held out."""
    use_all_cores()
    metric = selection_metric(task, comparison.search.metric)  # before anything runs

    def run(jobs: Sequence[RunJob]) -> None:
        if workers is not None:
            run_on(workers, jobs, out, data_dir, watcher)
            return
        for label in dict.fromkeys(job.spec.name for job in jobs):
            run_trials(comparison, [job for job in jobs if job.spec.name == label], out, problem, watcher)

    def judged(label: str, points: Sequence[SettingPoint]) -> list[Trial]:
        return [_judged(comparison, label, point, out, metric) for point in points]

    lower = is_lower_better(task, metric)
    whole = [label for label in comparison.grids if not comparison.is_sampled(label)]
    sampled = [label for label in comparison.grids if comparison.is_sampled(label)]
    studies = {
        label: OptunaStudy(comparison, label, lower) for label in sampled
    }  # before anything runs: it needs Optuna
    if workers is not None:
        workers.connect()  # fails before anything is written
    _check_known(comparison, out, *problem())
    run([job for label in whole for job in comparison.trials(label)])
    choices = {
        label: SearchResult(metric, lower, tuple(judged(label, [point for point, _ in comparison.candidates[label]])))
        for label in whole
    }
    while any(not study.done for study in studies.values()):
        asked = {label: study.ask() for label, study in studies.items()}
        run([job for label, points in asked.items() for job in comparison.trials_at(label, unlike(points))])
        for label, points in asked.items():
            studies[label].tell(judged(label, points))
    choices |= {label: study.choice(metric) for label, study in studies.items()}
    return {label: choices[label] for label in comparison.grids}


def _judged(comparison: Comparison, label: str, point: SettingPoint, out: Path, metric: str) -> Trial:
    """What the finished runs of a point say."""
    jobs = comparison.trials_at(label, [point])
    runs = [run for job in jobs if (run := state_of(job.spec, job.inside(out))) is not None]
    if len(runs) < len(jobs):
        raise FedraxError(f"the search of {label} is not finished.")
    return make_trial(point, [(run.events, run.failure is not None) for run in runs], metric)
