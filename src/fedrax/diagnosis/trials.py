"""What to try first, by trying: a few methods, each at settings of its own, on rows that clients hold out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any

import jax
import numpy as np

from fedrax.compiled.arithmetic import flops_in
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.local import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation, hold_out
from fedrax.diagnosis.diagnosis import batches, synchronous
from fedrax.diagnosis.methods import METHODS, RATES, Point
from fedrax.errors import FedraxError
from fedrax.simulation import Result, Settings, sweep
from fedrax.simulation.run import changed_settings
from fedrax.simulation.tuning import is_lower_better, metric_of

SHARE = 0.2
"""Of each client's rows that are held out."""
SEEDS = 3
EVALUATIONS = 20
"""Of a run; a score is the mean of the last quarter of them."""
LEAST = 1e5
"""Operations of a local step below which it takes no less time."""
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
    **changes: Any,
) -> Trials:
    """Train each method at every point of its grid, and take the best by rows that clients hold out.

    ``methods``: of `fedrax.diagnosis.methods.METHODS`. ``local``: their steps, but for the size. progress: told a
    method, how many are done and of how many. What a task or the settings do not admit, and what diverges at every step
    size, is said among the refused; FedraxError where nothing is left.
    """
    settings = changed_settings(settings or Settings(), changes)
    every = max(settings.rounds // EVALUATIONS, 1)
    plain = {"eval_every": every, "target": None, "epsilon_budget": None, "eval_train": False, "per_client": False}
    settings = synchronous(changed_settings(settings, plain | {"finetune": None}))
    held, seeds = hold_out(federation, SHARE), range(settings.seed, settings.seed + SEEDS)
    metric = metric_of(task, None)
    lower = is_lower_better(task, metric)
    best = min if lower else max
    model = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    remembered = min(federation.num_clients, max(ROOM // model, settings.cohort_size))
    found, refused = [], []
    for i, name in enumerate(methods):
        progress(name, i, len(methods))
        method, points = METHODS[name], METHODS[name].points()
        algorithms = [method.at(point, local or LocalSGD(), remembered) for point in points]
        mode = "auto" if len(points) * federation.num_clients * model <= ROOM else "in turn"
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
        raise FedraxError("no method can be tried: " + "; ".join(refused))
    order = sorted(found, key=lambda trial: trial.score, reverse=not lower)
    return Trials(metric, settings.rounds, tuple(order), tuple(refused))


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
    """Additions and multiplications that `try_methods` takes, about: those of gradients of the local steps."""
    held = [batches(local, int(n)) for n in federation.sizes]
    steps = [local.steps or (local.epochs or 1) * len(found) for found in held]
    batch = max(round(mean(mean(found) for found in held)), 1)
    samples: Any = Batch(*(jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in federation.train))  # type: ignore[arg-type]
    params = jax.eval_shape(task.init, jax.random.key(0))
    forward = flops_in(jax.make_jaxpr(task.evaluation_loss)(params, samples))
    points = sum(len(METHODS[name].points()) for name in methods)
    cohort = min(settings.cohort_size, federation.num_clients)
    return float(points * SEEDS * settings.rounds * cohort * mean(steps) * max(3 * forward, LEAST))
