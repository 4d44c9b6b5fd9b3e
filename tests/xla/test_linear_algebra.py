"""Batched factorizations equal JAX's, computed sequentially."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

import fedrax
from fedrax.models import Linear, Model
from fedrax.simulation.setup import prepare
from fedrax.xla.grouped_conv import vmap
from fedrax.xla.linear_algebra import SEQUENTIAL_RULES, lower_small_dot
from fedrax.xla.pipeline import optimize
from fedrax.xla.rewriting import rewrite
from fedrax.xla.tracing import equations_in

FUNCTIONS: dict[str, Callable] = {
    "cholesky": lambda a: jnp.linalg.cholesky(a @ a.mT + jnp.eye(4)),
    "determinants": jnp.linalg.slogdet,
    "eigenvalues": jnp.linalg.eigvals,
    "eigenvectors": jnp.linalg.eigh,
    "hessenberg": linalg.hessenberg,
    "qr": jnp.linalg.qr,
    "schur": linalg.schur,
    "singular values": lambda a: jnp.linalg.svd(a, compute_uv=False),
    "solutions": lambda a: jnp.linalg.solve(a, a.mT),
    "tridiagonal": linalg.tridiagonal,
    "tridiagonal solutions": lambda a: linalg.tridiagonal_solve(a[..., 0], 9 + a[..., 1], a[..., 2], a),
    "triangular solutions": lambda a: jax.scipy.linalg.solve_triangular(a + 4 * jnp.eye(4), a.mT),
}


def batched_factorizations(function: Callable, *args: Any) -> list[str]:
    """Batched factorizations in a function."""
    found = []
    for equation in equations_in(jax.make_jaxpr(function)(*args)):
        axes = 1 if equation.primitive.name == "tridiagonal_solve" else 2
        if equation.primitive.name in SEQUENTIAL_RULES and np.prod(equation.invars[0].aval.shape[:-axes]) > 1:
            found.append(equation.primitive.name)
    return found


@pytest.mark.slow(keep=4)
@pytest.mark.skipif(not SEQUENTIAL_RULES, reason="this jaxlib computes them in turn itself")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_factorizations_agree_with_jax(name: str):
    """For two batch axes, and vectorized clients."""
    function, a = FUNCTIONS[name], jax.random.normal(jax.random.key(0), (3, 2, 4, 4))
    expected = function(a)
    assert batched_factorizations(function, a)
    for fast in (optimize(function), vmap(optimize(function))):
        assert not batched_factorizations(fast, a)
        for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(jax.jit(fast)(a)), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not SEQUENTIAL_RULES, reason="this jaxlib computes them in turn itself")
def test_gradients_and_vectorized_clients_with_one_matrix_per_sample():
    loss = lambda w, a: jnp.linalg.cholesky(a * w + jnp.eye(4)).sum() + jnp.linalg.slogdet(a + w * jnp.eye(4))[1]  # noqa: E731
    a = jnp.ones((5, 4, 4)) + jnp.arange(1.0, 6)[:, None, None] * jnp.eye(4)
    gradient = optimize(jax.grad(lambda w, a: loss(w, a).sum()))
    side = vmap(gradient, (None, 0))
    assert batched_factorizations(jax.vmap(gradient, (None, 0)), 1.0, a) and not batched_factorizations(side, 1.0, a)
    np.testing.assert_allclose(side(1.0, a), jax.vmap(jax.grad(loss), (None, 0))(1.0, a), rtol=1e-4)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("of", ["bkr,bkc->brc", "bkr,bkc->bcr", "brk,ckb->brc", "kbjr,bkcj->brc", "rbks,bkc->bcrs"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_batched_products_are_sums(of: str, dtype: str):
    """Of two or three rows and columns; others are unchanged."""
    for size, summed in ((1, False), (3, True), (4, False)):
        sizes = {"b": 5, "k": 6, "j": 2, "r": size, "c": 2, "s": 1}
        rng = np.random.default_rng(0)
        left, right = (rng.normal(size=[sizes[k] for k in part]) for part in of.partition("->")[0].split(","))
        with jax.enable_x64(dtype == "float64"):
            a, b = jnp.asarray(left, dtype), jnp.asarray(right, dtype)
            made = rewrite(lambda a, b: jnp.einsum(of, a, b, precision="highest"), {"dot_general": lower_small_dot})
            products = [e for e in equations_in(jax.make_jaxpr(made)(a, b)) if e.primitive.name == "dot_general"]
            assert bool(products) != summed
            tolerance = 1e-13 if dtype == "float64" else 1e-5
            np.testing.assert_allclose(made(a, b), np.einsum(of, left, right), rtol=tolerance, atol=tolerance)


def test_vectorized_clients_with_three_features_and_three_classes():
    """This program crashed in jaxlib 0.10."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 3)), np.arange(24) % 3
    federation = fedrax.Federation.from_arrays(x, y, offsets=[0, 6, 12, 18, 24], shuffle=False)
    method = fedrax.algorithms.GradMAW(local=fedrax.LocalSGD(lr=0.05, steps=2, batch_size=4))
    init = lambda key: {"w": jnp.full((3, 3), 0.1), "b": jnp.zeros(3)}  # noqa: E731
    task = fedrax.classification(Model(init, lambda params, x, key=None: x @ params["w"] + params["b"]))
    plans: tuple[Any, ...] = ("vmap", "scan")
    side, turns = (
        fedrax.simulate(method, task, federation, rounds=2, cohort_size=3, plan=plan, devices=1, progress=False)
        for plan in plans
    )
    assert side.metric("train_loss")[-1] == pytest.approx(turns.metric("train_loss")[-1], rel=1e-6)


@pytest.mark.skipif(not SEQUENTIAL_RULES, reason="this jaxlib computes them in turn itself")
@pytest.mark.parametrize("where", ["client", "server"])
def test_factorizations_in_methods_are_sequential(where: str):
    """Devices that run batched factorizations in the same program would deadlock."""

    def of_many(params: Any) -> Any:
        matrices = jax.tree.leaves(params)[-1][:1, :1] + jnp.arange(64.0)[:, None, None] * jnp.eye(4)
        return jnp.linalg.eigh(matrices)[0].sum()

    @fedrax.hyperparameters
    class Mine(fedrax.FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> fedrax.ClientOutput:
            output = super().client(message, state, data)
            return output._replace(total=of_many(message)) if where == "client" else output

        def server(self, server: Any, cohort: Any) -> Any:
            after, _ = super().server(server, cohort)
            return after, {"sum": of_many(after.params) if where == "server" else cohort.total}

    x, y = np.random.default_rng(0).normal(size=(24, 4)), np.arange(24) % 3
    federation = fedrax.Federation.from_arrays(x, y, offsets=[0, 6, 12, 18, 24])
    method, task = Mine(local=fedrax.LocalSGD(lr=0.1, steps=1)), fedrax.classification(Linear().build((4,), 3))
    program = prepare(method, task, federation, fedrax.Settings(rounds=2, cohort_size=4)).traced.program
    shapes = [e.invars[0].aval.shape for e in equations_in(program) if e.primitive.name == "eigh"]
    assert shapes and all(np.prod(shape[:-2]) == 1 for shape in shapes)
    fedrax.simulate(method, task, federation, rounds=2, cohort_size=4, progress=False)
