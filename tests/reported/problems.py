"""Three clients and softmax regression with its NumPy gradient, for programs that follow public reports.

The model is ``x @ w`` with one array w [2, 3], so that a method's steps are a few lines of NumPy. Runs are in float64.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import fedrax
from fedrax import Federation, LocalSGD, classification
from fedrax.contract import Model

SIZES = (3, 5, 2)
START = np.array([[0.3, -0.2, 0.1], [-0.1, 0.4, 0.2]])
_rng = np.random.default_rng(5)
X, Y = _rng.normal(size=(31, 2)), _rng.integers(0, 3, 31)
"""The first ten rows are training rows of the clients; the others are test rows, more than one chunk."""
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
TEST_OFFSETS = np.array([0, 9, 13, 21])
FEDERATION = Federation.from_arrays(
    X[:10], Y[:10], offsets=OFFSETS, test=(X[10:], Y[10:]), test_offsets=TEST_OFFSETS, num_classes=3, shuffle=False
)
MODEL = Model(lambda key: jnp.asarray(START), lambda w, x, key=None: x @ w, name="softmax")
TASK = classification(MODEL)
LR, STEPS = 0.5, 2
LOCAL = LocalSGD(lr=LR, steps=STEPS, batch_size="full")


def rows_of(client: int) -> slice:
    """Training rows of a client."""
    return slice(OFFSETS[client], OFFSETS[client + 1])


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cross entropy of each row."""
    logits = x @ w
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]


def gradient(w: np.ndarray, client: int) -> np.ndarray:
    """Gradient of a client's mean loss."""
    x, y = X[rows_of(client)], Y[rows_of(client)]
    chances = np.exp(x @ w)
    chances /= chances.sum(1, keepdims=True)
    return x.T @ (chances - np.eye(3)[y]) / len(y)


def descend(w: np.ndarray, client: int, lr: float = LR, steps: int = STEPS) -> np.ndarray:
    """Local steps on all rows of a client."""
    for _ in range(steps):
        w = w - lr * gradient(w, client)
    return w


def run(algorithm: fedrax.Algorithm, federation: Federation = FEDERATION, **options: Any) -> fedrax.Result:
    """A run of two rounds from START in float64, unless options change it."""
    defaults: dict[str, Any] = {"rounds": 2, "cohort_size": 2, "eval_every": 100, "dtype": "float64"}
    return fedrax.simulate(algorithm, options.pop("task", TASK), federation, **(defaults | options))


def run_cohorts(algorithm: fedrax.Algorithm, cohorts: list[list[int]], **options: Any) -> fedrax.Result:
    """A run with these cohorts, one per round."""
    script = fedrax.simulation.Script(cohorts=cohorts, **options.pop("script", {}))
    size = max(map(len, cohorts))
    return run(algorithm, script=script, rounds=len(cohorts), cohort_size=size, **options)
