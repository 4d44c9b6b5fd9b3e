"""The projection onto the cone, fully compiled and one problem at a time, as users run it.

Vectorized problems (``test_cone``) are different programs. A compiler may compute a value repeatedly and round it
differently each time; decisions by rounding, as between two equal columns, must be made once.
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.optim.cone import multipliers, project_to_cone
from tests.reference_gradma import nearest
from tests.slow import slow_cases

pytestmark = pytest.mark.usefixtures("full_compilation")

MAX_ERROR = 50
NUM_PROBLEMS = 150
"""Number of problems of each kind."""
MIN_SINE = 0.1
"""Smallest sine between columns that are not parallel."""
KINDS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], list[np.ndarray]]] = {
    "two equal": lambda a, b, c: [a, a, b],
    "the last two equal": lambda a, b, c: [b, a, a],
    "the first and the last equal": lambda a, b, c: [a, b, a],
    "equal up to scaling": lambda a, b, c: [a, 3.7 * a, b],
    "three equal": lambda a, b, c: [a, a, a],
    "antiparallel": lambda a, b, c: [a, -0.25 * a, b],
    "all on a line": lambda a, b, c: [a, -a, 0.125 * a],
    "a zero column": lambda a, b, c: [a, 0 * a, b],
    "zero columns": lambda a, b, c: [0 * a, 0 * a, 0 * a],
    "two equal and a zero column": lambda a, b, c: [a, a, 0 * a],
    "four, two pairs equal": lambda a, b, c: [a, b, a, b],
    "four, three equal": lambda a, b, c: [a, a, b, a],
}
"""Columns made of independent vectors; more than three are solved by search instead of enumeration. Opposite columns
are scaled by powers of two: otherwise rounding makes them a wedge instead of a line.
"""


def sine(a: np.ndarray, b: np.ndarray) -> float:
    """Sine of the angle between two directions."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(np.linalg.norm(b - (a @ b) * a))


def draw(kind: str, rng: np.random.Generator, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Problem k: columns [50, m] and p [50], representable in ``dtype``."""
    d = int(rng.choice([1, 2, 3, 8, MAX_ERROR]))
    a, b, c = rng.normal(size=(3, d))
    while d > 1 and sine(a, b) < MIN_SINE:
        b = rng.normal(size=d)
    columns = np.stack(KINDS[kind](a, b, c), axis=1).astype(dtype).astype(float)
    positive = np.abs(rng.normal(size=columns.shape[1]))
    places = {
        0: lambda: rng.normal(size=d),
        1: lambda: -a * positive[0] - 0.7 * b + 0.3 * c,  # opposite to both
        2: lambda: -columns @ positive,  # the projection is zero
        3: lambda: nearest(rng.normal(size=d), list(columns.T)),  # in the cone, at its edge
    }
    p = np.asarray(places[k % 4](), dtype).astype(float)
    return np.pad(columns, [(0, MAX_ERROR - d), (0, 0)]), np.pad(p, (0, MAX_ERROR - d))


@cache
def problems(kind: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns [K, 50, m], p [K, 50] and the nearest points [K, 50]."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    columns, p = (np.stack(a) for a in zip(*(draw(kind, rng, k, dtype) for k in range(NUM_PROBLEMS)), strict=True))
    return columns, p, np.stack([nearest(q, list(m.T)) for q, m in zip(p, columns, strict=True)])


def moved(columns: jax.Array, p: jax.Array) -> jax.Array:
    """p + sum_k z_k M_k from the products only."""
    gram, inner = columns.T @ columns, columns.T @ p
    return p + columns @ multipliers(gram, inner)


def projected(columns: jax.Array, p: jax.Array) -> jax.Array:
    """The projection as in a local step: of a tree, with columns that are never stored in memory."""
    cut = lambda v: {"a": v[:20].reshape(4, 5), "b": v[20:]}  # noqa: E731
    parts = [cut(column) for column in columns.T]
    found = project_to_cone(cut(p), parts, lambda *pieces: pieces)
    return jnp.concatenate([found["a"].reshape(-1), found["b"]])


_alone, _alone_projected = jax.jit(moved), jax.jit(projected)


@jax.jit
def _in_a_loop(columns: jax.Array, p: jax.Array) -> jax.Array:
    """One problem after another, as in local steps."""
    body = lambda k, found: found.at[k].set(projected(columns[k], p[k]))  # noqa: E731
    return jax.lax.fori_loop(0, len(p), body, jnp.zeros_like(p))


PROGRAMS = {
    "alone": lambda columns, p: np.stack([_alone(*one) for one in zip(columns, p, strict=True)]),
    "in a loop": _in_a_loop,
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", slow_cases(["float32", "float64"]))  # sequential in test_cone
def test_single_problems_agree_with_least_squares(kind: str, dtype: str):
    """Products of unit columns have errors of several eps, which are divided by the smallest squared sine."""
    columns, p, exact = problems(kind, dtype)
    sizes = np.maximum(np.linalg.norm(p, axis=1, keepdims=True), 1e-30)
    wrong = {}
    with jax.enable_x64(True):
        given = jnp.asarray(columns, dtype), jnp.asarray(p, dtype)
        for name, program in PROGRAMS.items():
            error = np.abs(np.asarray(program(*given), np.float64) - exact).max(1) / sizes[:, 0]
            wrong[name] = int((error > 8 * np.finfo(dtype).eps / MIN_SINE**2).sum())
    assert not any(wrong.values()), f"of {len(p)} problems are wrong: {wrong}"


# Almost dependent active columns, for which the products lose digits


def remainder(p: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """The component of p orthogonal to the columns, in higher precision: repeated Gram-Schmidt."""
    p, directions = p.astype(np.longdouble), []
    for column in columns:
        column = column.astype(np.longdouble)
        for u in 2 * directions:
            column = column - (u @ column) * u
        directions.append(column / np.sqrt(column @ column))
    for u in 2 * directions:
        p = p - (u @ p) * u
    return p.astype(float)


def nearly_dependent(rng: np.random.Generator, sine: float, sign: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns [50, 3], two almost parallel or opposite and one zero, and a p [50] opposite to both."""
    a, b, q = np.linalg.qr(rng.normal(size=(MAX_ERROR, 3)))[0].T
    columns = np.stack([a, sign * a + sine * b, 0 * a], axis=1)
    weights = rng.uniform(0.2, 1, 2) / (1 if sign > 0 else sine)
    return columns.astype(dtype).astype(float), (q - columns[:, :2] @ weights).astype(dtype).astype(float)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nearly_dependent_columns(dtype: str, sign: int):
    """For opposite columns p is long and p~ exact up to rounding errors of p. For parallel columns p~ is about as long
    as p, and the sine divides the rounding errors of its inner products.
    """
    rng, eps = np.random.default_rng(1), float(np.finfo(dtype).eps)
    with jax.enable_x64(True):
        for sine in (0.05, 1e-2, 1e-3, 1e-4, 1e-5) if dtype == "float64" else (0.05, 1e-2):
            errors = []
            for _ in range(40):
                columns, p = nearly_dependent(rng, sine, sign, dtype)
                found = np.asarray(_alone_projected(jnp.asarray(columns, dtype), jnp.asarray(p, dtype)), np.float64)
                errors.append(np.abs(found - remainder(p, list(columns[:, :2].T))).max() / np.linalg.norm(p))
            assert np.median(errors) < (eps if sign < 0 else 0.05 * eps / sine), sine
