"""Workarounds for factorizations and small products of batches of matrices on CPUs.

:func:`map_over_batch`:

- Before: factorizations (Cholesky, QR, SVD and others) of a batch of matrices.
- After: a loop over the matrices.
- Why: before 0.11.2 jaxlib splits the batch over the process's thread pool and waits for it. If all threads of the pool
  run programs of devices that wait for each other, the run deadlocks. A single matrix is not split.
- Not for: jaxlib 0.11.2 and newer.

:func:`lower_small_dot`:

- Before: ``dot_general`` of a batch of matrices with two or three rows and columns.
- After: sums of products.
- Why: jaxlib 0.10 crashes while it compiles some of them, if their results are transposed next.
- Not for: dtypes other than float32 and float64.
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
"""Name scope of the loops, by which profiles recognize them."""
_SMALL_SIZES = (2, 3)
"""Rows or columns of a small product."""


def lower_linear_algebra(mapped: Callable) -> Callable:
    """Apply both workarounds to a function under ``vmap``, on CPUs."""
    return (
        rewrite(mapped, SEQUENTIAL_RULES | {"dot_general": lower_small_dot})
        if SEQUENTIAL_RULES and cpu_passes_apply()
        else mapped
    )


def map_over_batch(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    """Rule for factorizations of matrices [..., M, N]; None for a single matrix."""
    return _map(inputs, equation, inputs[0].ndim - 2)


def lower_small_dot(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``dot_general`` with batch axes; None unless each product has two or three rows and columns."""
    (of, batch), (left, right) = equation.params["dimension_numbers"], inputs
    if not batch[0] or not {left.dtype.name, right.dtype.name} <= {"float32", "float64"}:
        return None
    free = [[k for k in range(a.ndim) if k not in (*s, *b)] for a, s, b in zip(inputs, of, batch, strict=True)]
    if any(math.prod(a.shape[k] for k in axes) not in _SMALL_SIZES for a, axes in zip(inputs, free, strict=True)):
        return None
    left, right = (a.transpose(*b, *axes, *s) for a, b, axes, s in zip(inputs, batch, free, of, strict=True))
    shared, summed = left.shape[: len(batch[0])], left.shape[left.ndim - len(of[0]) :]
    rows, columns = ([a.shape[k] for k in axes] for a, axes in zip(inputs, free, strict=True))
    left = left.reshape(*shared, *rows, *(1 for _ in columns), *summed)
    right = right.reshape(*shared, *(1 for _ in rows), *columns, *summed)
    result: Any = equation.outvars[0].aval
    return (left * right).sum(range(left.ndim - len(summed), left.ndim)).astype(result.dtype)


def _map_over_batch_of_diagonals(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    """Rule for ``tridiagonal_solve``, whose first input is diagonals [..., N]."""
    return _map(inputs, equation, inputs[0].ndim - 1)


def _map(inputs: list[Array], equation: core.JaxprEqn, axes: int) -> Any:
    """Loop over the first ``axes`` axes; None for a batch of one."""
    batch, primitive = inputs[0].shape[:axes], equation.primitive
    if math.prod(batch) < 2:
        return None

    def factorize(matrices: list[Array]) -> Any:
        return primitive.bind(*matrices, **primitive.get_bind_params(equation.params))

    with jax.named_scope(LINEAR_ALGEBRA_SCOPE):
        found = lax.map(factorize, [x.reshape(-1, *x.shape[axes:]) for x in inputs])
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)


SEQUENTIAL_RULES: dict[str, Rule] = {}
"""Rules for factorizations by primitive; empty for versions of jaxlib that do not deadlock."""
if jax.__version_info__ < (0, 11, 2):
    SEQUENTIAL_RULES |= dict.fromkeys(_FACTORIZATIONS.split(), map_over_batch)
    SEQUENTIAL_RULES["tridiagonal_solve"] = _map_over_batch_of_diagonals
