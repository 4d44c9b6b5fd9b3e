"""Execute the runs of a comparison, in this process or on the workers of an executor.

The state of a run is that of its directory: a finished run is not repeated, an interrupted one resumes from its
checkpoint, on any worker. Workers need the same file system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomlkit

from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError, warnings_about
from fedrax.experiments import experiment
from fedrax.experiments.comparison import RunJob, saved_run
from fedrax.experiments.experiment import Experiment
from fedrax.report.runs import SavedRun, read_run, summary_line
from fedrax.signals import signals_end_waits
from fedrax.simulation import Event, NonFiniteError, Result, RunInfo, Sink, simulate, use_all_cores
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.results.progress import ProgressLine, ProgressSink
from fedrax.simulation.run import check_possible
from fedrax.tuning.selection import SearchResult, is_at_end

ATTEMPTS = 3
"""Number of lost workers of a run, or of broken executors without a finished run between them, that ends in an
error."""
FILE_TIMEOUT = 60.0
"""Seconds to wait for a file that a worker has written: network file systems show it with a delay."""
TaskAndFederation = tuple[Task, Federation]
ProblemOf = Callable[[Experiment], TaskAndFederation]
"""Returns the task and the federation of an experiment; those with equal models share a task."""
Executors = Executor | Callable[[], Executor]
"""An executor, or a function that makes executors."""


class ComparisonWatcher:
    """Receives the progress of a comparison; this base class ignores it."""

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Sink]:
        """Sinks for the events of a run in this process, the ``number``-th of ``of`` runs."""
        return []

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """Called at the end of a run; ``error``: the message of a run that diverged."""

    def searched(self, results: Mapping[str, SearchResult]) -> None:
        """Called after the search, before the runs on test data, with the result of each method by label."""

    def say(self, text: str) -> None:
        """Called with messages for the user."""

    def close(self) -> None:
        """Called at the end of the comparison, also after an error."""


class ProgressWatcher(ComparisonWatcher):
    """Shows a progress line for the current run, and prints a line for each finished one."""

    def __init__(self) -> None:
        self._line, self._shows_test = ProgressLine(), True

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Sink]:
        """The progress line."""
        shown = self._shows_test or job.spec.validation > 0
        return [ProgressSink(f"{job.title} ({number}/{of})", self._line, shows_test=shown)]

    def searched(self, results: Mapping[str, SearchResult]) -> None:
        """Show no test metrics if the search should go on: settings must not be chosen by them."""
        self._shows_test = not is_at_end(results)

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """Print the final metrics of the run."""
        self._line.clear()
        if error is not None:
            self.say(error)
        if not (self._shows_test or job.spec.validation):
            self.say(f"{job.title}: done")
            return
        on = ", on validation data" if job.spec.validation else ""
        self.say(f"{job.title}{on}: {summary_line(read_run(directory).events)}")

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self._line.say(text)

    def close(self) -> None:
        """Remove the progress line."""
        self._line.clear()


class ExperimentFile:
    """A sink that writes experiment.toml when the run starts, so that a rejected run leaves no file."""

    def __init__(self, spec: Experiment, directory: Path):
        self._spec, self._path = spec, directory / "experiment.toml"

    def start(self, run: RunInfo | None) -> None:
        """Write the file."""
        experiment.write(self._spec, self._path)

    def event(self, event: Event) -> None:
        """Do nothing."""

    def finish(self, result: Result | None) -> None:
        """Do nothing."""


def unfinished(jobs: Sequence[RunJob], out: Path) -> list[RunJob]:
    """The jobs that are not finished.

    Included are jobs interrupted between their last event and their last checkpoint, except those of a vectorized
    search, which have no checkpoint.
    """
    runs = [(job, saved_run(job.spec, job.directory_in(out))) for job in jobs]
    return [job for job, run in runs if run is None or not run.finished or not _has_last_checkpoint(run, job)]


def _has_last_checkpoint(run: SavedRun, job: RunJob) -> bool:
    """Whether a run with all its events has its last checkpoint, or needs none."""
    if not _has_checkpoint(run.directory):
        return job.spec.validation > 0  # part of a vectorized search
    if checkpoint.exists(run.directory / FAILURE):
        return True
    directory = run.directory / CHECKPOINT
    if (directory / checkpoint.PREVIOUS).exists():  # interrupted while the last checkpoint was written
        return False
    try:
        return int(checkpoint.load_meta(directory)["round"]) >= run.rounds_done
    except (FedraxError, KeyError, TypeError, ValueError):
        return True  # damaged; reading it raises


def _has_checkpoint(directory: Path) -> bool:
    """Whether a run directory has a checkpoint or a saved failure, which record what the run was computed from."""
    return any(checkpoint.exists(directory / name) for name in (CHECKPOINT, FAILURE))


def check_saved_runs(jobs: Sequence[RunJob], out: Path, problem: ProblemOf) -> None:
    """Raise FedraxError for saved runs of other data, another program or another version."""
    for job in jobs:
        run, directory = saved_run(job.spec, job.directory_in(out)), job.directory_in(out)
        if run is None or not _has_checkpoint(directory):
            continue
        try:
            with warnings_about(job.spec.name):
                check_possible(job.spec.algorithm, *problem(job.spec), job.spec.run, directory)
        except FedraxError as error:
            raise FedraxError(f"{error}: choose another --out for the present comparison") from error


def check_methods(jobs: Sequence[RunJob], out: Path, problem: ProblemOf) -> None:
    """Raise FedraxError for a method that does not fit the data, the model or the cohorts."""
    firsts = {job.path.parent: job for job in reversed(unfinished(jobs, out))}
    for job in reversed(firsts.values()):
        with naming(job.spec.name, job.spec.name):
            check_possible(job.spec.algorithm, *problem(job.spec), job.spec.run)


@contextmanager
def naming(title: str, label: str) -> Iterator[None]:
    """Prefix FedraxErrors with the title of the run, and warnings with the label of its method."""
    try:
        with warnings_about(label):
            yield
    except FedraxError as error:
        raise FedraxError(f"{title}: {error}") from error


def run_here(jobs: Sequence[RunJob], out: Path, problem: ProblemOf, watcher: ComparisonWatcher) -> None:
    """Execute unfinished runs one after another in this process.

    A run that diverges records it in its directory, and the others continue.
    """
    left = {job.path for job in unfinished(jobs, out)}
    for number, job in enumerate(jobs, 1):
        if job.path not in left:
            continue
        directory = job.directory_in(out)
        with naming(job.title, job.spec.name) if len(jobs) > 1 else nullcontext():
            error = _run(job.spec, directory, problem(job.spec), watcher.sinks(job, directory, number, len(jobs)))
        watcher.done(job, directory, error)


def _run(spec: Experiment, directory: Path, problem: TaskAndFederation, sinks: Sequence[Sink]) -> str | None:
    """Run or resume; returns the message of a run that diverged."""
    resume = (directory / "experiment.toml").exists()
    all_sinks = [ExperimentFile(spec, directory), *sinks]
    try:
        options: dict[str, Any] = {"directory": directory, "resume": resume, "keep_clients": False}
        simulate(spec.algorithm, *problem, spec.run, **options, sinks=all_sinks, progress=False)
    except NonFiniteError as error:
        return str(error)
    return None


class WorkerPool:
    """The executor of a comparison, replaced when it breaks.

    Some executors break when they lose a worker (ProcessPoolExecutor). A function that makes executors is then called
    again; an executor that the caller passed cannot be replaced, and is not shut down.
    """

    def __init__(self, executors: Executors):
        self._make = None if isinstance(executors, Executor) else executors
        self._executor = executors if isinstance(executors, Executor) else None

    def connect(self) -> Executor:
        """The current executor, made if there is none; making it may raise."""
        if self._executor is None:
            assert self._make is not None
            self._executor = self._make()
        return self._executor

    def replace(self, broken: BaseException) -> None:
        """Discard the broken executor; raises FedraxError if it cannot be replaced."""
        if self._make is None:
            raise FedraxError(
                "the executor is unusable after the loss of a worker: call again with a new one (finished runs are"
                " not repeated), or pass a function that creates executors, which is then called automatically"
            ) from broken
        self.close()

    def close(self) -> None:
        """Shut down an executor that was made here."""
        if self._make is not None and self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def run_on(workers: WorkerPool, jobs: Sequence[RunJob], out: Path, data_dir: Any, watcher: ComparisonWatcher) -> None:
    """Execute unfinished runs on the workers of an executor; the run of a lost worker is submitted again."""
    attempts, breaks = dict.fromkeys(range(len(jobs)), 0), 0
    todo = {job.path for job in unfinished(jobs, out)}
    left = {i for i, job in enumerate(jobs) if job.path in todo}
    running: dict[Future, int] = {}
    signals_end_waits()
    try:
        while left:
            broken: BaseException | None = None
            try:
                for i in sorted(left - set(running.values())):
                    running[_submit(workers.connect(), jobs[i], out, data_dir)] = i
            except BrokenExecutor as error:
                broken = error
            for future in wait(running, return_when=FIRST_COMPLETED).done if broken is None else ():
                i = running.pop(future)
                job, lost = jobs[i], _lost(future)
                if lost is None:
                    breaks = 0
                    left.discard(i)
                    _report(future.result(), job, out, watcher)
                    continue
                watcher.say(f"{job.title}: its worker was lost ({_first_line(lost)}); submitted again")
                if isinstance(lost, BrokenExecutor):  # raised for all submitted runs, also those that had not started
                    broken = lost
                    continue
                attempts[i] += 1
                if attempts[i] == ATTEMPTS:
                    raise FedraxError(f"{job.title}: {ATTEMPTS} workers were lost ({_first_line(lost)})") from lost
            if broken is not None:
                breaks += 1
                if breaks == ATTEMPTS:
                    cause = _first_line(broken)
                    raise FedraxError(f"{ATTEMPTS} executors broke without a finished run ({cause})") from broken
                workers.replace(broken)
                running = {}
    finally:
        for future in running:
            future.cancel()


def _lost(future: Future) -> BaseException | None:
    """The error of a future whose worker was lost, None if it has a result; errors of the run itself are results."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def _submit(executor: Executor, job: RunJob, out: Path, data_dir: Any) -> Future:
    """Submit a run to an executor."""
    text = tomlkit.dumps(experiment.to_table(job.spec))
    where = None if data_dir is None else str(Path(data_dir).resolve())
    return executor.submit(run_in_worker, text, str(job.directory_in(out).resolve()), where)


def _report(outcome: tuple[str, str] | None, job: RunJob, out: Path, watcher: ComparisonWatcher) -> None:
    """Report the outcome of a run on a worker; raises FedraxError for an invalid one."""
    if outcome is not None and outcome[0] == "invalid":
        raise FedraxError(f"{job.title}: {outcome[1]}")
    wait_for_file(job.directory_in(out) / "experiment.toml", job.title)
    watcher.done(job, job.directory_in(out), None if outcome is None else outcome[1])


def wait_for_file(file: Path, title: str) -> None:
    """Wait until a file that a worker has written is visible; raises FedraxError after FILE_TIMEOUT."""
    end = time.monotonic() + FILE_TIMEOUT
    while not file.exists():
        if time.monotonic() > end:
            raise FedraxError(
                f"{title}: its worker has finished it, but {file.parent} is not here: workers need the same file system"
            )
        time.sleep(0.5)


def _first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200].removesuffix(": ")


def run_in_worker(text: str, directory: str, data_dir: str | None) -> tuple[str, str] | None:
    """Execute the run of an experiment on a worker.

    The run has a thread of its own: a stop signal then ends the worker at once, and no process writes to the directory
    when another worker resumes the run.

    Args:
        text: The experiment as TOML, from the process that started the comparison, which trusted its code.
        directory: The run directory.
        data_dir: Directory of data files.

    Returns:
        None, or ("diverged", message) or ("invalid", message).
    """
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(_run_or_error(text, directory, data_dir)), daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _run_or_error(text: str, directory: str, data_dir: str | None) -> Any:
    """The outcome of a run, or the exception that it raised."""
    try:
        return _run_text(text, directory, data_dir)
    except BaseException as error:  # raised again by the waiting thread
        return error


def _run_text(text: str, directory: str, data_dir: str | None) -> tuple[str, str] | None:
    """Parse the experiment and run it."""
    use_all_cores()
    folder = Path(directory)
    try:
        table = tomlkit.parse(text).unwrap()
        spec = experiment.from_table(table, "the experiment of a worker", trust="typed")
        if (folder / "experiment.toml").exists() and read_run(folder).finished:
            return None  # a worker that was reported as lost has finished it
        shared = {key: value for key, value in table.items() if key not in ("name", "algorithm", "run")}
        error = _run(spec, folder, _problem(tomlkit.dumps(shared), data_dir), [])
    except FedraxError as invalid:
        return "invalid", str(invalid)
    return None if error is None else ("diverged", error)


@lru_cache(maxsize=2)
def _problem(shared: str, data_dir: str | None) -> TaskAndFederation:
    """Task and federation of experiments that share them, cached in the worker so that programs are compiled once."""
    spec = experiment.from_table(tomlkit.parse(shared).unwrap(), "the experiment of a worker", trust="typed")
    return experiment.build(spec, data_dir)[1:]
