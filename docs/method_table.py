"""Table of state, traffic and gradients of each method, measured on a small problem and written as Markdown.

The documentation build calls :func:`write`, so that the table always matches the code.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
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
Measured with N = {CLIENTS} clients of {SAMPLES} samples each, full participation, and T = {STEPS} local steps with
batches of {BATCH} (methods with blocks: M = {BLOCKS} blocks of {SAMPLES // BLOCKS} samples; Scaffnew draws T at random,
here with mean {STEPS}). Sizes are multiples of the size of the parameters. Gradients are per-sample gradients of a
client in a round.

"""
HEAD = """\
| method | down | up | phases | client state | server state | gradients | needs |
|---|---|---|---|---|---|---|---|
"""

NEEDS = {
    "uniform_weights": "uniform weights",
    "fixed_cohort": "a fixed cohort size",
    "features": "a model with features",
    "blocks": "a model with blocks",
    "per_sample_losses": "a loss for each sample",
    "no_statistics": "no running statistics",
    "plain_sum": "a plain sum of uploads",
}
"""Descriptions of the requirements in ``Traits``."""


def example(name: str, kind: type[Algorithm]) -> Algorithm:
    """An instance with the common local training."""
    batches = LocalSGD(lr=0.1, steps=STEPS, batch_size=BATCH)
    blocks = LocalSGD(lr=0.01, steps=STEPS, blocks=BLOCKS)
    if name in ("losac", "fedsaga"):
        return kind(local=blocks)  # type: ignore[call-arg]
    if name == "objectiveperturbation":
        return kind(inner=FedAvg(local=batches), guarantee="none")  # type: ignore[call-arg]
    if issubclass(kind, Wrapper):  # around FedAvg with the common local training
        return kind(inner=FedAvg(local=batches))
    if name == "fedsgd":
        return kind()
    if name == "scaffnew":  # with the same mean number of steps
        return kind(local=LocalSGD(lr=0.1, batch_size=BATCH), p=1 / STEPS)  # type: ignore[call-arg]
    if name in ("naiveparallelclip", "signsgd"):  # one step in a round
        return kind(local=LocalSGD(batch_size=BATCH, steps=1))  # type: ignore[call-arg]
    if name == "pfedme":  # its effective local step is local.lr times lam = 15
        batches = replace(batches, lr=0.005)
    return kind(local=batches)  # type: ignore[call-arg]


def copies(state: Any, parameters: int) -> str:
    """The size of a state in copies of the model, to two digits."""
    return f"{tree.num_bytes(state) / parameters:.3g}"


@cache
def row(name: str, kind: type[Algorithm]) -> str:
    """The row of one method."""
    rng = np.random.default_rng(0)
    rows = CLIENTS * SAMPLES
    x, y = rng.normal(size=(rows, 8)).astype(np.float32), rng.integers(0, 4, rows)
    offsets = np.arange(0, rows + 1, SAMPLES)
    federation = Federation.from_arrays(x, y, offsets=offsets, test=(x, y), num_classes=4)
    task = classification(Linear().build((8,), 4))
    with warnings.catch_warnings():  # Personalized without personal layers and FedMLB with one block warn
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
    path.write_text(INTRODUCTION + HEAD + "".join(row(name, kind) for name, kind in algorithms().items()))


if __name__ == "__main__":
    write(Path(__file__).parent / "_generated" / "methods.md")
