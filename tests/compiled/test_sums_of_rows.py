"""Sums over several axes as one product: the same numbers, in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.compiled.on_cpu import fast_on_cpu
from fedrax.compiled.tracing import equations_in


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def products(function, *args) -> list:
    """The dimensions of what is multiplied, also inside functions that are called."""
    found = equations_in(jax.make_jaxpr(function)(*args))
    return [e.params["dimension_numbers"] for e in found if e.primitive.name == "dot_general"]


ONE = (((0,), (0,)), ((), ()))


@pytest.mark.few(4)
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
        found = jax.jit(fast_on_cpu(function))(a, b)
        assert products(fast_on_cpu(function), a, b) == [ONE]
        wanted = np.tensordot(np.float64(a), np.float64(b), (range(axes), range(axes)))
        assert (found.shape, found.dtype) == (wanted.shape, dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 if dtype is np.float32 else 1e-12)


@pytest.mark.parametrize("spec", ["bti,btij->btj", "bti,tbj->ij", "bi,bj->ij", "bit,bjt->ij"])
def test_other_products_are_left_alone(spec: str):
    sizes = {"b": 3, "t": 4, "i": 5, "j": 6}
    args = [jnp.asarray(normal(k, *(sizes[c] for c in part))) for k, part in enumerate(spec.split("->")[0].split(","))]
    function = lambda *args: jnp.einsum(spec, *args)  # noqa: E731
    assert products(fast_on_cpu(function), *args) == products(function, *args) != []
    np.testing.assert_array_equal(jax.jit(fast_on_cpu(function))(*args), jax.jit(function)(*args))


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_the_gradient_of_a_dense_layer_over_places(shape: tuple[int, ...]):
    x, w = jnp.asarray(normal(0, 4, 7, 5)), jnp.asarray(normal(1, 5, *shape))

    def loss(w: Array) -> Array:
        return jnp.square(jnp.tanh(jnp.tensordot(x, w, 1))).sum()

    np.testing.assert_allclose(fast_on_cpu(jax.grad(loss))(w), jax.grad(loss)(w), rtol=2e-5, atol=1e-5)
    assert ONE in products(fast_on_cpu(jax.grad(loss)), w)
    assert ONE not in products(jax.grad(loss), w)
    twice = jax.grad(lambda w: jnp.square(jax.grad(loss)(w)).sum())
    np.testing.assert_allclose(fast_on_cpu(twice)(w), twice(w), rtol=1e-4, atol=1e-3)
