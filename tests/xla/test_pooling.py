"""Rewritten pooling and sums against JAX: values and gradients for random shapes."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.xla.pipeline import optimize
from fedrax.xla.tracing import equations_in
from tests.xla.agreement import assert_same, double_precision, draw, every_dtype, gradients

__all__ = ["double_precision"]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_max_pooling(seed: int):
    """With ties in a window, whose first entry gets the gradient."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    functions, inputs = [], []
    for _ in range(8):
        axes = range(choose.choice([2, 3, 4]))
        sizes = tuple(choose.randint(1, 3) for _ in axes)
        pads = tuple((choose.randint(0, size - 1), choose.randint(0, size - 1)) for size in sizes)
        strides = tuple(choose.randint(1, 3) for _ in axes)
        pool = partial(
            lax.reduce_window,
            init_value=-np.inf,
            computation=lax.max,
            window_dimensions=sizes,
            window_strides=strides,
            padding=pads,
        )
        functions.append(gradients(pool, len(functions)))
        inputs.append(rng.integers(0, 5, size=[choose.randint(4, 8) for _ in axes]).astype(np.float64))
    everything = lambda inputs: [f(x) for f, x in zip(functions, inputs, strict=True)]  # noqa: E731
    assert "select_and_scatter_add" not in str(jax.make_jaxpr(optimize(everything))(inputs))
    assert_same(everything, inputs)


def test_average_pooling_and_sums_over_scattered_axes():
    x = draw(np.random.default_rng(0), (2, 6, 6, 8))
    for how in (
        ((2, 3), (2, 1), "SAME"),
        ((4, 3), (4, 3), "VALID"),
        ((3, 4), (1, 1), "SAME"),
        ((6, 6), (6, 6), "VALID"),
    ):
        pool = gradients(partial(nn.avg_pool, window_shape=how[0], strides=how[1], padding=how[2]), 0)
        assert_same(pool, x)
        sums = [e for e in equations_in(jax.make_jaxpr(optimize(pool))(x)) if "window_sum" in e.primitive.name]
        large = [e for e in sums if math.prod(e.params["window_dimensions"]) > 8]
        assert all(
            max(e.params["window_strides"]) > 1 for e in large
        )  # at all positions, as in gradients: axis by axis
    assert_same(lambda x: [x.reshape(2, 6, 6, 4, 2).sum(axes) for axes in ((1, 2, 4), (0, 4), (1, 3), (3, 4))], x)


@every_dtype
def test_unit_axes_are_removed_from_reductions(dtype: Any):
    """With them the gradient of a softmax, which contains sums, takes six times as long in XLA."""
    x = draw(np.random.default_rng(0), (1, 3, 1, 8), dtype)

    def everything(x: Array) -> list:
        over = [(0,), (2, 3), (1, 3), (0, 2), (0, 1, 2, 3), (3,)]
        found = [one(x, axes) for axes in over for one in (jnp.sum, jnp.max)]
        return [*found, jax.nn.softmax(x), jnp.sum(x, 3, keepdims=True), jnp.max(x[:0], 3), jnp.sum(x[:0], 0)]

    assert_same(everything, x)
    for seed in range(2):
        assert_same(gradients(lambda x: jax.nn.softmax(x).sum((0, 1)), seed), x)
    made = equations_in(jax.make_jaxpr(optimize(everything))(x))
    read = [e.invars[0].aval.shape for e in made if e.primitive.name in ("reduce_sum", "reduce_max")]
    assert len(read) > 8
    assert not any(1 in shape for shape in read)


@pytest.mark.parametrize(("places", "kept"), [(1 << 15, True), (1 << 14, False)])
def test_sums_before_a_reshape_are_unchanged(places: int, kept: bool):
    """A reshape after the sum, as before a product, is not merged, because XLA would materialize it."""
    x = jax.random.normal(jax.random.key(0), (places // 16, 4, 16))
    weight = jax.random.normal(jax.random.key(1), (64, 2))
    product = lambda x: (x * jnp.sin(x)).sum(1).reshape(-1, 64) @ weight  # noqa: E731
    made = [equation.primitive.name for equation in equations_in(jax.make_jaxpr(optimize(product))(x))]
    assert ("optimization_barrier" in made) == kept
    assert_same(product, x)
