"""What ``benchmarks.advice`` trains: pairs of data and partition.

A method's points differ in floats alone, so that all of them, with all seeds, are one compiled program.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.advice_data import CLIENTS, LEAST_TWEETS, NEED_FILES, SETS
from fedrax import Federation, LocalSGD, Task, classification
from fedrax.analysis import trials
from fedrax.analysis.shortlist import BLOCKS, METHODS
from fedrax.data import (
    DirichletClasses,
    DirichletClients,
    Iid,
    LogNormal,
    Natural,
    Partitioner,
    Shards,
    Similarity,
)
from fedrax.models import MLP, Logistic

ROUNDS, STEPS, BATCH = 40, 10, 10
CANDIDATES = ("FedAvg", "SCAFFOLD", "FedDyn", "FedCM", "GradMA-S", "GradMA")
"""Methods that a shortlist to try may have."""
TRIALS, AT_THEIRS = "trials", "at the trials' points"
TUNING, SCORING = (0, 1), (2, 3, 4)
"""Seeds with which methods are tuned and the rule is made; seeds with which all is scored."""
VALIDATION = 0.2
_MLP = MLP(hidden=(32,))
_SOFTMAX = Logistic()


@dataclass(frozen=True)
class Pair:
    """A data set, its partition, and the model that is trained."""

    data: str
    """Of `advice_data.SETS`."""
    partition: Partitioner
    model: Logistic | MLP = _MLP
    cohort: int = 5

    @property
    def name(self) -> str:
        """As the page has it."""
        model = "softmax" if isinstance(self.model, Logistic) else "MLP"
        return f"{self.data}, {described(self.partition)}, {model}, {self.cohort} a round"

    @property
    def needs_files(self) -> bool:
        """In $FEDRAX_DATA."""
        return self.data in NEED_FILES

    def build(self) -> tuple[Task, Federation]:
        """The task and the federation."""
        dataset = SETS[self.data]()
        federation = Federation.from_dataset(dataset, self.partition, seed=0)
        model = self.model.build(dataset.train.x.shape[1:], dataset.num_classes or 1)
        return classification(model, preprocess=federation.preprocess()), federation


def described(partition: Partitioner) -> str:
    """A partition by its name and what is special to it."""
    values = {f.name: getattr(partition, f.name) for f in dataclasses.fields(partition)}  # type: ignore[arg-type]
    special = ("per_client", "percent", "omega", "alpha", "sigma")
    told = ", ".join(f"{name} {values[name]:g}" for name in special if name in values)
    title = "".join(f" {c.lower()}" if c.isupper() else c for c in type(partition).__name__).strip()
    return f"{title} ({told})" if told else title


PAIRS = (
    Pair("digits", Iid(CLIENTS)),
    Pair("digits", Similarity(CLIENTS, 50)),
    Pair("digits", DirichletClasses(CLIENTS, 1.0)),
    Pair("digits", DirichletClasses(CLIENTS, 0.3)),
    Pair("digits", DirichletClasses(CLIENTS, 0.1)),
    Pair("digits", DirichletClasses(CLIENTS, 0.1), cohort=CLIENTS),
    Pair("digits", Shards(CLIENTS, 2), _SOFTMAX),
    Pair("digits", Shards(CLIENTS, 1)),
    Pair("digits", Shards(CLIENTS, 1), _SOFTMAX, cohort=CLIENTS),
    Pair("digits", Similarity(CLIENTS, 10), _SOFTMAX),
    Pair("digits", LogNormal(CLIENTS, 1.0, min_size=10), _SOFTMAX),
    Pair("digits", DirichletClients(CLIENTS, 0.5, min_size=5)),
    Pair("synthetic(0, 0)", Natural(), _SOFTMAX),
    Pair("synthetic(0.5, 0.5)", Natural(), _SOFTMAX),
    Pair("synthetic(1, 1)", Natural(), _SOFTMAX),
    Pair("synthetic(1, 1)", Natural(), _SOFTMAX, cohort=CLIENTS),
    Pair("MNIST", Shards(CLIENTS, 2), _SOFTMAX),
    Pair("MNIST", DirichletClasses(CLIENTS, 0.1), _SOFTMAX),
    Pair("clusters", Shards(CLIENTS, 2)),
    Pair("clusters", DirichletClasses(CLIENTS, 0.3)),
    Pair("clusters", LogNormal(CLIENTS, 1.0, min_size=10)),
    Pair("clusters", Shards(CLIENTS, 1), cohort=10),
    Pair("Upcycled-FL (0.5, 0.5)", Natural(), _SOFTMAX),
    Pair("Upcycled-FL (0.5, 0.5)", Natural(), cohort=10),
    Pair("breast cancer", Similarity(CLIENTS, 10), _SOFTMAX),
    Pair("breast cancer", DirichletClasses(CLIENTS, 0.5), _SOFTMAX),
    Pair("activity", Natural(), _SOFTMAX),
    Pair("activity", DirichletClasses(CLIENTS, 0.1)),
    Pair("turned digits", Natural()),
    Pair("turned digits", Natural(), cohort=CLIENTS),
    Pair("CIFAR-10 (8x8)", DirichletClasses(CLIENTS, 0.3)),
    Pair("CIFAR-10 (8x8)", Shards(CLIENTS, 2), _SOFTMAX),
    Pair("mislabeled digits", Natural()),
    Pair("mislabeled digits", Natural(), _SOFTMAX, cohort=10),
    Pair("moons", Shards(CLIENTS, 1)),
    Pair("moons", DirichletClasses(CLIENTS, 0.3)),
    Pair("tweets", Natural(min_size=LEAST_TWEETS), _SOFTMAX),
    Pair("tweets", DirichletClasses(CLIENTS, 0.3), _SOFTMAX),
    Pair("synthetic(0, 0)", Natural(), cohort=10),
    Pair("Upcycled-FL (iid)", Natural(), _SOFTMAX),
    Pair("MNIST", Shards(CLIENTS, 1)),
    Pair("activity", Shards(CLIENTS, 2), _SOFTMAX),
)
"""The rule is made of every second one."""


LOCAL = LocalSGD(steps=STEPS, batch_size=BATCH)
"""The local steps of all methods but LoSAC, which draws blocks; their size is tuned, and fedrax's default along a
diagnosis."""


def definition(pair: Pair, method: str | None) -> str:
    """All that a run depends on, in words: what was done is not done again. Without a method of the diagnosis."""
    numbers = (ROUNDS, STEPS, BATCH, BLOCKS, CLIENTS, TUNING, SCORING, VALIDATION, LOCAL.lr)
    if method is None:
        return repr((numbers, pair, "drift without the noise of batches"))
    if method in (TRIALS, AT_THEIRS):
        grids = {name: METHODS[name].points() for name in CANDIDATES}
        of_trials = (numbers, pair, grids, trials.SHARE, trials.SEEDS, trials.EVALUATIONS)
        return repr(of_trials if method == TRIALS else (AT_THEIRS, *of_trials))
    return repr((numbers, pair, method, METHODS[method].points()))
