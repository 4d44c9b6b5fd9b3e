"""``fedrax deploy``: makes a Flower app of an experiment, rehearses it, and tries it with real processes."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedrax.cli import when_interrupted
from fedrax.cli.arguments import parse, parse_experiment
from fedrax.cli.run_command import ignored_keys_note, print_notes
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.comparison import safe_name
from fedrax.experiments.experiment import Experiment
from fedrax.privacy.ledger import NOT_COVERED
from fedrax.report.privacy_forecast import forecast
from fedrax.simulation import use_all_cores
from fedrax.simulation.privacy_ledger import private_releases

if TYPE_CHECKING:
    from fedrax.flower.trial import Compared

DESCRIPTION = """Deploy an experiment on Flower: `fedrax deploy [FILE.toml] [flags]`.

Writes a directory with a Flower app of the experiment's method, model and settings, certificates for TLS, a key for
each client, and a README.md with the commands for each machine. Then rehearses the app in this process and compares
its losses with those of the simulator. --trial also starts the SuperLink, the SuperNodes and the run as processes of
this machine, and stops all of them at the end. `fedrax deploy DIR` does the same with a directory that it has written,
whose app you may have changed. Needs fedrax[flower]."""
_TOLERANCE = 1e-4
"""Relative difference of losses up to which two runs are the same but for rounding."""


@dataclass
class TrialOptions:
    """Options of a deployment that exists."""

    trial: bool = False
    """Run the deployment with real processes on this machine."""
    nodes: Path | None = None
    """TOML file with a table [[node]] for each client: the node config of its SuperNode, for an app that reads it."""
    quiet: bool = False
    """Print nothing."""
    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""


@dataclass
class DeployOptions(TrialOptions):
    """Options of ``fedrax deploy``."""

    out: Path | None = None
    """Directory to write; by default deployments/NAME."""
    server: tuple[str, ...] = ()
    """Names or addresses of the server's machine, for which the certificate is valid besides this machine."""


def main(args: list[str]) -> int:
    """Write the deployment, rehearse it, try it."""
    if args and not args[0].startswith("-") and Path(args[0]).is_dir():
        options = parse(TrialOptions, args[1:], "fedrax deploy", DESCRIPTION)
        _require_flower()
        return _start(Path(args[0]), options, changed=True)
    parsed = parse_experiment(DeployOptions, args, "fedrax deploy", DESCRIPTION)
    spec, options = parsed.experiment, parsed.options
    directory = options.out or Path("deployments") / safe_name(spec.name)
    _require_flower()
    from fedrax.flower.deployment import write_deployment

    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    if not options.quiet:
        print_notes([*ignored_keys_note(parsed.ignored_keys, spec), *federation.notes, *task.notes], False)
    write_deployment(spec, federation, directory, options.server)
    if not options.quiet:
        print(f"{directory}: app, certificates and keys of {federation.num_clients} clients")
        if private_releases(algorithm):
            print(f"privacy: {_guarantee(algorithm, spec, federation)}")
    return _start(directory, options, changed=False)


def _guarantee(algorithm: Algorithm, spec: Experiment, federation: Federation) -> str:
    """The privacy loss of the deployment in words, which is larger than that of a simulation with sampled cohorts."""
    settings = dataclasses.replace(spec.run, amplification="none", epsilon_budget=None)
    spent = forecast(algorithm, settings, federation.sizes).spent
    limit = spec.run.epsilon_budget
    budget = "" if limit is None else f"; the run ends before epsilon exceeds {limit:g}"
    return f"{spent}, if each client is asked {spent.count} times at most{budget}; {NOT_COVERED}"


def _require_flower() -> None:
    """Raise FedraxError without Flower, but after --help, which does not need it."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise FedraxError('fedrax deploy needs Flower: pip install "fedrax[flower]"') from error


def _start(directory: Path, options: TrialOptions, changed: bool) -> int:
    """Rehearse a deployment and try it."""
    from fedrax.flower.trial import rehearse, run_trial

    def say(text: str) -> None:
        if not options.quiet:
            print(text, flush=True)

    when_interrupted(lambda: "all processes are stopped")
    with _data_directory(options.data_dir):
        compared = rehearse(directory, options.nodes, changed)
        if compared.difference > _TOLERANCE and not changed:
            raise FedraxError(
                "the losses of the app differ from those of the simulator by up to"
                f" {compared.difference:.2g} (relative): the method or the data of the experiment depend on more than"
                " its file"
            )
        say(f"rehearsal: {_in_words(compared)}")
        if options.trial:
            compared, place = run_trial(directory, say, options.nodes, changed)
            say(f"trial: {_in_words(compared)}; all processes are stopped")
            beside = "" if math.isnan(compared.difference) else " beside the simulation"
            say(f"show it{beside} with: fedrax report {shlex.quote(str(place))}")
        else:
            nodes = "" if options.nodes is None else f" --nodes {shlex.quote(str(options.nodes))}"
            say(f"next: fedrax deploy {shlex.quote(str(directory))}{nodes} --trial, or {directory / 'README.md'}")
    return 0


@contextmanager
def _data_directory(directory: Path | None) -> Iterator[None]:
    """Let the app, which runs in this process and in others, find the data files."""
    before = os.environ.get("FEDRAX_DATA")
    if directory is not None:
        os.environ["FEDRAX_DATA"] = str(directory.resolve())
    try:
        yield
    finally:
        if directory is not None:
            os.environ.pop("FEDRAX_DATA")
            os.environ.update({} if before is None else {"FEDRAX_DATA": before})


def _in_words(compared: Compared) -> str:
    """A comparison with the simulator in words."""
    if math.isnan(compared.difference):
        return f"done; not compared with the simulator, which needs the experiment's data ({compared.problem})"
    if math.isinf(compared.difference):
        return "its rounds or losses are not those of the simulator"
    if compared.difference > _TOLERANCE:
        return (
            f"its losses differ from those of the simulator by up to {compared.difference:.2g} (relative), as they do"
            " if the app reads other samples than the experiment, or the same in another order"
        )
    return f"the losses are those of the simulator (largest relative difference {compared.difference:.1g})"
