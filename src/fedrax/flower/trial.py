"""Rehearsal of a deployment in one process, and its trial on one machine with all of Flower's processes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import math
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Context, RecordDict

from fedrax.errors import FedraxError, FedraxWarning
from fedrax.experiments import experiment
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.jobs import ExperimentFile
from fedrax.files import read_toml, write_text
from fedrax.flower.credentials import CA
from fedrax.flower.deployment import (
    APP,
    CERTIFICATES,
    CONNECTION,
    DATABASE,
    KEYS,
    PACKAGE,
    Deployment,
    connection,
    superlink_command,
    supernode_command,
)
from fedrax.flower.local_grid import LocalGrid
from fedrax.flower.processes import ProcessSet
from fedrax.flower.registry import NOT_INTRODUCED, log
from fedrax.report.runs import read_run, summary_line
from fedrax.simulation.results.events import FILE, Event, holds, read_events
from fedrax.simulation.run import simulate

REHEARSED_ROUNDS = 2
"""Rounds of a rehearsal: the second one starts from client states and from what the first one has aggregated."""
MOST_CLIENTS = 32
"""Most clients of a trial: each has two processes of its own, and a third one with JAX for each message."""
_START_SECONDS = 120.0
_ROUND_SECONDS = 900.0
"""Longest time until a process has started, and between two rounds."""
_HOST = "127.0.0.1"
_SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
"""Environment variables: Flower sends no usage data, and looks for tasks every 0.1 s instead of every second."""


def read_deployment(directory: Path) -> Deployment:
    """Read the deployment in a directory; FedraxError where there is none."""
    if not (directory / APP / PACKAGE).is_dir():
        raise FedraxError(f"{directory} is not a deployment, which fedrax deploy FILE makes: it has no {APP}/{PACKAGE}")
    return Deployment.read(directory / APP / PACKAGE)


class Compared(NamedTuple):
    """The losses of a deployment beside those of the simulator."""

    difference: float
    """Their largest relative difference; infinite where rounds or losses differ, NaN where they were not compared."""
    problem: str = ""
    """Why they were not compared."""


def read_nodes(file: Path | None, clients: int, seed: int) -> list[dict[str, Any]]:
    """Read the node config of each client for a rehearsal.

    Args:
        file: a TOML file with a table ``[[node]]`` for each client; None for node configs without keys of its own.
        clients: number of clients.
        seed: the seed of the experiment.

    Returns:
        The node configs, which have the client's number as ``partition-id`` and the seed unless the file names others.

    Raises:
        FedraxError: the file is no such file, or has another number of tables.
    """
    tables: Any = [{}] * clients if file is None else read_toml(file).get("node")
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise FedraxError(f"{file} has no tables [[node]], one for each client with the node config of its SuperNode")
    if len(tables) != clients:
        raise FedraxError(f"{file} has {len(tables)} tables [[node]], and the deployment {clients} clients")
    odd = [key for table in tables for key, value in table.items() if not isinstance(value, str | int | float)]
    if odd:
        raise FedraxError(
            f"{file}: the values of a node config are strings, numbers, true or false, and {odd[0]} is not"
        )
    return [{"partition-id": number, "seed": seed} | table for number, table in enumerate(tables)]


def rehearse(directory: Path, nodes: Path | None = None, changed: bool = False) -> Compared:
    """Run the first rounds of a deployment's app in this process, and of the simulator.

    Args:
        directory: the deployment.
        nodes: the file of the node configs, see :func:`read_nodes`.
        changed: whether the app may have been changed, so that the experiment's own data need not be on this machine.

    Returns:
        The comparison of their losses.
    """
    deployed = read_deployment(directory)
    spec = deployed.experiment
    rounds = min(REHEARSED_ROUNDS, spec.run.rounds)
    configs = read_nodes(nodes, deployed.clients, spec.run.seed)
    spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, rounds=rounds, eval_every=1))
    with tempfile.TemporaryDirectory() as folder, _modules_of(directory / APP), _quiet():
        server, client = (importlib.import_module(f"{PACKAGE}.{name}_app").app for name in ("server", "client"))
        config = {"seed": spec.run.seed, "rounds": rounds, "eval_every": 1, "directory": folder}
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)  # type: ignore[arg-type]
        server(LocalGrid(client, configs), context)
        return _compared(read_events(folder), spec, None, changed)


def _compared(events: Sequence[Event], spec: Experiment, directory: Path | None, changed: bool) -> Compared:
    """Compare a deployment's events with those of the simulator."""
    try:
        problem = experiment.build(spec)
    except FedraxError as error:
        if changed:
            return Compared(math.nan, str(error))
        raise
    return Compared(largest_difference(events, _simulated(spec, problem, directory)))


def run_trial(
    directory: Path, say: Callable[[str], None], nodes: Path | None = None, changed: bool = False
) -> tuple[Compared, Path]:
    """Run a deployment on this machine: a SuperLink, a SuperNode for each client and ``flwr run``, each a process.

    All processes, and those that they start, have ended when this function returns or raises.

    Args:
        directory: the deployment. Runs, logs and Flower's files are written to a new directory in it.
        say: receives messages about the progress.
        nodes: the file of the node configs, see :func:`read_nodes`.
        changed: whether the app may have been changed, so that the experiment's own data need not be on this machine.

    Returns:
        The comparison of the losses with those of the simulator, and the directory of the trial.
    """
    directory = directory.resolve()
    deployed, place = read_deployment(directory), _new_directory(directory / "trial")
    if deployed.clients > MOST_CLIENTS:
        raise FedraxError(
            f"a trial of {deployed.clients} clients would start more than {2 * deployed.clients} processes: deploy the"
            f" experiment with at most {MOST_CLIENTS} clients to try it (--partition.clients {MOST_CLIENTS})"
        )
    configs = read_nodes(nodes, deployed.clients, deployed.experiment.run.seed)
    with ProcessSet(place / "logs", _environment(place / "flower")) as processes:
        at = start_federation(processes, directory, place, configs)
        say(
            f"SuperLink at {at}, over TLS; {deployed.clients} SuperNodes with registered keys; logs in {processes.logs}"
        )
        _run_app(processes, directory, place, deployed.experiment.run.seed, say)
    found = _compared(read_events(place / "run"), deployed.experiment, place / "simulation", changed)
    return found, place


def start_federation(processes: ProcessSet, directory: Path, place: Path, configs: Sequence[Mapping[str, Any]]) -> str:
    """Start a SuperLink and register and start a SuperNode for each node config; returns the SuperLink's address."""
    certificates, port = directory / CERTIFICATES, _free_port()
    at = f"{_HOST}:{port}"
    write_text(place / "flower" / "config.toml", connection(at, str(certificates / CA)))
    processes.start("superlink", superlink_command(port, _HOST, str(certificates), str(place / DATABASE)))
    processes.wait(lambda: _is_listening(port), _START_SECONDS, "the start of the SuperLink")
    for client, config in enumerate(configs):
        key = str(directory / KEYS / f"client-{client}")
        processes.run(f"register-{client}", ["flwr", "supernode", "register", f"{key}.pub", CONNECTION], _START_SECONDS)
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        node = supernode_command(at, _free_port(), str(certificates / CA), key, text)
        processes.start(f"client-{client}", node)
    return at


def _run_app(processes: ProcessSet, directory: Path, place: Path, seed: int, say: Callable[[str], None]) -> None:
    """Start the run and wait until it has ended; raises FedraxError for one that fails.

    A client whose app fails at its introduction ends the trial, which a server would wait for.
    """
    config = f'directory="{place / "run"}" seed={seed}'
    command = ["flwr", "run", str(directory / APP), CONNECTION, "--run-config", config, "--stream"]
    run, progress = processes.start("run", command), _Progress(place / "run", say)

    def changed() -> bool:
        return run.poll() is not None or progress.update() or _introduction_problem(processes.logs) is not None

    while run.poll() is None:
        processes.wait(changed, _ROUND_SECONDS, "a round")
        if not progress.rounds and (problem := _introduction_problem(processes.logs)) is not None:
            raise FedraxError(f"{problem}; the logs are in {processes.logs}")
    progress.update()
    if not progress.rounds or not read_run(place / "run").finished:
        raise FedraxError(f"the run has failed in round {progress.rounds + 1}: see {processes.logs / 'run.log'}")


def _introduction_problem(logs: Path) -> str | None:
    """The server's warning about a client that did not introduce itself, in the log of the run."""
    lines = (logs / "run.log").read_text("utf-8", "replace").splitlines()
    return next((line[line.find("node ") :] for line in lines if NOT_INTRODUCED in line), None)


def largest_difference(ours: Sequence[Event], theirs: Sequence[Event]) -> float:
    """The largest relative difference of a loss in two runs; infinite where they differ in rounds or losses."""
    if len(ours) != len(theirs):
        return math.inf
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        names = {name for name in other if name.endswith(("_loss", "_mse")) and holds(other, name)}
        names = {name for name in names if name.count("_") == 1}  # not those of personal models or single clients
        names -= {"local_loss", "train_loss"} if "local_loss" in other else set()  # a federation has the former only
        if not all(holds(one, name) for name in names):
            return math.inf
        largest = max([largest, *(abs(one[name] - other[name]) / max(abs(other[name]), 1e-12) for name in names)])
    return largest


class _Progress:
    """Tells the rounds of a run while another process writes them."""

    def __init__(self, directory: Path, say: Callable[[str], None]):
        self.rounds, self._directory, self._say = 0, directory, say

    def update(self) -> bool:
        """Tell new rounds; whether there are some."""
        events = read_events(self._directory) if (self._directory / FILE).exists() else []
        before, self.rounds = self.rounds, len(events)
        for number in range(before + 1, self.rounds + 1):
            self._say(f"round {events[number - 1]['round']}: {summary_line(events[:number])}")
        return self.rounds > before


def _simulated(spec: Experiment, problem: tuple, directory: Path | None) -> list[Event]:
    """The events of the simulator, whose privacy loss is accounted for as in a federation."""
    algorithm, task, federation = problem
    sinks = [] if directory is None else [ExperimentFile(spec, directory)]
    return simulate(algorithm, task, federation, spec.run, directory=directory, sinks=sinks, progress=False).events


@contextmanager
def _modules_of(app: Path) -> Iterator[None]:
    """Let the package of an app be imported, which has the same name in every deployment."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    forget()
    sys.path.insert(0, str(app.resolve()))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(app.resolve()))
        forget()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Flower's log of every round, and the warning that a seed makes private noise reproducible, as meant."""
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedraxWarning)
            yield
    finally:
        log.setLevel(level)


def _new_directory(stem: Path) -> Path:
    """``stem``, or with the first number that is free."""
    number = 1
    while (directory := stem if number == 1 else stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return directory


def _environment(home: Path) -> dict[str, str]:
    """Environment variables of Flower's processes: with the commands of this environment, and a home of their own."""
    commands = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*commands, os.environ.get("PATH", os.defpath)])
    if shutil.which("flower-superlink", path=path) is None:
        raise FedraxError("there is no command flower-superlink: install fedrax[flower] in this environment")
    return {**os.environ, **_SWITCHES, "PATH": path, "FLWR_HOME": str(home)}


def _free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        return listener.getsockname()[1]


def _is_listening(port: int) -> bool:
    """Whether a process listens at a port."""
    try:
        socket.create_connection((_HOST, port), 1).close()
    except OSError:
        return False
    return True
