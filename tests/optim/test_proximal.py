"""Proximal operators return the minimizer of their definition."""

import jax
import numpy as np
import pytest
import scipy.optimize

from fedrax.config.hyperparameters import check
from fedrax.errors import FedraxError
from fedrax.optim.proximal import L1, Box, ElasticNet, NuclearNorm

SHAPE, STEP = (3, 2), 0.7
CASES = {
    "L1": (L1(0.8), lambda z: 0.8 * np.abs(z).sum()),
    "ElasticNet": (ElasticNet(0.5, 1.3), lambda z: 0.5 * np.abs(z).sum() + 1.3 / 2 * (z**2).sum()),
    "NuclearNorm": (NuclearNorm(1.0), lambda z: 1.0 * np.linalg.svd(z, compute_uv=False).sum()),
    "Box": (Box(-0.5, 0.8), lambda z: 0.0 if z.min() >= -0.5 - 1e-9 and z.max() <= 0.8 + 1e-9 else np.inf),
}


@pytest.fixture(params=CASES)
def case(request):
    """(x, prox(x), objective) in float64."""
    prox, psi = CASES[request.param]
    x = np.random.default_rng(3).normal(size=SHAPE)
    with jax.enable_x64(True):
        point = np.asarray(prox({"w": x}, STEP)["w"])
    return x, point, lambda z: psi(z) + ((z - x) ** 2).sum() / (2 * STEP)


def test_prox_satisfies_the_inequality_of_strong_convexity(case):
    """p = prox(x) if and only if objective(z) >= objective(p) + |z - p|^2 / (2 t) for every z."""
    _, point, objective = case
    rng = np.random.default_rng(4)
    for scale in (1e-4, 1e-2, 0.1, 1, 10):
        for _ in range(200):
            z = point + scale * rng.normal(size=SHAPE) * rng.integers(0, 2, SHAPE)
            assert objective(z) >= objective(point) + ((z - point) ** 2).sum() / (2 * STEP) - 1e-12


def test_prox_agrees_with_a_numerical_minimizer(case):
    x, point, objective = case
    start = np.clip(x, -0.5, 0.8)
    options = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-13, "adaptive": True}
    for _ in range(4):  # restarts, because the objectives have kinks
        flat = lambda z: min(objective(z.reshape(SHAPE)), 1e9)  # noqa: E731
        start = scipy.optimize.minimize(flat, start.ravel(), method="Nelder-Mead", options=options).x.reshape(SHAPE)
    np.testing.assert_allclose(start, point, atol=2e-4)


def test_cases_are_not_trivial(case):
    """Some entries become zero, others do not."""
    x, point, _ = case
    assert np.abs(point - x).max() > 0.1
    assert np.abs(point).max() > 0.1
    assert np.any(np.isclose(point, 0)) or np.linalg.matrix_rank(point, 1e-8) < 2 or point.max() == 0.8


def test_nuclear_norm_applies_to_matrices_only():
    tree = {"bias": np.ones(3, np.float32), "kernel": np.ones((3, 3), np.float32)}
    result = NuclearNorm(1.0)(tree, 1.0)
    np.testing.assert_array_equal(result["bias"], tree["bias"])
    np.testing.assert_allclose(result["kernel"], np.full((3, 3), 2 / 3), rtol=1e-6)


def test_impossible_box_is_rejected():
    with pytest.raises(FedraxError, match=r"Box\.low must not exceed Box\.high"):
        check(Box(1.0, -1.0))
