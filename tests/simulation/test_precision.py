"""Products with operands of lower precision: against NumPy, inside loops and branches, and in runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import primitives

from fedrax import (
    Algorithm,
    FedAvg,
    Federation,
    FedraxError,
    LocalSGD,
    Scaffold,
    classification,
    simulate,
)
from fedrax.algorithms import GradMAS
from fedrax.contract.task import Batch
from fedrax.models import LSTM, LeNet, Model, TwoNN, from_linen
from fedrax.personalization import Ditto
from fedrax.robust import GeometricMedian, Robust
from fedrax.xla.precision import OperandFormat, with_operand_format
from fedrax.xla.tracing import equations_in
from tests.simulation.networks import EveryLayer
from tests.simulation.problems import make_federation
from tests.slow import slow_cases

FORMATS = pytest.mark.parametrize("format", ["tensorfloat32", "bfloat16"])
RNG = np.random.default_rng(0)


def rounded(x: np.ndarray, format: OperandFormat) -> np.ndarray:
    """float32 numbers rounded to the format in NumPy, with ties to even."""
    if format == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    tied = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))  # from 23 bits of mantissa to 10
    return (tied & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@FORMATS
def test_both_products_of_a_gradient_are_rounded(format: OperandFormat):
    x, w, c = draw(5, 7), draw(7, 3), draw(5, 3)
    value, gradient = with_operand_format(jax.value_and_grad(lambda w: jnp.sum((x @ w) * c)), format)(w)
    r = lambda a: rounded(a, format)  # noqa: E731
    stored = r((r(x) @ r(w)).astype(np.float32)) if format == "bfloat16" else r(x) @ r(w)
    np.testing.assert_allclose(value, np.sum(stored * c), rtol=1e-5)
    np.testing.assert_allclose(gradient, r(x).T @ r(c), rtol=1e-5, atol=1e-6)
    assert np.abs(gradient - x.T.astype(float) @ c).max() > 1e-4


def test_results_are_stored_in_bfloat16_and_gradients_of_weights_in_float32():
    """Two layers with biases and a residual connection: of the six products, two are gradients of weights."""
    x, c = draw(5, 7), draw(5, 7)
    params = {"w": draw(7, 7), "v": draw(7, 7), "b": draw(7)}

    def loss(params: dict) -> jax.Array:
        h = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.sum((h + h @ params["v"]) * c)

    found = with_operand_format(jax.grad(loss), "bfloat16")(params)
    r = lambda a: rounded(np.asarray(a, np.float32), "bfloat16")  # noqa: E731
    h = np.tanh(r(r(x) @ r(params["w"])) + params["b"])
    after = (c + r(r(c) @ r(params["v"]).T)) * (1 - h**2)
    np.testing.assert_allclose(found["v"], r(h).T @ r(c), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["b"], after.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["w"], r(x).T @ r(after), rtol=2e-2, atol=2e-2)
    assert not np.array_equal(found["v"], r(found["v"]))


@pytest.mark.parametrize(
    "used",
    [
        lambda w: jnp.concatenate([w[:, 3:], w[:, :3]], 1),
        lambda w: jnp.concatenate(jnp.split(w, 2, 1)[::-1], 1),
        lambda w: jax.lax.dynamic_slice_in_dim(w, 1, 6, 1),
        lambda w: jax.lax.dynamic_update_slice_in_dim(w, w[:, :2], 4, 1),
        lambda w: jnp.pad(w, ((0, 0), (1, 2))),
        lambda w: w.reshape(7, 2, 3)[:, ::-1].reshape(7, 6),
    ],
    ids=["slice", "split", "dynamic_slice", "dynamic_update_slice", "pad", "reverse"],
)
def test_gradients_of_weights_that_are_cut_and_joined_are_not_rounded(used: Callable):
    """As those of the gates of a recurrent cell, or of queries, keys and values."""
    x, w = draw(5, 7), draw(7, 6)
    c = draw(5, used(w).shape[1])
    gradient = with_operand_format(jax.grad(lambda w: jnp.sum((x @ used(w)) * c)), "bfloat16")(w)
    r = lambda a: rounded(a, "bfloat16").astype(np.float32)  # noqa: E731
    (expected,) = jax.vjp(used, w)[1](jnp.asarray(r(x).T @ r(c)))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_recurrent_cells_weights_are_summed_in_float32():
    """One product for all gates at each step: its results are neither rounded nor added in bfloat16."""
    cell, x = nn.RNN(nn.OptimizedLSTMCell(8)), jnp.asarray(draw(3, 5, 4))
    weights = cell.init(jax.random.key(0), x)
    gradient = with_operand_format(jax.grad(lambda w: jnp.sum(cell.apply(w, x) ** 2)), "bfloat16")  # type: ignore[operator]
    rounds = [e for e in equations_in(jax.make_jaxpr(gradient)(weights)) if e.primitive.name == "reduce_precision"]
    assert {(8, 32), (4, 32)} & {e.outvars[0].aval.shape for e in rounds} == {(8, 32), (4, 32)}  # operands: the weights
    assert not {(32, 8), (32, 4)} & {e.outvars[0].aval.shape for e in rounds}  # results: their gradients


@FORMATS
def test_products_inside_a_loop_are_rounded(format: OperandFormat):
    """Backpropagation through h <- h w, three times, in NumPy."""
    h0, w, c = draw(4, 6), draw(6, 6), draw(4, 6)

    def loss(w: jax.Array) -> jax.Array:
        h = jax.lax.scan(lambda h, _: (h @ w, None), h0, length=3)[0]
        return jnp.sum(h * c)

    r = lambda a: rounded(np.asarray(a, np.float32), format)  # noqa: E731
    hs = [h0]
    stored = r if format == "bfloat16" else lambda a: a
    for _ in range(3):
        hs.append(stored(r(hs[-1]) @ r(w)))
    expected, back = np.zeros((6, 6)), c.astype(np.float64)
    for h in reversed(hs[:-1]):
        expected += r(h).T @ r(back)
        back = stored(r(back) @ r(w).T)
    np.testing.assert_allclose(with_operand_format(jax.grad(loss), format)(w), expected, rtol=2e-3, atol=2e-3)
    exact = jax.grad(loss)(w)
    assert np.abs(exact - expected).max() > 1e-2  # ten times the tolerance, the effect of one different rounding


@pytest.mark.slow
@FORMATS
def test_gradient_error_is_bounded(format: OperandFormat):
    """Through convolutions with custom gradients, platform branches, and the loop of a recurrent cell."""
    for model, shape in ((TwoNN(), (30,)), (LeNet(), (28, 28, 1)), (LSTM(), (6, 5))):
        task = classification(model.build(shape, 4))
        params = task.init(jax.random.key(0))
        batch = Batch(draw(16, *shape), RNG.integers(0, 4, 16))
        gradient = jax.grad(lambda p, task=task, batch=batch: task.loss(p, batch, jax.random.key(1)).mean())
        flat = lambda f, params=params: np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.jit(f)(params))])  # noqa: E731
        exact, short = flat(gradient), flat(with_operand_format(gradient, format))
        apart = np.linalg.norm(short - exact) / np.linalg.norm(exact)
        assert 1e-6 < apart < (0.05 if format == "tensorfloat32" else 0.2), type(model).__name__


def test_checkpointed_and_branching_functions_keep_their_values():
    def f(w: jax.Array) -> jax.Array:
        inner = jax.checkpoint(lambda w: jnp.tanh(w @ w))
        return jnp.sum(jax.lax.cond(w[0, 0] > 0, inner, lambda w: w @ w.T, w))

    for w in (draw(8, 8), -np.abs(draw(8, 8))):
        exact, short = jax.grad(f)(w), with_operand_format(jax.grad(f), "tensorfloat32")(w)
        np.testing.assert_allclose(short, exact, atol=0.05)
        assert np.any(short != exact)


def test_highest_precision_and_other_dtypes_are_unchanged():
    f = lambda a: a @ a  # noqa: E731
    assert with_operand_format(f, "highest") is f
    whole = np.arange(9, dtype=np.int32).reshape(3, 3)
    np.testing.assert_array_equal(with_operand_format(f, "bfloat16")(whole), whole @ whole)


@pytest.mark.parametrize(("format", "operands"), [("tensorfloat32", "float32"), ("bfloat16", "bfloat16")])
def test_accelerators_use_native_formats(format: OperandFormat, operands: str, monkeypatch: pytest.MonkeyPatch):
    """Traced program for backends other than CPU: native products, gradients of weights in float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    traced = jax.make_jaxpr(with_operand_format(gradient, format))(draw(3, 3), draw(4, 3))
    forward, backward = [e for e in traced.jaxpr.eqns if e.primitive is primitives.dot_general_p]
    for product in (forward, backward):
        assert [v.aval.dtype.name for v in product.invars] == [operands] * 2
        if format == "tensorfloat32":
            assert product.params["precision"] == (jax.lax.Precision.HIGH,) * 2
    assert (forward.outvars[0].aval.dtype, backward.outvars[0].aval.dtype) == (operands, jnp.float32)


PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution)\b[^\n]*")
FLOATS = re.compile(r"tensor<(?:\d+x)*(f32|f64)>")


def programs(folder: Path, function: Callable[[], Any]) -> dict[str, list[str]]:
    """The products of floats in each program that is compiled in a call, by the name of the program."""
    jax.clear_caches()
    jax.config.update("jax_dump_ir_to", str(folder))
    try:
        function()
    finally:
        jax.config.update("jax_dump_ir_to", None)
    found: dict[str, list[str]] = {}
    for file in folder.glob("*.mlir"):
        products = PRODUCT.findall(file.read_text())
        found.setdefault(file.name, []).extend(line for line in products if FLOATS.search(line))
    return {name: products for name, products in found.items() if products}


TWO_STEPS = LocalSGD(steps=2)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [GradMAS(TWO_STEPS), Ditto(Scaffold(TWO_STEPS)), Robust(rule=GeometricMedian())])
def test_every_product_of_a_run_on_an_accelerator_has_full_precision(
    method: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Local steps, server, evaluation, personal models and predictions, in the programs that XLA is given.

    Those for accelerators, where JAX multiplies in TensorFloat-32 unless it is told otherwise.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4, 4)).astype(np.float32), rng.integers(0, 3, 40)
    federation = Federation.from_arrays(x, y, np.repeat(np.arange(4), 10), test=(x[:5], y[:5]))
    task = classification(from_linen(EveryLayer(width=4), x[:1]))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def run() -> None:
        made = simulate(method, task, federation, rounds=2, plan="vmap", devices=1, per_client=True, progress=False)
        made.predict(x[:3])

    found = programs(tmp_path, run)
    assert len(found) >= 3 and max(map(len, found.values())) > 20
    assert any("convolution" in product for products in found.values() for product in products)
    for name, products in found.items():
        for product in products:
            assert "precision = [HIGHEST, HIGHEST]" in product or "precision HIGHEST" in product, (name, product)


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(["vmap", "loop", "debug"]))
@pytest.mark.parametrize("format", slow_cases(["bfloat16", "tensorfloat32"]))
def test_runs_agree_on_every_plan(format: OperandFormat, plan: str):
    task = classification(TwoNN().build((4,), 3))
    algorithm = FedAvg(local=LocalSGD(lr=0.1, batch_size=4))
    run = lambda **settings: simulate(algorithm, task, make_federation(), rounds=3, cohort_size=3, **settings)  # noqa: E731
    exact = run(plan="scan").params
    one, other = (run(plan=p, precision=format).params for p in ("scan", plan))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), other, one)
    apart = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(one), strict=True))
    assert 1e-6 < apart < 0.05


def test_low_precision_is_rejected_in_float64():
    task = classification(TwoNN().build((4,), 3))
    with pytest.raises(FedraxError, match="rounds float32"):
        simulate(FedAvg(), task, make_federation(), dtype="float64", precision="bfloat16")


def test_bfloat16_parameters_become_float32_and_the_plan_says_so():
    model = Model(
        lambda key: {"w": jnp.zeros((4, 3), jnp.bfloat16), "b": jnp.zeros(3)},
        lambda p, x, key=None: x @ p["w"] + p["b"],
    )
    printed = simulate(FedAvg(), classification(model), make_federation(), rounds=1, cohort_size=3)
    assert printed.plan.endswith(", parameters of bfloat16 held as float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(printed.params)} == {np.dtype(np.float32)}
    silent = classification(TwoNN().build((4,), 3))
    assert "held" not in simulate(FedAvg(), silent, make_federation(), rounds=1, cohort_size=3).plan
