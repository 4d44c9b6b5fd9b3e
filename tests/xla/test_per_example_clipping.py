"""Sums of clipped per-example gradients against NumPy, example by example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import classification, tree
from fedrax.contract.task import Batch
from fedrax.models import CNN, MLP, Logistic
from fedrax.xla.per_example_clipping import _match_outer_product, clipped_gradient_sum
from fedrax.xla.rewriting import trace_inlined

B, BOUND = 6, 0.9
COUNTS = np.array([True, True, False, True, True, True])
NETWORKS = {
    "logistic": (Logistic().build((8, 8), 3), set()),
    "mlp": (MLP(hidden=(20, 12)).build((8, 8), 30), {"dense1/weight", "dense2/weight", "output/weight"}),
    "cnn": (CNN(channels=(3, 4), hidden=7, dropout=(0.0, 0.0)).build((8, 8), 3), {"dense1/weight"}),
}


def gradient_of(network: str) -> tuple[Any, Any, Batch]:
    """(gradient of a sample, parameters, samples)."""
    task = classification(NETWORKS[network][0])
    x = np.random.default_rng(0).normal(size=(B, 8, 8)).astype(np.float32)
    one = lambda params, sample: task.loss(params, jax.tree.map(lambda a: a[None], sample), jax.random.key(0))[0]  # noqa: E731
    return jax.grad(one), task.init(jax.random.key(1)), Batch(jnp.asarray(x), jnp.arange(B) % 3)


def one_by_one(gradient: Any, params: Any, samples: Any) -> tuple[list[np.ndarray], list[float]]:
    """(leaves of the clipped sum, norms of the gradients)."""
    total, lengths = [np.zeros(leaf.shape) for leaf in jax.tree.leaves(params)], []
    single = jax.jit(gradient)
    for b in np.flatnonzero(COUNTS):
        found = single(params, jax.tree.map(lambda a: a[b], samples))  # noqa: B023
        found = [np.asarray(leaf, float) for leaf in jax.tree.leaves(found)]
        lengths.append(np.sqrt(sum(np.sum(leaf**2) for leaf in found)))
        total = [t + min(1, BOUND / lengths[-1]) * leaf for t, leaf in zip(total, found, strict=True)]
    return total, lengths


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("network", NETWORKS)
def test_sums_agree_with_single_gradients(network: str):
    gradient, params, samples = gradient_of(network)
    summed = jax.jit(lambda p, s: clipped_gradient_sum(gradient, p, s, bound=BOUND, counts=jnp.asarray(COUNTS)))(
        params, samples
    )
    expected, lengths = one_by_one(gradient, params, samples)
    assert max(lengths) > BOUND
    for leaf, other in zip(jax.tree.leaves(summed), expected, strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-6)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("network", NETWORKS)
def test_per_example_gradients_of_dense_layers_are_not_materialized(network: str):
    gradient, params, samples = gradient_of(network)
    jaxpr = trace_inlined(jax.vmap(gradient, (None, 0)), params, samples)[0].jaxpr
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    names = zip(tree.leaf_names(params), jaxpr.outvars, strict=True)
    assert {name for name, v in names if _match_outer_product(v, makers)} == NETWORKS[network][1]


def test_weights_used_repeatedly_and_transposed():
    def loss(params: dict, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, row: (jnp.tanh(params["again"] @ h + row), None), jnp.zeros(4), x)
        return jnp.sum((params["turned"].T @ h[:, None]) ** 2)

    params = {"again": jnp.eye(4) * 0.5, "turned": jnp.arange(12.0).reshape(4, 3) / 10}
    samples = jnp.asarray(np.random.default_rng(1).normal(size=(B, 5, 4)), jnp.float32)
    summed = jax.jit(lambda p, s: clipped_gradient_sum(jax.grad(loss), p, s, bound=BOUND, counts=jnp.asarray(COUNTS)))(
        params, samples
    )
    for leaf, other in zip(jax.tree.leaves(summed), one_by_one(jax.grad(loss), params, samples)[0], strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-6)


def test_every_clipped_gradient_is_within_the_bound():
    """Neither with nonfinite entries, nor with factors whose squares underflow."""
    samples = jnp.array([[1e-25, 2e22], [jnp.inf, 1.0], [jnp.nan, 1.0], [1.0, 1.0], [0.0, 1.0]])

    def gradient(params: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (sample[1] * (jnp.full((1, 3), sample[0]) @ w)).sum())(params)

    sums = jax.jit(
        lambda bound: clipped_gradient_sum(gradient, jnp.zeros((3, 2)), samples, bound=bound, counts=jnp.ones(5, bool))
    )
    for bound in (1e-4, 10.0):
        summed = sums(bound)
        exact = min(bound, 2e-3 * np.sqrt(6)) + min(bound, np.sqrt(6))
        np.testing.assert_allclose(summed, np.full((3, 2), exact / np.sqrt(6)), rtol=1e-5)
