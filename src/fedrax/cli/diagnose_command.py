"""``fedrax diagnose``: a task and its partition measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedrax.algorithms.fedavg import FedAvg
from fedrax.cli import tell
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.figures import save
from fedrax.cli.run_command import not_of_one_run
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.local_training import LocalSGD
from fedrax.errors import FedraxError
from fedrax.escaping import plain
from fedrax.experiments import experiment
from fedrax.participation import Asynchronous, Poisson, Turns, Uniform
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import use_all_cores

if TYPE_CHECKING:
    from fedrax.analysis import Diagnosis

DESCRIPTION = """A task and its partition measured: `fedrax diagnose [FILE.toml] [flags]`.

Along the rounds of a run of FedAvg with the experiment's local steps, at rounds 0, 1, 2, 4, 8 ... and the last: how far
clients' gradients and updates are apart, how noisy batches are, how curvature goes with the gradient; and the constants
of the methods' assumptions that fit. Of more than 256 clients as many are drawn. Then, where that takes little or with
--tune always, a few methods are trained for the experiment's rounds, each at step sizes of its own, and compared on
rows that clients hold out. It ends with what to try first, and how often such advice was right. Flags are those of
`fedrax run`."""


@dataclass
class DiagnoseOptions:
    """Options of ``fedrax diagnose``."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    picture: Path | None = Path("diagnosis")
    """Where the picture goes, as .png and .svg; None for no picture."""
    tune: Literal["auto", "always", "never"] = "auto"
    """Whether methods are tried, each at step sizes of its own; by default where that takes a minute or two."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Parse, measure, print, draw."""
    parsed = parse_experiment(DiagnoseOptions, args, "fedrax diagnose", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    from fedrax.analysis import advice, diagnose, rendering, trials

    def progress(text: str, last: bool) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)

    def measured(done: int, of: int) -> None:
        progress(f"{done} of {of} points measured", done == of)

    def tried(method: str, done: int, of: int) -> None:
        progress(f"{done} of {of} methods tried" + f", {method} at step sizes of its own" * (done < of), done == of)

    aside = set_aside(spec, algorithm)
    local, names = algorithm.local_steps, advice.shortlist()
    made, found, unmeasured, left_out, failed = None, None, None, None, None
    try:
        made = diagnose(task, federation, spec.run, local, progress=measured)
    except FedraxError as error:  # the methods tried have step sizes of their own
        unmeasured = error
    work = 0.0 if options.tune == "never" else trials.operations(task, federation, spec.run, local or LocalSGD(), names)
    if options.tune == "always" or (options.tune == "auto" and work <= trials.LITTLE):
        try:
            found = trials.try_methods(task, federation, spec.run, local, methods=names, progress=tried)
        except FedraxError as error:
            left_out, failed = str(error), error if options.tune == "always" else None
    else:
        cost = f", about {work:.0e} operations" if work else ""
        left_out = f"{', '.join(names)}: with --tune always each is trained here{cost}"
    if unmeasured is not None and found is None and task.loss_and_statistics is None:
        raise unmeasured
    if made is None and failed is not None:
        raise failed
    pictures, not_drawn = ((), None) if made is None else save(partial(rendering.draw, made), options.picture)
    if options.json:
        first = [dataclasses.asdict(one) for one in advice.advise(made, found)]
        reasons = {"not_measured": unmeasured and str(unmeasured), "not_tried": left_out, "set_aside": aside}
        shown = {"advice": first, "trials": found and found.to_dict(), "pictures": [str(path) for path in pictures]}
        print(json.dumps((made.to_dict() if made else {}) | shown | reasons))
    else:
        for note in [*not_of_one_run(parsed.left_out, spec), *federation.notes]:
            tell(plain(note))
        told = rendering.lines(made) if made is not None else [f"not measured   {unmeasured}"]
        told += [*advice.lines(made, found, left_out), *(f"set aside      {text}" for text in aside)]
        _print(federation.name, made, [*told, *(f"picture: {path}" for path in pictures)])
    if (error := failed or not_drawn) is not None:  # once what was found is printed
        raise error
    return 0


def _print(name: str, made: Diagnosis | None, told: list[str]) -> None:
    """The table of what was measured, if anything was, and what it says."""
    from fedrax.analysis import rendering

    console = wide_console()
    if made is not None:
        rounds = max([made.points[-1].round, *made.left_out])
        about = f"{made.measured} of {made.clients} clients, {rounds} round{'s' * (rounds != 1)} of FedAvg"
        console.print(f"{plain(name)}: {about}", highlight=False, markup=False)
        console.print(rendering.points_table(made))
    for line in told:
        console.print(line, highlight=False, markup=False)


def set_aside(spec: experiment.Experiment, algorithm: Algorithm) -> list[str]:
    """What the experiment says, and neither the measurements nor the methods tried have of it."""
    found = []
    if type(algorithm) is not FedAvg:
        private = ", its privacy among it" if algorithm.releases() else ""
        taken = "local steps alone are taken: whatever else it does is not here"
        if algorithm.local_steps is None:
            taken = "nothing is taken, for it has no local steps: measured and tried are those of FedAvg by default"
        found.append(f"of {spec.method_name} {taken}{private}")
    if isinstance(spec.run.participation, Asynchronous):
        found.append(
            "clients that work at their own pace: here each round waits for its cohort, and the methods named do, too"
        )
    elif not isinstance(spec.run.participation, Uniform | Turns | Poisson):
        found.append("who takes part: measured are all clients alike, and cohorts drawn uniformly from them")
    if spec.run.stragglers:
        found.append("stragglers: the drift that was measured is that of whole local work")
    return found
