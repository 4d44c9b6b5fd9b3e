"""MOON and FedMLB on a small network against NumPy.

The NumPy gradients are Im f(x + ih) / h with h = 1e-30 (complex step), exact to float64 because nothing cancels.

"""

from __future__ import annotations

import dataclasses
import warnings
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, LocalSGD, Result, Upcycled, classification, simulate
from fedrax.algorithms import MOON, FedMLB
from fedrax.algorithms.moon import cosine
from fedrax.contract import binary_classification
from fedrax.contract.model import Model
from fedrax.errors import FedraxError, FedraxWarning
from fedrax.models import MLP, Linear
from fedrax.optim.server import SGD
from fedrax.simulation import Script

SIZES = (4, 3, 5, 3)
"""Inputs, two hidden layers, classes."""
LAYERS = ("dense1", "dense2", "output")
OFFSETS = (0, 6, 10, 18, 23)
LR, EPOCHS, BATCH = 0.2, 2, 4
LOCAL = LocalSGD(lr=LR, epochs=EPOCHS, batch_size=BATCH, order="stored")
COHORTS = [(0, 2, 3), (2, 1, 0)]
NETWORK = MLP(hidden=SIZES[1:-1], activation="tanh").build(SIZES[:1], SIZES[-1])


def samples() -> tuple[np.ndarray, np.ndarray]:
    """x and y of clients with different inputs; some have an incomplete last batch."""
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(len(OFFSETS) - 1), np.diff(OFFSETS))
    x = rng.normal(size=(OFFSETS[-1], SIZES[0])) + rng.normal(size=(len(OFFSETS) - 1, SIZES[0]))[owner]
    return x.astype(np.float32), rng.integers(0, SIZES[-1], OFFSETS[-1])


def initial_arrays() -> list[np.ndarray]:
    """Weight [in, out] and bias of each layer."""
    rng = np.random.default_rng(6)
    shapes = [shape for i, o in pairwise(SIZES) for shape in ((i, o), (o,))]
    return [rng.normal(size=shape) for shape in shapes]


TASK = classification(NETWORK)


def run(algorithm: Any, model: Model = NETWORK, **settings: Any) -> Result:
    """Two rounds in float64, from ``initial_arrays`` if the model is ``NETWORK``."""
    x, y = samples()
    federation = Federation.from_arrays(x, y, offsets=np.array(OFFSETS), shuffle=False)
    script = Script(cohorts=[np.array(cohort) for cohort in COHORTS])
    params = fedrax_params(initial_arrays()) if model is NETWORK else None
    defaults = {"rounds": len(COHORTS), "dtype": "float64", "devices": 1, "script": script, "params": params}
    task = TASK if model is NETWORK else classification(model)
    return simulate(algorithm, task, federation, **(defaults | settings))


def fedrax_params(arrays: list[np.ndarray]) -> dict[str, Any]:
    """Parameters of the zoo's network, whose last weight is [out, in]."""
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    named = {name: {"weight": w, "bias": b} for name, (w, b) in zip(LAYERS, pairs, strict=True)}
    return named | {"output": {"weight": named["output"]["weight"].T, "bias": named["output"]["bias"]}}


def assert_close(actual: Any, desired: Any, tolerance: float = 1e-12) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), actual, desired)


def distance(a: Any, b: Any) -> float:
    """Largest difference between two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


# -- losses in NumPy, sample by sample -------------------------------------------------------------------------------


def hidden(p: list, row: np.ndarray) -> list[np.ndarray]:
    """Outputs of each hidden layer."""
    first = np.tanh(row @ p[0] + p[1])
    return [first, np.tanh(first @ p[2] + p[3])]


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum()


def moon_loss(own: list, shared: list, last: list, row: np.ndarray, label: int) -> Any:
    """Cross entropy + mu times -log(e^{s+ / tau} / (e^{s+ / tau} + e^{s- / tau})), mu = 1.5 and tau = 0.4."""
    z, good, bad = (hidden(p, row)[1] for p in (own, shared, last))
    near, far = (np.exp(z @ v / np.sqrt((z @ z) * (v @ v)) / 0.4) for v in (good, bad))
    return -np.log(probabilities(z @ own[4] + own[5])[label]) - 1.5 * np.log(near / (near + far))


def mlb_loss(own: list, shared: list, last: list, row: np.ndarray, label: int) -> Any:
    """A network of three layers has two hybrids: the global network from its second, or third, layer on.

    lambda1 = 0.7, lambda2 = 1.3, temperature = 2.

    """
    first, second = hidden(own, row)
    main = second @ own[4] + own[5]
    hybrids = [np.tanh(first @ shared[2] + shared[3]) @ shared[4] + shared[5], second @ shared[4] + shared[5]]
    total = -np.log(probabilities(main)[label])
    for hybrid in hybrids:
        p, q = probabilities(hybrid / 2), probabilities(main / 2)
        total = total - 0.7 / 2 * np.log(probabilities(hybrid)[label]) + 1.3 / 2 * (p * np.log(p / q)).sum()
    return total


def complex_step_gradient(loss: Any, p: list[np.ndarray]) -> list[np.ndarray]:
    """Gradient of ``loss`` at p, entry by entry."""
    result = [np.zeros_like(a) for a in p]
    for k, a in enumerate(p):
        for at in np.ndindex(a.shape):
            moved = a.astype(complex)
            moved[at] += 1e-30j
            result[k][at] = loss([*p[:k], moved, *p[k + 1 :]]).imag / 1e-30
    return result


def local_steps(loss: Any, shared: list, last: list, client: int) -> list[np.ndarray]:
    """The client's model after its epochs of local steps."""
    x, y = samples()
    own = shared
    for first in [*range(OFFSETS[client], OFFSETS[client + 1], BATCH)] * EPOCHS:
        rows = range(first, min(first + BATCH, OFFSETS[client + 1]))
        each = [
            complex_step_gradient(lambda p, r=r: loss(p, shared, last, x[r].astype(float), y[r]), own) for r in rows
        ]
        own = [a - LR * sum(g) / len(rows) for a, g in zip(own, zip(*each, strict=True), strict=True)]
    return own


def expected(loss: Any) -> tuple[list, list]:
    """Global parameters, and the last local parameters of each client, after the two rounds."""
    shared, last = initial_arrays(), [initial_arrays() for _ in OFFSETS[1:]]
    for cohort in COHORTS:
        ends = [local_steps(loss, shared, last[i], i) for i in cohort]
        for i, end in zip(cohort, ends, strict=True):
            last[i] = end
        shared = [sum(arrays) / len(cohort) for arrays in zip(*ends, strict=True)]
    return shared, last


# -- the tests -------------------------------------------------------------------------------------------------------


def test_moon_agrees_with_numpy():
    (shared, last), result = expected(moon_loss), run(MOON(LOCAL, mu=1.5, temperature=0.4))
    assert_close(result.params, fedrax_params(shared))
    for i, end in enumerate(last):
        assert_close(result.client_state(i).previous, fedrax_params(end))
    assert distance(result.params, run(FedAvg(LOCAL)).params) > 1e-3


def test_fedmlb_agrees_with_numpy():
    (shared, _), result = expected(mlb_loss), run(FedMLB(LOCAL, lambda1=0.7, lambda2=1.3, temperature=2.0))
    assert_close(result.params, fedrax_params(shared))
    assert distance(result.params, run(FedAvg(LOCAL)).params) > 1e-3


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("server", [SGD(), SGD(0.7, momentum=0.6)], ids=["plain", "momentum"])
@pytest.mark.parametrize("same", [MOON(LOCAL, mu=0.0), FedMLB(LOCAL, lambda1=0.0, lambda2=0.0)], ids=["MOON", "FedMLB"])
def test_with_zero_weights_moon_and_fedmlb_are_fedavg(same: Any, server: SGD):
    moved = type(same)(**(vars(same) | {"server_optimizer": server}))
    assert_close(run(moved).params, run(FedAvg(LOCAL, server)).params)


def test_moon_is_fedavg_in_its_first_round():
    """Previous local and global model are equal, so the contrastive term has no gradient."""
    assert_close(run(MOON(LOCAL, mu=5.0), rounds=1).params, run(FedAvg(LOCAL), rounds=1).params)


def test_a_network_of_one_block_has_no_hybrids():
    linear = Linear().build(SIZES[:1], SIZES[-1])
    with pytest.warns(FedraxWarning, match="the model has one block: the method has no effect"):
        found = run(FedMLB(LOCAL), linear)
    assert_close(found.params, run(FedAvg(LOCAL), linear).params)


def test_features_equal_to_the_samples_are_warned_of():
    linear = Linear().build(SIZES[:1], SIZES[-1])
    with pytest.warns(FedraxWarning, match="do not depend on its parameters: the method has no effect"):
        found = run(Upcycled(MOON(LOCAL), a=0.0), linear)
    assert_close(found.params, run(FedAvg(LOCAL), linear).params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in (MOON(LOCAL), FedMLB(LOCAL)):
            method.traits.check_parts(TASK, fedrax_params(initial_arrays()), samples()[0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("local", [{"momentum": 0.5, "weight_decay": 0.1}, {"batch_size": "full"}], ids=str)
@pytest.mark.parametrize("kind", [MOON, FedMLB])
def test_loss_terms_apply_to_every_kind_of_local_step(kind: Any, local: dict):
    """The terms are part of the loss, for any choice of batches and with momentum."""
    steps = LocalSGD(lr=0.1, steps=3, order="stored", **local)
    assert distance(run(kind(steps)).params, run(FedAvg(steps)).params) > 1e-4


def test_zero_features_have_zero_gradient():
    """Features of ReLU units may all be zero, whose cosine similarity is defined as 0."""
    rows, others = jnp.array([[0.0, 0.0], [3.0, 4.0]]), jnp.ones((2, 2))
    np.testing.assert_allclose(cosine(rows, others), [0, 7 / (5 * np.sqrt(2))], rtol=1e-6)
    gradient = jax.grad(lambda z: cosine(z, others).sum())(rows)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()
    assert not jax.grad(lambda z: cosine(others, z).sum())(rows)[0].any()


@pytest.mark.parametrize(("kind", "lacks"), [(MOON, "features"), (FedMLB, "blocks")])
def test_models_without_features_or_blocks_are_rejected(kind: Any, lacks: str):
    with pytest.raises(FedraxError, match=f"{kind.__name__} needs a model .*{lacks}"):
        run(kind(LOCAL), Model(NETWORK.init, NETWORK.apply))


@pytest.mark.parametrize(
    ("kind", "task", "message"),
    [
        (
            MOON,
            dataclasses.replace(TASK, features=lambda params, x: x),
            "task's features cannot be computed.* 3 were given",
        ),
        (FedMLB, dataclasses.replace(TASK, blocks=(lambda params, x: x,)), "task's block 1 cannot be computed"),
        (FedMLB, dataclasses.replace(TASK, loss_of_outputs=None), r"give Task\(..., loss_of_outputs=...\)"),
        (FedMLB, binary_classification(MLP(hidden=(3,)).build(SIZES[:1], 1)), "this model has one output per sample"),
    ],
    ids=["features", "block", "loss", "one output"],
)
def test_malformed_features_and_blocks_raise_a_clear_error(kind: Any, task: Any, message: str):
    x, _ = samples()
    federation = Federation.from_arrays(x, (x[:, 0] > 0).astype(int), offsets=np.array(OFFSETS))
    with pytest.raises(FedraxError, match=message):
        simulate(kind(LOCAL), task, federation, rounds=1)
