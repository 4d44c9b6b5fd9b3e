"""Wrappers around methods with their own loss terms, messages, phases or step counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD
from fedrax.algorithms import MOON, FedMLB, upcycle
from fedrax.compression import RandomK
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Batch
from fedrax.models import MLP
from fedrax.personalization import Personalized
from fedrax.robust import Attacked
from fedrax.robust.attacked_clients import LabelFlip
from fedrax.simulation import Script
from tests.simulation.problems import FEDERATION, run

TASK = fedrax.classification(MLP(hidden=(5, 4), activation="tanh").build((4,), 3))
LOCAL = LocalSGD(lr=0.1, steps=2, batch_size="full")
FIRST = tuple(name for name in fedrax.tree.leaf_names(TASK.init(jax.random.key(0))) if name.startswith("dense1"))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "method", [FedMLB(LOCAL), MOON(LOCAL), FedAvg(LOCAL), fedrax.algorithms.PFedMe(LOCAL)], ids=repr
)
def test_flipped_labels_affect_all_loss_terms(method: Algorithm):
    """As if the samples of malicious clients had other labels."""
    bad = (1, 4)
    x, y = FEDERATION.train
    owner = np.repeat(np.arange(FEDERATION.num_clients), FEDERATION.sizes)
    flipped = type(FEDERATION.train)(x, np.where(np.isin(owner, bad), 2 - y, y))
    others = dataclasses.replace(FEDERATION, train=flipped)
    options: dict[str, Any] = {"task": TASK, "rounds": 3, "dtype": "float64", "devices": 1}
    attacked = run(Attacked(method, LabelFlip(classes=3), clients=bad), **options)
    honest = run(method, federation=others, **options)
    for a, b in zip(*map(jax.tree.leaves, (attacked.params, honest.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert any(
        not np.allclose(a, b, atol=1e-3)
        for a, b in zip(*map(jax.tree.leaves, (run(method, **options).params, honest.params)), strict=True)
    )


def moon_loss(mu: float, own: Any, start: Any, previous: Any, batch: Batch) -> Any:
    """MOON's loss."""
    unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)  # noqa: E731
    z, positive, negative = (unit(TASK.features(p, batch.x)) for p in (own, start, previous))  # type: ignore[misc]
    logits = jnp.stack([(z * positive).sum(-1), (z * negative).sum(-1)], -1) / 0.5
    term = jax.nn.logsumexp(logits, -1) - logits[:, 0]
    return (TASK.loss(own, batch, jax.random.key(0)) + mu * term).mean()


def test_frozen_parameters_are_frozen_in_every_loss_term():
    """Personalized with alternate around MOON: the contrastive term uses the frozen first layer."""
    client, rounds, mu = 3, 2, 2.0
    start = TASK.init(jax.random.key(7))
    low, high = FEDERATION.offsets[client : client + 2]
    options: dict[str, Any] = {"task": TASK, "params": start, "rounds": rounds, "dtype": "float64", "devices": 1}
    method = Personalized(MOON(LOCAL, mu=mu), personal_params=FIRST, alternate=dataclasses.replace(LOCAL, steps=1))
    found = run(method, script=Script(cohorts=[[client]] * rounds), **options)
    with jax.enable_x64(True):
        batch = Batch(*(jnp.asarray(part[low:high]) for part in FEDERATION.train))
        batch = batch._replace(x=batch.x.astype(jnp.float64))
        x = previous = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), start)
        step = lambda x, g, moves: {  # noqa: E731
            name: jax.tree.map(lambda a, b: a - 0.1 * b, x[name], g[name]) if moves(name) else x[name] for name in x
        }
        plain = jax.grad(lambda p: TASK.loss(p, batch, jax.random.key(0)).mean())
        for _ in range(rounds):
            x = began = step(x, plain(x), lambda name: name == "dense1")
            for _ in range(2):
                gradient = jax.grad(lambda p, began=began, before=previous: moon_loss(mu, p, began, before, batch))(x)
                x = step(x, gradient, lambda name: name != "dense1")
            previous = x
    ours = found.params | {"dense1": found.client_state(client).own}
    for name in ("dense2", "output"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), ours[name], x[name])
    for name, leaf in ours["dense1"].items():
        np.testing.assert_allclose(leaf, x["dense1"][name.split("/")[-1]], rtol=1e-10)


UNSUPPORTED = {
    "the broadcast of MimeLite has another structure": Personalized(
        fedrax.algorithms.MimeLite(LOCAL), personal_params=FIRST
    ),
    "the broadcast of FedCM has another structure": Personalized(fedrax.algorithms.FedCM(LOCAL), personal_params=FIRST),
    "the upload of FedExP has another structure": Personalized(fedrax.algorithms.FedExP(LOCAL), personal_params=FIRST),
    "the upload of QFedAvg has another structure": Personalized(
        fedrax.algorithms.QFedAvg(LOCAL), personal_params=FIRST
    ),
    "the upload of FedNova has another structure": Personalized(
        fedrax.algorithms.FedNova(LOCAL), personal_params=FIRST
    ),
    "Scaffnew changes them in an earlier phase": upcycle(fedrax.algorithms.Scaffnew(LocalSGD(lr=0.1)), 0.5),
    "Scaffnew takes its local steps in another phase": fedrax.personalization.Ditto(
        fedrax.algorithms.Scaffnew(LocalSGD(lr=0.1))
    ),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_combinations_are_rejected(message: str):
    with pytest.raises(FedraxError, match=message):
        run(UNSUPPORTED[message], task=TASK, rounds=1, weights="uniform")


def test_ditto_has_its_own_number_of_personal_steps():
    method = fedrax.personalization.Ditto(fedrax.algorithms.Scaffnew(LocalSGD(lr=0.1)), own_steps=LOCAL)
    assert run(method, task=TASK, rounds=1, weights="uniform").events


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "method",
    [fedrax.algorithms.FedCM(LOCAL), fedrax.algorithms.FedNova(LOCAL), fedrax.algorithms.QFedAvg(LOCAL)],
    ids=repr,
)
def test_scalars_of_an_upload_are_not_sparsified(method: Algorithm):
    """Numbers of steps and scales are uploaded unchanged; half of the other entries is drawn."""
    options: dict[str, Any] = {"task": TASK, "rounds": 6}
    whole, drawn = run(method, **options), run(RandomK(method, fraction=0.5), **options)
    assert [e.get("tau_eff") for e in drawn.events] == [e.get("tau_eff") for e in whole.events]
    start = TASK.init(jax.random.key(7))
    first = [run(RandomK(method, fraction=0.5), task=TASK, rounds=1, seed=seed, params=start) for seed in range(4)]
    moved = [float(fedrax.tree.norm(fedrax.tree.sub(result.params, start))) for result in first]
    assert min(moved) > 0.3 * max(moved) > 0


def test_labels_outside_of_the_classes_are_rejected():
    task = fedrax.contract.binary_classification(MLP(hidden=(5,)).build((4,), 1))
    with pytest.raises(FedraxError, match="takes labels from 0 to 1, and these are from 0 to 2"):
        run(task=task, rounds=1)
