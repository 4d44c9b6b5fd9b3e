"""Sums over a scan's turns that are made after it: gradients of recurrent networks against JAX's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.compiled.on_cpu import fast_on_cpu


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def carried_shapes(function: Callable, *args: Any) -> set[tuple[int, ...]]:
    """Of what scans hand from turn to turn."""
    found: set[tuple[int, ...]] = set()

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                fixed, carried = equation.params["num_consts"], equation.params["num_carry"]
                found.update(v.aval.shape for v in equation.invars[fixed : fixed + carried])
            for value in equation.params.values():
                walk(value.jaxpr) if hasattr(value, "jaxpr") else None

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def assert_same(function: Callable, *args: Any) -> None:
    expected, given = jax.jit(function)(*args), jax.jit(fast_on_cpu(function))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-12)


@pytest.mark.few(5)
@pytest.mark.parametrize("cell", [nn.OptimizedLSTMCell, nn.LSTMCell, nn.GRUCell, nn.SimpleCell])
@pytest.mark.parametrize("how", [{}, {"reverse": True, "keep_order": True}, {"unroll": 3}])
def test_recurrent_networks_of_flax(cell: Any, how: dict) -> None:
    """No gradient of a weight is handed from step to step, and every gradient is JAX's."""
    network, x = nn.RNN(cell(24, param_dtype=float), **how), jnp.asarray(drawn(3, 7, 5))
    weights = network.init(jax.random.key(0), x)
    gradient = jax.grad(lambda w, x: (network.apply(w, x) ** 2).sum(), argnums=(0, 1))
    assert_same(gradient, weights, x)
    assert (24, 24) in carried_shapes(gradient, weights, x)
    assert not {(24, 24), (24, 96)} & carried_shapes(fast_on_cpu(gradient), weights, x)


def summed_products(body: Callable) -> Callable:
    """(a [T, B, A], b [T, B, C]) -> what a scan of ``body(total, a, b)`` ends with, from a start that is not zero."""
    return lambda a, b: lax.scan(lambda total, ab: body(total, *ab), jnp.ones((a.shape[-1], b.shape[-1])), (a, b))


@pytest.mark.parametrize(
    ("body", "is_taken_out"),
    [
        (lambda total, a, b: (total + a.T @ b, a.sum()), True),
        (lambda total, a, b: ((b.T @ a).T + total, a), True),
        (lambda total, a, b: (total + jnp.tanh(a).T @ b, ()), True),
        (lambda total, a, b: (total + a.T @ b, total.sum()), False),
        (lambda total, a, b: ((new := total + a.T @ b), new[0]), False),
        (lambda total, a, b: (total + (product := a.T @ b), product[0]), False),
        (lambda total, a, b: (total - a.T @ b, ()), False),
        (lambda total, a, b: (total + 2 * (a.T @ b), ()), False),
        (lambda total, a, b: (0.5 * total + a.T @ b, ()), False),
        (lambda total, a, b: (total + jnp.tanh(a.T @ b), ()), False),
        (lambda total, a, b: (total + total, ()), False),
        (lambda total, a, b: (a.T @ b, total), False),
    ],
)
def test_only_what_is_added_and_nothing_else(body: Callable, is_taken_out: bool) -> None:
    function, a, b = summed_products(body), drawn(6, 2, 30), drawn(6, 2, 20)
    assert_same(function, a, b)
    assert ((30, 20) in carried_shapes(fast_on_cpu(function), a, b)) is not is_taken_out


def test_factors_larger_than_their_product_stay() -> None:
    function, a, b = (
        summed_products(lambda total, a, b: (total + jnp.tanh(a).T @ b, ())),
        drawn(6, 90, 3),
        drawn(6, 90, 2),
    )
    assert_same(function, a, b)
    assert (3, 2) in carried_shapes(fast_on_cpu(function), a, b)


def test_a_scan_in_a_scan() -> None:
    def gradient(w: Array, x: Array) -> Array:
        inner = lambda h, x: lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, h, x)  # noqa: E731
        return lax.scan(inner, jnp.zeros(x.shape[2:]), x)[1].sum()

    assert_same(jax.grad(gradient), drawn(30, 30), drawn(3, 4, 2, 30))
    assert_same(jax.vmap(jax.grad(gradient), (None, 0)), drawn(30, 30), drawn(2, 3, 4, 2, 30))
