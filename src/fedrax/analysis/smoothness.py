"""Spectral norm of the Hessian of the mean loss, by the Lanczos method on Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.data.dataset import numpy_generator
from fedrax.prng.keys import CURVATURE, purpose_key
from fedrax.tree import Tree
from fedrax.xla import optimize

ITERATIONS = 20
"""Lanczos iterations. The estimate is a lower bound that grows with them."""
CHUNK = 128
"""Samples in one Hessian-vector product."""


def curvature(
    task: Task, federation: Federation, most: int, seed: int = 0, shares: np.ndarray | None = None
) -> Callable[[Tree], float]:
    """Function from parameters to |Hess f|, f = sum_i shares_i f_i over the N clients, f_i the mean loss of client i.

    shares: [N], by default 1/N. Uses all samples, or ``most`` samples if there are more: each is drawn by sampling a
    client with its share as probability, then one of its samples uniformly.
    """
    if shares is None:
        shares = np.full(federation.num_clients, 1 / federation.num_clients)
    rows, weights = _sample(federation, shares, most, numpy_generator(seed, "samples of the curvature"))
    padding = -len(rows) % CHUNK
    rows = np.pad(rows, (0, padding)).reshape(-1, CHUNK)
    weights = np.pad(weights, (0, padding)).reshape(-1, CHUNK).astype(np.float32)
    samples = jax.tree.map(lambda part: jnp.asarray(part)[rows], Batch(*federation.train))

    @jax.jit
    def tridiagonal(samples: Batch, weights: Array, params: Tree) -> tuple[Array, Array]:
        def product(v: Tree) -> Tree:
            def add(total: Tree, part: tuple[Batch, Array]) -> tuple[Tree, None]:
                def loss(p: Tree) -> Array:
                    return jnp.vdot(part[1], task.evaluation_loss(p, part[0]))

                image = optimize(lambda p, v: jax.jvp(jax.grad(loss), (p,), (v,))[1])
                return tree.add(total, image(params, v)), None

            return jax.lax.scan(add, tree.zeros_like(params), (samples, weights))[0]

        def lanczos_step(
            carry: tuple[Tree, Tree, Array], _: None
        ) -> tuple[tuple[Tree, Tree, Array], tuple[Array, Array]]:
            before, v, beta = carry
            image = tree.add_scaled(product(v), -beta, before)
            alpha = tree.dot(image, v)
            image = tree.add_scaled(image, -alpha, v)
            beta = tree.norm(image)
            return (v, tree.scale(1 / jnp.where(beta > 0, beta, 1), image), beta), (alpha, beta)

        keys = jax.random.split(purpose_key(seed, CURVATURE), len(jax.tree.leaves(params)))
        leaves, structure = jax.tree.flatten(params)
        drawn = [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves, strict=True)]
        start = jax.tree.unflatten(structure, drawn)
        start = tree.scale(1 / tree.norm(start), start)
        return jax.lax.scan(lanczos_step, (tree.zeros_like(params), start, jnp.zeros(())), None, ITERATIONS)[1]

    def norm(params: Tree) -> float:
        """The largest absolute eigenvalue on the Krylov space."""
        alpha, beta = (np.asarray(a, float) for a in tridiagonal(samples, jnp.asarray(weights), params))
        if not np.isfinite([alpha, beta]).all():
            return float("nan")
        table = np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)
        return float(np.abs(np.linalg.eigvalsh(table)).max())

    return norm


def _sample(
    federation: Federation, shares: np.ndarray, most: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``train``, and the weights of their losses in f."""
    sizes, n = federation.sizes, federation.num_clients
    if sizes.sum() <= most:
        return np.arange(sizes.sum()), np.repeat(shares / sizes, sizes)
    clients = rng.choice(n, most, p=shares / shares.sum())
    return federation.offsets[clients] + rng.integers(0, sizes[clients]), np.full(most, shares.sum() / most)
