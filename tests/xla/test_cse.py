"""Common forward passes are merged into one backward pass, and different ones are not merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.extend import core

from fedrax.xla.cse import eliminate_common_subexpressions, has_common_subexpressions
from fedrax.xla.pipeline import optimize_forward
from fedrax.xla.rewriting import inline_calls
from fedrax.xla.tracing import equations_in


class Network(nn.Module):
    """Convolutions and activations with custom derivatives; its last layer reads the features."""

    rate: float = 0.0

    def setup(self) -> None:
        self.convolutions = [nn.Conv(4, (3, 3)) for _ in range(2)]
        self.norm, self.last = nn.GroupNorm(2), nn.Dense(3)
        self.dropout = nn.Dropout(self.rate, deterministic=self.rate == 0)

    def features(self, x: Array) -> Array:
        for convolution in self.convolutions:
            x = nn.relu(self.norm(convolution(x)))
        return self.dropout(nn.silu(x).mean((1, 2)))

    def __call__(self, x: Array) -> Array:
        return self.last(self.features(x))


X = jax.random.normal(jax.random.key(0), (5, 6, 6, 2))


def two_headed(network: Network, *keys: Array) -> tuple[Callable, Any]:
    """A loss of outputs and of features, each with a key, and initial parameters."""
    params = network.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, X)

    def loss(params: Any) -> Array:
        first, second = ({"dropout": key} for key in keys)
        features = network.apply(params, X, rngs=second, method="features")
        outputs = network.apply(params, X, rngs=first)
        return jnp.sum(jnp.sin(outputs)) + jnp.sum(features**2)  # type: ignore[operator]

    return loss, params


class AttentionNetwork(Network):
    """Attention over enough positions to be computed blockwise."""

    def setup(self) -> None:
        self.attend, self.last = nn.MultiHeadDotProductAttention(2), nn.Dense(3)

    def features(self, x: Array) -> Array:
        places = jnp.repeat(x.reshape(1, -1, 4), 16, axis=1)
        return self.attend(places, places).mean(1)


def count_equations(name: str, function: Callable, *args: Any) -> int:
    return sum(e.primitive.name == name for e in equations_in(jax.make_jaxpr(function)(*args)))


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), a, b)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_equal_passes_are_merged(rate: float) -> None:
    key = jax.random.key(3)
    loss, params = two_headed(Network(rate), key, key)
    assert (
        count_equations("conv_general_dilated", jax.grad(loss), params) == 2 * 5
    )  # the first layer has no gradient of images
    assert count_equations("conv_general_dilated", jax.grad(optimize_forward(loss)), params) == 5
    assert_close(jax.grad(optimize_forward(loss))(params), jax.grad(loss)(params))


def test_blockwise_attention_is_merged() -> None:
    key = jax.random.key(3)
    (loss, params), single = (
        two_headed(AttentionNetwork(), key, key),
        lambda p: jnp.sum(AttentionNetwork().apply(p, X) ** 2),
    )  # type: ignore[operator]
    loops = [count_equations("scan", optimize_forward(f), params) for f in (single, loss)]
    assert loops[0] == loops[1] > 0
    assert_close(jax.grad(optimize_forward(loss))(params), jax.grad(loss)(params))


def test_passes_with_different_keys_are_not_merged() -> None:
    loss, params = two_headed(Network(0.4), jax.random.key(3), jax.random.key(4))
    # layers before the first dropout are the same
    assert count_equations("random_bits", jax.grad(optimize_forward(loss)), params) == 2
    assert_close(jax.grad(optimize_forward(loss))(params), jax.grad(loss)(params))


def test_second_derivatives() -> None:
    key = jax.random.key(3)
    loss, params = two_headed(Network(), key, key)
    along = jax.tree.map(jnp.ones_like, params)

    def twice(loss: Callable) -> Any:
        return jax.grad(lambda p: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(p), along))))(params)

    assert_close(twice(optimize_forward(loss)), twice(loss))


def straight_through(slope: float) -> Callable:
    sign = jax.custom_jvp(jnp.sign)
    sign.defjvp(lambda primals, tangents: (jnp.sign(primals[0]), slope * tangents[0]))
    return sign


def test_functions_with_different_derivatives_are_not_merged() -> None:
    one, other = straight_through(1.0), straight_through(3.0)
    w = jnp.array([[0.3, -0.2], [0.1, 0.7]])
    loss = lambda w: jnp.sum(one(w @ w) + other(w @ w))  # noqa: E731
    same = lambda w: jnp.sum(one(w @ w) + straight_through(1.0)(w @ w))  # noqa: E731
    assert_close(jax.grad(optimize_forward(loss))(w), jax.grad(loss)(w))
    made = [eliminate_common_subexpressions(inline_calls(jax.make_jaxpr(f)(w))) for f in (loss, same)]
    assert [sum(e.primitive.name == "custom_jvp_call" for e in closed.jaxpr.eqns) for closed in made] == [2, 1]
    assert all(sum(e.primitive.name == "dot_general" for e in closed.jaxpr.eqns) == 1 for closed in made)


def test_functions_with_different_constants_are_not_merged() -> None:
    def scanned(rows: np.ndarray) -> Callable:
        return lambda x: jax.lax.scan(lambda c, _: (c @ rows, None), x, None, length=2)[0]

    first, second = (scanned(np.eye(2, dtype=np.float32) * s) for s in (2, 3))
    x = jnp.ones((2, 2))
    loss = lambda x: jnp.sum(first(x) * second(x) * first(x))  # noqa: E731
    assert_close(jax.grad(optimize_forward(loss))(x), jax.grad(loss)(x))


def test_equations_with_different_used_outputs_are_merged() -> None:
    def loss(w: Array) -> Array:
        a = w @ w
        first, _ = jax.lax.sort((a, a * 2), num_keys=1)
        _, second = jax.lax.sort((a, a * 2), num_keys=1)
        loop = lambda c, _: (c @ w / 2, c.sum())  # noqa: E731
        last, _ = jax.lax.scan(loop, w, None, length=3)
        _, sums = jax.lax.scan(loop, w, None, length=3)
        return jnp.sum(first * 2) + jnp.sum(second**2) + jnp.sum(w @ w) + jnp.sum(last) + jnp.sum(sums**2)

    w = jax.random.normal(jax.random.key(0), (3, 3))
    made = jax.make_jaxpr(optimize_forward(loss))(w)
    assert [sum(e.primitive.name == name for e in made.jaxpr.eqns) for name in ("sort", "scan")] == [1, 1]
    assert_close(jax.grad(optimize_forward(loss))(w), jax.grad(loss)(w))


def test_functions_with_effects_are_not_merged(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(w: Array) -> Array:
        total = jnp.zeros(())
        for _ in range(2):
            jax.debug.print("{}", 7, ordered=True)
            total += jnp.sum(w @ w)
        return total

    w = jnp.eye(2)
    assert_close(jax.grad(optimize_forward(loss))(w), jax.grad(loss)(w))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("7") == 4


def test_common_subexpressions_are_found_in_calls() -> None:
    dense = jax.jit(lambda w, x: jnp.tanh(x @ w))
    w, v = jnp.ones((2, 2)), jnp.ones((2, 2))
    twice: Callable = lambda w, v: dense(w, v) + jnp.tanh(v @ w)  # noqa: E731
    once: Callable = lambda w, v: dense(w, v) + dense(v, w)  # noqa: E731
    assert has_common_subexpressions(jax.make_jaxpr(twice)(w, v))
    assert not has_common_subexpressions(jax.make_jaxpr(once)(w, v))


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("seed", range(30))
def test_random_programs_keep_their_values(seed: int) -> None:
    """Operations on earlier results, drawn such that many are equal."""
    rng = np.random.default_rng(seed)
    kinds: list[Callable] = [
        lambda a, b: a @ b,
        lambda a, b: jnp.tanh(a) * b,
        lambda a, b: nn.relu(a + b),
        lambda a, b: jnp.where(a > 0.5, a, b),
        lambda a, b: jax.lax.fori_loop(0, 2, lambda i, c: c @ a / 2 + b, b),
        jax.jit(lambda a, b: jnp.sort(a, axis=0) - b.sum()),
    ]
    steps = [(rng.integers(len(kinds)), *rng.integers(2 + n // 2, size=2)) for n in range(12)]

    def program(w: Array, v: Array) -> Array:
        made = [w, v]
        for kind, a, b in steps:
            made.append(kinds[kind](made[a], made[b]) / 2)
        return jnp.sum(jnp.stack(made))

    args = [jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(2)]
    flat = inline_calls(jax.make_jaxpr(program)(*args))
    once = core.jaxpr_as_fun(eliminate_common_subexpressions(flat))
    assert_close(once(*args)[0], program(*args))
    assert_close(jax.grad(lambda *a: once(*a)[0], (0, 1))(*args), jax.grad(program, (0, 1))(*args))


def test_different_callbacks_are_not_merged():
    def made(factor: float) -> Any:
        call = lambda v: np.float32(factor * v)  # noqa: E731
        return jax.checkpoint(lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), x))

    one, other = made(2.0), made(3.0)
    closed = jax.make_jaxpr(lambda x: (one(x), other(x)))(1.0)
    assert [float(v) for v in core.jaxpr_as_fun(eliminate_common_subexpressions(closed))(jnp.float32(1))] == [2, 3]
