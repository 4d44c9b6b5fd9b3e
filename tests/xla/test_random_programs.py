"""Random programs and their gradients agree with all passes, each pass alone, and none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import Array, lax

from fedrax.xla import PASSES, Limits, Options, accumulate_gradients, optimize, optimize_forward, plan_microbatches
from fedrax.xla import use_options as under
from fedrax.xla.options import PassName

ROWS, WIDTH, SIZE, CHANNELS = 4, 6, 5, 2
LOW_LIMITS = Limits(
    attention_bytes=0,
    attention_block_bytes=64,
    attention_block_rows=2,
    attention_growth=1,
    attention_batched_growth=1,
    layer_scan_equations=4,
    microbatch_bytes=64,
    microbatch_weight_ratio=0,
    conv_groups=1,
    kernel_gradient_bytes=512,
    full_conv_useful=float("inf"),
    full_conv_pixels=1,
    recurrent_weight_ratio=1,
    recurrent_product_ratio=1,
    recurrent_steps=1,
    random_bits=1,
    sine_numbers=1,
)
"""Limits with which passes apply to arrays of any size."""
ALL_PASSES = frozenset(get_args(PassName))
IN_PIPELINE = sorted(one.name for one in PASSES if one.stage in ("forward", "lowering"))


def conv(x: Array, w: Array, stride: int = 1, padding: str = "SAME", groups: int = 1) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, w, (stride, stride), padding, feature_group_count=groups, dimension_numbers=numbers)
    return jnp.tanh(y)


def pooled(x: Array, largest: bool) -> Array:
    first, add = (-jnp.inf, lax.max) if largest else (0.0, lax.add)
    return lax.reduce_window(x, first, add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")


def recurrent(v: Array, w: Array) -> Array:
    return lax.scan(lambda h, x: ((h := jax.nn.sigmoid(h @ w + x @ w)), h), v, jnp.stack([v, jnp.sin(v), -v]))[0]


def blocks(v: Array, w: Array) -> Array:
    for k in range(3):
        v = v + jnp.tanh((v - v.mean(-1, keepdims=True)) @ (w * (k + 1)))
    return v


def attention(u: Array, v: Array) -> Array:
    a, b = (x.reshape(ROWS, WIDTH, 1) for x in (u, v))
    return (jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", a, b)) @ b).reshape(ROWS, WIDTH)


VECTORS: list[Callable[[Array, Array, Array], Array]] = [
    lambda u, v, w: u + v,
    lambda u, v, w: jnp.tanh(u * v),
    lambda u, v, w: jnp.sin(3 * u) - jnp.cos(v),
    lambda u, v, w: jnp.where(u > 0, v, -u),
    lambda u, v, w: jnp.tanh(u @ w),
    lambda u, v, w: jnp.tanh(u @ w) + jnp.tanh(u @ w) ** 2,
    lambda u, v, w: jnp.tanh(jax.vmap(lambda row: w @ row)(u)),
    lambda u, v, w: jax.nn.softmax(u) * v,
    lambda u, v, w: (jnp.tanh(u) @ jnp.ones((WIDTH, WIDTH))) / WIDTH,
    lambda u, v, w: u - u.mean(0),
    lambda u, v, w: u[jnp.array([1, 3, 0, 0])],
    lambda u, v, w: jnp.take(u, jnp.array([5, 1, 1, 0, 2, 3]), axis=1),
    lambda u, v, w: jax.checkpoint(lambda u: jnp.tanh(u @ w) @ w / 4)(u),
    lambda u, v, w: u * jax.random.bernoulli(jax.random.key(3), 0.5, u.shape),
    lambda u, v, w: recurrent(u, w),
    lambda u, v, w: blocks(u, w / 2),
    lambda u, v, w: attention(u, v),
    lambda u, v, w: lax.cond(jnp.sum(u) > 0, jnp.tanh, jnp.sin, v),
]
IMAGES: list[Callable[[Array, Array], Array]] = [
    lambda x, w: conv(x, w),
    lambda x, w: conv(x, w[:, :, :1], groups=CHANNELS),
    lambda x, w: conv(x, w, padding="VALID"),
    lambda x, w: conv(x, w, stride=2),
    lambda x, w: pooled(x, True),
    lambda x, w: pooled(x, False) / 4,
    lambda x, w: (x - x.mean((1, 2), keepdims=True)) * lax.rsqrt(x.var((1, 3), keepdims=True) + 0.1),
    lambda x, w: jnp.tanh(x) * x,
]
STEPS = st.lists(
    st.tuples(st.integers(0, len(VECTORS) + len(IMAGES) - 1), st.integers(0, 7), st.integers(0, 7)), max_size=7
)


def program(steps: list[tuple[int, int, int]]) -> Callable[..., Array]:
    """(weights, x [ROWS, ...]) -> losses [ROWS] of the operations in ``steps``, each with its inputs."""

    def losses(weights: tuple[Array, Array], x: Array, key: Array) -> Array:
        dense, kernel = weights
        flat = x.reshape(len(x), -1)
        vectors, images = [flat[:, :WIDTH], jnp.sin(flat[:, -WIDTH:])], [x]
        for operation, i, j in steps:
            if operation < len(VECTORS):
                u, v = vectors[i % len(vectors)], vectors[j % len(vectors)]
                vectors.append(VECTORS[operation](u, v, dense))
            else:
                image = images[i % len(images)]
                fits = min(image.shape[1:3]) >= 3
                images.append(IMAGES[operation - len(VECTORS)](image, kernel) if fits else jnp.tanh(image))
        return sum(v.sum(1) for v in vectors[-2:]) + images[-1].mean((1, 2, 3))

    return losses


def arguments() -> tuple[tuple[Array, Array], Array]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32) / 2  # noqa: E731
    return (draw(WIDTH, WIDTH), draw(3, 3, CHANNELS, CHANNELS)), draw(ROWS, SIZE, SIZE, CHANNELS)


def assert_agrees(found: object, expected: object) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(jnp.abs(b).max(initial=1)))


def check(steps: list[tuple[int, int, int]], single_pass: list[str]) -> None:
    losses, (weights, x), key = program(steps), arguments(), jax.random.key(0)
    objective = lambda weights, x: losses(weights, x, key).sum()  # noqa: E731
    expected = jax.jit(jax.value_and_grad(objective, (0, 1)))(weights, x)
    for kept in (IN_PIPELINE, *([name] for name in single_pass)):
        options = Options(ALL_PASSES - set(kept), LOW_LIMITS)
        gradient = jax.value_and_grad(optimize_forward(objective, options), (0, 1))
        assert_agrees(jax.jit(optimize(gradient, options=options))(weights, x), expected)


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@settings(SETTINGS, max_examples=6)
@given(STEPS, st.sampled_from(IN_PIPELINE))
def test_passes_composed_and_one_alone_agree_with_jax(steps: list[tuple[int, int, int]], single_pass: str) -> None:
    check(steps, [single_pass])


@pytest.mark.slow
@settings(SETTINGS, max_examples=100)
@given(STEPS)
def test_passes_composed_and_each_alone_agree_with_jax(steps: list[tuple[int, int, int]]) -> None:
    check(steps, IN_PIPELINE)


@settings(SETTINGS, max_examples=5)
@given(STEPS)
def test_microbatches_of_any_program_add_up_to_the_batch(steps: list[tuple[int, int, int]]) -> None:
    losses, (weights, x), key = program(steps), arguments(), jax.random.key(0)
    gradient = lambda weights, x, counts: jax.value_and_grad(lambda w: losses(w, x, key).sum())(weights)  # noqa: E731
    with under(Options(limits=LOW_LIMITS)):
        plan = plan_microbatches(losses, weights, x, key)
        if plan is not None and plan.drawn is None:
            summed = jax.jit(lambda w, x: accumulate_gradients(gradient, plan, w, x, None))
            assert_agrees(summed(weights, x), jax.jit(lambda w, x: gradient(w, x, None))(weights, x))


def test_all_passes_are_registered_and_can_be_switched_off() -> None:
    assert sorted(one.name for one in PASSES) == sorted(ALL_PASSES)
    with pytest.raises(Exception, match="no compiler pass is called 'sce'"):
        Options(frozenset({"sce"}))  # type: ignore[arg-type]


def test_documentation_lists_every_pass() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compiler-passes.md").read_text("utf-8")
    for one in PASSES:
        assert f"| `{one.name}` | {one.matches} | {one.becomes} | {', '.join(one.backends).upper()} |" in page
