"""``local.lr`` is the learning rate of each method's formula, and weight decay acts on every gradient in it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import Episode, FedAvg, Federation, FedraxError, LocalSGD, Task, simulate
from fedrax.algorithms import FedCM, Mime, MimeLite, NaiveParallelClip, QFedAvg
from fedrax.config.hyperparameters import check
from fedrax.optim import Optax
from fedrax.optim.proximal import L1
from tests.simulation.problems import run

FINISHED, OURS = Optax(optax.sgd(0.01)), Optax.of(optax.sgd)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QFedAvg(local=LocalSGD(optimizer=FINISHED)), "QFedAvg takes 1 / local.lr for the Lipschitz constant"),
        (lambda: Episode(local=LocalSGD(optimizer=FINISHED), gamma=0.1), "unset local.optimizer or gamma"),
        (lambda: Episode(local=LocalSGD(optimizer=OURS), gamma=0.1), "unset local.optimizer or gamma"),
        (
            lambda: FedAvg(local=LocalSGD(optimizer=FINISHED, prox=L1(0.1))),
            "local.prox needs the learning rate local.lr",
        ),
    ],
    ids=["q-FedAvg", "EPISODE", "EPISODE, lr", "prox"],
)
def test_learning_rate_in_an_optimizer_is_rejected_if_the_method_needs_lr(make: Any, message: str):
    with pytest.raises(FedraxError, match=message):
        check(make())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "make",
    [
        lambda local: QFedAvg(local=local, q=2.0),
        lambda local: FedAvg(local=LocalSGD(**vars(local) | {"prox": L1(0.05)})),
        lambda local: Episode(local=local),
    ],
    ids=["q-FedAvg", "prox", "EPISODE without clipping"],
)
def test_sgd_optimizer_with_lr_is_the_plain_step(make: Any):
    plain = {"lr": 0.05, "steps": 3, "batch_size": 2}
    one, other = (run(make(local)).params for local in (LocalSGD(**plain), LocalSGD(**plain, optimizer=OURS)))
    for name in one:
        for part in one[name]:
            np.testing.assert_allclose(one[name][part], other[name][part], rtol=1e-5, atol=1e-6)


def test_episode_clips_gradients_including_weight_decay():
    """With one full-batch step a round EPISODE is NaiveParallelClip: the same steps are clipped in the same rounds."""
    local = {"lr": 0.2, "steps": 1, "batch_size": "full", "weight_decay": 3.0}
    one = Episode(local=LocalSGD(**local), gamma=0.1)
    other = NaiveParallelClip(local=LocalSGD(**local, clip=0.1))
    params = {"output": {"weight": np.full((3, 4), 0.3), "bias": np.full(3, -0.2)}}
    options = {"rounds": 6, "cohort_size": 4, "dtype": "float64", "params": params, "trajectory": True}
    for actual, desired in zip(run(one, **options).trajectory, run(other, **options).trajectory, strict=True):
        for part in ("weight", "bias"):
            np.testing.assert_allclose(actual["output"][part], desired["output"][part], rtol=1e-12)


def test_events_contain_the_share_of_clipped_steps():
    """Gradient x - 1 (at 0: -1), learning rate 0.1, steps of at most 0.08: later gradients are below the bound."""
    x, shortened = 0.0, []
    for _ in range(12):
        shortened.append(0.1 * abs(x - 1) > 0.08)
        x += min(0.1 * (1 - x), 0.08)
    assert 0 < sum(shortened) < 12
    task = Task(lambda key: jnp.zeros(1), lambda params, batch, key: (params - batch.x)[:, 0] ** 2 / 2)
    data = Federation.from_arrays(np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32), offsets=[0, 1, 2])
    settings = {"rounds": 4, "cohort_size": 2, "devices": 1}
    local = simulate(FedAvg(local=LocalSGD(lr=0.1, steps=3, clip=0.08)), task, data, **settings)
    assert [event["clipped"] for event in local.events] == pytest.approx(np.reshape(shortened, (4, 3)).mean(1))
    each = NaiveParallelClip(local=LocalSGD(lr=0.1, steps=1, clip=0.08))
    once = simulate(each, task, data, **settings | {"rounds": 12})
    assert [event["clipped"] for event in once.events] == shortened
    assert "clipped" not in simulate(FedAvg(), task, data, **settings).events[0]


def test_fixed_point_with_weight_decay_does_not_depend_on_momentum():
    """With one full-batch step, FedCM, Mime and MimeLite end where FedAvg does: at grad f(x) + lambda x = 0."""
    local = LocalSGD(lr=0.2, steps=1, batch_size="full", weight_decay=0.5)
    methods = (FedAvg(local=local), FedCM(local=local, alpha=0.1), Mime(local=local), MimeLite(local=local))
    ends = [run(method, rounds=800, cohort_size=8, dtype="float64", weights="uniform").params for method in methods]
    flat = [np.concatenate([np.ravel(part) for layer in end.values() for part in layer.values()]) for end in ends]
    assert np.linalg.norm(flat[0]) > 0.01
    for other in flat[1:]:
        np.testing.assert_allclose(other, flat[0], atol=1e-7)
