"""Convolutions of vectorized clients as products: equal to JAX, without grouped convolutions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedrax.simulation.executors.execution_plan import describe_plan
from fedrax.xla import Options, repeat_steps, use_options
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


# -- the kernel ------------------------------------------------------------------------------------------------------

KERNEL = Options(enabled=frozenset({"implicit_gemm"}))


def kernels_in(function: Callable, *args: Any) -> int:
    return sum(e.primitive.name == "pallas_call" for e in equations_in(jax.make_jaxpr(function)(*args)))


def random_window(choose: random.Random) -> tuple[Callable, list[tuple[int, ...]]]:
    """(function, shapes of its images, kernel and result): two spatial axes, channels that the kernel takes."""
    into, out = choose.choice([3, 8, 16]), choose.choice([8, 12, 16])
    images = {"N": choose.randint(1, 3), "C": into, "H": choose.randint(5, 8), "W": choose.randint(5, 8)}
    kernel = {"O": out, "I": into, "H": choose.randint(2, 3), "W": choose.randint(1, 3)}
    orders = ["".join(choose.sample(axes, 4)) for axes in ("NCHW", "OIHW", "NCHW")]
    few: Callable[[list], tuple] = lambda values: tuple(choose.choice(values) for _ in "HW")  # noqa: E731
    numbers: Any = tuple(orders)
    function = partial(
        lax.conv_general_dilated,
        window_strides=few([1, 1, 2, 3]),
        padding=tuple((choose.randint(-1, 3), choose.randint(-1, 3)) for _ in "HW"),
        lhs_dilation=few([1, 1, 2]),
        rhs_dilation=few([1, 1, 2]),
        dimension_numbers=numbers,
    )
    shapes = [tuple(images[axis] for axis in orders[0]), tuple(kernel[axis] for axis in orders[1])]
    shapes.append(jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, float) for shape in shapes)).shape)
    terms = math.prod(shapes[1]) // out
    return (function, shapes) if terms >= 16 and math.prod(shapes[2]) else random_window(choose)


def with_gradients(function: Callable, x: Any, w: Any, upstream: Any) -> Any:
    y, pull = jax.vjp(function, x, w)
    return y, pull(upstream)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("seed", range(34))
def test_the_kernel_agrees_on_a_random_window_and_on_both_gradients(seed: int):
    """Three clients in either type, each gradient by another call of the kernel; expected are JAX's in float64."""
    choose, rng = random.Random(seed), np.random.default_rng(seed)
    function, shapes = random_window(choose)
    dtype = jnp.bfloat16 if seed % 2 else np.float32
    given = [draw(rng, (3, *shape)).astype(dtype) for shape in shapes]
    clients = jax.vmap(partial(with_gradients, function))
    with use_options(KERNEL):
        rewritten = lower_grouped_convs(clients)
        assert kernels_in(rewritten, *given) >= 1  # gradients of few channels stay products
        found = jax.jit(rewritten)(*given)
    expected = jax.jit(clients)(*(a.astype(np.float64) for a in given))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert b.dtype == dtype
        tolerance = 2**-7 if seed % 2 else 1e-5
        np.testing.assert_allclose(b.astype(np.float64), a, rtol=0, atol=tolerance * np.abs(a).max(initial=1))


def test_the_kernel_inside_scans_and_rematerialized_parts_with_short_operands():
    """Local steps in bfloat16 with sums in float32, in a loop over steps and once more over runs."""
    rng = np.random.default_rng(1)
    x, w = draw(rng, (2, 3, 4, 2, 6, 6, 8)), draw(rng, (2, 3, 3, 3, 8, 8))

    def steps(x: Any, w: Any) -> Any:
        short = lambda w, x: conv(x.astype("bfloat16"), w.astype("bfloat16"), preferred_element_type="float32")  # noqa: E731
        loss = jax.checkpoint(lambda w, x: (jnp.tanh(short(w, x)) ** 2).sum())
        return lax.scan(lambda w, x: (w - 0.01 * jax.grad(loss)(w, x), None), w, x)[0]

    clients = jax.vmap(steps)
    with use_options(KERNEL):
        rewritten = jax.vmap(lower_grouped_convs(clients))
        assert kernels_in(rewritten, x, w) >= 3
        found = jax.jit(rewritten)(x, w)
    np.testing.assert_allclose(found, jax.jit(jax.vmap(clients))(x, w), rtol=0.02, atol=0.02)


def test_the_kernel_is_lowered_to_triton_and_takes_no_other_shapes():
    """The text that a GPU is given, without one: no patches, one call; and what stays as it is."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (3, 2, 8, 8, 3), np.float32), draw(rng, (3, 3, 3, 3, 16), np.float32)
    with use_options(KERNEL):
        assert kernels_in(lower_grouped_convs(jax.vmap(conv)), x, w) == 1
        for images, kernel in [
            (x.astype(np.float64), w.astype(np.float64)),  # no tensor cores
            (x, w[..., :4]),  # few results
            (x, w[:, :1, :1]),  # one entry: its patches are the images
        ]:
            assert kernels_in(lower_grouped_convs(jax.vmap(conv)), images, kernel) == 0
    assert kernels_in(lower_grouped_convs(jax.vmap(conv)), x, w) == 0  # by default


def test_the_first_step_merges_the_clients(monkeypatch: pytest.MonkeyPatch):
    """Its forward pass is an ordinary convolution, and the parameters are those of the loop."""
    rng = np.random.default_rng(0)
    x, w = draw(rng, (3, 4, 2, 6, 6, 3)), draw(rng, (3, 3, 3, 5))

    def client(w: Any, x: Any) -> Any:
        loss = lambda w, x: (jnp.tanh(conv(x, w)) ** 2).sum()  # noqa: E731
        return repeat_steps(4, lambda i, w: w - 0.01 * jax.grad(loss)(w, x[i]), w)

    clients = lambda: jax.vmap(lambda w, x: client(w, x), (None, 0))  # noqa: E731 - a new one is traced again
    expected = jax.jit(clients())(w, x)
    assert groups_in(clients(), w, x) == [3, 3]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with use_options(Options(enabled=frozenset({"first_step"}))):
        assert sorted(groups_in(clients(), w, x)) == [1, 3, 3, 3]
        np.testing.assert_allclose(jax.jit(clients())(w, x), expected, rtol=1e-5, atol=1e-6)


def test_the_plan_says_how_convolutions_are_computed():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")], object))
    program = jax.make_jaxpr(conv)(np.zeros((2, 6, 6, 3), np.float32), np.zeros((3, 3, 3, 8), np.float32))
    on_a_gpu = "vmap: 3 clients side by side on one GPU, their convolutions"
    assert describe_plan(mesh, "vmap", 3, program) == f"{on_a_gpu} as products"
    with use_options(Options(enabled=frozenset({"implicit_gemm", "first_step"}))):
        said = describe_plan(mesh, "vmap", 3, program)
        assert said == f"{on_a_gpu} by implicit_gemm where it takes them, their first local step as one batch"
        assert describe_plan(mesh, "vmap", 1, program) == "vmap: 1 clients side by side on one GPU"
