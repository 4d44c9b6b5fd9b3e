"""Factorisations of many matrices, one after another where each core is a device.

jaxlib shared the matrices of a batch out over the threads of the process until 0.11.2, and whoever asked waits for
them. Where all threads are programs of devices that wait, none is left to do what they wait for, and the run never
ends. A single matrix is not shared out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.extend import core

from fedrax.compiled.rewriting import Rule, rewritten
from fedrax.compiled.tracing import in_fast_forms

_NAMES = """cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd triangular_solve
    tridiagonal"""


def in_turn(function: Callable) -> Callable:
    """``function`` with its factorisations one after another, on a CPU; for what ``vmap`` has made."""
    return rewritten(function, RULES) if RULES and in_fast_forms() else function


def one_by_one(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    """The rule for operations whose first input is matrices [..., M, N]; None where it is one."""
    return _mapped(inputs, equation, inputs[0].ndim - 2)


def _of_diagonals(inputs: list[Array], equation: core.JaxprEqn) -> Any:
    return _mapped(inputs, equation, inputs[0].ndim - 1)


def _mapped(inputs: list[Array], equation: core.JaxprEqn, axes: int) -> Any:
    batch, primitive = inputs[0].shape[:axes], equation.primitive
    if math.prod(batch) < 2:
        return None
    of_one = lambda of: primitive.bind(*of, **primitive.get_bind_params(equation.params))  # noqa: E731
    found = lax.map(of_one, [x.reshape(-1, *x.shape[axes:]) for x in inputs])
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), found)


RULES: dict[str, Rule] = {}
"""None where batches are not shared out."""
if jax.__version_info__ < (0, 11, 2):
    RULES |= dict.fromkeys(_NAMES.split(), one_by_one)
    RULES["tridiagonal_solve"] = _of_diagonals
