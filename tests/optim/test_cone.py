"""The projection onto the cone of directions that agree with given columns: thousands of problems.

The oracle is scipy's non-negative least squares on the columns themselves (``reference_gradma``), which never computes
their inner products.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from fedrax.optim.cone import multipliers, project_to_cone
from tests.reference_gradma import nearest
from tests.slow import slow_cases

pytestmark = pytest.mark.usefixtures("full_compilation")

COUNTS = (1, 2, 3, 10, 50)
KINDS = (
    "random",
    "inside",
    "zero p",
    "polar",
    "zero columns",
    "duplicates",
    "opposites",
    "dependent",
    "signs",
    "scales",
    "one direction",
)
NUM_PROBLEMS = {1: 200, 2: 200, 3: 300, 10: 60, 50: 30}
"""Number of problems of each kind, by the number of columns."""


@dataclass(frozen=True)
class Problems:
    """K problems of m columns in d dimensions: columns [K, d, m], p [K, d] and the oracle's answers [K, d]."""

    columns: np.ndarray
    p: np.ndarray
    nearest: np.ndarray

    @property
    def units(self) -> np.ndarray:
        """Columns with length one or zero."""
        columns = self.columns / np.maximum(np.abs(self.columns).max(1, keepdims=True), 1e-300)
        return columns / np.maximum(np.linalg.norm(columns, axis=1, keepdims=True), 1e-300)

    @property
    def sizes(self) -> np.ndarray:
        """|p|, or one if it is zero: [K, 1]."""
        norms = np.linalg.norm(self.p, axis=1, keepdims=True)
        return np.where(norms > 0, norms, 1)


def draw(kind: str, rng: np.random.Generator, d: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """One problem: columns [d, m] and p [d]."""
    columns, p = rng.normal(size=(d, m)), rng.normal(size=d)
    positive, other = np.abs(rng.normal(size=m)), rng.integers(0, m, m)
    if kind == "inside":  # p from a feasible point at which most constraints are inactive
        p = nearest(p, list(columns.T)) + columns @ np.linalg.pinv(columns.T @ columns) @ positive * (m <= d)
    elif kind == "zero p":
        p = np.zeros(d)
    elif kind == "polar":  # the projection is zero
        p = -columns @ positive
    elif kind == "zero columns":
        columns[:, rng.random(m) < 0.5] = 0
    elif kind == "duplicates":
        columns = columns[:, other] * positive
    elif kind == "opposites":
        columns = columns[:, other] * rng.normal(size=m)
    elif kind == "dependent":
        rank = max(1, min(d, m) // 2)
        columns = rng.normal(size=(d, rank)) @ rng.normal(size=(rank, m))
    elif kind == "signs":  # small integers: exactly parallel, antiparallel, orthogonal and zero columns
        columns, p = rng.integers(-1, 2, (d, m)).astype(float), rng.integers(-2, 3, d).astype(float)
    elif kind == "scales":
        columns, p = columns * 10.0 ** rng.uniform(-20, 20, m), p * 10.0 ** rng.uniform(-20, 20)
    elif kind == "one direction":
        columns = columns[:, :1] * rng.normal(size=m)
    return columns, p


@cache
def problems(kind: str, m: int) -> Problems:
    """In 2, 3, 8 and 60 dimensions, with more columns than dimensions and fewer."""
    rng = np.random.default_rng([KINDS.index(kind), m])
    drawn = [draw(kind, rng, int(rng.choice([2, 3, 8, 60])), m) for _ in range(NUM_PROBLEMS[m])]
    fill = lambda a: np.pad(a, [(0, 60 - len(a))] + [(0, 0)] * (a.ndim - 1))  # noqa: E731
    columns, p = (np.stack([fill(problem[k]) for problem in drawn]) for k in (0, 1))
    return Problems(columns, p, np.stack([nearest(b, list(a.T)) for a, b in zip(columns, p, strict=True)]))


_vectorized = jax.jit(jax.vmap(multipliers))
_sequential = jax.jit(lambda *products: jax.lax.map(lambda one: multipliers(*one), products))


def solve(given: Problems, dtype: str = "float64", program: Any = _vectorized) -> tuple[np.ndarray, np.ndarray]:
    """z [K, m] and p + M z [K, d] of all problems, with products and solutions in ``dtype``."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        columns, p = jnp.asarray(given.columns, dtype), jnp.asarray(given.p, dtype)
        gram, inner = jnp.einsum("kdm,kdn->kmn", columns, columns), jnp.einsum("kdm,kd->km", columns, p)
        z = program(gram, inner)
        assert z.dtype == jnp.dtype(dtype)
        return np.asarray(z, np.float64), np.asarray(p + jnp.einsum("kdm,km->kd", columns, z), np.float64)


def violation(given: Problems, found: np.ndarray) -> np.ndarray:
    """Largest violation of a condition of each solution, relative to |p| [K]."""
    cosines = np.einsum("kdm,kd->km", given.units, found) / given.sizes
    return np.maximum(0, -cosines.min(1))


ALL_PROBLEMS = [(kind, m) for m in COUNTS for kind in KINDS]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(("kind", "m"), ALL_PROBLEMS)
def test_float64_agrees_with_least_squares(kind: str, m: int):
    """Also satisfies the Karush-Kuhn-Tucker conditions, which characterize the nearest point without an oracle."""
    given = problems(kind, m)
    z, found = solve(given)
    np.testing.assert_allclose(found / given.sizes, given.nearest / given.sizes, rtol=0, atol=1e-6)
    assert (z >= 0).all()
    assert not z[np.einsum("kdm,kdm->km", given.columns, given.columns) == 0].any()
    assert violation(given, found).max() < 1e-9
    complementary = np.einsum("kd,kd->k", found, found - given.p) / given.sizes[:, 0] ** 2
    np.testing.assert_allclose(complementary, 0, atol=1e-9)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("kind", "m"), [(kind, m) for kind, m in ALL_PROBLEMS if kind != "scales"])
def test_float32_error_is_bounded_by_that_of_the_products(kind: str, m: int):
    """Products of unit columns have errors of eps, which the solution divides by their smallest eigenvalue.

    That is the square of the smallest singular value of the columns and bounds the error for columns of full rank. For
    any columns, the solution violates no condition by more than the sine below which a column counts as dependent
    (about 3e-3; three times that if several are dropped), and is not longer than p.
    """
    given = problems(kind, m)
    _, found = solve(given, "float32")
    assert violation(given, found).max() < 1e-2
    assert (np.linalg.norm(found, axis=1) <= 1.001 * np.linalg.norm(given.p, axis=1)).all()
    least = np.linalg.svd(given.units, compute_uv=False).min(1)
    error = np.abs(found - given.nearest).max(1) / given.sizes[:, 0]
    sound = least > 0.03
    assert (error[sound] < 8 * np.finfo(np.float32).eps / least[sound] ** 2).all()


def rounded(columns: list[np.ndarray], p: np.ndarray, dtype: str) -> Problems:
    """Problems rounded to ``dtype``, without the oracle."""
    exact = lambda a: np.asarray(a, dtype).astype(np.float64)  # noqa: E731
    return Problems(exact(columns), exact(p), p)


def assert_nearly_feasible(given: Problems, dtype: str) -> None:
    """Assert the properties of ill-posed problems: nearly feasible, and not longer than p.

    Problems run sequentially, because vectorized ones all wait for the slowest.
    """
    _, found = solve(given, dtype, _sequential)
    assert violation(given, found).max() < (1e-3 if dtype == "float64" else 2e-2)
    assert (np.linalg.norm(found, axis=1) <= 1.001 * np.linalg.norm(given.p, axis=1)).all()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("m", "d", "count"), [(10, 8, 1000), (50, 20, 600), (100, 40, 200)])
@pytest.mark.parametrize("dtype", slow_cases(["float32", "float64"]))
def test_many_columns_in_a_subspace(m: int, d: int, count: int, dtype: str):
    """The columns span all dimensions except one: the last active column is independent or a rounding error."""
    rng = np.random.default_rng([m, d, 3])
    columns = [rng.normal(size=(d, d - 1)) @ rng.normal(size=(d - 1, m)) for _ in range(count)]
    assert_nearly_feasible(rounded(columns, rng.normal(size=(count, d)), dtype), dtype)


NEARLY = [(dtype, m) for dtype in ("float64", "float32") for m in (2, 3, 4, 10, 50)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("dtype", "m"), slow_cases(NEARLY, NEARLY[1::2]))
def test_nearly_opposite_columns(dtype: str, m: int):
    """Opposite up to 1 ... 1e-16; for half of them float64 resolves the difference, as in full-batch GradMA from the
    second step on. The projection jumps from a wedge to a plane where rounding decides which it is.
    """
    rng, columns, p = np.random.default_rng(m), [], []
    for k in range(3000 if m < 50 else 300):
        d, noise = int(rng.choice([2, 3, 5, 20])), 10.0 ** -(rng.uniform(0, 16) if k % 2 else rng.uniform(3.5, 7.5))
        few = rng.normal(size=(d, min(m - 1, 3)))
        near = few[:, rng.integers(0, few.shape[1], m)] * rng.choice([-1, 1], m) + noise * rng.normal(size=(d, m))
        columns.append(np.pad(near, [(0, 20 - d), (0, 0)]))
        start = -near @ np.abs(rng.normal(size=m)) if k % 3 == 0 else rng.normal(size=d)
        p.append(np.pad(start, (0, 20 - d)))
    assert_nearly_feasible(rounded(columns, np.array(p), dtype), dtype)


@pytest.mark.parametrize("m", COUNTS)
def test_feasible_p_is_unchanged(m: int):
    given = problems("random", m)
    feasible = np.einsum("kdm,kd->km", given.columns, given.p).min(1) > 0
    assert feasible.any() == (m < 10)
    inside = problems("inside", m)
    loose = np.einsum("kdm,kd->km", inside.columns, inside.p).min(1) > 1e-12
    assert loose.any()
    for case, rows in ((given, feasible), (inside, loose)):
        z, found = solve(case)
        assert not z[rows].any()
        np.testing.assert_array_equal(found[rows], case.p[rows])


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("m", COUNTS)
@pytest.mark.parametrize("kind", ["random", "duplicates", "signs"])
def test_no_feasible_point_is_nearer(kind: str, m: int):
    """Candidates: the origin, points with given slacks, points near the solution and between, if feasible."""
    given, rng = problems(kind, m), np.random.default_rng(m)
    _, found = solve(given)
    distance = np.linalg.norm(found - given.p, axis=1)
    inverse = np.linalg.pinv(given.units.transpose(0, 2, 1))  # [K, d, m]: M' q = s is solved by q = inverse s
    for scale in (1e-3, 0.03, 1.0, 10.0):
        for _ in range(20):
            slack = scale * np.abs(rng.normal(size=(len(found), m))) * rng.integers(0, 2, (len(found), m))
            anywhere = np.einsum("kdm,km->kd", inverse, slack)
            near = found + scale * rng.normal(size=found.shape)
            for q in (np.zeros_like(found), anywhere, found + anywhere, near):
                feasible = np.einsum("kdm,kd->km", given.units, q).min(1) >= 0
                nearer = np.linalg.norm(q - given.p, axis=1) < distance - 1e-9 * given.sizes[:, 0]
                assert not (feasible & nearer).any()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("m", COUNTS)
def test_solutions_do_not_depend_on_other_problems_of_the_batch(m: int):
    given = problems("random", m)
    (z, found), (_, alone) = solve(given), solve(given, program=_sequential)
    np.testing.assert_allclose(alone / given.sizes, found / given.sizes, rtol=0, atol=1e-10)
    assert z.shape == (NUM_PROBLEMS[m], m)


def test_oracle_satisfies_the_conditions():
    """Feasible, in p plus the cone of the columns, and orthogonal to the move."""
    for kind, m in ALL_PROBLEMS:
        given = problems(kind, m)
        assert violation(given, given.nearest).max() < 1e-9
        move = given.nearest - given.p
        np.testing.assert_allclose(np.einsum("kd,kd->k", move, given.nearest) / given.sizes[:, 0] ** 2, 0, atol=1e-9)
        for units, step, size in zip(given.units[:20], move, given.sizes[:, 0], strict=False):
            assert scipy.optimize.nnls(units, step / size)[1] < 1e-9


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parallel", [False, True], ids=["separated", "nearly parallel"])
def test_projection_has_a_derivative(parallel: bool) -> None:
    """Needed by attacks on client programs; nearly parallel columns use the refinement in a loop."""
    rng = np.random.default_rng(0)
    p, a, b = rng.normal(size=(3, 6))
    b = b - 1.1 * p
    a = b + 1e-3 * a if parallel else a

    def weighed(p: Any, a: Any, b: Any) -> Any:
        return project_to_cone(p, (a, b), lambda a, b: (a, b)) @ jnp.arange(6.0)

    found = jax.jit(jax.grad(weighed, argnums=(0, 1, 2)))(*(jnp.asarray(v, jnp.float32) for v in (p, a, b)))
    with jax.enable_x64(True):
        weighed = jax.jit(weighed)
        for k, gradient in enumerate(found):
            for i in range(6):
                moved = [np.array([p, a, b]) for _ in range(2)]
                moved[0][k, i] += 1e-6
                moved[1][k, i] -= 1e-6
                slope = (float(weighed(*moved[0])) - float(weighed(*moved[1]))) / 2e-6
                assert float(gradient[i]) == pytest.approx(slope, rel=1e-3, abs=1e-3)
