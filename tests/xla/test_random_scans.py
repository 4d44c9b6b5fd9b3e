"""Scans with random bodies, and their gradients, against JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.xla.pipeline import optimize

WIDTH = 16


@pytest.fixture(autouse=True)
def low_limits(limits: Callable[..., None]) -> Iterator[None]:
    """Hoist products of any size."""
    limits(recurrent_weight_ratio=1, recurrent_product_ratio=1, recurrent_steps=1)
    with jax.enable_x64(True):
        yield


def random_body(rng: np.random.Generator, weights: list[Array]) -> Callable:
    """(carried arrays, rows [B, WIDTH]) -> (carried arrays, outputs), with up to 14 operations."""
    operations: list[Callable[[Array, Array, Array], list[Array]]] = [
        lambda v, u, w: [v @ w / 4],
        lambda v, u, w: [v @ w.T / 4],
        lambda v, u, w: [v + u],
        lambda v, u, w: [v - u],
        lambda v, u, w: [jnp.tanh(v) * jnp.tanh(u)],
        lambda v, u, w: [jax.nn.sigmoid(v), 0.5 * u],
        lambda v, u, w: [jnp.tanh(v), jnp.tanh(v)],
        lambda v, u, w: [jnp.where(v > 0, u, v)],
        lambda v, u, w: [jax.jit(lambda v, w: jnp.tanh(v @ w / 4))(v, w)],
        lambda v, u, w: [jnp.cumsum(v, 0)],
        lambda v, u, w: [v.T @ u],
    ]
    chosen = [(operations[rng.integers(len(operations))], rng.random(3)) for _ in range(rng.integers(2, 15))]
    ends, outputs = rng.random((4, 2)), rng.random(rng.integers(0, 5))
    pick = lambda among, u: among[int(u * len(among))]  # noqa: E731

    def body(carried: tuple, rows: tuple) -> tuple[tuple, list]:
        vectors, sums = [c for c in carried if len(c) < WIDTH] + list(rows), []
        for operation, (i, j, k) in chosen:
            made = operation(pick(vectors, i), pick(vectors, j), pick(weights, k))
            (sums if len(made[0]) == WIDTH else vectors).extend(made)
        after = []
        for c, (i, how) in zip(carried, ends, strict=False):
            new = pick(vectors if len(c) < WIDTH else sums or [0.5 * c], i)
            after.append(c + new if len(c) == WIDTH or how < 0.3 else jnp.tanh(new))
        return tuple(after), [pick(vectors + sums, u) for u in outputs]

    return body


def random_scan(seed: int) -> tuple[Callable, tuple]:
    """(a scan over weights, carried arrays and rows, and these arguments)."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    length, batch = int(rng.integers(1, 6)), int(rng.integers(1, 3))
    weights = [draw(WIDTH, WIDTH) for _ in range(rng.integers(1, 4))]
    carried = [draw(batch, WIDTH), *(draw((batch, WIDTH)[rng.integers(2)], WIDTH) for _ in range(rng.integers(0, 3)))]
    rows = [draw(length, batch, WIDTH) for _ in range(rng.integers(0, 3))]
    rows = [rows[0]] * 2 if len(rows) == 2 and rng.random() < 0.3 else rows
    how: dict[str, Any] = {"length": length, "reverse": bool(rng.random() < 0.4), "unroll": int(rng.integers(1, 3))}
    state = int(rng.integers(1 << 30))

    def function(weights: list[Array], carried: list[Array], rows: list[Array]) -> Any:
        body = random_body(np.random.default_rng(state), weights)
        return lax.scan(body, tuple(carried), tuple(rows), **how)

    return function, (weights, carried, rows)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", range(60))
def test_random_scans_and_their_gradients_agree_with_jax(seed: int) -> None:
    function, args = random_scan(seed)
    loss = lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*args)))  # noqa: E731
    for each in (function, jax.grad(loss, (0, 1, 2))):
        expected, found = jax.jit(each)(*args), jax.jit(optimize(each))(*args)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-10)
