"""What each method uploads, and what an attacker reconstructs from it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedrax
from fedrax import FedraxError, LocalSGD, files, tree
from fedrax.attacks import as_client_program, as_gradient, candidate_gradients, dlg, parameter_vectors, score
from fedrax.attacks.messages import decode_upload
from fedrax.data import load
from fedrax.models import MLP
from papers.losac.running import write_table

SEEDS = (0, 1, 2)
CLIENTS, SAMPLES, ROUNDS, STEPS, RESTARTS = 4, 2, 2, 800, 2
FULL = LocalSGD(lr=0.1, steps=3, batch_size="full")
BLOCK = LocalSGD(lr=0.1, steps=3, blocks=1)

METHODS: dict[str, fedrax.Algorithm] = {
    "FedSGD": fedrax.algorithms.FedSGD(),
    "FedAvg": fedrax.FedAvg(local=FULL),
    "FedAvg, one sample a step": fedrax.FedAvg(local=dataclasses.replace(FULL, batch_size=1)),
    "FedProx": fedrax.FedProx(local=FULL),
    "SCAFFOLD": fedrax.Scaffold(local=FULL),
    "FedDyn": fedrax.algorithms.FedDyn(local=FULL),
    "FedCM": fedrax.algorithms.FedCM(local=FULL),
    "MimeSVRG": fedrax.algorithms.MimeSVRG(local=FULL),
    "MimeLite": fedrax.algorithms.MimeLite(local=FULL),
    "EPISODE": fedrax.Episode(local=FULL, gamma=1.0),
    "FedSaga": fedrax.algorithms.FedSaga(local=BLOCK),
    "LoSAC": fedrax.LoSAC(local=BLOCK),
    "GradMA-W": fedrax.algorithms.GradMAW(local=FULL),
    "pFedMe": fedrax.algorithms.PFedMe(local=FULL, lam=1.0, inner_lr=0.1),
    "q-FedAvg": fedrax.algorithms.QFedAvg(local=FULL),
    "FedLion": fedrax.algorithms.FedLion(local=dataclasses.replace(FULL, lr=1e-3)),
    "Personalized FedAvg, last layer at home": fedrax.personalization.Personalized(
        fedrax.FedAvg(local=FULL), personal_params=("output/*",)
    ),
    "SignSGD": fedrax.algorithms.SignSGD(local=dataclasses.replace(FULL, steps=1), abstain=False),
    "ClientDP of FedAvg, noise at the client": fedrax.privacy.ClientDP(fedrax.FedAvg(local=FULL), at="client"),
    "ClientDP of FedAvg, noise at the server": fedrax.privacy.ClientDP(fedrax.FedAvg(local=FULL)),
    "SampleDP of FedAvg": fedrax.privacy.SampleDP(fedrax.FedAvg(local=dataclasses.replace(FULL, batch_size=SAMPLES))),
    "OutputPerturbation of FedAvg": fedrax.privacy.OutputPerturbation(fedrax.FedAvg(local=FULL)),
    "ObjectivePerturbation of FedProx": fedrax.privacy.ObjectivePerturbation(
        fedrax.FedProx(local=FULL), guarantee="none"
    ),
    "Quantized (8 bits) of FedAvg": fedrax.compression.Quantized(inner=fedrax.FedAvg(local=FULL), bits=8),
    "FedADMM": fedrax.algorithms.FedADMM(local=FULL),
    "MIFA": fedrax.algorithms.MIFA(local=FULL),
    "TopK (10 %) of FedAvg": fedrax.compression.TopK(inner=fedrax.FedAvg(local=FULL), fraction=0.1),
    "RandomK (10 %) of FedAvg": fedrax.compression.RandomK(inner=fedrax.FedAvg(local=FULL), fraction=0.1),
    "EFSign of FedAvg": fedrax.compression.EFSign(inner=fedrax.FedAvg(local=FULL)),
}
"""Full batches, T = 3, learning rate 0.1 (FedLion: 0.001), and one block for methods with blocks."""

ALIKE: dict[str, tuple[str, ...]] = {
    "FedAvg": (
        *("Attacked", "Ditto", "FedBuff", "FedExP", "FedMLB", "FedNova", "GradMAS", "MOON", "QuantizedBroadcast"),
        *("Robust", "Scaffnew", "Upcycled"),
    ),
    "FedSGD": ("NaiveParallelClip",),
    "GradMA-W": ("GradMA",),
    "MimeSVRG": ("Mime",),
}
"""Other methods of the library by the row with an equivalent upload: a vector of the same kind, also with its norm, its
number of steps or its staleness."""


def methods(arguments: argparse.Namespace) -> int:
    """A row for each method; finished rows are stored below --out and not computed again."""
    rows = []
    for name, method in METHODS.items():
        kept = arguments.out / "methods" / f"{name}.json"
        asked = {"seeds": list(arguments.seeds or SEEDS), "steps": arguments.steps or STEPS, "restarts": RESTARTS}
        row = _kept(kept) if kept.exists() else {}
        if any(row.get(key) != value for key, value in asked.items()):
            row = asked | study(method, asked["seeds"], asked["steps"])
            files.write_text(kept, json.dumps(row))
        psnr = [f"{np.median(values):.0f}" if values else "-" for values in row["psnr"]]
        labels = f"{100 * np.mean(row['labels']):.0f} %" if row["labels"] else "-"
        rows.append([name, row["sends"], *psnr, labels])
        print(rows[-1], flush=True)
    columns = ["method", "sends", "last round, dB", "history, dB", "client program, dB", "labels"]
    note = (
        f"Clients with {SAMPLES} images each (digits, 8x8, a sigmoid network of one hidden layer), {ROUNDS} rounds, an "
        "honest-but-curious server. Sends: the vectors of the parameters' size that go up in each phase, and bytes a "
        "round. PSNR of the images that L-BFGS finds from a vector of the last round taken for the gradient, from "
        "vectors of all rounds, summed or differenced, and from all messages through the method's own client; of "
        f"several vectors, and of {RESTARTS} starts, the one that is matched best. '-': no vector goes up whose point "
        "is known, or the client has no useful derivative. The server knows the bound of a private method, not its "
        "noise, here of the same deviation as the bound (of objective perturbation alpha is 10). Labels: recovered by "
        "the best matched attack. "
        f"The median of {len(arguments.seeds or SEEDS)} draws of images; "
        "above 25 dB an image is plainly recognized. The library's other methods send nothing of a new kind: "
        + "; ".join(f"as {row}, {', '.join(some)}" for row, some in ALIKE.items())
        + "; with at most the vector's length, the number of its steps or its delay beside it."
    )
    write_table(arguments, "methods", "What methods send, and what is recovered from it", note, columns, rows)
    return 0


def _kept(path: Path) -> dict[str, Any]:
    """A row of an earlier command."""
    try:
        with files.open_regular_file(path, files.MAX_JSON) as file:
            row = json.loads(file.read())  # NaN if an attack diverged
        return {key: row[key] for key in ("seeds", "steps", "restarts", "psnr", "labels", "sends")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FedraxError(f"{path} holds no row of this table; take it out and go on.") from error


def study(method: fedrax.Algorithm, seeds: list[int], steps: int) -> dict[str, Any]:
    """A row of the table."""
    whole = load("digits").train
    images, labels = (np.asarray(a) for a in whole)
    task, attack = _task(), dlg(steps, RESTARTS)
    found: dict[str, Any] = {"psnr": [[], [], []], "labels": []}
    for seed in seeds:
        rows = np.random.default_rng(seed).permutation(len(labels))[: CLIENTS * SAMPLES]
        owner = np.repeat(np.arange(CLIENTS), SAMPLES)
        federation = fedrax.Federation.from_arrays(images[rows], labels[rows], owner, num_classes=10)
        settings: dict[str, Any] = {"rounds": ROUNDS, "cohort_size": CLIENTS, "weights": "uniform", "seed": seed}
        params = task.init(jax.random.key(seed))
        run = fedrax.simulate(
            method, task, federation, params=params, record=fedrax.simulation.MessageSelection(), **settings
        )
        x, y = federation.train[0][:SAMPLES], federation.train[1][:SAMPLES]
        found["sends"] = sends(method, run, params)
        made = {}
        for one in candidate_gradients(method, run.exchanges, params):
            view = as_gradient(task, one.params, one.vector)
            made[one.name] = attack.invert(view, x.shape, 10, seed=seed)
        last = min((one for name, one in made.items() if "last" in name), key=_fit, default=None)
        ever = min(made.values(), key=_fit, default=None)
        tried = [last, ever, _by_program(method, task, run, params, x.shape, seed, attack)]
        scores = [None if one is None else score(one.x, x, one.y, y) for one in tried]
        for values, one in zip(found["psnr"], scores, strict=True):
            values += [] if one is None else [min(one.psnr, 200.0)]
        nearest = min((one for one in tried if one is not None), key=_fit, default=None)
        found["labels"] += [] if nearest is None else [score(nearest.x, x, nearest.y, y).labels]
    return found


def _by_program(method: Any, task: Any, run: Any, params: Any, shape: Any, seed: int, attack: Any) -> Any:
    """Attack by matching the client's program; for wrappers with rounding that of the inner method, with noise that
    without it.

    None if the program has no derivative.
    """
    inside = (
        method.inner
        if isinstance(method, fedrax.compression.Quantized | fedrax.privacy.ObjectivePerturbation)
        else method
    )
    if isinstance(method, fedrax.privacy.ClientDP | fedrax.privacy.SampleDP):
        inside = dataclasses.replace(method, noise=0.0)
    if isinstance(method, fedrax.privacy.OutputPerturbation):
        inside = dataclasses.replace(method, sigma=0.0)
    if isinstance(method, fedrax.algorithms.SignSGD | fedrax.compression.EFSign):
        return None
    try:
        view = as_client_program(task, method, params, run.exchanges, CLIENTS, CLIENTS, program=inside)
        return attack.invert(view, shape, 10, seed=seed)
    except FedraxError:
        return None


def sends(method: fedrax.Algorithm, run: fedrax.Result, params: Any) -> str:
    """Uploaded vectors by phase, and bytes per client and round."""
    first = [one for one in run.exchanges if one.round == 1]
    names = [", ".join(parameter_vectors(decode_upload(method, one), params)) or "-" for one in first]
    return "; ".join(names) + f" ({sum(tree.num_bytes(one.sent) for one in first)} B)"


def _fit(found: Any) -> float:
    return found.distance


@cache
def _task() -> fedrax.Task:
    """One task for all methods, so that attacks on gradients are compiled once."""
    return fedrax.classification(MLP(hidden=(32,), activation="sigmoid").build((8, 8), 10))
