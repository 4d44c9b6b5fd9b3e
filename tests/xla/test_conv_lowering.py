"""Rewritten convolutions against JAX: values and gradients for random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
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


def random_convolution(rng: random.Random) -> tuple[Callable, dict, dict, tuple[str, str, str]]:
    """(function of images and kernel, their shapes, order of axes) with random values for every option of ``lax``."""
    space = "HWT"[: rng.choice([1, 2, 2, 2, 3])]
    groups = rng.choice([1, 1, 1, 2, 3, 6])
    into, out = groups * rng.choice([1, 1, 2, 3]), groups * rng.choice([1, 2, 3])
    images = {"N": rng.randint(1, 3), "C": into} | {axis: rng.randint(5, 8) for axis in space}
    kernel = {"O": out, "I": into // groups} | {axis: rng.randint(1, 3) for axis in space}
    by_batch = 1
    if rng.random() < 0.25:
        images |= {"N": images["N"] * groups, "C": kernel["I"]}
        groups, by_batch = 1, groups
    orders = ["".join(rng.sample(axes + space, len(axes + space))) for axes in ("NC", "OI", "NC")]
    few: Callable[[list], tuple] = lambda values: tuple(rng.choice(values) for _ in space)  # noqa: E731
    function = partial(
        lax.conv_general_dilated,
        window_strides=few([1, 2, 3]),
        padding=tuple((rng.randint(-1, 3), rng.randint(-1, 3)) for _ in space),
        lhs_dilation=few([1, 1, 2]),
        rhs_dilation=few([1, 2]),
        dimension_numbers=tuple(orders),
        feature_group_count=groups,
        batch_group_count=by_batch,
    )
    return function, images, kernel, tuple(orders)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(5))
def test_random_convolutions_and_their_gradients(seed: int):
    """Twenty in each program, alternating between dtypes."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    functions, inputs = [], []
    while len(functions) < 20:
        dtype = np.float32 if len(functions) % 2 else np.float64
        function, images, kernel, orders = random_convolution(choose)
        x, w = ([sizes[axis] for axis in order] for sizes, order in zip((images, kernel), orders[:2], strict=True))
        inputs.append((draw(rng, x, dtype), draw(rng, w, dtype)))
        functions.append(gradients(function, len(functions)))
    assert_same(lambda inputs: [f(*xw) for f, xw in zip(functions, inputs, strict=True)], inputs)


def conv(x: Array, w: Array, **options: Any) -> Array:
    """Images are [N, H, W, C]."""
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("size", "step"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (5, 3), (3, 4), (7, 2)])
@every_dtype
def test_strides(size: int, step: int, dtype: Any):
    """With enough channels that dilated inputs become convolutions of their own, and with a transposed convolution."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (2, 10, 9, 16), dtype), draw(rng, (size, size, 16, 18), dtype)
    strided = partial(conv, window_strides=(step, step))
    between = partial(conv, lhs_dilation=(step, step), padding=((size - 1, step), (size, size)))
    both = lambda x, w: [gradients(f, 1)(x, w) for f in (strided, between)]  # noqa: E731
    assert_same(both, x, w)
    found = [e for e in equations_in(jax.make_jaxpr(optimize(both))(x, w)) if "conv_general" in e.primitive.name]
    assert all(set(e.params["lhs_dilation"]) <= {1} for e in found)  # which XLA would constant-fold


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((1, 1, 6, 4), dict(window_strides=(2, 2))),
        ((8, 8, 6, 4), dict(padding="VALID")),
        ((3, 3, 1, 12), dict(feature_group_count=6, window_strides=(2, 1))),
        ((3, 3, 2, 6), dict(feature_group_count=3)),
        ((3, 3, 6, 0), dict()),
        ((4, 4, 6, 5), dict(window_strides=(4, 4), padding="VALID")),
        ((2, 3, 6, 5), dict(window_strides=(2, 5), padding="VALID")),
        ((1, 2, 6, 5), dict(window_strides=(1, 2))),
        ((8, 3, 6, 5), dict(padding=((0, 0), (1, 1)), window_strides=(1, 2))),
        ((4, 1, 6, 5), dict(padding=((1, 0), (0, 0)), rhs_dilation=(2, 1), window_strides=(3, 1))),
        ((3, 2, 1, 12), dict(feature_group_count=6, padding="VALID")),
        ((8, 1, 1, 12), dict(feature_group_count=6, padding="VALID")),
        ((8, 3, 1, 18), dict(feature_group_count=6, padding=((0, 0), (1, 1)), window_strides=(1, 2))),
        ((8, 3, 2, 9), dict(feature_group_count=3, padding=((0, 0), (2, 1)))),
    ],
    ids=[
        "a product",
        "one place",
        "depthwise",
        "groups",
        "no channels",
        "patches",
        "patches with gaps",
        "pairs",
        "whole height",
        "dilated along the height",
        "two outputs per channel",
        "whole height of each channel",
        "whole height of each channel, three outputs",
        "whole height in groups",
    ],
)
@every_dtype
def test_special_convolutions(kernel: tuple, options: dict, dtype: Any):
    rng = np.random.default_rng(0)
    assert_same(gradients(partial(conv, **options), 1), draw(rng, (3, 8, 8, 6), dtype), draw(rng, kernel, dtype))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("channels", "kernel", "options"),
    [
        ((4, 30), (3, 3), dict()),
        ((30, 4), (3, 2), dict(padding=((0, 1), (2, 0)))),
        ((30, 4), (3, 3), dict(rhs_dilation=(2, 1))),
        ((5, 6), (3, 5), dict(padding=((2, 1), (-1, 3)))),
        ((5, 6), (9, 2), dict()),
        ((30, 5), (3, 3), dict(window_strides=(2, 3))),
        ((30, 5), (5, 2), dict(window_strides=(2, 3), padding=((-1, 3), (2, 0)))),
        ((30, 5), (7, 1), dict(window_strides=(3, 2), padding=((9, 0), (0, 1)))),
        ((5, 6), (11, 37), dict(window_strides=(11, 37))),
        ((5, 6), (1, 37), dict(window_strides=(1, 37))),
        ((5, 6), (2, 2), dict(lhs_dilation=(2, 2), padding=((1, 1), (0, 1)))),
        (
            (5, 6),
            (3, 2),
            dict(lhs_dilation=(2, 3), window_strides=(3, 2), rhs_dilation=(1, 2), padding=((1, 2), (0, 1))),
        ),
        ((6, 12), (3, 3), dict(feature_group_count=6, padding="VALID")),
        ((6, 6), (3, 2), dict(feature_group_count=6, window_strides=(2, 1), rhs_dilation=(1, 2))),
        ((6, 4), (3, 3), dict(feature_group_count=2)),
    ],
)
@pytest.mark.parametrize("samples", [1, 4, 7])
@every_dtype
def test_gradients_of_kernels(
    channels: tuple, kernel: tuple, options: dict, samples: int, dtype: Any, limits: Callable[..., None]
):
    """All forms, some of which are summed over a few samples at a time."""
    limits(kernel_gradient_bytes=20_000)
    rng = np.random.default_rng(0)
    into = channels[0] // options.get("feature_group_count", 1)
    x, w = draw(rng, (samples, 11, 37, channels[0]), dtype), draw(rng, (*kernel, into, channels[1]), dtype)
    assert_same(gradients(partial(conv, **options), 1), x, w)


@every_dtype
def test_many_groups_are_batched_products(dtype: Any, limits: Callable[..., None]):
    """Groups of channels, and of samples with different kernels, which XLA would compute entry by entry."""
    limits(conv_groups=3)
    rng = np.random.default_rng(0)
    x, w = draw(rng, (6, 7, 6, 12), dtype), draw(rng, (3, 2, 2, 18), dtype)
    grouped = gradients(partial(conv, feature_group_count=6, window_strides=(2, 1)), 1)
    assert_same(grouped, x, w)
    own = gradients(lambda x, w: jax.vmap(conv)(x[:, None], w), 1)
    assert_same(own, x, draw(rng, (6, 3, 2, 12, 5), dtype))
    equations = equations_in(jax.make_jaxpr(optimize(grouped))(x, w))
    left = [e.params for e in equations if e.primitive.name == "conv_general_dilated"]
    assert {(p["feature_group_count"], p["batch_group_count"]) for p in left} <= {(1, 1)}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("options", [{}, {"feature_group_count": 3, "window_strides": (2, 1)}])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_convolutions(options: dict, dtype: Any):
    rng = np.random.default_rng(0)
    x, w = (
        draw(rng, of) + 1j * draw(rng, of)
        for of in ((2, 7, 6, 6), (3, 2, 6 // options.get("feature_group_count", 1), 9))
    )
    assert_same(gradients(partial(conv, **options), 1), x.astype(dtype), w.astype(dtype))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("groups", "into", "out", "products"), [(8, 4, 4, 2), (8, 2, 3, 1), (6, 3, 8, 2), (4, 6, 5, 2), (3, 17, 18, 3)]
)
def test_groups_with_few_channels_are_merged_into_products(groups: int, into: int, out: int, products: int):
    """Each product has more than four input and output channels; for example the 32 groups of four in ResNeXt."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (2, 6, 6, groups * into)), draw(rng, (3, 3, into, groups * out))
    grouped = partial(conv, feature_group_count=groups)
    assert_same(gradients(grouped, 1), x, w)
    equations = equations_in(jax.make_jaxpr(optimize(grouped))(x, w))
    assert sum(e.primitive.name == "conv_general_dilated" for e in equations) == products


def test_dense_convolutions_have_the_fast_layout():
    """In the gradient of a loop; other layouts of images and kernels are slow."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (2, 3, 8, 8)), draw(rng, (4, 3, 3, 3))
    loss = lambda w: (lax.conv_general_dilated(x, w, (2, 2), "SAME") ** 2).sum()  # noqa: E731
    loop = lambda w: lax.fori_loop(0, 2, lambda _, w: w - 0.1 * jax.grad(loss)(w), w)  # noqa: E731
    text = str(jax.make_jaxpr(optimize(loop))(w))
    assert "lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1), out_spec=(0, 3, 1, 2)" in text
    assert text.count("lhs_spec") == text.count("lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1)")


@pytest.mark.parametrize("size", [3, 4, 5])
def test_convolutions_do_not_enlarge_images(size: int):
    """The gradient of a convolution without padding would, for which XLA has no fast implementation."""
    x, w = (draw(np.random.default_rng(0), shape) for shape in ((4, 9, 8, 32), (size, size, 32, 24)))
    gradient = jax.grad(lambda x, w: (conv(x, w, padding="VALID") ** 2).sum(), (0, 1))
    assert_same(gradient, x, w)
    made = jax.make_jaxpr(optimize(gradient))(x, w)
    found = [e for e in equations_in(made) if e.primitive.name == "conv_general_dilated"]
    images = [e for e in found if e.params["rhs_dilation"] == (1, 1) == e.params["window_strides"]]
    assert len(images) >= 2
    for equation in images:
        (given, _), (out,) = equation.invars, equation.outvars
        assert all(a <= b for a, b in zip(out.aval.shape[1:-1], given.aval.shape[1:-1], strict=True))  # type: ignore[attr-defined]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("groups", "out"), [(1, 4), (6, 6), (6, 24), (3, 6)])
@pytest.mark.parametrize(
    "options", [dict(), dict(window_strides=(3, 2), padding=((4, 2), (1, 1)), rhs_dilation=(2, 1))]
)
@every_dtype
def test_images_with_one_row(groups: int, out: int, options: dict, dtype: Any):
    rng = np.random.default_rng(0)
    one = gradients(partial(conv, feature_group_count=groups, **options), 1)
    assert_same(one, draw(rng, (3, 1, 7, 6), dtype), draw(rng, (3, 4, 6 // groups, out), dtype))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((2, 2), (3, 3), dict()),
        ((4, 3), (3, 3), dict()),
        ((4, 5), (4, 2), dict(window_strides=(2, 1), padding=((2, 3), (1, 0)))),
        ((3, 4), (3, 3), dict(rhs_dilation=(2, 3), padding=((2, 2), (4, 3)))),
        ((5, 4), (3, 3), dict(window_strides=(3, 2), rhs_dilation=(2, 1), padding=((5, 4), (3, 2)))),
        ((2, 7), (4, 2), dict(padding=((3, 3), (0, 1)))),
    ],
)
@pytest.mark.parametrize("channels", [(128, 130), (130, 128)])
def test_small_images_with_many_channels_are_not_padded(channels: tuple, size: tuple, kernel: tuple, options: dict):
    rng = np.random.default_rng(0)
    x, w = draw(rng, (3, *size, channels[0])), draw(rng, (*kernel, *channels))
    forward = partial(conv, **options)
    assert_same(gradients(forward, 1), x, w)
    of_kernel = jax.grad(lambda w: (forward(x, w) ** 2).sum())
    for function, args in ((forward, (x, w)), (of_kernel, (w,))):
        found = equations_in(jax.make_jaxpr(optimize(function))(*args))
        assert all("conv_general" not in e.primitive.name for e in found)


def test_explicit_padding_is_not_merged_into_the_convolution():
    """As in networks from PyTorch: XLA would merge it, and the images would then be too small."""
    x, w = (draw(np.random.default_rng(0), shape) for shape in ((4, 2, 2, 20), (3, 3, 20, 9)))
    padded = lambda x, w: conv(jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), w, padding="VALID")  # noqa: E731
    assert_same(gradients(padded, 1), x, w)
    loop = jax.jit(lambda x, w: lax.fori_loop(0, 9, lambda i, s: s + optimize(padded)(x + s, w).sum(), 0.0))
    assert "window={size=3x3}" in (text := loop.lower(x, w).compile().as_text())
    assert "rhs_reversal" not in text and "pad=" not in text


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((12, 11), (3, 2), dict(padding="VALID")),  # the gradient of the kernel, with fewer output channels
        ((4, 4), (5, 5), dict()),
        ((2, 3), (3, 3), dict()),
        ((4, 5), (5, 5), dict(window_strides=(2, 2))),
        ((3, 3), (5, 2), dict(rhs_dilation=(1, 2), padding=((2, 3), (1, 1)))),
        ((3, 2), (4, 4), dict(lhs_dilation=(2, 2), padding=((3, 2), (2, 2)))),
    ],
)
def test_kernels_are_not_larger_than_images(size: tuple, kernel: tuple, options: dict):
    """XLA would exchange the two, and compute the result entry by entry."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (4, *size, 20)), draw(rng, (*kernel, 20, 9))
    both = gradients(partial(conv, **options), 1)
    assert_same(both, x, w)
    found = [e for e in equations_in(jax.make_jaxpr(optimize(both))(x, w)) if "conv_general" in e.primitive.name]
    assert len(found) >= (1 if options.get("padding") == "VALID" else 2)  # the gradient of its images is dilated
    for equation in found:
        images, entries = (variable.aval.shape for variable in equation.invars)  # type: ignore[attr-defined]
        assert np.prod(entries[:-2]) <= np.prod(images[1:-1])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("size", "step", "pads"), [(1, 3, (3, 3)), (2, 5, (5, 6)), (2, 4, (0, 6)), (3, 4, (7, 1))])
def test_images_smaller_than_the_stride(size: int, step: int, pads: tuple):
    """Some phases of a kernel's gradient, with fewer output than input channels, read no pixel."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (2, size, 8, 30)), draw(rng, (3, 3, 30, 5))
    assert_same(gradients(partial(conv, window_strides=(step, 1), padding=(pads, (1, 1))), 1), x, w)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("pads", [((9, 0), (0, 7)), ((0, 9), (2, 2)), ((3, 4), (6, 0)), ((1, 0), (0, 0))])
def test_padding_of_any_size(pads: Any):
    x, w = (draw(np.random.default_rng(1), shape) for shape in ((2, 6, 5, 20), (3, 3, 20, 20)))
    assert_same(partial(conv, padding=pads), x, w)
    assert_same(jax.grad(lambda x, w: (conv(x, w, padding=pads) ** 2).sum(), (0, 1)), x, w)


def test_other_dtypes_are_unchanged():
    x, w = jnp.ones((1, 4, 4, 2), jnp.int32), jnp.ones((3, 3, 2, 2), jnp.int32)
    assert str(jax.make_jaxpr(optimize(conv))(x, w)) == str(jax.make_jaxpr(conv)(x, w))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_convolutions_are_computed_in_float32(dtype: Any):
    """As XLA does, which in loops would do so entry by entry."""
    rng, options = np.random.default_rng(0), dict(window_strides=(2, 1), rhs_dilation=(1, 2))
    layer = lambda x, w: nn.max_pool(conv(x, w, **options), (3, 2), (2, 2), "SAME")  # noqa: E731
    into_float32 = partial(conv, preferred_element_type=jnp.float32)
    x, w = draw(rng, (3, 9, 8, 2), dtype), draw(rng, (3, 3, 2, 4), dtype)
    for function in (gradients(layer, 1), into_float32):
        expected, found = jax.jit(function)(x, w), jax.jit(optimize(function))(x, w)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert a.dtype == b.dtype
            atol = 2 * float(jnp.finfo(dtype).eps) * float(jnp.abs(a).max())
            np.testing.assert_allclose(np.float32(b), np.float32(a), rtol=0, atol=atol)
    equations = list(equations_in(jax.make_jaxpr(optimize(gradients(layer, 1)))(x, w)))
    kinds = {e.outvars[0].aval.dtype for e in equations if e.primitive.name == "conv_general_dilated"}  # type: ignore[attr-defined]
    assert kinds == {np.dtype(np.float32)}
    assert not any(equation.primitive.name == "select_and_scatter_add" for equation in equations)


# --- Transformations ----------------------------------------------------------------------------------


def small_loss(w: Array, x: Array) -> Array:
    """A strided convolution, max pooling and a depthwise convolution."""
    y = nn.max_pool(jax.nn.relu(conv(x, w, window_strides=(2, 2))), (2, 2), (2, 2))
    return (jnp.tanh(conv(y, w[:, :, :1], feature_group_count=4)) ** 2).sum()


@pytest.mark.slow(keep=1)
@every_dtype
def test_rewriting_inside_and_outside_of_transformations(dtype: Any):
    rng = np.random.default_rng(0)
    w, x = draw(rng, (3, 3, 2, 4), dtype), draw(rng, (3, 9, 8, 2), dtype)
    by_sample = lambda w, x: jax.vmap(jax.grad(small_loss), (None, 0))(w, x[:, None])  # noqa: E731
    assert_same(by_sample, w, x)
    own_weights = lambda w, x: jax.vmap(jax.grad(small_loss))(jnp.stack([w, 2 * w]), jnp.stack([x, x + 1]))  # noqa: E731
    assert_same(own_weights, w, x)
    assert_same(lambda w, x: lax.scan(lambda w, _: (w - 0.01 * jax.grad(small_loss)(w, x), ()), w, length=3)[0], w, x)
    assert_same(lambda w, x: lax.cond(x[0, 0, 0, 0] > 9, lambda: w, lambda: jax.grad(small_loss)(w, x)), w, x)
    assert_same(jax.grad(jax.checkpoint(small_loss)), w, x)
    twice = lambda w, x: jax.grad(lambda w: (jax.grad(small_loss)(w, x) ** 2).sum())(w)  # noqa: E731
    assert_same(twice, w, x)


def test_rewritten_functions_can_be_transformed():
    rng = np.random.default_rng(0)
    w, x = draw(rng, (3, 3, 2, 4), np.float64), draw(rng, (3, 9, 8, 2), np.float64)
    fast, slow = optimize(jax.grad(small_loss)), jax.grad(small_loss)

    @jax.jit
    def differences(w: Array, x: Array) -> list[Array]:
        """Differences relative to the largest value."""
        pairs = [(jax.grad(optimize(small_loss))(w, x), slow(w, x))]
        for transform in (
            lambda g: jax.grad(lambda w: (g(w, x) ** 2).sum())(w),
            lambda g: jax.vmap(g, (None, 0))(w, x[:, None]),
            lambda g: jax.jvp(lambda w: g(w, x), (w,), (w,))[1],
        ):
            pairs.append((transform(fast), transform(slow)))
        return [(a - b) / jnp.abs(b).max() for a, b in pairs]

    for difference in differences(w, x):
        np.testing.assert_allclose(difference, 0, atol=1e-11)


def test_custom_derivatives_are_kept():
    """A layer with a custom gradient, rewritten before and after differentiation."""

    @jax.custom_vjp
    def layer(x: Array, w: Array) -> Array:
        return conv(x, w)

    layer.defvjp(lambda x, w: (conv(x, w), (x, w)), lambda saved, g: (7 * conv(g, saved[1]), jnp.zeros_like(saved[1])))
    x, w = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2))
    gradient = jax.grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))
    expected = gradient(x, w)
    for form in (optimize(gradient), jax.grad(optimize(lambda x, w: layer(x, w).sum()), argnums=(0, 1))):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), form(x, w), expected)
