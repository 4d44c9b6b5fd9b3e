"""Federated fine-tuning of a pretrained transformer: all parameters, the head alone, and low-rank adapters.

python examples/fine_tuning.py [DIRECTORY]

A small transformer is pretrained on the digits 0 to 4 in one place. Ten clients with other digits, 5 to 9 and few of
them each, then train it together. The table and the picture are written to DIRECTORY, by default to the current one.
"""

import os
import platform
import sys
from datetime import date
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import linen as nn

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate, tree
from fedrax.data import Dataset, DirichletClasses, Iid, Samples, load
from fedrax.models import freeze, from_linen, lora
from fedrax.participation import FixedList
from fedrax.simulation import use_all_cores

use_all_cores()  # before the first array of JAX
directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


class Transformer(nn.Module):
    """Each row of an image [8, 8, 1] is a token."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64)(x[..., 0]) + self.param("positions", nn.initializers.normal(0.1), (8, 64))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(axis=1))


digits = load("digits")
model = from_linen(Transformer(), digits.train.x[:1])


def digits_of(name, chosen):
    """The samples of some classes, as a data set."""
    parts = [Samples(part.x[chosen(part.y)], part.y[chosen(part.y)]) for part in (digits.train, digits.test)]
    return Dataset(name, *parts, num_classes=10)


# Pretraining is training of one client.
local = LocalSGD(lr=0.05, epochs=1, batch_size=16, momentum=0.9)
one_client = Federation.from_dataset(digits_of("0 to 4", lambda y: y < 5), Iid(clients=1), seed=0)
pretrained = simulate(FedAvg(local=local), classification(model), one_client, rounds=30, cohort_size=1, seed=0)
print(f"pretrained on the digits 0 to 4: test accuracy {pretrained.events[-1]['test_accuracy']:.3f}")

# Ten clients have the digits 5 to 9, each in other proportions.
federation = Federation.from_dataset(
    digits_of("5 to 9", lambda y: y >= 5), DirichletClasses(clients=10, omega=0.5), seed=0
)
start, example = pretrained.params, digits.train.x[:1]
models = {
    "all parameters": model,
    "head alone": freeze(model, start, trainable="head/*"),
    "LoRA of rank 4, and head": lora(model, start, example, rank=4, alpha=8, trainable="head/*"),
    "LoRA, B alone, and head": lora(model, start, example, rank=4, alpha=8, trainable="head/*", train_a=False),
}
method = FedAvg(local=LocalSGD(lr=0.1, steps=5, batch_size=16))
rows, last, figure = [], {}, plt.figure(figsize=(7, 4.5), layout="constrained")
axes = figure.add_subplot(xlabel="megabytes sent (log scale)", ylabel="test accuracy, digits 5 to 9", xscale="log")
for name, tuned in models.items():
    settings = {"params": start} if tuned is model else {}
    runs = [
        simulate(
            method, classification(tuned), federation, rounds=40, cohort_size=5, eval_every=2, seed=seed, **settings
        )
        for seed in range(3)
    ]
    last[name] = runs[0].params
    accuracy = np.array([run.events[-1]["test_accuracy"] for run in runs])
    events = [event for event in runs[0].events if "test_accuracy" in event]
    megabytes = [(event["bytes_up"] + event["bytes_down"]) / 1e6 for event in events]
    curves = np.array([[event["test_accuracy"] for event in run.events if "test_accuracy" in event] for run in runs])
    axes.plot(megabytes, curves.mean(0), label=name)
    axes.fill_between(megabytes, curves.min(0), curves.max(0), alpha=0.2)
    seconds = np.median([run.events[-1]["seconds"] for run in runs])
    trained = sum(leaf.size for leaf in jax.tree.leaves(runs[0].params))
    spread = f"{100 * accuracy.mean():.1f} ± {100 * accuracy.std(ddof=1):.1f}"
    rows.append(f"| {name} | {trained:,} | {spread} | {megabytes[-1]:.2f} | {seconds:.2f} |")
    print(f"{name}: test accuracy {spread} %, {megabytes[-1]:.2f} MB, {seconds:.2f} s")
axes.legend(frameon=False)
head = "| trained | trainable parameters | test accuracy in % | MB sent | seconds of 40 rounds |\n" + "| --- " * 5 + "|"
machine = f"Seconds without compilation, on {os.cpu_count()} cores ({platform.machine()}), {date.today()}."
(directory / "fine-tuning.md").write_text("\n".join([head, *rows, "", machine]) + "\n")


def averaging_error(tuned, params):
    """The distance of the server's average from the mean of the clients' weights, relative to the mean's change."""

    def round_of(clients):
        settings = {"params": params, "cohort_size": len(clients), "participation": FixedList(clients)}
        return tuned.merge(simulate(method, classification(tuned), federation, rounds=1, **settings).params)

    alone = [round_of((client,)) for client in range(10)]
    mean = jax.tree.map(lambda *weights: sum(weights) / len(weights), *alone)
    distance = tree.norm(tree.sub(round_of(tuple(range(10))), mean))
    return float(distance / tree.norm(tree.sub(mean, tuned.merge(params))))


# The server averages A and B. The clients have found A B.
lines = ["| trained | relative distance |", "| --- | --- |"]
for name, tuned in models.items():
    if tuned is not model:
        lines.append(f"| {name} | {averaging_error(tuned, last[name]):.1%} |")
        print(f"{name}: the average of the parameters is {lines[-1].split('|')[2].strip()} from that of the weights")
(directory / "fine-tuning-averaging.md").write_text("\n".join(lines) + "\n")
figure.savefig(directory / "fine-tuning.png", dpi=150)
