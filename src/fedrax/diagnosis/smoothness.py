"""How curved the mean loss is: the spectral norm of its Hessian, by power iteration on products with vectors."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.tree import Tree

ITERATIONS = 20
"""Of the power method. Its estimate only grows, and is short of the norm by little even where two eigenvalues are
close, for then either will do."""
AT_ONCE = 128
"""Samples in one product with the Hessian."""


def curvature(task: Task, federation: Federation, most: int, seed: int = 0) -> Callable[[Tree], float]:
    """parameters -> |Hess f| with f = mean_i f_i over the N clients, f_i the mean loss of client i.

    Of all samples, or where there are more than ``most`` of as many: a client drawn uniformly, then one of its samples.
    """
    rows, weights = _sample(federation, most, np.random.default_rng(seed))
    short = -len(rows) % AT_ONCE
    rows = np.pad(rows, (0, short)).reshape(-1, AT_ONCE)
    weights = np.pad(weights, (0, short)).reshape(-1, AT_ONCE).astype(np.float32)
    samples = Batch(*(jnp.asarray(part)[rows] for part in federation.train))

    @jax.jit
    def norm(samples: Batch, weights: Array, params: Tree) -> Array:
        def product(v: Tree) -> Tree:
            def add(total: Tree, part: tuple[Batch, Array]) -> tuple[Tree, None]:
                loss = lambda p: jnp.vdot(part[1], task.evaluation_loss(p, part[0]))  # noqa: E731
                return tree.add(total, jax.jvp(jax.grad(loss), (params,), (v,))[1]), None

            return jax.lax.scan(add, tree.zeros_like(params), (samples, weights))[0]

        def again(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
            v, _ = carry
            image = product(v)
            length = tree.norm(image)
            return tree.scale(1 / jnp.where(length > 0, length, 1), image), length

        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
        leaves, structure = jax.tree.flatten(params)
        drawn = [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves, strict=True)]
        start = jax.tree.unflatten(structure, drawn)
        start = tree.scale(1 / tree.norm(start), start)
        return jax.lax.fori_loop(0, ITERATIONS, again, (start, jnp.zeros(())))[1]

    return lambda params: float(norm(samples, jnp.asarray(weights), params))


def _sample(federation: Federation, most: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows and the weights of their losses in f."""
    sizes, n = federation.sizes, federation.num_clients
    if sizes.sum() <= most:
        return np.arange(sizes.sum()), np.repeat(1 / (n * sizes), sizes)
    clients = rng.integers(0, n, most)
    return federation.offsets[clients] + rng.integers(0, sizes[clients]), np.full(most, 1 / most)
