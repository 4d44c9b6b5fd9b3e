"""The projection onto the cone in the programs that users run: one problem at a time, compiled with every optimization.

Many problems in one array (``test_cone``) are other programs. A compiler may compute a value anew wherever it is
used, and round it differently; what is decided by rounding, as between two equal columns, must be decided once.
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

LARGEST = 50
EACH = 150
"""Problems of a kind."""
APART = 0.1
"""The least sine between columns that are not parallel."""
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
"""Columns made of independent vectors; more than three are searched instead of tried. Opposite ones are scaled by
powers of two: rounded otherwise, they are a wedge instead of a line.
"""


def sine(a: np.ndarray, b: np.ndarray) -> float:
    """Between two directions."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(np.linalg.norm(b - (a @ b) * a))


def draw(kind: str, rng: np.random.Generator, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Problem k: columns [50, m] and p [50], in numbers that ``dtype`` has."""
    d = int(rng.choice([1, 2, 3, 8, LARGEST]))
    a, b, c = rng.normal(size=(3, d))
    while d > 1 and sine(a, b) < APART:
        b = rng.normal(size=d)
    columns = np.stack(KINDS[kind](a, b, c), axis=1).astype(dtype).astype(float)
    positive = np.abs(rng.normal(size=columns.shape[1]))
    places = {
        0: lambda: rng.normal(size=d),
        1: lambda: -a * positive[0] - 0.7 * b + 0.3 * c,  # behind both
        2: lambda: -columns @ positive,  # the answer is zero
        3: lambda: nearest(rng.normal(size=d), list(columns.T)),  # in the cone, at its edge
    }
    p = np.asarray(places[k % 4](), dtype).astype(float)
    return np.pad(columns, [(0, LARGEST - d), (0, 0)]), np.pad(p, (0, LARGEST - d))


@cache
def problems(kind: str, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns [K, 50, m], p [K, 50] and the nearest points [K, 50]."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    columns, p = (np.stack(a) for a in zip(*(draw(kind, rng, k, dtype) for k in range(EACH)), strict=True))
    return columns, p, np.stack([nearest(q, list(m.T)) for q, m in zip(p, columns, strict=True)])


def moved(columns: jax.Array, p: jax.Array) -> jax.Array:
    """p + sum_k z_k M_k from the products alone."""
    gram, inner = columns.T @ columns, columns.T @ p
    return p + columns @ multipliers(gram, inner)


def projected(columns: jax.Array, p: jax.Array) -> jax.Array:
    """The same as a local step takes it: of a tree, with columns that are never written to memory."""
    cut = lambda v: {"a": v[:20].reshape(4, 5), "b": v[20:]}  # noqa: E731
    parts = [cut(column) for column in columns.T]
    found = project_to_cone(cut(p), parts, lambda *pieces: pieces)
    return jnp.concatenate([found["a"].reshape(-1), found["b"]])


_alone, _alone_projected = jax.jit(moved), jax.jit(projected)


@jax.jit
def _in_a_loop(columns: jax.Array, p: jax.Array) -> jax.Array:
    """One problem after another, as local steps follow each other."""
    body = lambda k, found: found.at[k].set(projected(columns[k], p[k]))  # noqa: E731
    return jax.lax.fori_loop(0, len(p), body, jnp.zeros_like(p))


PROGRAMS = {
    "alone": lambda columns, p: np.stack([_alone(*one) for one in zip(columns, p, strict=True)]),
    "in a loop": _in_a_loop,
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", slow_cases(["float32", "float64"]))  # the latter in test_cone, many at a time
def test_one_problem_at_a_time(kind: str, dtype: str):
    """Products of unit columns are off by some eps, which the least squared sine divides."""
    columns, p, exact = problems(kind, dtype)
    sizes = np.maximum(np.linalg.norm(p, axis=1, keepdims=True), 1e-30)
    wrong = {}
    with jax.enable_x64(True):
        given = jnp.asarray(columns, dtype), jnp.asarray(p, dtype)
        for name, program in PROGRAMS.items():
            error = np.abs(np.asarray(program(*given), np.float64) - exact).max(1) / sizes[:, 0]
            wrong[name] = int((error > 8 * np.finfo(dtype).eps / APART**2).sum())
    assert not any(wrong.values()), f"of {len(p)} problems are wrong: {wrong}"


# Active columns that are nearly dependent, where the products have lost digits


def remainder(p: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """p without its part in the columns' span, in longer numbers: Gram and Schmidt, each direction taken out twice."""
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
    """Columns [50, 3], two nearly parallel or opposite and one of zero, and a p [50] behind both of the two."""
    a, b, q = np.linalg.qr(rng.normal(size=(LARGEST, 3)))[0].T
    columns = np.stack([a, sign * a + sine * b, 0 * a], axis=1)
    weights = rng.uniform(0.2, 1, 2) / (1 if sign > 0 else sine)
    return columns.astype(dtype).astype(float), (q - columns[:, :2] @ weights).astype(dtype).astype(float)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nearly_dependent_columns(dtype: str, sign: int):
    """Opposite columns make p long: p~ is right to rounding errors of p. Parallel ones leave p~ about as long as p,
    and the sine divides the rounding errors of its inner products.
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
