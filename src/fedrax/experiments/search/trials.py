"""Search of a comparison: run the points of each method's grid on validation data, and select the best.

The runs are saved in the directory ``search`` of the comparison.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.errors import FedraxError, warnings_about
from fedrax.escaping import format_settings
from fedrax.experiments.comparison import Comparison, RunJob, saved_run
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import (
    ComparisonWatcher,
    ExperimentFile,
    ProblemOf,
    WorkerPool,
    naming,
    run_here,
    run_on,
    unfinished,
)
from fedrax.experiments.search.grid import SettingPoint, of_model
from fedrax.files import join_without_links, read_json, write_text
from fedrax.simulation import Result, use_all_cores
from fedrax.simulation.evaluation import is_lower_better
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE, lock_directory
from fedrax.simulation.persistence.run_identity import difference, of_data
from fedrax.simulation.process import write_environment
from fedrax.simulation.results.events import EventFile, rounds_done
from fedrax.tuning import sweep
from fedrax.tuning.optuna_study import OptunaStudy, distinct
from fedrax.tuning.selection import SearchResult, Trial, group_by_structure, make_trial, metric_of, selection_metric
from fedrax.tuning.sweeps import program_keys, should_vectorize


def run_trials(
    comparison: Comparison,
    jobs: Sequence[RunJob],
    out: Path,
    problem: ProblemOf,
    watcher: ComparisonWatcher,
) -> None:
    """Execute unfinished trials in this process.

    Trials that differ in float hyper-parameters only are one vectorized sweep if that is faster. A group of which some
    trials are finished is run again as a whole: run one by one, the others would differ by rounding.
    """
    left = {job.path for job in unfinished(jobs, out)}
    sequential = {job.path for job in jobs if checkpoint.exists(job.directory_in(out) / CHECKPOINT)}
    for group in _vectorizable([job for job in jobs if job.path not in sequential], comparison.search_seeds):
        if not any(job.path in left for jobs_of_point in group for job in jobs_of_point):
            continue
        task, federation = problem(group[0][0].spec)
        algorithms = [jobs_of_point[0].spec.algorithm for jobs_of_point in group]
        settings = group[0][0].spec.run
        if not should_vectorize(algorithms, task, federation, settings, len(comparison.search_seeds)):
            continue
        new = sum(any(job.path in left for job in jobs_of_point) for jobs_of_point in group)
        of_them = f", {new} of them new" * (new < len(group))
        watcher.say(f"{group[0][0].spec.name}: {len(group)} points of its grid in one program{of_them}")
        results = sweep(
            algorithms, task, federation, comparison.search_seeds, settings, mode="vectorized", progress=False
        )
        for jobs_of_point, runs in zip(group, results, strict=True):
            for job, result in zip(jobs_of_point, runs, strict=True):
                if job.path in left:
                    _save(job, out, result)
    run_here(jobs, out, problem, watcher)


def _vectorizable(jobs: Sequence[RunJob], seeds: Sequence[int]) -> list[list[list[RunJob]]]:
    """Groups of points that one program can run, each point a list of its jobs; points need all seeds."""
    points: dict[Path, list[RunJob]] = {}
    for job in jobs:
        points.setdefault(job.path.parent, []).append(job)
    complete = [jobs for jobs in points.values() if len(jobs) == len(seeds)]
    groups: dict[str, list[list[RunJob]]] = {}
    for jobs in complete:
        spec = jobs[0].spec
        groups.setdefault(f"{spec.name} {spec.run!r} {spec.model!r} {spec.finetuning!r}", []).append(jobs)
    return [
        [group[i] for i in positions]
        for group in groups.values()
        for positions in group_by_structure([jobs[0].spec.algorithm for jobs in group])
        if len(positions) > 1
    ]


def _save(job: RunJob, out: Path, result: Result) -> None:
    """Save a run of a vectorized sweep as a run directory; events.jsonl, which makes it finished, is written last."""
    directory = job.directory_in(out)
    with lock_directory(directory, resume=True):
        if not unfinished([job], out):
            return  # another process has saved it
        write_environment(directory)
        ExperimentFile(job.spec, directory).start(None)
        if result.stopped == "diverged":
            message = f"{job.title}: a number is not finite in round {rounds_done(result.events) + 1}"
            checkpoint.save(directory / FAILURE, (), {"error": message})
        EventFile(directory, result.events).close()


def _check_saved_trials(comparison: Comparison, out: Path, problem: ProblemOf) -> None:
    """Raise FedraxError for saved trials of other samples or programs.

    Vectorized runs have no checkpoint with digests of these, so the directory of the search has a file of them.
    """
    path, data = join_without_links(out, Path("search")) / ".rows.json", of_data(problem(comparison.first_candidate)[1])
    programs = _programs(comparison, problem)
    saved: Any = read_json(path) if path.exists() else None
    if next(path.parent.glob("*/*/*/experiment.toml"), None) is not None:
        differs = difference(saved, data)
        for label, digests in programs.items() if differs is None else ():
            if any(saved.get(name, digest) != digest for name, digest in digests.items()):
                differs = f"the program of {label} differs"
        if differs:
            raise FedraxError(
                f"{path.parent} holds the runs of a search, and {differs}: choose another --out for the present"
                " comparison."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    all_digests = {name: digest for of_label in programs.values() for name, digest in of_label.items()}
    write_text(path, json.dumps((saved if isinstance(saved, dict) else {}) | data | all_digests))


def _programs(comparison: Comparison, problem: ProblemOf) -> dict[str, dict[str, str]]:
    """For each label with a search, digests of its programs: one for points that differ in floats only.

    The keys describe the settings. Raises FedraxError for points that do not fit the data, the model or the cohorts.
    """
    found: dict[str, dict[str, str]] = {}
    for label in comparison.searched:
        firsts: dict[str, tuple[SettingPoint, Experiment]] = {}
        for point, spec in comparison.candidates[label]:
            structure = f"{_without_numbers(spec.algorithm)} {spec.run!r} {of_model(point)}"
            firsts.setdefault(structure, (point, spec))
        found[label] = {}
        for point, spec in firsts.values():
            run = dataclasses.replace(spec.run, seed=comparison.search_seeds[0])
            with naming(f"{label} ({format_settings(dict(point))})", label):
                name, digests = program_keys(spec.algorithm, *problem(spec), run)
            at = format_settings(of_model(point))
            found[label][f"program of {label}{at and f' ({at})'}: {name}"] = digests
    return found


def _without_numbers(algorithm: Algorithm) -> str:
    """A method's structure without integers: tracing each value of an integer grid would take too long."""
    return re.sub(r"\d+", "", str(jax.tree.structure(algorithm)))


def search(
    comparison: Comparison,
    out: Path,
    task: Task,
    problem: ProblemOf,
    watcher: ComparisonWatcher,
    workers: WorkerPool | None = None,
    data_dir: Path | str | None = None,
) -> dict[str, SearchResult]:
    """Search the grids of a comparison.

    Args:
        comparison: The comparison.
        out: Its directory.
        task: The task.
        problem: Returns an experiment's task and the federation with validation data in place of test data.
        watcher: Receives the progress.
        workers: Executes the runs; by default this process.
        data_dir: Directory of data files, for workers.

    Returns:
        The result for each method with a grid of several points, by label.
    """
    use_all_cores()
    metric = selection_metric(task, comparison.search.metric)  # raises before anything runs

    def run(jobs: Sequence[RunJob]) -> None:
        if workers is not None:
            run_on(workers, jobs, out, data_dir, watcher)
            return
        for label in dict.fromkeys(job.spec.name for job in jobs):
            with warnings_about(label):
                run_trials(comparison, [job for job in jobs if job.spec.name == label], out, problem, watcher)

    def evaluated(label: str, points: Sequence[SettingPoint]) -> list[Trial]:
        return [_trial(comparison, label, point, out, metric) for point in points]

    lower = is_lower_better(task, metric)
    full_grids = [label for label in comparison.searched if not comparison.is_sampled(label)]
    studies = {}  # made before anything runs: raises if Optuna is not installed
    for label, grid in comparison.searched.items():
        if comparison.is_sampled(label):
            assert comparison.search.trials is not None
            seed = comparison.search_seeds[0]
            studies[label] = OptunaStudy(grid.axes, comparison.search.trials, seed, lower)
    if workers is not None:
        workers.connect()  # raises before anything is written
    _check_saved_trials(comparison, out, problem)
    run([job for label in full_grids for job in comparison.search_runs(label)])
    results = {}
    for label in full_grids:
        found = tuple(evaluated(label, [p for p, _ in comparison.candidates[label]]))
        results[label] = SearchResult(metric_of(found, metric), lower, found)
    while any(not study.done for study in studies.values()):
        asked = {label: study.ask() for label, study in studies.items()}
        run([job for label, points in asked.items() for job in comparison.search_runs_at(label, distinct(points))])
        for label, points in asked.items():
            studies[label].tell(evaluated(label, points))
    results |= {label: study.result(metric) for label, study in studies.items()}
    return {label: results[label] for label in comparison.searched}


def _trial(comparison: Comparison, label: str, point: SettingPoint, out: Path, metric: str) -> Trial:
    """The trial of a point from its finished runs."""
    jobs = comparison.search_runs_at(label, [point])
    runs = [run for job in jobs if (run := saved_run(job.spec, job.directory_in(out))) is not None]
    if len(runs) < len(jobs):
        raise FedraxError(f"the search of {label} is not finished.")
    return make_trial(point, [(run.events, run.failure is not None) for run in runs], metric)
