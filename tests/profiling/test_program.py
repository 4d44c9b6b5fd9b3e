"""The parser of compiled programs, on programs of XLA."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from fedrax.profiling.hlo import OperationDescription, ProgramText
from fedrax.xla.linear_algebra import LINEAR_ALGEBRA_SCOPE, SEQUENTIAL_RULES
from fedrax.xla.pipeline import optimize
from fedrax.xla.scopes import GATHER, GRADIENT, phase_scope, read_scope, scope


def compiled(function: Callable, *arguments: Array, donate: tuple[int, ...] = ()) -> ProgramText:
    """Text of the function's compiled program."""
    text = jax.jit(function, donate_argnums=donate).lower(*arguments).compile().as_text()
    return ProgramText(text or "")


def total(text: ProgramText) -> tuple[float, float]:
    """(flops, bytes) of the operations outside of fusions."""
    fused = {called for op in text.operations.values() if op.opcode == "fusion" for called in op.calls}
    costs = [text.cost(op.name) for op in text.operations.values() if op.computation not in fused]
    return sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)


def convolve(x: Array, kernel: Array, groups: int = 1) -> Array:
    """Channels last, without padding."""
    numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=groups
    )


def test_product():
    text = compiled(lambda a, b: a @ b, jnp.ones((30, 40)), jnp.ones((40, 50)))
    assert text.module.startswith("jit_")
    assert total(text) == (2 * 30 * 40 * 50, 4 * (30 * 40 + 40 * 50 + 30 * 50))


def test_operands_of_products_have_their_own_shapes():
    text = ProgramText("""HloModule m

ENTRY %e (a: f32[2,3,5]) -> f32[6,7] {
  %a = f32[2,3,5]{2,1,0} parameter(0)
  %b = f32[5,7]{1,0} parameter(1)
  %flat = f32[6,5]{1,0} bitcast(%a)
  ROOT %dot = f32[6,7]{1,0} dot(%flat, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""")
    assert text.cost("dot").flops == 2 * 6 * 5 * 7
    assert text.describe("dot").shapes == "6×5 · 5×7"


def test_convolution():
    text = compiled(convolve, jnp.ones((2, 12, 12, 3)), jnp.ones((5, 5, 3, 4)))
    assert total(text)[0] == 2 * (2 * 8 * 8 * 4) * (5 * 5 * 3)


@pytest.mark.parametrize(
    ("operands", "result", "kind", "products"),
    [
        ("%x, %k", "f32[2,8,8,4]", "Forward", 1),
        ("%g, %k", "f32[2,12,12,3]", "BackwardInput", 1),
        ("%x, %g", "f32[5,5,3,4]", "BackwardFilter", 1),
        ("%k, %x", "f32[5,5,3,4]", "ReorderFilter", 0),
    ],
)
def test_cudnn_convolutions_and_their_gradients(operands: str, result: str, kind: str, products: int):
    attributes = f'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{kind}"'
    text = ProgramText(f"""HloModule m

ENTRY %e (x: f32[2,12,12,3], k: f32[5,5,3,4], g: f32[2,8,8,4]) -> {result} {{
  %x = f32[2,12,12,3]{{3,2,1,0}} parameter(0)
  %k = f32[5,5,3,4]{{3,2,1,0}} parameter(1)
  %g = f32[2,8,8,4]{{3,2,1,0}} parameter(2)
  %conv = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call({operands}), window={{size=5x5}}, {attributes}
  ROOT %out = {result}{{3,2,1,0}} get-tuple-element(%conv), index=0
}}
""")
    assert text.cost("conv").flops == products * 2 * (2 * 8 * 8 * 4) * (5 * 5 * 3)
    assert text.describe("conv").side == 3 * products


def test_table_lookups_count_rows():
    table, rows = jnp.ones((10_000, 8)), jnp.array([3, 5, 7])
    assert 2 * 3 * 8 * 4 <= total(compiled(lambda t, i: t[i] * 2, table, rows))[1] < 10 * 3 * 8 * 4
    write = lambda t, v, i: jax.lax.dynamic_update_slice(t, v * 2, (i, 0))  # noqa: E731
    assert total(compiled(write, table, jnp.ones((1, 8)), jnp.int32(4), donate=(0,)))[1] < 1000


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


def test_operations_are_described_by_their_layers():
    """Including convolutions, whose operations `optimize` replaces."""

    def loss(weights: list[Array], x: Array) -> Array:
        with jax.named_scope("net/first"):
            x = jnp.tanh(convolve(x, weights[0]))
        with jax.named_scope("net/alone"):
            x = convolve(x, weights[1], groups=20)
        with jax.named_scope("net/cell"):
            cell = lambda h, row: (jnp.tanh(h @ weights[2] + row), None)  # noqa: E731
            state, _ = jax.lax.scan(cell, x[:, 0, 0], x[:, :, 1].swapaxes(0, 1))
        return state.sum()

    def step(weights: list[Array], x: Array) -> list[Array]:
        with phase_scope(0), scope(GRADIENT):
            return optimize(jax.grad(loss))(weights, x)

    weights = [jnp.ones((3, 3, 17, 20)), jnp.ones((3, 3, 1, 20)), jnp.ones((20, 20))]
    text = compiled(step, weights, jnp.ones((18, 12, 12, 17)))  # pyright: ignore[reportArgumentType]
    fused = {called for op in text.operations.values() if op.opcode == "fusion" for called in op.calls}
    about = {text.describe(op.name) for op in text.operations.values() if op.computation not in fused}
    assert OperationDescription("convolution", "net/first", "forward", "18×12×12×17 · 3×3×17×20", False, 17) in about
    named = {(d.what, d.layer, d.direction, d.looped) for d in about}
    both = {"forward", "backward"}
    assert {direction for what, layer, direction, _ in named if (what, layer) == ("convolution", "net/first")} == both
    alone = {(what, looped) for what, layer, _, looped in named if layer == "net/alone"}
    assert ("depthwise convolution", False) in alone and not {looped for _, looped in alone} - {False}
    assert {looped for what, layer, _, looped in named if (what, layer) == ("product", "net/cell")} >= {True}


def test_batched_products_have_the_dimensions_of_each_product():
    """Four heads are no dimension of length four."""
    text = compiled(
        lambda q, k: jnp.einsum("bhle,bhme->bhlm", q, k), jnp.ones((2, 4, 24, 16)), jnp.ones((2, 4, 24, 16))
    )
    assert {text.describe(op.name).side for op in text.operations.values() if text.cost(op.name).flops} == {16}


def test_sorts_and_fourier_transforms_are_no_elementwise_passes():
    text = compiled(lambda x: jnp.sort(jnp.abs(jnp.fft.fft(x))), jnp.ones((8, 32)))
    about = {text.describe(op.name).what for op in text.operations.values()}
    assert {"sort", "Fourier transform"} <= about


@pytest.mark.skipif("lu" not in SEQUENTIAL_RULES, reason="batches of matrices are computed at once")
def test_loops_of_factorizations_are_not_loops_of_the_model():
    def step(a: Array) -> Array:
        with phase_scope(0), scope(GRADIENT):
            return jax.grad(lambda a: optimize(jax.vmap(lambda a: jnp.linalg.solve(a, a[0])))(a).sum())(a)

    text = compiled(step, jnp.eye(12) + jnp.ones((6, 12, 12)))
    about = [text.describe(op.name) for op in text.operations.values() if LINEAR_ALGEBRA_SCOPE in op.op_name]
    assert about and not any(one.looped or LINEAR_ALGEBRA_SCOPE in one.layer for one in about)


def test_names_without_scopes():
    assert read_scope("jit(run)/while/body/gather") == (None, None)
    assert read_scope("jit(run)/fedrax.phase0/transpose(jvp(fedrax.gradient))/dot") == (0, GRADIENT)
    assert ProgramText("").operations == {}
