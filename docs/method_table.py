"""What each method stores, sends and evaluates: measured on a small problem, written as a Markdown table.

The documentation build calls :func:`write`, so that the table is always that of the code.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax import FedAvg, Wrapper, tree
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import classification
from fedrax.data import Federation
from fedrax.errors import FedraxWarning
from fedrax.experiments.method_registry import algorithms
from fedrax.models import Linear
from fedrax.simulation import simulate

CLIENTS, SAMPLES, STEPS, BATCH, BLOCKS = 4, 50, 5, 10, 5

INTRODUCTION = f"""\
Measured with N = {CLIENTS} clients of {SAMPLES} samples each, all in every round, T = {STEPS} local steps on
{BATCH} samples each (methods with blocks: M = {BLOCKS} blocks of {SAMPLES // BLOCKS} samples; Scaffnew draws its T,
here {STEPS} in the mean). Sizes are in copies of the model: 1 is as many bytes as the parameters have. Gradients
are evaluations of one sample's gradient, a client and round.

| method | down | up | phases | client state | server state | gradients | needs |
|---|---|---|---|---|---|---|---|
"""

NEEDS = {
    "uniform_weights": "uniform weights",
    "fixed_cohort": "cohorts of one size",
    "features": "a model with features",
    "blocks": "a model of blocks",
    "per_sample_losses": "a loss a sample",
    "no_statistics": "no running statistics",
    "plain_sum": "a plain sum of uploads",
}
"""The requirements among the fields of ``Traits`` in words."""


def example(name: str, kind: type[Algorithm]) -> Algorithm:
    """An instance with the common local work."""
    batches = LocalSGD(lr=0.1, steps=STEPS, batch_size=BATCH)
    blocks = LocalSGD(lr=0.01, steps=STEPS, blocks=BLOCKS)
    if name in ("losac", "fedsaga"):
        return kind(local=blocks)  # type: ignore[call-arg]
    if name == "objectiveperturbation":
        return kind(inner=FedAvg(local=batches), guarantee="none")  # type: ignore[call-arg]
    if issubclass(kind, Wrapper):  # around FedAvg with the common local work
        return kind(inner=FedAvg(local=batches))
    if name == "fedsgd":
        return kind()
    if name == "scaffnew":  # with as many steps in the mean
        return kind(local=LocalSGD(lr=0.1, batch_size=BATCH), p=1 / STEPS)  # type: ignore[call-arg]
    if name in ("naiveparallelclip", "signsgd"):  # of one step a round
        return kind(local=LocalSGD(batch_size=BATCH, steps=1))  # type: ignore[call-arg]
    if name == "pfedme":  # whose local step is local.lr times lam = 15
        batches = replace(batches, lr=0.005)
    return kind(local=batches)  # type: ignore[call-arg]


def copies(state: Any, parameters: int) -> str:
    """The size of a state in copies of the model, to two digits."""
    return f"{tree.num_bytes(state) / parameters:.3g}"


def row(name: str, kind: type[Algorithm]) -> str:
    """One method's line."""
    rng = np.random.default_rng(0)
    rows = CLIENTS * SAMPLES
    x, y = rng.normal(size=(rows, 8)).astype(np.float32), rng.integers(0, 4, rows)
    offsets = np.arange(0, rows + 1, SAMPLES)
    federation = Federation.from_arrays(x, y, offsets=offsets, test=(x, y), num_classes=4)
    task = classification(Linear().build((8,), 4))
    with warnings.catch_warnings():  # that Personalized keeps nothing at home, and FedMLB has one block, costs the same
        warnings.simplefilter("ignore", FedraxWarning)
        algorithm = example(name, kind)
        result = simulate(algorithm, task, federation, rounds=1, cohort_size=CLIENTS)
    size = tree.num_bytes(result.params)
    event = result.events[-1]
    client = jax.eval_shape(algorithm.init_client, result.params)
    sent = [f"{event[key] / CLIENTS / size:.3g}" for key in ("bytes_down", "bytes_up")]
    cells = [
        kind.__name__,
        *sent,
        str(len(algorithm.phases)),
        copies(client, size),
        copies(result.server, size),
        f"{event['gradients'] / CLIENTS:g}",
        ", ".join(words for field, words in NEEDS.items() if getattr(algorithm.traits, field)),
    ]
    return "| " + " | ".join(cells) + " |\n"


def write(path: Path) -> None:
    """Write the table to ``path``."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(INTRODUCTION + "".join(row(name, kind) for name, kind in algorithms().items()))


if __name__ == "__main__":
    write(Path(__file__).parent / "_generated" / "methods.md")
