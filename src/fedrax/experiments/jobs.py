"""The runs of a comparison: here, one after another, or on the workers of an executor.

A run is what its directory says. One that is finished is not run again, one that was broken off goes on from its
checkpoint, wherever it is run: workers need nothing but the same file system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomlkit

from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.comparison import RunJob, state_of
from fedrax.experiments.experiment import Experiment
from fedrax.report.runs import SavedRun, read_run, summary_line
from fedrax.simulation import Event, NonFiniteError, Result, RunInfo, Sink, simulate, use_all_cores
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.process import signals_end_waits
from fedrax.simulation.results.progress import ProgressLine, ProgressSink
from fedrax.simulation.run import check_possible

ATTEMPTS = 3
"""Workers that a run may lose, or executors that may break with no run finished between, before it is given up."""
ARRIVAL = 60.0
"""Seconds in which what a worker has written must be seen here; network file systems take some."""
TaskAndFederation = tuple[Task, Federation]
Executors = Executor | Callable[[], Executor]


class ComparisonWatcher:
    """What wants to see a comparison go on; the base sees nothing."""

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Sink]:
        """Who sees the events of a run here, the ``number``-th ``of`` those of its kind."""
        return []

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """A run has ended; ``error`` says how it diverged."""

    def say(self, text: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """The comparison is over, or broken off."""


class ProgressWatcher(ComparisonWatcher):
    """A line for the run under way, and one that stays for each that is done."""

    def __init__(self) -> None:
        self._line = ProgressLine()

    def sinks(self, job: RunJob, directory: Path, number: int, of: int) -> list[Sink]:
        """The line."""
        return [ProgressSink(f"{job.title} ({number}/{of})", self._line)]

    def done(self, job: RunJob, directory: Path, error: str | None) -> None:
        """How it came out."""
        self._line.clear()
        if error is not None:
            self.say(error)
        on = ", on validation data" if job.spec.validation else ""
        self.say(f"{job.title}{on}: {summary_line(read_run(directory).events)}")

    def say(self, text: str) -> None:
        """A line above that of the run."""
        self._line.say(text)

    def close(self) -> None:
        """Take the line away."""
        self._line.clear()


class ExperimentFile:
    """A sink that writes experiment.toml when the run starts, so that a rejected run leaves no file."""

    def __init__(self, spec: Experiment, directory: Path):
        self._spec, self._path = spec, directory / "experiment.toml"

    def start(self, run: RunInfo | None) -> None:
        """Write the file."""
        experiment.write(self._spec, self._path)

    def event(self, event: Event) -> None:
        """Nothing to add."""

    def finish(self, result: Result | None) -> None:
        """Nothing to close."""


def unfinished(jobs: Sequence[RunJob], out: Path) -> list[RunJob]:
    """The jobs that are not finished.

    Included are jobs interrupted between their last event and their last checkpoint, except those of a vectorized
    search, which have no checkpoint.
    """
    runs = [(job, state_of(job.spec, job.inside(out))) for job in jobs]
    return [job for job, run in runs if run is None or not run.finished or not _is_kept(run, job)]


def _is_kept(run: SavedRun, job: RunJob) -> bool:
    """Whether a run that has all its events has its last checkpoint, too, or needs none."""
    if not _is_known(run.directory):
        return job.spec.validation > 0  # it ran together with others
    if checkpoint.exists(run.directory / FAILURE):
        return True
    place = run.directory / CHECKPOINT
    if (place / checkpoint.PREVIOUS).exists():  # cut short while the last one took its place
        return False
    try:
        return int(checkpoint.load_meta(place)["round"]) >= len(run.events)
    except (FedraxError, KeyError, TypeError, ValueError):
        return True  # it is damaged, which those say who read it


def _is_known(place: Path) -> bool:
    """Whether something of a run tells what it was computed from."""
    return any(checkpoint.exists(place / name) for name in (CHECKPOINT, FAILURE))


def check_kept(jobs: Sequence[RunJob], out: Path, problem: Callable[[], TaskAndFederation]) -> None:
    """Refuse, before anything runs, runs that were made of other data, another program or another version."""
    for job in jobs:
        run, place = state_of(job.spec, job.inside(out)), job.inside(out)
        if run is None or not _is_known(place):
            continue
        try:
            check_possible(job.spec.algorithm, *problem(), job.spec.run, place)
        except FedraxError as error:
            raise FedraxError(f"{error}: choose another --out for a comparison of what there is now") from error


def check_all(jobs: Sequence[RunJob], out: Path, problem: Callable[[], TaskAndFederation]) -> None:
    """Refuse, before anything runs, a method that the data, the model or the cohorts do not fit."""
    firsts = {job.place.parent: job for job in reversed(unfinished(jobs, out))}
    for job in reversed(firsts.values()):
        with titled(job.spec.name):
            check_possible(job.spec.algorithm, *problem(), job.spec.run)


@contextmanager
def titled(title: str) -> Iterator[None]:
    """Refusals say which of several runs is meant."""
    try:
        yield
    except FedraxError as error:
        raise FedraxError(f"{title}: {error}") from error


def run_here(
    jobs: Sequence[RunJob], out: Path, problem: Callable[[], TaskAndFederation], watcher: ComparisonWatcher
) -> None:
    """Run what is not finished; a run that diverges is noted in its directory and does not stop the others."""
    left = {job.place for job in unfinished(jobs, out)}
    for number, job in enumerate(jobs, 1):
        if job.place not in left:
            continue
        directory = job.inside(out)
        with titled(job.title) if len(jobs) > 1 else nullcontext():
            error = _run(job.spec, directory, problem(), watcher.sinks(job, directory, number, len(jobs)))
        watcher.done(job, directory, error)


def _run(spec: Experiment, directory: Path, problem: TaskAndFederation, sinks: Sequence[Sink]) -> str | None:
    """Run or go on; how it diverged, if it did."""
    resume = (directory / "experiment.toml").exists()
    seen = [ExperimentFile(spec, directory), *sinks]
    try:
        kept: dict[str, Any] = {"directory": directory, "resume": resume, "keep_clients": False}
        simulate(spec.algorithm, *problem, spec.run, **kept, sinks=seen, progress=False)
    except NonFiniteError as error:
        return str(error)
    return None


class WorkerPool:
    """An executor for as long as a comparison takes, and the next one where it breaks and there is a way to make one.

    Some executors break when they lose a worker (ProcessPoolExecutor). A function that makes executors is then called
    for a new one; one that was given ready-made cannot be replaced, and stays its owner's to end.
    """

    def __init__(self, executors: Executors):
        self._make = None if isinstance(executors, Executor) else executors
        self._executor = executors if isinstance(executors, Executor) else None

    def connect(self) -> Executor:
        """The executor in use; made where there is none, which may fail."""
        if self._executor is None:
            assert self._make is not None
            self._executor = self._make()
        return self._executor

    def replace(self, broken: BaseException) -> None:
        """Go on with a new one; FedraxError where there is none."""
        if self._make is None:
            raise FedraxError(
                "the executor has broken with a worker: call again with a new one, what is finished is kept; a"
                " function that makes executors, in its place, is called for the next one by itself"
            ) from broken
        self.close()

    def close(self) -> None:
        """End what was made here."""
        if self._make is not None and self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def run_on(workers: WorkerPool, jobs: Sequence[RunJob], out: Path, data_dir: Any, watcher: ComparisonWatcher) -> None:
    """As ``run_here`` on the workers of an executor; the run of a worker that is lost is taken up by another."""
    attempts, breaks = dict.fromkeys(range(len(jobs)), 0), 0
    todo = {job.place for job in unfinished(jobs, out)}
    left = {i for i, job in enumerate(jobs) if job.place in todo}
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
                    _note(future.result(), job, out, watcher)
                    continue
                watcher.say(f"{job.title}: its worker was lost ({_words(lost)}); another one takes it up")
                if isinstance(lost, BrokenExecutor):  # of every run that it held, also those that had not begun
                    broken = lost
                    continue
                attempts[i] += 1
                if attempts[i] == ATTEMPTS:
                    raise FedraxError(f"{job.title}: {ATTEMPTS} workers were lost with it ({_words(lost)})") from lost
            if broken is not None:
                breaks += 1
                if breaks == ATTEMPTS:
                    raise FedraxError(f"{ATTEMPTS} executors broke with no run finished ({_words(broken)})") from broken
                workers.replace(broken)
                running = {}
    finally:
        for future in running:
            future.cancel()


def _lost(future: Future) -> BaseException | None:
    """Why a future has no result, if it has none: what the run itself says is a result."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def _submit(executor: Executor, job: RunJob, out: Path, data_dir: Any) -> Future:
    text = tomlkit.dumps(experiment.to_table(job.spec))
    where = None if data_dir is None else str(Path(data_dir).resolve())
    return executor.submit(run_in_worker, text, str(job.inside(out).resolve()), where)


def _note(outcome: tuple[str, str] | None, job: RunJob, out: Path, watcher: ComparisonWatcher) -> None:
    """What a worker said of a run."""
    if outcome is not None and outcome[0] == "refused":
        raise FedraxError(f"{job.title}: {outcome[1]}")
    await_arrival(job.inside(out) / "experiment.toml", job.title)
    watcher.done(job, job.inside(out), None if outcome is None else outcome[1])


def await_arrival(file: Path, title: str) -> None:
    """Return once a file is there that a worker says it has written; FedraxError if it never is."""
    end = time.monotonic() + ARRIVAL
    while not file.exists():
        if time.monotonic() > end:
            raise FedraxError(
                f"{title}: its worker has finished it, but {file.parent} is not here: workers need the same file system"
            )
        time.sleep(0.5)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200].removesuffix(": ")


def run_in_worker(text: str, directory: str, data_dir: str | None) -> tuple[str, str] | None:
    """Run the experiment of a file's text in a directory: None, or ("diverged" or "refused", why).

    It comes from the process that started the comparison, with code that was trusted there. The run has a thread of its
    own: a signal to stop then ends a worker at once, and what takes the run up finds nobody writing to its directory.
    """
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(_caught(text, directory, data_dir)), daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _caught(text: str, directory: str, data_dir: str | None) -> Any:
    try:
        return _from_text(text, directory, data_dir)
    except BaseException as error:  # handed to the thread that waits
        return error


def _from_text(text: str, directory: str, data_dir: str | None) -> tuple[str, str] | None:
    use_all_cores()
    place = Path(directory)
    try:
        table = tomlkit.parse(text).unwrap()
        spec = experiment.from_table(table, "the experiment of a worker", trust="typed")
        if (place / "experiment.toml").exists() and read_run(place).finished:
            return None  # by a worker that was thought to be lost
        shared = {key: value for key, value in table.items() if key not in ("name", "algorithm", "run")}
        error = _run(spec, place, _problem(tomlkit.dumps(shared), data_dir), [])
    except FedraxError as refused:
        return "refused", str(refused)
    return None if error is None else ("diverged", error)


@lru_cache(maxsize=2)
def _problem(shared: str, data_dir: str | None) -> TaskAndFederation:
    """Task and federation of experiments that share them, as long as the worker lives: programs are compiled once."""
    spec = experiment.from_table(tomlkit.parse(shared).unwrap(), "the experiment of a worker", trust="typed")
    return experiment.build(spec, data_dir)[1:]
