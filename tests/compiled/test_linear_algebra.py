"""Factorisations of many matrices are JAX's, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

from fedrax.compiled.linear_algebra import RULES
from fedrax.compiled.on_cpu import fast_on_cpu
from fedrax.compiled.side_by_side import side_by_side
from fedrax.compiled.tracing import equations_in

FUNCTIONS: dict[str, Callable] = {
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.mT + jnp.eye(4)),
    "determinants": jnp.linalg.slogdet,
    "eigenvalues": jnp.linalg.eigvals,
    "eigenvectors": jnp.linalg.eigh,
    "hessenberg": linalg.hessenberg,
    "qr": jnp.linalg.qr,
    "schur": linalg.schur,
    "singular values": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "solutions": lambda a: jnp.linalg.solve(a, a.mT),
    "tridiagonal": linalg.tridiagonal,
    "tridiagonal solutions": lambda a: linalg.tridiagonal_solve(a[..., 0], 9 + a[..., 1], a[..., 2], a),
    "triangular solutions": lambda a: jax.scipy.linalg.solve_triangular(a + 4 * jnp.eye(4), a.mT),
}


def of_several(function: Callable, *args: Any) -> list[str]:
    """The factorisations of several matrices at once that it makes."""
    found = []
    for equation in equations_in(jax.make_jaxpr(function)(*args)):
        axes = 1 if equation.primitive.name == "tridiagonal_solve" else 2
        if equation.primitive.name in RULES and np.prod(equation.invars[0].aval.shape[:-axes]) > 1:
            found.append(equation.primitive.name)
    return found


@pytest.mark.skipif(not RULES, reason="this jaxlib computes them in turn itself")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_jaxs_in_turn(name: str):
    """Of a batch in two axes, and of clients at once."""
    function, a = FUNCTIONS[name], jax.random.normal(jax.random.key(0), (3, 2, 4, 4))
    expected = function(a)
    assert of_several(function, a)
    for fast in (fast_on_cpu(function), side_by_side(fast_on_cpu(function))):
        assert not of_several(fast, a)
        for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(jax.jit(fast)(a)), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not RULES, reason="this jaxlib computes them in turn itself")
def test_gradients_and_clients_at_once_whose_samples_are_single_matrices():
    loss = lambda w, a: jnp.linalg.cholesky(a * w + jnp.eye(4)).sum() + jnp.linalg.slogdet(a + w * jnp.eye(4))[1]  # noqa: E731
    a = jnp.ones((5, 4, 4)) + jnp.arange(1.0, 6)[:, None, None] * jnp.eye(4)
    gradient = fast_on_cpu(jax.grad(lambda w, a: loss(w, a).sum()))
    side = side_by_side(gradient, (None, 0))
    assert of_several(jax.vmap(gradient, (None, 0)), 1.0, a) and not of_several(side, 1.0, a)
    np.testing.assert_allclose(side(1.0, a), jax.vmap(jax.grad(loss), (None, 0))(1.0, a), rtol=1e-4)
