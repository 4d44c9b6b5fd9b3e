"""Products hoisted out of scans: gradients of recurrent networks against JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from fedrax.xla import Options, use_options
from fedrax.xla.pipeline import optimize
from fedrax.xla.tracing import scan_counts


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_array(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def carried_shapes(function: Callable, *args: Any) -> set[tuple[int, ...]]:
    """Shapes of the carried arrays of scans."""
    found: set[tuple[int, ...]] = set()

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                fixed, carried = scan_counts(equation)
                found.update(v.aval.shape for v in equation.invars[fixed : fixed + carried])
            for value in equation.params.values():
                walk(value.jaxpr) if hasattr(value, "jaxpr") else None

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def products_within(function: Callable, *args: Any) -> list[tuple[int, ...]]:
    """Shapes of the products in the bodies of scans."""
    found = []

    def walk(jaxpr: Any, inside: bool) -> None:
        for equation in jaxpr.eqns:
            if inside and equation.primitive.name == "dot_general":
                found.append(equation.outvars[0].aval.shape)
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    walk(value.jaxpr, inside or equation.primitive.name == "scan")

    walk(jax.make_jaxpr(function)(*args).jaxpr, False)
    return sorted(found)


def assert_same(function: Callable, *args: Any) -> None:
    expected, given = jax.jit(function)(*args), jax.jit(optimize(function))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=1e-11, atol=1e-12)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("cell", [nn.OptimizedLSTMCell, nn.LSTMCell, nn.GRUCell, nn.SimpleCell])
@pytest.mark.parametrize("how", [{}, {"reverse": True, "keep_order": True}, {"unroll": 3}])
def test_recurrent_networks_of_flax(cell: Any, how: dict) -> None:
    """No weight gradient is carried from step to step, and all gradients equal JAX's."""
    network, x = nn.RNN(cell(24, param_dtype=float), **how), jnp.asarray(random_array(3, 7, 5))
    weights = network.init(jax.random.key(0), x)
    gradient = jax.grad(lambda w, x: (network.apply(w, x) ** 2).sum(), argnums=(0, 1))
    assert_same(gradient, weights, x)
    assert (24, 24) in carried_shapes(gradient, weights, x)
    assert not {(24, 24), (24, 96)} & carried_shapes(optimize(gradient), weights, x)


def final_carry(body: Callable) -> Callable:
    """(a [T, B, A], b [T, B, C]) -> final carry of a scan of ``body(total, a, b)`` with a nonzero initial value."""
    return lambda a, b: lax.scan(lambda total, ab: body(total, *ab), jnp.ones((a.shape[-1], b.shape[-1])), (a, b))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("body", "is_hoisted"),
    [
        (lambda total, a, b: (total + a.T @ b, a.sum()), True),
        (lambda total, a, b: ((b.T @ a).T + total, a), True),
        (lambda total, a, b: (total + jnp.tanh(a).T @ b, ()), True),
        (lambda total, a, b: (total + a.T @ b, total.sum()), False),
        (lambda total, a, b: ((new := total + a.T @ b), new[0]), False),
        (lambda total, a, b: (total + (product := a.T @ b), product[0]), False),
        (lambda total, a, b: (total - a.T @ b, ()), False),
        (lambda total, a, b: (total + 2 * (a.T @ b), ()), False),
        (lambda total, a, b: (0.5 * total + a.T @ b, ()), False),
        (lambda total, a, b: (total + jnp.tanh(a.T @ b), ()), False),
        (lambda total, a, b: (total + total, ()), False),
        (lambda total, a, b: (a.T @ b, total), False),
    ],
)
def test_only_sums_of_products_are_hoisted(body: Callable, is_hoisted: bool) -> None:
    function, a, b = final_carry(body), random_array(6, 2, 30), random_array(6, 2, 20)
    assert_same(function, a, b)
    assert ((30, 20) in carried_shapes(optimize(function), a, b)) is not is_hoisted


def test_factors_larger_than_their_product_are_not_hoisted() -> None:
    function, a, b = (
        final_carry(lambda total, a, b: (total + jnp.tanh(a).T @ b, ())),
        random_array(6, 90, 3),
        random_array(6, 90, 2),
    )
    assert_same(function, a, b)
    assert (3, 2) in carried_shapes(optimize(function), a, b)


def test_nested_scans() -> None:
    def gradient(w: Array, x: Array) -> Array:
        inner = lambda h, x: lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, h, x)  # noqa: E731
        return lax.scan(inner, jnp.zeros(x.shape[2:]), x)[1].sum()

    assert_same(jax.grad(gradient), random_array(30, 30), random_array(3, 4, 2, 30))
    assert_same(jax.vmap(jax.grad(gradient), (None, 0)), random_array(30, 30), random_array(2, 3, 4, 2, 30))


def test_products_with_inputs_are_hoisted() -> None:
    """Of four products per step and two of the sums for gradients, two remain: those with the weights of the state."""
    network, x = nn.RNN(nn.OptimizedLSTMCell(64, param_dtype=float)), jnp.asarray(random_array(3, 7, 64))
    weights = network.init(jax.random.key(0), x)
    gradient = jax.grad(lambda w, x: (network.apply(w, x) ** 2).sum(), argnums=(0, 1))
    for function in (gradient, jax.jit(gradient)):
        assert len(products_within(function, weights, x)) == 6
        assert products_within(optimize(function), weights, x) == [(3, 64), (3, 256)]
        assert_same(function, weights, x)
    many = jax.vmap(gradient, (None, 0))
    assert_same(many, weights, jnp.stack([x, 2 * x]))
    assert_same(lambda w, x: jax.jvp(gradient, (w, x), (w, x))[1], weights, x)


def test_residuals_are_stored_once() -> None:
    """Of each step of an LSTM, four gates, two states and a tanh, but not 1 - s and s (1 - s)."""
    network, x = nn.RNN(nn.OptimizedLSTMCell(64, param_dtype=float)), jnp.asarray(random_array(3, 7, 5))
    weights = network.init(jax.random.key(0), x)
    gradient = jax.grad(lambda w: (network.apply(w, x) ** 2).sum())

    def read(function: Callable) -> int:
        jaxpr = jax.make_jaxpr(function)(weights).jaxpr
        *_, last = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        return len({v for v in last.invars if v.aval.shape == (7, 3, 64)})  # type: ignore[attr-defined]

    assert read(gradient) == 13
    assert read(optimize(gradient)) == read(optimize(jax.jit(gradient))) == 8  # and the gradient of the outputs
    assert_same(gradient, weights)


ON_A_GPU = Options(enabled=frozenset({"recurrent", "remat"}))


def test_a_gpu_launches_fewer_operations_a_step_where_the_passes_are_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients side by side: no gradient of weights is carried, for products of any precision; the values are JAX's.

    The products of the state stay, two a step, and that with the few inputs. Weights are not transposed, and by default
    nothing changes.
    """
    network, x = nn.RNN(nn.OptimizedLSTMCell(24)), jnp.asarray(random_array(2, 3, 20, 5), jnp.float32)
    weights = network.init(jax.random.key(0), x[0])
    gradient = jax.grad(lambda w, x: (network.apply(w, x) ** 2).sum())  # type: ignore[operator]
    expected = jax.jit(jax.vmap(gradient, (None, 0)))(weights, x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert optimize(gradient) is gradient
    with use_options(ON_A_GPU):
        for precision in ("highest", "bfloat16"):
            clients = jax.vmap(optimize(gradient, precision), (None, 0))
            assert not {(2, 24, 24), (2, 24, 96), (24, 24), (24, 96)} & carried_shapes(clients, weights, x)
            assert len(products_within(clients, weights, x)) == 3
        given = jax.jit(jax.vmap(optimize(gradient), (None, 0)))(weights, x)
        body = lambda c, w: (jnp.tanh(lax.dot_general(c, w, (((1,), (1,)), ((), ())))), None)  # noqa: E731
        recurrence = lambda w, c: lax.scan(lambda c, _: body(c, w), c, None, 20)[0]  # noqa: E731
        assert summed_axes_of((12, 12), optimize(recurrence), random_array(12, 12), random_array(3, 12)) == [1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), expected, given)


def scan_over_rows(body: Callable, **how: Any) -> Callable:
    """(w [64, 48], rows [T, B, 64]) -> a scan of ``body(w, carried, row)`` from zeros [B, 64]."""
    return lambda w, rows: lax.scan(lambda h, row: body(w, h, row), jnp.zeros_like(rows[0]), rows, **how)


def wide(h: Array) -> Array:
    return jnp.tanh(jnp.pad(h, ((0, 0), (0, 16))))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("how", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
@pytest.mark.parametrize(
    ("body", "remaining"),
    [
        (lambda w, h, row: (wide(row @ w) + h, h), 0),  # before the scan
        (lambda w, h, row: (wide(jnp.sin(row) @ w) * h.sum(), ()), 0),
        (lambda w, h, row: (wide(h @ w) + row, h), 1),  # carried
        (lambda w, h, row: (h + row, (2 * h) @ w), 1),  # inputs are larger than outputs
        (lambda w, h, row: (h + row, ((2 * h)[:, :48] @ w.T, 2 * h)), 0),  # a slice of a residual
        (lambda w, h, row: (h + row, ((2 * h) @ w, 2 * h)), 0),  # after the scan: 2 h is stored anyway
        (lambda w, h, row: (h + row, (h[:, :48] @ w.T)), 0),  # smaller than its output
        (lambda w, h, row: (h + row, (h[:, :48] @ w.T + h[:, 16:] @ w.T)), 2),  # two of them are not
        (lambda w, h, row: (wide(p := (2 * h) @ w) + row, (p, 2 * h)), 1),  # also used otherwise
        (lambda w, h, row: (h + row, ((2 * h) @ w + (row @ w), 2 * h)), 0),
        (lambda w, h, row: (h + row, ((2 * h) @ w, (2 * h) @ w, 2 * h, row, 3.0, row)), 0),
        (lambda w, h, row: (row @ (w @ w.T), h), 0),  # weights that every iteration would compute
    ],
)
def test_which_products_are_hoisted(body: Callable, remaining: int, how: dict) -> None:
    function, w, rows = scan_over_rows(body, **how), random_array(64, 48) / 8, random_array(7, 2, 64)
    assert len(products_within(optimize(function), w, rows)) == remaining
    assert_same(function, w, rows)
    assert_same(jax.grad(lambda w, rows: sum(a.sum() for a in jax.tree.leaves(function(w, rows))), (0, 1)), w, rows)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("body", "axes"),
    [
        (lambda c, w: c @ w, [0]),
        (lambda c, w: c @ w.T, [0]),
        (lambda c, w: (w @ c.T).T, [0]),
        (lambda c, w: (w.T @ c.T).T, [0]),
        (lambda c, w: jax.vmap(lambda one: w @ one)(c), [0]),
        (lambda c, w: c @ (w + w.T), [0]),
        (lambda c, w: c @ w + c @ w.T, [0, 0]),
    ],
)
def test_weights_of_remaining_products_have_the_fast_layout(body: Callable, axes: list[int]) -> None:
    """In every iteration, forwards and backwards, they are contracted along their first axis without a copy."""
    function = lambda w, c: lax.scan(lambda c, _: (jnp.tanh(body(c, w)), None), c, None, 20)[0].sum()  # noqa: E731
    w, c = jnp.asarray(random_array(12, 12)) / 4, jnp.asarray(random_array(3, 12))
    for each, times in ((function, 1), (jax.grad(function, 1), 2)):
        assert_same(each, w, c)
        assert summed_axes_of((12, 12), optimize(each), w, c) == axes * times
    assert_same(jax.grad(function), w, c)


def summed_axes_of(shape: tuple[int, ...], function: Callable, *args: Any) -> list[int]:
    """Contracted axes of factors with this shape that scans receive; fails for other factors of the shape."""
    found = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                body = equation.params["jaxpr"].jaxpr
                fixed = body.invars[: scan_counts(equation)[0]]
                for product in (e for e in body.eqns if e.primitive.name == "dot_general"):
                    place = next(i for i, v in enumerate(product.invars) if v.aval.shape == shape)
                    assert product.invars[place] in fixed
                    found.append(product.params["dimension_numbers"][0][place][0])
            for value in equation.params.values():
                walk(value.jaxpr) if hasattr(value, "jaxpr") else None

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def test_small_weights_keep_their_layout() -> None:
    function, w, rows = (
        scan_over_rows(lambda w, h, row: (jnp.tanh(row @ w) + h, ())),
        random_array(9, 9),
        random_array(7, 20, 9),
    )
    assert len(products_within(optimize(function), w, rows)) == 1
    assert_same(function, w, rows)


def test_effects_stay_in_the_scan() -> None:
    def body(w: Array, h: Array, row: Array) -> tuple[Array, tuple]:
        jax.debug.callback(lambda x: seen.append(float(x)), row[0, 0], ordered=True)
        return wide(row @ w) + h, ()

    seen: list[float] = []
    rows = random_array(7, 2, 64)
    jax.block_until_ready(jax.jit(optimize(scan_over_rows(body)))(random_array(64, 48), rows))
    jax.effects_barrier()
    assert seen == rows[:, 0, 0].tolist()


def test_expensive_residuals_are_stored() -> None:
    """The gradient reads all of thirty iterates; only those that cost few multiplications are recomputed."""

    def gradient(x: Array) -> Array:
        def step(h: Array, row: Array) -> tuple[Array, Array]:
            y = jnp.tanh(h + row)
            for _ in range(30):
                y = y * (1.5 - 0.5 * y * y)
            return y, y

        return lax.scan(step, x[0], x)[1].sum()

    def read(function: Callable) -> int:
        scans = [e for e in jax.make_jaxpr(function)(random_array(5, 2, 3)).jaxpr.eqns if e.primitive.name == "scan"]
        return len({v for v in scans[-1].invars if v.aval.shape == (5, 2, 3)})  # type: ignore[attr-defined]

    assert 10 < read(optimize(jax.grad(gradient))) < read(jax.grad(gradient)) / 2
    assert_same(jax.grad(gradient), random_array(5, 2, 3))


def test_residuals_may_have_several_shapes() -> None:
    """A decoder with attention to an encoder: in each step weights of all positions, and the gates of a state."""

    def loss(w: Array, x: Array, seen: Array) -> Array:
        def step(h: Array, row: Array) -> tuple[Array, Array]:
            places = jax.nn.sigmoid(jnp.einsum("btd,bd->bt", seen, h))
            gate = jax.nn.sigmoid(row + jnp.einsum("bt,btd->bd", places, seen) @ w)
            h = gate * h + (1 - gate) * jnp.tanh(row + h @ w)
            return h, h

        return (lax.scan(step, jnp.zeros(x.shape[1:]), x)[1] ** 2).sum()

    with jax.enable_checks(True):  # JAX does not always detect a body with wrong shapes
        assert_same(jax.grad(loss, argnums=(0, 1, 2)), random_array(4, 4), random_array(5, 2, 4), random_array(2, 7, 4))
