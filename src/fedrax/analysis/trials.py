"""What to try first, by trying: a few methods, each at settings of its own, on rows that clients hold out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any, Unpack

import jax
import numpy as np

from fedrax.analysis.diagnosis import batches, plain
from fedrax.analysis.shortlist import METHODS, RATES, Point
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.initialization import shapes_of
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation, hold_out
from fedrax.data.dataset import floor_fractions
from fedrax.errors import FedraxError, unknown
from fedrax.simulation import Result, Settings
from fedrax.simulation.settings import SettingsOptions
from fedrax.simulation.validate import changed_settings
from fedrax.tuning import sweep
from fedrax.tuning.selection import is_lower_better, selection_metric
from fedrax.xla import count_flops

SHARE = 0.2
"""Of each client's rows that are held out."""
SEEDS = 3
EVALUATIONS = 20
"""Of a run; a score is the mean of the last quarter of them."""
LEAST, LEAST_EVALUATION = 1e5, 1e7
"""Operations of a local step, and of an evaluation, below which it takes no less time."""
FEWEST = 20
"""Rows that have to be held out."""
LITTLE = 2e12
"""Operations that are a minute or two."""
ROOM = 2**31
"""Bytes for models that are kept for each client: those of all points side by side, or a server's memory of them."""


@dataclass(frozen=True)
class Tried:
    """A method at the best of its points."""

    method: str
    algorithm: Algorithm
    point: Point
    """The value of ``local.lr``, and of the method's second number where it has one."""
    score: float
    """Accuracy, or the loss of a task without it, on held-out rows: the mean over seeds of a run's last quarter."""
    spread: float
    """Its standard deviation over seeds."""

    @property
    def at_end(self) -> bool:
        """Whether the step size is the grid's smallest or largest."""
        return self.point["local.lr"] in (RATES[0], RATES[-1])


@dataclass(frozen=True)
class Trials:
    """The methods tried, the best first."""

    metric: str
    """"accuracy" or "loss"."""
    rows: int
    """Rows held out."""
    rounds: int
    tried: tuple[Tried, ...]
    refused: tuple[str, ...]
    """Methods that the task or the settings do not admit, with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        parts = ("method", "point", "score", "spread", "at_end")
        return vars(self) | {"tried": [{part: getattr(trial, part) for part in parts} for trial in self.tried]}


def try_methods(
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    local: LocalSGD | None = None,
    *,
    methods: Sequence[str],
    progress: Callable[[str, int, int], None] = lambda method, done, of: None,
    **options: Unpack[SettingsOptions],
) -> Trials:
    """Train each method at every point of its grid, and take the best by rows that clients hold out.

    ``methods``: of `fedrax.analysis.shortlist.METHODS`. ``local``: their steps, but for the size. progress: told a
    method, how many are done and of how many. What a task or the settings do not admit, and what diverges at every step
    size, is said among the refused; FedraxError for other names, where nothing is left, where clients hold out fewer
    than 20 rows, and for a finished local optimizer, whose step size cannot be chosen.
    """
    settings = changed_settings(settings or Settings(), options)
    settings = plain(settings, evaluated_every(settings))
    local = local or LocalSGD()
    for name in methods:
        if name not in METHODS:
            raise unknown("method to try:", name, METHODS)
    if not local.lr_is_step_size:
        raise FedraxError("a finished local optimizer has its own step size, so that methods cannot be tried at others")
    rows = int(np.sum(floor_fractions(federation.sizes, SHARE)))
    if rows < FEWEST:
        raise FedraxError(f"clients hold out {rows} row{'s' * (rows != 1)} in all, too few to choose a method by")
    held, seeds = hold_out(federation, SHARE), range(settings.seed, settings.seed + SEEDS)
    metric = selection_metric(task, None)
    lower = is_lower_better(task, metric)
    best = min if lower else max
    model = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes_of(task)))
    remembered = min(federation.num_clients, max(ROOM // model, settings.cohort_size))
    found, refused = [], []
    for i, name in enumerate(methods):
        progress(name, i, len(methods))
        method, points = METHODS[name], METHODS[name].points()
        algorithms = [method.at(point, local, remembered) for point in points]
        mode = "auto" if SEEDS * len(points) * federation.num_clients * model <= ROOM else "sequential"
        try:
            results = sweep(algorithms, task, held, seeds, settings, mode=mode, progress=False)
        except FedraxError as error:
            refused.append(f"{name}: {error}")
            continue
        scores = [[_score(run, f"test_{metric}") for run in runs] for runs in results]
        sound = [j for j, of_seeds in enumerate(scores) if all(map(math.isfinite, of_seeds))]
        if not sound:
            refused.append(f"{name}: diverges at every step size from {RATES[0]:g} to {RATES[-1]:g}")
            continue
        j = best(sound, key=lambda j: mean(scores[j]))
        found.append(Tried(name, algorithms[j], points[j], mean(scores[j]), pstdev(scores[j])))
    progress("", len(methods), len(methods))
    if not found:
        raise FedraxError("no method can be tried: " + ("; ".join(refused) or "none is named"))
    order = sorted(found, key=lambda trial: trial.score, reverse=not lower)
    return Trials(metric, rows, settings.rounds, tuple(order), tuple(refused))


def evaluated_every(settings: Settings) -> int:
    """Rounds between a trial's evaluations."""
    return max(settings.rounds // EVALUATIONS, 1)


def _score(run: Result, metric: str) -> float:
    """The mean of the last quarter of a run's evaluations; NaN where it diverged."""
    if run.stopped == "diverged":
        return math.nan
    values = [event[metric] for event in run.events if metric in event]
    return float(np.mean(values[-max(len(values) // 4, 1) :]))


def operations(
    task: Task,
    federation: Federation,
    settings: Settings,
    local: LocalSGD,
    methods: Sequence[str],
) -> float:
    """Additions and multiplications that `try_methods` takes, about: those of local steps' gradients, and those of
    evaluations.
    """
    held = [batches(local, int(n)) for n in federation.sizes]
    steps = [local.steps or (local.epochs or 1) * len(found) for found in held]
    batch = max(round(mean(mean(found) for found in held)), 1)
    params = shapes_of(task)

    def forward(rows: int) -> float:
        samples: Any = Batch(*(jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in federation.train))  # type: ignore[arg-type]
        return count_flops(jax.make_jaxpr(task.evaluation_loss)(params, samples))

    points = sum(len(METHODS[name].points()) for name in methods)
    cohort = min(settings.cohort_size, federation.num_clients)
    rows, times = SHARE * federation.sizes.sum(), -(-settings.rounds // evaluated_every(settings))
    of_steps = settings.rounds * cohort * mean(steps) * max(3 * forward(batch), LEAST)
    return float(points * SEEDS * (of_steps + times * (rows / batch * forward(batch) + LEAST_EVALUATION)))
