"""Images from one gradient: DLG, iDLG and inverting gradients on the LeNet of Zhu et al. (2019)."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import jax
import numpy as np
from jax import Array
from matplotlib.figure import Figure

import fedrax
from fedrax import tree
from fedrax.attacks import (
    Reconstruction,
    ReconstructionScore,
    as_gradient,
    dlg,
    inverting_gradients,
    recover_labels,
    score,
)
from fedrax.data import load
from fedrax.models import Model
from fedrax.privacy.accounting import Accountant, about_replacement
from fedrax.report import curves
from fedrax.simulation.privacy_ledger import private_releases
from papers.losac.running import spread, write_table

SEEDS = (0, 1, 2, 3, 4)
STEPS = {"DLG": 300, "iDLG": 300, "inverting gradients": 1200}
ONE_STEP = fedrax.FedAvg(local=fedrax.LocalSGD(lr=1.0, steps=1, batch_size=1))
ROUNDS: dict[str, fedrax.Algorithm] = {
    "FedSGD": fedrax.algorithms.FedSGD(),
    "ClientDP, noise at the server": fedrax.privacy.ClientDP(fedrax.algorithms.FedSGD()),
    "ClientDP, z = 0.001": fedrax.privacy.ClientDP(fedrax.algorithms.FedSGD(), noise=0.001, at="client"),
    "ClientDP, z = 0.01": fedrax.privacy.ClientDP(fedrax.algorithms.FedSGD(), noise=0.01, at="client"),
    "ClientDP, z = 1": fedrax.privacy.ClientDP(fedrax.algorithms.FedSGD(), at="client"),
    "SampleDP, z = 1": fedrax.privacy.SampleDP(ONE_STEP),
}
"""Methods of the attacked round; with "z", noise with standard deviation z times a bound of 1."""
DELTA = 1e-5
SHOWN = ("inverting gradients",)
"""Attacks on a private round in the picture; clipping does not change the cosine similarity."""


def sigmoid_lenet(input_shape: tuple[int, ...], classes: int, channels: int = 12) -> Model:
    """Three 5x5 convolutions with sigmoid, strides 2, 2 and 1, and a dense layer, initialized uniformly in [-1/2, 1/2].

    As in the authors' code: smooth, so that it can be differentiated twice, and without pooling.
    """
    height, width, *rest = input_shape
    depths, strides = [rest[0] if rest else 1, channels, channels, channels], (2, 2, 1)
    left = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2) * channels
    shapes = {
        f"conv{i + 1}": {"kernel": (5, 5, depths[i], depths[i + 1]), "bias": (depths[i + 1],)} for i in range(3)
    } | {"output": {"weight": (left, classes), "bias": (classes,)}}

    def init(key: Array) -> dict:
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
        keys = jax.random.split(key, len(leaves))
        drawn = [jax.random.uniform(k, shape, minval=-0.5, maxval=0.5) for k, shape in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def apply(params: dict, x: Array, key: Array | None = None) -> Array:
        x = x.reshape(len(x), height, width, -1)
        for i, stride in enumerate(strides):
            layer = params[f"conv{i + 1}"]
            window = ((stride, stride), ((2, 2), (2, 2)))
            x = jax.lax.conv_general_dilated(x, layer["kernel"], *window, dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.sigmoid(x + layer["bias"])
        return x.reshape(len(x), -1) @ params["output"]["weight"] + params["output"]["bias"]

    return Model(init, apply, name="sigmoid_lenet")


def one_gradient(
    task: fedrax.Task, x: np.ndarray, y: np.ndarray, seed: int, method: fedrax.Algorithm
) -> tuple[dict, dict]:
    """(parameters, gradient) of a round with one client, as the server receives it."""
    federation = fedrax.Federation.from_arrays(x, y, np.zeros(len(y), int), num_classes=10)
    settings: dict[str, Any] = {"rounds": 1, "cohort_size": 1, "seed": seed, "weights": "uniform"}
    (sent,) = fedrax.simulate(
        method, task, federation, record=fedrax.simulation.MessageSelection(), **settings
    ).exchanges
    upload = sent.sent.upload
    return sent.received, tree.scale(-1, upload) if isinstance(method, fedrax.privacy.SampleDP) else upload


def attacked(
    task: fedrax.Task, params: dict, gradient: dict, shape: tuple[int, ...], seed: int, steps: dict[str, int]
) -> dict[str, Reconstruction]:
    """Reconstruction by each attack from a gradient."""
    view, labels = as_gradient(task, params, gradient), recover_labels(gradient, shape[0])
    return {
        "DLG": dlg(steps["DLG"]).invert(view, shape, 10, seed=seed),
        "iDLG": dlg(steps["iDLG"]).invert(view, shape, y=labels, seed=seed),
        "inverting gradients": inverting_gradients(steps["inverting gradients"]).invert(
            view, shape, y=labels, seed=seed
        ),
    }


def lenet(arguments: argparse.Namespace) -> int:
    """Reconstruct a random MNIST image from the upload of a client with one sample, for each seed."""
    train = load("mnist", arguments.data_dir).train
    task = fedrax.classification(sigmoid_lenet(train.x.shape[1:], 10), fedrax.contract.rescale())
    steps = {name: arguments.steps or count for name, count in STEPS.items()}
    scores: dict[tuple[str, str], list[ReconstructionScore]] = {}
    pictures: list[list[np.ndarray]] = []
    for seed in arguments.seeds or SEEDS:
        row = np.random.default_rng(seed).integers(len(train.y), size=1)
        x, y = train.x[row], train.y[row].astype(int)
        true = x / 255 if x.dtype == np.uint8 else x
        pictures.append([true[0]])
        for of, method in ROUNDS.items():
            params, gradient = one_gradient(task, x, y, seed, method)
            found = attacked(task, params, gradient, x.shape, seed, steps)
            for name, one in found.items():
                scores.setdefault((of, name), []).append(score(one.x, true, one.y, y))
            pictures[-1] += [one.x[0] for name, one in found.items() if of == "FedSGD" or name in SHOWN]
    rows = [[of, _epsilon(ROUNDS[of]), name, *_cells(some)] for (of, name), some in scores.items()]
    columns = ["round", "epsilon", "attack", "PSNR dB", "lowest", "SSIM", "distance", "labels", "above 25 dB"]
    note = (
        "One random MNIST image and one random start a seed; mean ± standard deviation over seeds. The attacker is the "
        f"server, and epsilon is what the round gives away to it, at delta = {DELTA:g}, of which data the client has."
    )
    write_table(arguments, "lenet", "One image from one round (LeNet, MNIST)", note, columns, rows)
    names = ["true", *STEPS, *(f"{of},\n{name}" for of in list(ROUNDS)[1:] for name in SHOWN)]
    curves.save_curves(draw(pictures, names), arguments.results / "lenet")
    return 0


def _epsilon(method: fedrax.Algorithm) -> str:
    """Epsilon against an adversary that observes the client's message, which has no noise if the server adds it."""
    releases = private_releases(method)
    if not releases or any(release.seen == "public" for release in releases):
        return "∞"
    return f"{Accountant(about_replacement(releases), DELTA).epsilon(1):.3g}"


def _cells(scores: list[ReconstructionScore]) -> list[str]:
    level = [one.psnr for one in scores]
    return [
        spread(level, ".1f"),
        f"{min(level):.1f}",
        spread([one.ssim for one in scores], ".3f"),
        spread([one.frobenius for one in scores], ".2g"),
        f"{100 * statistics.mean(one.labels for one in scores):.0f} %",
        f"{sum(value > 25 for value in level)} of {len(level)}",
    ]


def draw(pictures: list[list[np.ndarray]], names: list[str]) -> Figure:
    """A row for each image, with a column for the true one and each attack."""
    sketch = Figure(figsize=(1.6 * len(names), 1.5 * len(pictures) + 0.3), layout="constrained")
    grid = sketch.subplots(len(pictures), len(names), squeeze=False)
    for row, images in zip(grid, pictures, strict=True):
        for axes, image in zip(row, images, strict=True):
            axes.imshow(np.clip(image, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name, fontsize="small")
    return sketch
