"""PyTorch's operators of linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.pytorch.operators import OPERATORS, operator

OPERATORS |= {
    "linalg_matrix_exp": lambda x: jax.scipy.linalg.expm(x) if x.ndim == 2 else _map_matrices(jax.scipy.linalg.expm, x),
    "linalg_qr": lambda x, mode="reduced": (None, jnp.linalg.qr(x, "r")) if mode == "r" else jnp.linalg.qr(x, mode),
    "_linalg_eigh": lambda x, UPLO="L", compute_v=True: jnp.linalg.eigh(x, UPLO=UPLO),
}


def _map_matrices(function: Callable[[Array], Array], x: Array) -> Array:
    """A function of a matrix for each matrix of x [..., n, m]."""
    results = jax.vmap(function)(x.reshape(-1, *x.shape[-2:]))
    return results.reshape(*x.shape[:-2], *results.shape[1:])


@operator("linalg_householder_product")
def _householder_product(x: Array, tau: Array) -> Array:
    """The first columns of (1 - tau_1 v_1 v_1') (1 - tau_2 v_2 v_2') ..., v below the diagonal of x [..., n, m]."""
    ones = jnp.broadcast_to(jnp.eye(*x.shape[-2:], dtype=x.dtype), x.shape)
    columns = jnp.moveaxis(jnp.tril(x, -1) + ones, -1, 0)[: tau.shape[-1]]

    def reflect(q: Array, reflection: tuple[Array, Array]) -> tuple[Array, None]:
        v, factor = reflection
        return q - factor[..., None, None] * v[..., :, None] * (v[..., None, :] @ q), None

    return lax.scan(reflect, ones, (columns, jnp.moveaxis(tau, -1, 0)), reverse=True)[0]


@operator("_linalg_det")
def _det(x: Array) -> tuple[Array, None, None]:
    """The determinant; PyTorch's factors for the derivative are not computed."""
    return jnp.linalg.det(x), None, None


@operator("_linalg_slogdet")
def _slogdet(x: Array) -> tuple[Array, Array, None, None]:
    return *jnp.linalg.slogdet(x), None, None


@operator("linalg_inv_ex")
def _inverse(x: Array, *, check_errors: bool = False) -> tuple[Array, None]:
    return jnp.linalg.inv(x), None


@operator("linalg_cholesky_ex")
def _cholesky(x: Array, *, upper: bool = False, check_errors: bool = False) -> tuple[Array, None]:
    lower = jnp.linalg.cholesky(x)
    return (lower.mT.conj() if upper else lower), None


@operator("_linalg_solve_ex")
def _solve(x: Array, y: Array, *, left: bool = True, check_errors: bool = False) -> tuple[Array, None, None, None]:
    is_vector = y.ndim == 1 or (y.ndim == x.ndim - 1 and y.shape == x.shape[:-1])
    matrix = y[..., None] if is_vector else y
    solution = jnp.linalg.solve(x, matrix) if left else jnp.linalg.solve(x.mT, matrix.mT).mT
    return (solution[..., 0] if is_vector else solution), None, None, None


@operator("linalg_solve_triangular")
def _solve_triangular(x: Array, y: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    shape = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (jnp.broadcast_to(a, (*shape, *a.shape[-2:])) for a in (x, y))
    solve = partial(lax.linalg.triangular_solve, left_side=left, lower=not upper, unit_diagonal=unitriangular)
    return solve(x, y)


@operator("_linalg_svd")
def _svd(x: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None):
    if not compute_uv:
        return None, jnp.linalg.svd(x, compute_uv=False), None
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))
