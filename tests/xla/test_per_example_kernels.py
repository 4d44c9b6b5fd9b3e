"""Per-example gradients of convolution kernels, as DP-SGD clips them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array, lax

from fedrax.xla.pipeline import optimize
from fedrax.xla.tracing import equations_in
from tests.xla.agreement import assert_same, double_precision, draw, every_dtype

__all__ = ["double_precision"]


def per_example_gradients(upstream: Any, **options: Any) -> Callable[[Array, Array], Array]:
    """(images [B, space, C], kernel) -> gradients [B, ...] of the kernel."""

    def one(kernel: Array, image: Array, given: Array) -> Array:
        through = lambda kernel: lax.conv_general_dilated(image[None], kernel, **options)  # noqa: E731
        return jax.vjp(through, kernel)[1](given[None])[0]

    return lambda images, kernel: jax.vmap(partial(one, kernel))(images, upstream)


def case(rng: random.Random, dtype: Any) -> tuple[Callable, np.ndarray, np.ndarray]:
    numbers, axes = np.random.default_rng(rng.randint(0, 99)), rng.choice([1, 2, 2, 2, 3])
    space, few = "HWT"[:axes], lambda values: tuple(rng.choice(values) for _ in range(axes))
    groups = rng.choice([1, 1, 1, 2])
    into, out = groups * rng.choice([1, 2, 5]), groups * rng.choice([1, 3, 20])
    options: dict[str, Any] = dict(
        window_strides=few([1, 1, 2]),
        padding=rng.choice(["SAME", "VALID", tuple((rng.randint(0, 2), rng.randint(0, 3)) for _ in space)]),
        rhs_dilation=few([1, 1, 2]),
        feature_group_count=groups,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
    )
    images = draw(numbers, (rng.choice([2, 5]), *few([9, 12]), into), dtype)
    kernel = draw(numbers, (*few([1, 2, 3, 4, 8] if axes < 3 else [1, 2, 3]), into // groups, out), dtype)
    dilated = [(n - 1) * d + 1 for n, d in zip(kernel.shape, options["rhs_dilation"], strict=False)]
    if any(n > size for n, size in zip(dilated, images.shape[1:-1], strict=True)):
        return case(rng, dtype)
    shape = jax.eval_shape(partial(lax.conv_general_dilated, **options), images, kernel).shape
    return per_example_gradients(draw(numbers, shape, dtype), **options), images, kernel


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(4))
@every_dtype
def test_per_example_gradients_agree_with_jax(seed: int, dtype: Any):
    """Twelve in each program."""
    rng = random.Random(seed)
    functions, *inputs = zip(*(case(rng, dtype) for _ in range(12)), strict=True)
    assert_same(lambda *inputs: [f(*of) for f, *of in zip(functions, *inputs, strict=True)], *inputs)


def test_program_size_does_not_grow_with_the_samples():
    """And no convolution has a group for each sample, which XLA computes entry by entry."""
    rng, lengths = np.random.default_rng(0), set()
    kernel = draw(rng, (3, 3, 8, 32))
    for samples in (4, 40):
        images, upstream = draw(rng, (samples, 10, 10, 8)), draw(rng, (samples, 10, 10, 32))
        options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        gradients = per_example_gradients(upstream, **options)
        made = list(equations_in(jax.make_jaxpr(optimize(gradients))(images, kernel)))
        left = [e.params for e in made if e.primitive.name == "conv_general_dilated"]
        assert {(p["feature_group_count"], p["batch_group_count"]) for p in left} <= {(1, 1)}
        lengths.add(len(made))
        assert_same(gradients, images, kernel)
    assert len(lengths) == 1


@pytest.mark.parametrize("clients", [2, 3])
def test_per_example_gradients_of_vectorized_clients_agree_with_jax(clients: int):
    """With several samples in each group, for clients with different kernels."""
    rng = np.random.default_rng(1)
    images, kernels = draw(rng, (clients, 4, 9, 9, 5)), draw(rng, (clients, 3, 3, 5, 6))
    conv = partial(lax.conv, window_strides=(1, 1), padding="SAME")
    loss = lambda kernel, x: (conv(x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1)) ** 2).sum()  # noqa: E731
    assert_same(lambda kernels, images: jax.vmap(jax.value_and_grad(loss))(kernels, images), kernels, images)
