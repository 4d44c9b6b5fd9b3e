"""Trials of several methods on a task, each at its best hyper-parameters, on rows that clients hold out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any, Unpack

import jax
import numpy as np

from fedrax.algorithms.episode import Episode
from fedrax.algorithms.fedavg import FedAvg, FedProx
from fedrax.algorithms.fedcm import FedCM
from fedrax.algorithms.feddyn import FedDyn
from fedrax.algorithms.gradma import GradMA, GradMAS
from fedrax.algorithms.losac import LoSAC
from fedrax.algorithms.scaffold import Scaffold
from fedrax.algorithms.upcycled import Upcycled
from fedrax.analysis.diagnosis import batch_sizes, settings_of_measurement
from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.initialization import shapes_of
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation, hold_out
from fedrax.data.dataset import floor_fractions
from fedrax.errors import FedraxError, plain_name, unknown
from fedrax.optim.server import SGD
from fedrax.simulation import Result, Settings
from fedrax.simulation.settings import SettingsOptions
from fedrax.simulation.validate import changed_settings
from fedrax.tuning import sweep
from fedrax.tuning.selection import is_lower_better, selection_metric
from fedrax.xla import count_flops

LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Values of ``local.lr`` in every grid."""
BLOCKS = 5
"""LoSAC's M."""
DEFAULT_METHODS = ("FedAvg", "SCAFFOLD", "FedDyn", "GradMA")
"""Chosen for ``DEFAULT_REASON``."""
DEFAULT_REASON = (
    "the baseline, and one method for each kind of drift correction: client control variates, a client regularizer, and"
    " client updates stored by the server"
)
VALIDATION = 0.2
"""Share of each client's training rows that is held out."""
SEEDS = 3
"""Seeds of each point."""
EVALUATIONS = 20
"""Evaluations of a run; its score is the mean of the last quarter of them."""
STEP_OVERHEAD, EVALUATION_OVERHEAD = 1e5, 1e7
"""Smallest cost of a local step and of an evaluation in operations: smaller ones take as long."""
FEWEST_ROWS = 20
"""Smallest total number of held-out rows."""
QUICK = 2e12
"""Operations that take a minute or two: `fedrax diagnose` tries methods by default up to this cost."""
CLIENT_MODELS = 2**31
"""Limit in bytes of one model for each client: in all vectorized points, or in the server's memory (GradMA)."""

GridPoint = dict[str, float]
"""A value for ``local.lr`` and for the method's second hyper-parameter, if it has one."""


@dataclass(frozen=True)
class MethodGrid:
    """A method and its grid of hyper-parameters."""

    make: Callable[[LocalSGD, float, int], Algorithm]
    """Makes the algorithm from its local steps, the second hyper-parameter and the number of clients whose updates the
    server may store."""
    second: str = ""
    """Name of the second hyper-parameter; empty if there is none. "gamma / lr" is gamma in units of ``local.lr``."""
    values: tuple[float, ...] = (0.0,)
    """Values of the second hyper-parameter."""

    def points(self) -> list[GridPoint]:
        """All points of the grid."""
        return [
            {"local.lr": rate} | ({self.second: value} if self.second else {})
            for rate, value in itertools.product(LEARNING_RATES, self.values)
        ]

    def axes(self, rates: Sequence[float], rate: float) -> dict[str, list[float]]:
        """The grid as settings of an experiment, with these learning rates; a unit of ``local.lr`` is ``rate``."""
        name, _, relative = self.second.partition(" / ")
        values = [float(f"{value * rate:.6g}") if relative else value for value in self.values]
        return {"algorithm.local.lr": list(rates)} | ({f"algorithm.{name}": values} if name else {})

    def at(self, point: GridPoint, local: LocalSGD, memory: int) -> Algorithm:
        """The algorithm at a point: ``local`` with the point's learning rate, and updates of ``memory`` clients."""
        return self.make(dataclasses.replace(local, lr=point["local.lr"]), point.get(self.second, 0.0), memory)


METHODS: dict[str, MethodGrid] = {
    "FedAvg": MethodGrid(lambda local, *_: FedAvg(local=local)),
    "FedAvgM": MethodGrid(
        lambda local, lr, _: FedAvg(local=local, server_optimizer=SGD(lr=lr, momentum=0.9)),
        "server_optimizer.lr",
        (0.1, 0.3, 1.0),
    ),
    "FedProx": MethodGrid(lambda local, mu, _: FedProx(local=local, mu=mu), "mu", (0.01, 0.1, 1.0)),
    "Upcycled FedAvg": MethodGrid(lambda local, a, _: Upcycled(FedAvg(local=local), a=a), "a", (0.2, 0.5, 0.9)),
    "SCAFFOLD": MethodGrid(lambda local, *_: Scaffold(local=local)),
    "FedDyn": MethodGrid(lambda local, alpha, _: FedDyn(local=local, alpha=alpha), "alpha", (0.01, 0.1, 1.0)),
    "FedCM": MethodGrid(lambda local, alpha, _: FedCM(local=local, alpha=alpha), "alpha", (0.1, 0.3)),
    "EPISODE": MethodGrid(lambda local, g, _: Episode(local=local, gamma=g * local.lr), "gamma / lr", (0.3, 3.0)),
    "LoSAC": MethodGrid(
        lambda local, *_: LoSAC(
            local=dataclasses.replace(local, blocks=BLOCKS, batch_size=LocalSGD.batch_size), reading="consistent"
        ),
    ),
    "GradMA-S": MethodGrid(lambda local, _, memory: GradMAS(local=local, memory=memory)),
    "GradMA": MethodGrid(lambda local, _, memory: GradMA(local=local, memory=memory)),
}


@dataclass(frozen=True)
class MethodTrial:
    """One method at the best point of its grid.

    Example:
        >>> point = {"local.lr": 0.1}
        >>> trial = fedrax.analysis.MethodTrial("FedAvg", fedrax.FedAvg(), point, score=0.9, spread=0.01)
        >>> trial.at_end  # 0.1 is neither the smallest nor the largest learning rate tried
        False
    """

    method: str
    """Its name in ``METHODS``."""
    algorithm: Algorithm
    """The algorithm at the best point."""
    point: GridPoint
    """The value of ``local.lr``, and of the method's second hyper-parameter where it has one."""
    score: float
    """Accuracy, or the loss of a task without it, on held-out rows: the mean over seeds of a run's last quarter."""
    spread: float
    """Standard deviation of the score over seeds."""

    @property
    def at_end(self) -> bool:
        """Whether the learning rate is the smallest or the largest of the grid."""
        return self.point["local.lr"] in (LEARNING_RATES[0], LEARNING_RATES[-1])


@dataclass(frozen=True)
class MethodTrials:
    """The methods tried, the best first.

    Example:
        >>> trial = fedrax.analysis.MethodTrial("FedAvg", fedrax.FedAvg(), {"local.lr": 0.1}, score=0.9, spread=0.01)
        >>> trials = fedrax.analysis.MethodTrials("accuracy", rows=200, rounds=8, tried=(trial,), rejected=())
        >>> trials.to_dict()["tried"][0]["method"]
        'FedAvg'
    """

    metric: str
    """"accuracy" or "loss"."""
    rows: int
    """Rows held out in all."""
    rounds: int
    """Rounds of each run."""
    tried: tuple[MethodTrial, ...]
    """The methods, the best first."""
    rejected: tuple[str, ...]
    """Methods that the task or the settings do not allow, with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """The trials as JSON values.

        Returns:
            The fields, each trial as a dictionary without its algorithm.
        """
        fields = ("method", "point", "score", "spread", "at_end")
        return vars(self) | {"tried": [{name: getattr(trial, name) for name in fields} for trial in self.tried]}


def no_trial_progress(method: str, done: int, total: int) -> None:
    """Ignore the progress."""


@checked_arguments
def try_methods(
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    local: LocalSGD | None = None,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    progress: Callable[[str, int, int], None] = no_trial_progress,
    **options: Unpack[SettingsOptions],
) -> MethodTrials:
    """Train each method at every point of its grid and rank the methods on rows that clients hold out.

    Each client holds out 20 % of its training rows. A point is run with three seeds; its score is the mean of the last
    quarter of about 20 evaluations. Methods that the task or the settings do not allow, and those that diverge at every
    learning rate, are listed in ``rejected``.

    Args:
        task: The task.
        federation: The clients and their data.
        settings: Settings of the runs; ``settings.rounds`` rounds are run at each point.
        local: Local steps of all methods; their learning rate is replaced by those of the grid.
        methods: Names of methods: "FedAvg", "FedAvgM", "FedProx", "Upcycled FedAvg", "SCAFFOLD", "FedDyn", "FedCM",
            "EPISODE", "LoSAC", "GradMA-S", "GradMA". Case, spaces and hyphens are ignored.
        progress: Called with the next method, the number of methods done and their total.
        **options: Fields of ``settings`` to replace.

    Returns:
        The methods with their best hyper-parameters and scores, the best first.

    Raises:
        FedraxError: For unknown names, where no method can be tried, where clients hold out fewer than 20 rows in all,
            and for an initialized local optimizer, whose learning rate cannot be changed.

    Example:
        >>> federation = fedrax.Federation.from_dataset(fedrax.data.load("digits"), fedrax.data.Shards(10, 2), seed=0)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((8, 8), 10))
        >>> trials = fedrax.analysis.try_methods(task, federation, methods=["FedAvg"], rounds=2, cohort_size=2)
        >>> trials.tried[0].method, trials.metric
        ('FedAvg', 'accuracy')
    """
    settings = changed_settings(settings or Settings(), options)
    settings = settings_of_measurement(settings, rounds_between_evaluations(settings))
    local = local or LocalSGD()
    methods = method_names(methods)
    if not local.lr_is_step_size:
        raise FedraxError(
            "methods cannot be tried with an initialized local optimizer, whose learning rate is fixed: use Optax.of"
        )
    rows = int(np.sum(floor_fractions(federation.sizes, VALIDATION)))
    if rows < FEWEST_ROWS:
        raise FedraxError(f"clients hold out {rows} row{'s' * (rows != 1)} in all, too few to choose a method by")
    held, seeds = hold_out(federation, VALIDATION), range(settings.seed, settings.seed + SEEDS)
    metric = selection_metric(task, None)
    lower = is_lower_better(task, metric)
    best = min if lower else max
    model_bytes = _model_bytes(task)
    memory = server_memory(task, federation, settings)
    found, rejected = [], []
    for i, name in enumerate(methods):
        progress(name, i, len(methods))
        grid, points = METHODS[name], METHODS[name].points()
        algorithms = [grid.at(point, local, memory) for point in points]
        mode = "auto" if SEEDS * len(points) * federation.num_clients * model_bytes <= CLIENT_MODELS else "sequential"
        try:
            results = sweep(algorithms, task, held, seeds, settings, mode=mode, progress=False)
        except FedraxError as error:
            rejected.append(f"{name}: {error}")
            continue
        scores = [[_score(run, f"test_{metric}") for run in runs] for runs in results]
        finite = [j for j, of_seeds in enumerate(scores) if all(map(math.isfinite, of_seeds))]
        if not finite:
            low, high = LEARNING_RATES[0], LEARNING_RATES[-1]
            rejected.append(f"{name}: diverges at every learning rate from {low:g} to {high:g}")
            continue
        j = best(finite, key=lambda j: mean(scores[j]))
        found.append(MethodTrial(name, algorithms[j], points[j], mean(scores[j]), pstdev(scores[j])))
    progress("", len(methods), len(methods))
    if not found:
        raise FedraxError("no method can be tried: " + ("; ".join(rejected) or "methods is empty"))
    order = sorted(found, key=lambda trial: trial.score, reverse=not lower)
    return MethodTrials(metric, rows, settings.rounds, tuple(order), tuple(rejected))


def method_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names in ``METHODS``, ignoring case, spaces, "-" and "_"; raises FedraxError for unknown ones."""
    known = {plain_name(name): name for name in METHODS}
    found = [(name, known.get(plain_name(name))) for name in names]
    for given, name in found:
        if name is None:
            raise unknown("method to try:", given, METHODS)
    return tuple(dict.fromkeys(name for _, name in found if name is not None))


def rounds_between_evaluations(settings: Settings) -> int:
    """Rounds between the evaluations of a trial."""
    return max(settings.rounds // EVALUATIONS, 1)


def _model_bytes(task: Task) -> int:
    """Size of the model's parameters in bytes."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes_of(task)))


def server_memory(task: Task, federation: Federation, settings: Settings) -> int:
    """Number of clients whose updates GradMA's server stores: all, or as many as fit into ``CLIENT_MODELS`` bytes."""
    return min(federation.num_clients, max(CLIENT_MODELS // _model_bytes(task), settings.cohort_size))


def _score(run: Result, metric: str) -> float:
    """The mean of the last quarter of a run's evaluations, NaN if it diverged."""
    if run.stopped == "diverged":
        return math.nan
    values = [event[metric] for event in run.events if event.get(metric) is not None]
    return float(np.mean(values[-max(len(values) // 4, 1) :]))


def operations(
    task: Task,
    federation: Federation,
    settings: Settings,
    local: LocalSGD,
    methods: Sequence[str],
) -> float:
    """Estimate the additions and multiplications of `try_methods`: gradients of local steps, and evaluations."""
    batches = [batch_sizes(local, int(n)) for n in federation.sizes]
    steps = [local.steps or (local.epochs or 1) * len(sizes) for sizes in batches]
    batch = max(round(mean(mean(sizes) for sizes in batches)), 1)
    params = shapes_of(task)

    def forward(rows: int) -> float:
        samples = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), Batch(*federation.train))
        return count_flops(jax.make_jaxpr(task.evaluation_loss)(params, samples))

    points = sum(len(METHODS[name].points()) for name in methods)
    cohort = min(settings.cohort_size, federation.num_clients)
    rows, evaluations = VALIDATION * federation.sizes.sum(), -(-settings.rounds // rounds_between_evaluations(settings))
    of_steps = settings.rounds * cohort * mean(steps) * max(3 * forward(batch), STEP_OVERHEAD)
    of_evaluations = evaluations * (rows / batch * forward(batch) + EVALUATION_OVERHEAD)
    return float(points * SEEDS * (of_steps + of_evaluations))
