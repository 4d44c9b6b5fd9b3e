"""``fedrax diagnose``: measure a task and its partition, try methods, write the comparison to run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomlkit

from fedrax.algorithms.fedavg import FedAvg
from fedrax.cli import tell
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.figures import save
from fedrax.cli.run_command import ignored_keys_note
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.local_training import LocalSGD
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line
from fedrax.experiments import experiment
from fedrax.files import write_text
from fedrax.participation import Asynchronous, Poisson, RoundRobin, Uniform
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import use_all_cores

if TYPE_CHECKING:
    from fedrax.analysis import Diagnosis, MethodTrials

DESCRIPTION = """Measure a task and its partition: `fedrax diagnose [FILE.toml] [flags]`.

Measures along a run of FedAvg with the experiment's local steps, at rounds 0, 1, 2, 4, 8 ... and the last: the
dissimilarity of client gradients, the drift of client updates, the noise of mini-batches, the curvature, and the
constants of the methods' assumptions that fit. Of more than 256 clients, 256 are sampled. Then, where it takes little
time (always with --tune always), trains FedAvg, SCAFFOLD, FedDyn and GradMA, or those of --methods, for the
experiment's rounds, each over a grid of learning rates, and ranks them on rows that clients hold out. The trials have
the local steps, weights, participation and stragglers of the experiment. Writes an experiment file that compares these
methods, for `fedrax compare`; the measurements do not replace the comparison. Flags are those of `fedrax run`."""
HEADER = "Written by fedrax diagnose. Run it with: fedrax compare"


@dataclass
class DiagnoseOptions:
    """Options of ``fedrax diagnose``."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    picture: Path | None = Path("diagnosis")
    """Where to save the figure, as .png and .svg; None for no figure."""
    comparison: Path | None = Path("diagnosis.toml")
    """Where to write the file of a comparison; None for no file."""
    tune: Literal["auto", "always", "never"] = "auto"
    """Whether to try methods, each over its grid; by default where that takes a minute or two."""
    methods: tuple[str, ...] = ()
    """Methods to try, of FedAvg, FedAvgM, FedProx, Upcycled FedAvg, SCAFFOLD, FedDyn, FedCM, EPISODE, LoSAC, GradMA-S
    and GradMA; by default the baseline, and one method for each kind of drift correction."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Parse, measure, try, print, draw, write."""
    parsed = parse_experiment(DiagnoseOptions, args, "fedrax diagnose", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    from fedrax.analysis import diagnose, method_trials, rendering

    def progress(text: str, last: bool) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)

    def measured(done: int, total: int) -> None:
        progress(f"{done} of {total} points measured", done == total)

    def tried(method: str, done: int, total: int) -> None:
        progress(f"{done} of {total} methods tried" + f", now {method}" * (done < total), done == total)

    ignored = not_measured(spec, algorithm)
    local, names = algorithm.local_steps, method_trials.method_names(options.methods or method_trials.DEFAULT_METHODS)
    made, trials, unmeasured, untried, failed = None, None, None, None, None
    try:
        made = diagnose(task, federation, spec.run, local, progress=measured)
    except FedraxError as error:  # methods can be tried all the same: they have learning rates of their own
        unmeasured = error
    work = 0.0
    if options.tune != "never":
        work = method_trials.operations(task, federation, spec.run, local or LocalSGD(), names)
    if options.tune == "always" or (options.tune == "auto" and work <= method_trials.QUICK):
        try:
            trials = method_trials.try_methods(task, federation, spec.run, local, methods=names, progress=tried)
        except FedraxError as error:
            untried, failed = str(error), error if options.tune == "always" else None
    else:
        cost = f", about {work:.0e} operations" if work else ""
        untried = f"{', '.join(names)}: --tune always trains each of them{cost}"
    if unmeasured is not None and trials is None and task.loss_and_statistics is None:
        raise unmeasured
    if made is None and failed is not None:
        raise failed
    pictures, not_drawn = ((), None) if made is None else save(partial(rendering.draw, made), options.picture)
    memory = method_trials.server_memory(task, federation, spec.run)
    compared, unfit = ([trial.method for trial in trials.tried], []) if trials else fitting(spec, local, names, memory)
    written = bool(compared) and write_comparison(
        spec, local or LocalSGD(), compared, trials, memory, options.comparison
    )
    if options.json:
        reasons = {"not_measured": unmeasured and str(unmeasured), "not_tried": untried, "ignored": ignored}
        files = {"pictures": [str(path) for path in pictures], "comparison": written and str(options.comparison)}
        found = {"trials": trials and trials.to_dict()} | files
        print(json.dumps((made.to_dict() if made else {}) | found | reasons))
    else:
        for note in [*ignored_keys_note(parsed.ignored_keys, spec), *federation.notes]:
            tell(printable_line(note))
        lines = rendering.lines(made, spec.model_name) if made is not None else [f"not measured   {unmeasured}"]
        lines += [] if trials is None else rendering.trial_lines(trials, conditions(spec, federation.num_clients))
        lines += [f"not tried      {untried}"] * (untried is not None)
        lines += [f"rejected       {reason}" for reason in unfit]
        if not options.methods and options.tune != "never":
            others = ", ".join(name for name in method_trials.METHODS if name not in names)
            lines.append(f"methods        {method_trials.DEFAULT_REASON}; --methods tries others: {others}")
        if federation.num_clients == 1:
            lines.append("one client     there is no drift to correct")
        lines += [f"ignored        {text}" for text in ignored]
        lines += [f"picture        {path}" for path in pictures]
        if written:
            lines.append(f"comparison     to compare these methods: fedrax compare {options.comparison}")
        elif compared and options.comparison is not None:
            lines.append(f"comparison     {options.comparison} exists and is kept: name another with --comparison")
        _print(federation.name, made, lines)
    if (error := failed or not_drawn) is not None:  # after what was measured has been printed
        raise error
    return 0


def write_comparison(
    spec: experiment.Experiment,
    local: LocalSGD,
    names: Sequence[str],
    trials: MethodTrials | None,
    memory: int,
    path: Path | None,
) -> bool:
    """Write the file of a comparison of the methods, each with the grid of its trials. Paths are relative to the file.

    After trials the learning rates are the best one and its neighbors, and the methods come best first.

    Returns:
        Whether the file was written: an existing one is kept.
    """
    if path is None or path.exists():
        return False
    from fedrax.analysis import method_trials

    rates, folder = method_trials.LEARNING_RATES, path.parent.resolve()
    best = {} if trials is None else {trial.method: trial.point for trial in trials.tried}
    table: dict[str, Any] = experiment.to_table(replace(spec, algorithm=FedAvg(), validation=0.0), folder)
    table = {key: value for key, value in table.items() if key not in ("algorithm", "validation")}
    table["run"] = {key: value for key, value in table["run"].items() if key != "seed"}
    seeds = [spec.run.seed + k for k in range(method_trials.SEEDS)]
    table |= {"seeds": seeds, "search": {"validation": method_trials.VALIDATION}, "compare": []}
    for name in names:
        grid = method_trials.METHODS[name]
        at = rates.index(best[name]["local.lr"]) if name in best else None
        nearby = rates if at is None else rates[max(at - 1, 0) : at + 2]
        axes = grid.axes(nearby, local.lr if at is None else rates[at])
        algorithm = grid.at(best.get(name, grid.points()[0]), local, memory)
        entry = experiment.to_table(replace(spec, algorithm=algorithm), folder)["algorithm"]
        table["compare"].append({"label": name, "grid": axes, **entry})
    scalars = {key: value for key, value in table.items() if not isinstance(value, dict) and key != "compare"}
    write_text(path, f"# {HEADER} {path}\n" + tomlkit.dumps(scalars | table))
    return True


def fitting(
    spec: experiment.Experiment, local: LocalSGD | None, names: Sequence[str], memory: int
) -> tuple[list[str], list[str]]:
    """The methods that the settings of the experiment allow, and for each of the others the reason."""
    from fedrax.analysis import method_trials

    allowed, reasons = [], []
    for name in names:
        grid = method_trials.METHODS[name]
        try:
            replace(spec, algorithm=grid.at(grid.points()[0], local or LocalSGD(), memory)).check()
        except FedraxError as error:
            reasons.append(f"{name}: {error}")
        else:
            allowed.append(name)
    return allowed, reasons


def _print(name: str, made: Diagnosis | None, lines: list[str]) -> None:
    """Print the table of measurements, if there are any, and the lines below it."""
    from fedrax.analysis import rendering

    console = wide_console()
    if made is not None:
        rounds = max([made.points[-1].round, *made.skipped_rounds])
        about = f"{made.measured} of {made.clients} clients, {rounds} round{'s' * (rounds != 1)} of FedAvg"
        console.print(f"{printable_line(name)}: {about}", highlight=False, markup=False)
        console.print(rendering.points_table(made))
    for line in lines:
        console.print(line, highlight=False, markup=False)


def conditions(spec: experiment.Experiment, clients: int) -> str:
    """Participation and stragglers of the trials, which are those of the experiment."""
    from fedrax.analysis.diagnosis import settings_of_measurement

    run = settings_of_measurement(spec.run, 1)
    policy = type(run.participation).__name__
    stragglers = f"{100 * run.stragglers:g} % stragglers" if run.stragglers else "no stragglers"
    return f"{policy} participation of {min(run.cohort_size, clients)} of {clients} clients, {stragglers}"


def not_measured(spec: experiment.Experiment, algorithm: Algorithm) -> list[str]:
    """Parts of the experiment that neither the measurements nor the trials take into account."""
    found = []
    if type(algorithm) is not FedAvg:
        private = ", including its privacy" if algorithm.releases() else ""
        if algorithm.local_steps is None:
            found.append(f"{spec.method_name} has no local steps: FedAvg's default ones are measured and tried")
        else:
            found.append(f"everything of {spec.method_name} but its local steps{private}")
    if isinstance(spec.run.participation, Asynchronous):
        found.append("asynchronous participation: here each round waits for its cohort")
    elif not isinstance(spec.run.participation, Uniform | RoundRobin | Poisson):
        found.append("participation: all clients are measured, and trials sample cohorts as the run does")
    if spec.run.stragglers:
        found.append("stragglers: the drift is that of complete local work; trials have them")
    return found
