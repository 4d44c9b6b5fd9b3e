"""Attacks beyond Figure 6: increments summed over rounds, and matching the client's program."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

import fedrax
from fedrax.attacks import (
    Attack,
    Observation,
    Reconstruction,
    as_client_program,
    as_gradient,
    candidate_gradients,
    dlg,
    frobenius,
)
from fedrax.simulation import use_all_cores
from papers.losac.figure6 import CLIENTS, DATA, ROUNDS, SEEDS, Problem, exchanges, first_client, methods, problem
from papers.losac.running import spread, write_table

STEPS = 300


def attacks(arguments: argparse.Namespace) -> int:
    """Errors of a server's estimates of the first client's gradient, and of its data if it has one sample."""
    use_all_cores()
    rows = []
    seeds, rounds = arguments.seeds or SEEDS, arguments.rounds or ROUNDS
    for name, (shown, _) in DATA.items():
        found: dict[str, list[list[float]]] = {}
        for seed in seeds:
            whole, single = (problem(name, arguments.data_dir, seed, samples) for samples in (None, 1))
            for label, method in methods("sum").items():
                cells = [*gradient_errors(whole, method, rounds), *data_errors(single, method, rounds, seed)]
                found.setdefault(label, []).append(cells)
        for label, cells in found.items():
            rows.append([shown, label, *(spread(values, ".2g") for values in zip(*cells, strict=True))])
    columns = ["data", "method", "gradient, last round", "gradient, history"]
    columns += ["one sample, last round", "one sample, history", "one sample, client program"]
    note = (
        "Relative errors, 0 is exact. Gradient: sine of the angle between the first client's true gradient, all of its "
        f"samples, at the model it was sent in round {rounds}, and the nearest vector that the server has, from the "
        f"messages of that round or from all {rounds}. One sample: |D^ - D|_F / |D|_F where each client has one "
        f"sample, for L-BFGS ({STEPS} steps, both labels tried) on a vector as the gradient, up to its scale, the one "
        "with the best fit, and on the messages of all rounds through the method's own client. Mean ± standard "
        "deviation over seeds."
    )
    write_table(arguments, "figure6-attacks", "LoSAC's Figure 6: the attacks it does not make", note, columns, rows)
    return 0


def gradient_errors(given: Problem, method: fedrax.Algorithm, rounds: int) -> list[float]:
    """[last round's messages, sums over all rounds]; see the note of the table."""
    seen = candidate_gradients(method, exchanges(given, method, rounds), given.params)
    x, y = first_client(given)
    view = as_gradient(given.task, seen[0].params, seen[0].vector, "sum")
    true = view.predict(view.known, fedrax.contract.Batch(x, y), None)[0]

    def sine(vector: Any) -> float:
        a, b = (
            np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(v)]) for v in (vector, true)
        )
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return float(np.linalg.norm(a - (a @ b) * b))

    last = min(sine(one.vector) for one in seen if "last" in one.name)
    return [last, min(sine(one.vector) for one in seen)]


def data_errors(given: Problem, method: fedrax.Algorithm, rounds: int, seed: int) -> list[float]:
    """[last message as a gradient, history as a gradient, client program]; see the note of the table."""
    sent = exchanges(given, method, rounds)
    x, _ = first_client(given)
    attack, made = dlg(STEPS), {}
    for one in candidate_gradients(method, sent, given.params):
        if "negative" not in one.name:  # of the other label
            view = as_gradient(given.task, one.params, one.vector, "sum")
            made[one.name] = _both_labels(Attack(attack.optimizer, STEPS, "cosine"), view, x.shape, seed)
    view = as_client_program(given.task, method, given.params, sent, CLIENTS, CLIENTS)
    best = lambda some: min(some, key=lambda found: found.distance)  # noqa: E731
    tried = [best([found for name, found in made.items() if "last" in name]), best(made.values())]
    tried.append(_both_labels(attack, view, x.shape, seed))
    return [frobenius(found.x, x) / float(np.linalg.norm(x)) for found in tried]


def _both_labels(attack: Attack, view: Observation, shape: tuple[int, ...], seed: int) -> Reconstruction:
    """For a single sample: the label with the better match."""
    found = [attack.invert(view, shape, y=np.asarray([label], np.int32), seed=seed) for label in (0, 1)]
    return min(found, key=lambda one: one.distance)
