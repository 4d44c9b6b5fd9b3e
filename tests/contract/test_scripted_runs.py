"""Runs with scripted cohorts, batches and steps against plain NumPy loops."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import Episode, FedAvg, LocalSGD, Scaffold
from fedrax.contract.client_data import ClientData
from fedrax.simulation import Script
from tests.simulation.problems import FEDERATION, SIZES, TASK, run

ROUNDS, SIZE, MOST, ROWS, LR = 4, 3, 4, 3, 0.1
RNG = np.random.default_rng(5)
COHORTS = np.stack([RNG.permutation(len(SIZES))[:SIZE] for _ in range(ROUNDS)])
STEPS = RNG.integers(1, MOST + 1, (ROUNDS, SIZE))


def rows(*shape: int) -> np.ndarray:
    """Row indices of the clients; some batches lack their last one or two entries."""
    drawn = RNG.integers(0, np.array(SIZES)[COHORTS].reshape(ROUNDS, SIZE, *[1] * len(shape)), (ROUNDS, SIZE, *shape))
    short = RNG.integers(1, shape[-1] + 1, drawn.shape[:-1])
    return np.where(np.arange(shape[-1]) < short[..., None], drawn, -1)


BATCHES, FRESH = rows(MOST, ROWS), rows(ROWS)
SCRIPT = Script(cohorts=COHORTS, steps=STEPS, batches=BATCHES, fresh=FRESH)
X, Y = (np.asarray(a, np.float64 if i == 0 else int) for i, a in enumerate(FEDERATION.train))


def gradient(w: np.ndarray, client: int, rows: np.ndarray) -> np.ndarray:
    """Gradient of softmax regression on a batch; w is [classes, features + 1] with the bias last."""
    at = FEDERATION.offsets[client] + rows[rows >= 0]
    x = np.hstack([X[at], np.ones((len(at), 1))])
    p = np.exp(x @ w.T)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(at)), Y[at]] -= 1
    return p.T @ x / len(at)


def flat(params: Any) -> np.ndarray:
    """Parameters as an array [classes, features + 1]."""
    return np.hstack([np.asarray(params["output"]["weight"]), np.asarray(params["output"]["bias"])[:, None]])


def numpy_run(method: str, gamma: float | None = None) -> list[np.ndarray]:
    """Global parameters after every round."""
    w = np.zeros((3, 5))
    control, controls, trajectory = np.zeros_like(w), np.zeros((len(SIZES), *w.shape)), []
    for r in range(ROUNDS):
        fresh = [gradient(w, c, FRESH[r, k]) for k, c in enumerate(COHORTS[r])]
        mean, updates, changes = np.mean(fresh, 0), [], []
        for k, client in enumerate(COHORTS[r]):
            x = w
            for t in range(STEPS[r, k]):
                d = gradient(x, client, BATCHES[r, k, t])
                if method == "scaffold":
                    d = d - controls[client] + control
                if method == "episode":
                    d = d - fresh[k] + mean
                    if gamma is not None and np.linalg.norm(mean) > gamma / LR:
                        d = d * min(1, gamma / LR / np.linalg.norm(d))
                x = x - LR * d
            updates.append(x - w)
            if method == "scaffold":
                new = controls[client] - control + (w - x) / (STEPS[r, k] * LR)
                changes.append(new - controls[client])
                controls[client] = new
        w = w + np.mean(updates, 0)
        control = control + SIZE / len(SIZES) * np.mean(changes, 0) if changes else control
        trajectory.append(w)
    return trajectory


LOCAL = LocalSGD(lr=LR, steps=MOST, batch_size=ROWS)
METHODS = {
    "fedavg": (FedAvg(local=LOCAL), None),
    "scaffold": (Scaffold(local=LOCAL), None),
    "episode": (Episode(local=LOCAL), None),
    "episode clipped": (Episode(local=LOCAL, gamma=0.02), 0.02),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("plan", ["scan", "vmap"])
def test_scripted_run_agrees_with_numpy(name: str, plan: str):
    method, gamma = METHODS[name]
    start = jax.tree.map(lambda a: np.zeros(a.shape), TASK.init(jax.random.key(0)))
    options = {"rounds": ROUNDS, "script": SCRIPT, "dtype": "float64", "params": start, "trajectory": True}
    result = run(method, **options, plan=plan, devices=2 if plan == "scan" else 1)
    expected = numpy_run(name.split()[0], gamma)
    assert len(result.trajectory) == ROUNDS
    for actual, desired in zip(result.trajectory, expected, strict=True):
        np.testing.assert_allclose(flat(actual), desired, rtol=1e-12, atol=1e-14)
    samples = (BATCHES >= 0).sum(-1) * (np.arange(MOST) < STEPS[..., None])
    if "episode" not in name:
        counted = np.diff([0, *(event["gradients"] for event in result.events)])
        np.testing.assert_array_equal(counted, samples.sum((1, 2)))


def test_script_may_contain_fresh_batches_only():
    method = Episode(local=LocalSGD(lr=LR, epochs=1, batch_size=ROWS), gamma=0.02)
    options = {"rounds": 2, "trajectory": True}
    one, other = (run(method, script=Script(COHORTS, fresh=fresh), **options).trajectory for fresh in (FRESH, None))
    assert not np.allclose(flat(one[0]), flat(other[0]))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("wrap", [fedrax.algorithms.upcycle, fedrax.compression.TopK], ids=["Upcycled", "TopK"])
def test_scripted_blocks_reach_wrapped_methods(wrap: Any):
    local = LocalSGD(lr=0.02, steps=2, blocks=2)
    blocks = np.random.default_rng(1).integers(0, 2, (2, SIZE, 2))
    script = Script(cohorts=COHORTS[:2], blocks=blocks)
    changes = {"a": 0.0} if wrap is fedrax.algorithms.upcycle else {"fraction": 1.0}
    inside = fedrax.LoSAC(local=local) if wrap is fedrax.algorithms.upcycle else FedAvg(local=local)
    options = {"rounds": 2, "script": script, "trajectory": True}
    one, other = (run(method, **options).trajectory for method in (inside, wrap(inside, **changes)))
    for actual, desired in zip(one, other, strict=True):
        np.testing.assert_allclose(flat(actual), flat(desired), rtol=1e-5, atol=1e-7)
    drawn = run(inside, rounds=2, script=Script(cohorts=COHORTS[:2]), trajectory=True).trajectory
    assert not np.allclose(flat(drawn[-1]), flat(one[-1]))


def test_gradients_of_scripted_fresh_batches_are_counted():
    data = ClientData.alone(TASK, X, Y, jax.random.key(0), round=0, num_clients=1, cohort_size=1)
    steps, fresh = np.array([[0, 1, -1], [2, -1, -1]]), np.array([3, 4, 5])
    data.assignment = data.assignment._replace(batches=steps, fresh=fresh)
    assert (LOCAL.samples(data, 2), LOCAL.samples(data.resampled(), 1)) == (3, 3)
    batch, inside = data.resampled().batch(0, ROWS, "shuffle")
    np.testing.assert_array_equal(batch.y, Y[3:6])
    assert inside.all()
