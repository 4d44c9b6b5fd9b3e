"""MOON's features: in training or evaluation mode, with and without its projection head, on a small problem."""

from __future__ import annotations

import argparse
import math

from jax import Array

import fedrax
from fedrax.algorithms import MOON
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.client_data import ClientData
from fedrax.contract.model import Model
from fedrax.contract.task import Batch
from fedrax.data import load
from fedrax.models import composable_layers as layers
from fedrax.simulation.results.result import Result
from fedrax.tree import Tree
from papers.gradma.partition import DirichletWorkers
from papers.losac.running import spread, write_table

CLIENTS, OMEGA, COHORT, ROUNDS, EVERY = 20, 0.1, 10, 100, 5
UNITS, HEAD = (128, 64), 64
"""Hidden units, and outputs of the projection head."""
MUS = (1.0, 5.0)
"""Of MNIST and of CIFAR-10 in Table 1."""
NETWORKS = {
    "dropout 0.5": (0.5, False),
    "no dropout": (0.0, False),
    "dropout 0.5, projection head": (0.5, True),
    "no dropout, projection head": (0.0, True),
}
"""Rate of dropout after each hidden layer, and whether a projection head follows."""


@hyperparameters
class Evaluated(MOON):
    """MOON with the features of the local model in evaluation mode, as those of the two models beside it."""

    def _contrast(
        self, data: ClientData, own: Tree, start: Tree, previous: Tree, batch: Batch, key: Array | None
    ) -> Array:
        return super()._contrast(data, own, start, previous, batch, None)  # type: ignore[arg-type]


def network(inputs: int, outputs: int, dropout: float, head: bool) -> Model:
    """LeNet-5's dense part, batch norm and dropout; the head has two dense layers, and features are its outputs."""
    blocks, sizes = {}, (inputs, *UNITS)
    for i, (fan_in, units) in enumerate(zip(sizes, UNITS, strict=False), 1):
        norm, drop = layers.norm("batch", units), layers.dropout(dropout)
        dense = layers.dense(fan_in, units)
        blocks[f"dense{i}"] = layers.sequential(dense=dense, norm=norm, relu=layers.relu(), drop=drop)
    if head:
        first, second = layers.dense(UNITS[-1], UNITS[-1]), layers.dense(UNITS[-1], HEAD)
        blocks["head"] = layers.sequential(first=first, relu=layers.relu(), second=second)
    return layers.build_network("moon", blocks, HEAD if head else UNITS[-1], outputs)


def moon(arguments: argparse.Namespace) -> None:
    """Accuracy of FedAvg, and of MOON with each kind of features and each mu, for each network."""
    rounds, dataset, rows = arguments.rounds or ROUNDS, load("digits"), []
    federation = fedrax.Federation.from_dataset(dataset, DirichletWorkers(CLIENTS, OMEGA), 0)
    local = fedrax.LocalSGD(lr=0.1, steps=5, batch_size=16)
    settings = fedrax.Settings(rounds=rounds, cohort_size=COHORT, eval_every=min(rounds, EVERY), weights="samples")
    groups: dict[str, list[fedrax.Algorithm]] = {"FedAvg, -": [fedrax.FedAvg(local=local)]}
    for kind, mode in ((MOON, "training"), (Evaluated, "evaluation")):
        groups[f"MOON, {mode}"] = [kind(local=local, mu=mu) for mu in MUS]
    for name, (dropout, head) in NETWORKS.items():
        task = fedrax.classification(network(math.prod(dataset.train.x.shape[1:]), 10, dropout, head))
        plain = 0.0
        for group, algorithms in groups.items():
            found = fedrax.sweep(algorithms, task, federation, arguments.seeds, settings, progress=False)
            for mu, results in zip(MUS, found, strict=False):
                tops, usual = [top(result) for result in results], [second_half(result) for result in results]
                mean = sum(tops) / len(tops)
                plain = mean if group.startswith("FedAvg") else plain
                cells = [*group.split(", "), f"{mu:g}" if group.startswith("MOON") else "-", spread(tops, ".2f")]
                rows.append([name, *cells, f"{mean - plain:+.2f}", spread(usual, ".2f")])
    note = (
        "Top test accuracy in %, its distance from FedAvg's on the same network, and the mean of the second half of a "
        f"run, mean ± standard deviation over the seeds, on the bundled digits: {CLIENTS} clients from Dir({OMEGA}), "
        f"{COHORT} a round, {rounds} rounds of {local.steps} steps of {local.lr:g} on batches of 16. The network is "
        f"LeNet-5's dense part with {' and '.join(map(str, UNITS))} units and batch norm. Mode: of the local model's "
        "features; those of the two models beside it are always in evaluation mode."
    )
    columns = ["network", "method", "mode", "mu", "top", "less FedAvg", "second half"]
    write_table(arguments, "moon", "GradMA, MOON's features on a small problem", note, columns, rows)


def top(result: Result) -> float:
    """The highest accuracy of a run in %."""
    return 100 * max(value for _, value in result.metric("test_accuracy"))


def second_half(result: Result) -> float:
    """The mean accuracy of the second half of a run in %."""
    values = [value for _, value in result.metric("test_accuracy")]
    half = values[len(values) // 2 :]
    return 100 * sum(half) / len(half)
