"""Factorizations of batches of matrices, in forms that jaxlib before 0.11.2 computes.

- Factorizations of a batch (Cholesky, QR, SVD and others) become a loop over the matrices. Before 0.11.2 jaxlib splits
  a batch over the process's thread pool and waits for it; where all threads run programs of devices that wait for each
  other, none is left, and the run never ends. A single matrix is not split.
- Products of matrices with two or three rows and columns become sums: jaxlib 0.10 crashes while it compiles some of
  them for a batch, those whose results are transposed next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.extend import core

from fedrax.xla.rewriting import Rule, rewrite
from fedrax.xla.tracing import cpu_passes_apply

_FACTORIZATIONS = """cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd triangular_solve
    tridiagonal"""
LINEAR_ALGEBRA_SCOPE = "one_matrix_at_a_time"
"""The scope of a loop that is no one's but ours."""
_SMALL_SIZES = (2, 3)
"""Rows, or columns, of a small product."""


def lower_linear_algebra(mapped: Callable) -> Callable:
    """What ``vmap`` has made, on a CPU with factorizations one after another and small products as sums."""
    return (
        rewrite(mapped, SEQUENTIAL_RULES | {"dot_general": lower_small_dot})
        if SEQUENTIAL_RULES and cpu_passes_apply()
        else mapped
    )


def map_over_batch(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    """The rule for operations whose first input is matrices [..., M, N]; None where it is one."""
    return _map(inputs, equation, inputs[0].ndim - 2)


def lower_small_dot(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for products of a batch, as sums where each has two or three rows and columns; None for others."""
    (of, batch), (left, right) = equation.params["dimension_numbers"], inputs
    if not batch[0] or not {left.dtype.name, right.dtype.name} <= {"float32", "float64"}:
        return None
    free = [[k for k in range(a.ndim) if k not in (*s, *b)] for a, s, b in zip(inputs, of, batch, strict=True)]
    if any(math.prod(a.shape[k] for k in axes) not in _SMALL_SIZES for a, axes in zip(inputs, free, strict=True)):
        return None
    left, right = (a.transpose(*b, *axes, *s) for a, b, axes, s in zip(inputs, batch, free, of, strict=True))
    shared, summed = left.shape[: len(batch[0])], left.shape[left.ndim - len(of[0]) :]
    rows, columns = ([a.shape[k] for k in axes] for a, axes in zip(inputs, free, strict=True))
    each = left.reshape(*shared, *rows, *(1 for _ in columns), *summed)
    other = right.reshape(*shared, *(1 for _ in rows), *columns, *summed)
    result: Any = equation.outvars[0].aval
    return (each * other).sum(range(each.ndim - len(summed), each.ndim)).astype(result.dtype)


def _map_over_batch_of_diagonals(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    return _map(inputs, equation, inputs[0].ndim - 1)


def _map(inputs: list[Array], equation: core.JaxprEqn, axes: int) -> Any:
    batch, primitive = inputs[0].shape[:axes], equation.primitive
    if math.prod(batch) < 2:
        return None
    of_one = lambda of: primitive.bind(*of, **primitive.get_bind_params(equation.params))  # noqa: E731
    with jax.named_scope(LINEAR_ALGEBRA_SCOPE):
        found = lax.map(of_one, [x.reshape(-1, *x.shape[axes:]) for x in inputs])
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)


SEQUENTIAL_RULES: dict[str, Rule] = {}
"""None where batches are not shared out."""
if jax.__version_info__ < (0, 11, 2):
    SEQUENTIAL_RULES |= dict.fromkeys(_FACTORIZATIONS.split(), map_over_batch)
    SEQUENTIAL_RULES["tridiagonal_solve"] = _map_over_batch_of_diagonals
