"""Convolutions whose output is larger than their input."""

from __future__ import annotations

import math
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
from tests.xla.agreement import assert_same, double_precision, draw, gradients

__all__ = ["double_precision"]


def conv(x: Array, w: Array, **options: Any) -> Array:
    space = "HWT"[: x.ndim - 2]
    options = {
        "window_strides": (1,) * len(space),
        "dimension_numbers": (f"N{space}C", f"{space}IO", f"N{space}C"),
    } | options
    return lax.conv_general_dilated(x, w, **options)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(4))
def test_full_convolutions_agree_with_jax(seed: int, limits: Callable[..., None]):
    """With any padding and dilation, where inputs may be dilated; twelve in each program."""
    limits(full_conv_useful=math.inf, full_conv_pixels=1, full_conv_taps=2)
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    functions, inputs = [], []
    while len(functions) < 12:
        axes = choose.choice([1, 2, 2, 3])
        of = lambda values, axes=axes: tuple(choose.choice(values) for _ in range(axes))  # noqa: E731
        entries, apart = of([1, 2, 3, 4]), of([1, 1, 2])
        reach = [
            (n - 1) * by for n, by in zip(entries, apart, strict=True)
        ]  # larger padding has wrong results in XLA itself
        padding = tuple((choose.randint(-1, far), choose.randint(-1, far)) for far in reach)
        options = dict(padding=padding, lhs_dilation=of([1, 1, 2, 3]), rhs_dilation=apart)
        inputs.append((draw(rng, (2, *of([3, 4, 6]), 3)), draw(rng, (*entries, 3, 5))))
        functions.append(gradients(partial(conv, **options), len(functions)))
    assert_same(lambda inputs: [f(*xw) for f, xw in zip(functions, inputs, strict=True)], inputs)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("size", "entries", "step", "pads", "is_spread"),
    [
        (14, 9, 1, "VALID", True),
        (20, 9, 2, "VALID", True),
        (8, 3, 1, "VALID", True),
        (32, 3, 1, "VALID", False),
        (14, 9, 1, "SAME", False),
        (16, 4, 2, "SAME", False),
    ],
)
def test_convolutions_that_mostly_read_padding_are_rewritten(
    size: int, entries: int, step: int, pads: str, is_spread: bool
):
    """The gradient of images for large kernels, or small images, without padding."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (4, size, size, 32)), draw(rng, (entries, entries, 32, 32))
    gradient = jax.grad(lambda x, w: (conv(x, w, window_strides=(step, step), padding=pads) ** 2).sum())
    assert_same(gradient, x, w)
    made = list(equations_in(jax.make_jaxpr(optimize(gradient))(x, w)))
    assert any(e.primitive.name == "dynamic_update_slice" for e in made) == is_spread
