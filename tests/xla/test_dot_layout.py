"""Sums over several axes as one product, equal up to rounding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.xla.pipeline import optimize, optimize_forward
from fedrax.xla.tracing import equations_in


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def products_in(function, *args) -> list:
    """Dimensions of the factors of all products, including those in called functions."""
    found = equations_in(jax.make_jaxpr(function)(*args))
    return [e.params["dimension_numbers"] for e in found if e.primitive.name == "dot_general"]


ONE_PRODUCT = (((0,), (0,)), ((), ()))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("left", "right", "axes"),
    [
        ((3, 5, 7), (3, 5, 4), 2),
        ((3, 5, 4), (3, 5, 7), 2),
        ((2, 3, 4, 5, 6), (2, 3, 4, 8), 3),
        ((6, 2, 3, 4), (6, 2, 5, 2), 2),
        ((4, 1, 9), (4, 1, 9), 2),
        ((4, 3), (4, 3, 5), 2),
        ((4, 3), (4, 3), 2),
        ((0, 3, 2), (0, 3, 5), 2),
    ],
)
def test_sums_over_leading_axes(left: tuple, right: tuple, axes: int, dtype):
    with jax.enable_x64(dtype is np.float64):
        a, b = jnp.asarray(normal(0, *left, dtype=dtype)), jnp.asarray(normal(1, *right, dtype=dtype))
        numbers = ((tuple(range(axes)), tuple(range(axes))), ((), ()))
        function = lambda a, b: lax.dot_general(a, b, numbers, precision="highest")  # noqa: E731
        found = jax.jit(optimize(function))(a, b)
        assert products_in(optimize(function), a, b) == [ONE_PRODUCT]
        expected = np.tensordot(np.float64(a), np.float64(b), (range(axes), range(axes)))
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 if dtype is np.float32 else 1e-12)


@pytest.mark.parametrize("spec", ["bti,btij->btj", "bti,tbj->ij", "bi,bj->ij", "bit,bjt->ij"])
def test_other_contractions_are_unchanged(spec: str):
    sizes = {"b": 3, "t": 4, "i": 5, "j": 6}
    args = [jnp.asarray(normal(k, *(sizes[c] for c in part))) for k, part in enumerate(spec.split("->")[0].split(","))]
    function = lambda *args: jnp.einsum(spec, *args)  # noqa: E731
    assert products_in(optimize(function), *args) == products_in(function, *args) != []
    np.testing.assert_array_equal(jax.jit(optimize(function))(*args), jax.jit(function)(*args))


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_gradient_of_a_dense_layer_over_positions(shape: tuple[int, ...]):
    x, w = jnp.asarray(normal(0, 4, 7, 5)), jnp.asarray(normal(1, 5, *shape))

    def loss(w: Array) -> Array:
        return jnp.square(jnp.tanh(jnp.tensordot(x, w, 1))).sum()

    np.testing.assert_allclose(optimize(jax.grad(loss))(w), jax.grad(loss)(w), rtol=2e-5, atol=1e-5)
    assert ONE_PRODUCT in products_in(optimize(jax.grad(loss)), w)
    assert ONE_PRODUCT not in products_in(jax.grad(loss), w)
    twice = jax.grad(lambda w: jnp.square(jax.grad(loss)(w)).sum())
    np.testing.assert_allclose(optimize(twice)(w), twice(w), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_a_matrix_and_each_vector_have_rows_first(dtype):
    """In Equinox, layers are matrix @ vector under ``vmap``; gradients are not transposed either."""
    weights = normal(1, 7, 5, dtype=dtype), normal(2, 5, 7, dtype=dtype), normal(3, 7, dtype=dtype)
    x = normal(4, 3, 6, 5, dtype=dtype)

    def loss(weights, x):
        wide, narrow, bias = weights
        layer = lambda v: v + narrow @ jnp.tanh(wide @ v + bias)  # noqa: E731
        step = lambda x, _: (jax.vmap(jax.vmap(layer))(x), None)  # noqa: E731
        return jnp.square(lax.scan(step, x, None, length=2)[0]).sum()

    gradient = jax.grad(optimize_forward(loss), (0, 1))
    with jax.enable_x64(True):
        for a, b in zip(
            *(jax.tree.leaves(jax.jit(f)(weights, x)) for f in (jax.grad(loss, (0, 1)), gradient)), strict=True
        ):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(b, a, rtol=1e-4 if dtype == np.float32 else 1e-12)
        made = list(equations_in(jax.make_jaxpr(gradient)(weights, x)))
    multiplied = [[v.aval for v in (*e.invars, *e.outvars)] for e in made if e.primitive.name == "dot_general"]
    rows: Any = [left for left, _, out in multiplied if out.ndim == 3]  # type: ignore[attr-defined]
    assert len(rows) >= 4
    assert all(left.ndim == 3 for left in rows)  # vectors are the first factor, never the matrix


def test_products_with_rows_first_are_unchanged():
    """Of a batch and a matrix, and of a matrix and columns."""
    for dims, right in ((((1,), (1,)), (3, 5)), (((1,), (0,)), (5, 3, 2))):
        product = lambda a, b, dims=dims: lax.dot_general(a, b, (dims, ((), ())))  # noqa: E731
        assert products_in(optimize_forward(product), normal(0, 7, 5), normal(1, *right)) == [(dims, ((), ()))]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("spec", "exchanged"),
    [
        ("km,kn->mn", True),
        ("kn,km->nm", False),
        ("km,nk->mn", True),
        ("kn,mk->nm", True),
        ("bkm,bkn->bmn", True),
        ("bkhm,bkhn->bhmn", True),
        ("bkhm,bhnk->bhmn", True),
        ("kmb,bkn->bmn", True),
        ("klm,kln->mn", True),
        ("bklm,bkln->bmn", True),
        ("kmj,kn->mjn", True),
        ("kn,kmj->nmj", False),
    ],
)
def test_narrower_factor_of_a_sum_over_rows_is_first(spec: str, exchanged: bool, dtype: Any):
    sizes = {"k": 20, "l": 2, "m": 7, "n": 3, "b": 2, "h": 2, "j": 2}
    with jax.enable_x64(dtype is np.float64):
        operands, output = spec.split("->")
        left, right = (
            jnp.asarray(normal(i, *(sizes[a] for a in o), dtype=dtype)) for i, o in enumerate(operands.split(","))
        )
        dims = _dimensions(*operands.split(","), output)
        function = lambda a, b: lax.dot_general(a, b, dims, precision="highest")  # noqa: E731
        fast = optimize(function)
        found = jax.jit(fast)(left, right)
        expected, rounding = function(left, right), 1e-5 if dtype is np.float32 else 1e-13
        np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        made = list(equations_in(jax.make_jaxpr(fast)(left, right)))
        (product,) = [e for e in made if e.primitive.name == "dot_general"]
        assert any(e.primitive.name == "optimization_barrier" for e in made)  # otherwise XLA exchanges them again
        narrow = sizes["n"] == math.prod(
            n
            for i, n in enumerate(product.invars[0].aval.shape)  # type: ignore[attr-defined]
            if i not in (*product.params["dimension_numbers"][0][0], *product.params["dimension_numbers"][1][0])
        )
        assert narrow != (spec == "kn,mk->nm")  # the second one is summed over its last axis
        assert exchanged == (product.invars[0].aval.shape[-1] != left.shape[-1])  # type: ignore[attr-defined]


def _dimensions(left: str, right: str, output: str) -> Any:
    batch = [a for a in output if a in left and a in right]
    summed = [a for a in left if a in right and a not in output]
    places = lambda names, axes: tuple(axes.index(a) for a in names)  # noqa: E731
    return (places(summed, left), places(summed, right)), (places(batch, left), places(batch, right))


@pytest.mark.parametrize("spec", ["mk,kn->mn", "mk,nk->mn", "bmk,bkn->bmn"])
def test_products_over_rows_are_unchanged(spec: str):
    sizes = {"k": 20, "m": 7, "n": 3, "b": 2}
    operands = spec.split("->")[0].split(",")
    args = [jnp.asarray(normal(i, *(sizes[a] for a in axes))) for i, axes in enumerate(operands)]
    function = lambda *args: jnp.einsum(spec, *args)  # noqa: E731
    made = equations_in(jax.make_jaxpr(optimize(function))(*args))
    assert not any(e.primitive.name == "optimization_barrier" for e in made)
