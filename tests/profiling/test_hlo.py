"""The reader of compiled programs, on programs that XLA has compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from fedrax.compiled.scopes import GATHER, GRADIENT, phase_scope, read_scope, scope
from fedrax.profiling.hlo import Cost, ProgramText


def compiled(function: Callable, *arguments: Array) -> ProgramText:
    """The text of the function's program."""
    return ProgramText(jax.jit(function).lower(*arguments).compile().as_text() or "")


def total(text: ProgramText) -> Cost:
    """Of the whole program, run once."""
    names = [op.name for op in text.operations.values()]
    entry = [name for name in names if text.operations[name].computation not in text.caller]
    called = {inner for name in names for inner in text.inner(name)}
    cost = Cost()
    for name in entry:
        if name not in called:
            cost = cost.plus(text.whole_cost(name))
    return cost


def test_a_product():
    text = compiled(lambda a, b: a @ b, jnp.ones((30, 40)), jnp.ones((40, 50)))
    assert text.module.startswith("jit_")
    assert total(text) == Cost(2 * 30 * 40 * 50, 4 * (30 * 40 + 40 * 50 + 30 * 50))


def test_products_in_a_loop_count_for_every_trip():
    def chain(x: Array, w: Array) -> Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=7)[0]

    assert total(compiled(chain, jnp.ones((8, 64)), jnp.ones((64, 64)))).flops == 7 * 2 * 8 * 64 * 64


def test_a_convolution():
    def convolve(x: Array, kernel: Array) -> Array:
        numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers)

    text = compiled(convolve, jnp.ones((2, 12, 12, 3)), jnp.ones((5, 5, 3, 4)))
    assert total(text).flops == 2 * (2 * 8 * 8 * 4) * (5 * 5 * 3)


def test_rows_of_a_table_count_as_rows():
    table, rows = jnp.ones((10_000, 8)), jnp.array([3, 5, 7])
    read = total(compiled(lambda t, i: t[i] * 2, table, rows)).bytes
    assert 2 * 3 * 8 * 4 <= read < 10 * 3 * 8 * 4
    text = ProgramText(
        jax.jit(lambda t, v, i: jax.lax.dynamic_update_slice(t, v * 2, (i, 0)), donate_argnums=0)
        .lower(table, jnp.ones((1, 8)), jnp.int32(4))
        .compile()
        .as_text()
        or ""
    )
    assert total(text).bytes < 1000


@pytest.mark.parametrize("side_by_side", [False, True])
def test_operations_belong_to_the_innermost_scope(side_by_side: bool):
    def client(w: Array, x: Array, i: Array) -> Array:
        with scope(GATHER):
            batch = x[i]
        with scope(GRADIENT):
            return jax.grad(lambda w: jnp.tanh(batch @ w).sum())(w)

    def phase(w: Array, x: Array, i: Array) -> Array:
        with phase_scope(1):
            if side_by_side:
                return jax.vmap(client, (None, None, 0))(w, x, jnp.stack([i, i + 1])).sum(0)
            return jax.lax.fori_loop(0, i[0], lambda _, w: w - client(w, x, i), w)

    text = compiled(phase, jnp.ones((16, 32)), jnp.ones((100, 16)), jnp.array([1, 2, 3]))
    scopes = {text.scope(op.name) for op in text.operations.values() if op.opcode != "parameter"}
    assert {(1, GATHER), (1, GRADIENT)} <= scopes
    products = [op.name for op in text.operations.values() if text.cost(op.name).flops]
    assert products and all(text.scope(name) == (1, GRADIENT) for name in products)


def test_names_without_scopes():
    assert read_scope("jit(run)/while/body/gather") == (None, None)
    assert read_scope("jit(run)/fedrax.phase0/transpose(jvp(fedrax.gradient))/dot") == (0, GRADIENT)
    assert ProgramText("").operations == {}
