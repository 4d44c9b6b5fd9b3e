"""Products with operands of lower precision: against NumPy, inside loops and branches, and in runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import primitives

from fedrax import FedAvg, FedraxError, LocalSGD, classification, simulate
from fedrax.contract.task import Batch
from fedrax.models import LSTM, LeNet, Model, TwoNN
from fedrax.xla.precision import OperandFormat, with_operand_format
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
    np.testing.assert_allclose(value, np.sum((r(x) @ r(w)) * c), rtol=1e-5)
    np.testing.assert_allclose(gradient, r(x).T @ r(c), rtol=1e-5, atol=1e-6)
    assert np.abs(gradient - x.T.astype(float) @ c).max() > 1e-4


@FORMATS
def test_products_inside_a_loop_are_rounded(format: OperandFormat):
    """Backpropagation through h <- h w, three times, in NumPy."""
    h0, w, c = draw(4, 6), draw(6, 6), draw(4, 6)

    def loss(w: jax.Array) -> jax.Array:
        h = jax.lax.scan(lambda h, _: (h @ w, None), h0, length=3)[0]
        return jnp.sum(h * c)

    r = lambda a: rounded(np.asarray(a, np.float32), format)  # noqa: E731
    hs = [h0]
    for _ in range(3):
        hs.append(r(hs[-1]) @ r(w))
    expected, back = np.zeros((6, 6)), c.astype(np.float64)
    for h in reversed(hs[:-1]):
        expected += r(h).T @ r(back)
        back = r(back) @ r(w).T
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
    """Traced program for backends other than CPU: native products, sums in float32."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    traced = jax.make_jaxpr(with_operand_format(lambda a: a @ a, format))(draw(3, 3))
    (product,) = [e for e in traced.jaxpr.eqns if e.primitive is primitives.dot_general_p]
    assert [v.aval.dtype.name for v in product.invars] == [operands] * 2
    assert product.outvars[0].aval.dtype == jnp.float32
    if format == "tensorfloat32":
        assert product.params["precision"] == (jax.lax.Precision.HIGH,) * 2


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
