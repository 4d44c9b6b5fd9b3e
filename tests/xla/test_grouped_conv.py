"""Convolutions of vectorized clients as products: equal to JAX, without grouped convolutions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from fedrax.xla.grouped_conv import lower_grouped_convs
from fedrax.xla.tracing import equations_in
from tests.xla.agreement import TOLERANCE, double_precision, draw, gradients
from tests.xla.test_conv_lowering import conv, random_convolution

__all__ = ["double_precision"]


def groups_in(function: Callable, *args: Any) -> list[int]:
    """Number of groups of each convolution in a function."""
    found = [
        e.params for e in equations_in(jax.make_jaxpr(function)(*args)) if e.primitive.name == "conv_general_dilated"
    ]
    return [params["feature_group_count"] * params["batch_group_count"] for params in found]


def assert_products(function: Callable, *args: Any) -> None:
    """Assert that grouped convolutions become products with equal results."""
    rewritten = lower_grouped_convs(function)
    assert max(groups_in(function, *args)) > 1 and max(groups_in(rewritten, *args), default=1) == 1
    expected, found = jax.jit(function)(*args), jax.jit(rewritten)(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=0, atol=TOLERANCE[a.dtype] * np.abs(a).max(initial=1))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(6))
def test_vectorized_clients_with_random_kernels(seed: int):
    """Twelve in each program, with three clients each, alternating between dtypes; some have groups of their own."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    functions, inputs = [], []
    while len(functions) < 12:
        dtype = np.float32 if len(functions) % 2 else np.float64
        function, images, kernel, orders = random_convolution(choose)
        x, w = ([sizes[axis] for axis in order] for sizes, order in zip((images, kernel), orders[:2], strict=True))
        inputs.append((draw(rng, (3, *x), dtype), draw(rng, (3, *w), dtype)))
        functions.append(jax.vmap(gradients(function, len(functions))))
    assert_products(lambda inputs: [f(*xw) for f, xw in zip(functions, inputs, strict=True)], inputs)


def test_patches_of_any_size_are_products():
    """In vision transformers, whose kernels are too large for patches."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (2, 1, 144, 132, 1)), draw(rng, (2, 12, 12, 1, 2))
    assert_products(jax.vmap(gradients(partial(conv, window_strides=(12, 12)), 0)), x, w)


def test_large_groups_are_computed_sequentially(limits: Callable[..., None]):
    limits(grouped_conv_bytes=3000)
    rng = np.random.default_rng(0)
    x, w = draw(rng, (5, 2, 6, 6, 3)), draw(rng, (5, 3, 3, 3, 8))
    assert_products(jax.vmap(gradients(conv, 0)), x, w)
    jaxpr = jax.make_jaxpr(lower_grouped_convs(jax.vmap(conv)))(x, w)
    assert any(e.primitive.name == "scan" for e in equations_in(jaxpr))


def test_convolutions_in_loops_with_bfloat16_operands():
    """As in local steps in bfloat16 with sums in float32."""
    rng = np.random.default_rng(1)
    x, w = draw(rng, (3, 4, 2, 6, 6, 3)), draw(rng, (3, 3, 3, 3, 5))

    def steps(x: Any, w: Any) -> Any:
        short = lambda w, x: conv(x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type="float32")  # noqa: E731
        return lax.scan(lambda w, x: (w - 0.01 * jax.grad(lambda w: (short(w, x) ** 2).sum())(w), None), w, x)[0]

    function = jax.vmap(steps)
    assert max(groups_in(lower_grouped_convs(function), x, w), default=1) == 1
    np.testing.assert_allclose(
        jax.jit(lower_grouped_convs(function))(x, w), jax.jit(function)(x, w), rtol=0.02, atol=0.02
    )


def test_bfloat16_depthwise_convolutions_are_summed_in_float32():
    """In bfloat16 a sum of 49 terms would have an error of a percent."""
    rng = np.random.default_rng(3)
    x, w = draw(rng, (3, 2, 9, 9, 4)).astype("bfloat16"), draw(rng, (3, 7, 7, 1, 4)).astype("bfloat16")
    function = jax.vmap(lambda x, w: conv(x, w, feature_group_count=4))
    exact = function(x.astype("float64"), w.astype("float64"))
    found = jax.jit(lower_grouped_convs(function))(x, w)
    assert found.dtype == "bfloat16"
    np.testing.assert_allclose(found.astype("float64"), exact, rtol=2**-8, atol=1e-3)


def test_convolutions_with_a_shared_kernel_are_unchanged():
    rng = np.random.default_rng(2)
    x, w = draw(rng, (3, 2, 6, 6, 3)), draw(rng, (3, 3, 3, 4))
    shared = jax.vmap(conv, in_axes=(0, None))
    assert groups_in(lower_grouped_convs(shared), x, w) == [1]
