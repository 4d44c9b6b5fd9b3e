"""Trace regression: estimation of a matrix from its inner products with sample matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError
from fedrax.models.architecture import Architecture, Shape

RANK_TOLERANCE = 1e-3
"""Singular values above this count toward the rank (LoSAC, section 5.5)."""


@dataclass(frozen=True)
class TraceRegression(Architecture):
    """y = <X, D> for a parameter matrix X and samples D of its shape, no bias (Negahban and Wainwright 2010).

    The model reports the rank of X (singular values above 1e-3) and, if the true matrix is known, the Frobenius norm
    of the difference. With ``NuclearNorm`` as the proximal operator it estimates matrices of low rank.

    Example:
        >>> model = fedrax.models.TraceRegression().build(input_shape=(3, 2), num_outputs=1)
        >>> model.apply({"matrix": jnp.ones((3, 2))}, jnp.ones((1, 3, 2))).tolist()
        [6.0]
    """

    deviation: float = 0.0
    """Standard deviation of the normal initial entries of X; 0 initializes X to zero."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        if len(input_shape) != 2 or num_outputs != 1:
            raise FedraxError(
                "trace_regression takes matrices (rows, columns) and has one output, "
                f"not inputs of shape {tuple(input_shape)} and {num_outputs} outputs"
            )
        if self.deviation < 0:
            raise FedraxError(f"trace_regression.deviation must be 0 or more, not {self.deviation}")

        def init(key: Array) -> Params:
            return {"matrix": self.deviation * jax.random.normal(key, input_shape)}

        def apply(params: Params, x: Array, key: Array | None = None) -> Array:
            return jnp.tensordot(x, params["matrix"], 2)

        return Model(init, apply, name="trace_regression", measures=_measures, reads_amounts=True)


def _measures(params: Params, truth: Any) -> dict[str, Array]:
    """Rank of the matrix and, if the true matrix is known, the Frobenius norm of the error."""
    measures = {"rank": (jnp.linalg.svd(params["matrix"], compute_uv=False) > RANK_TOLERANCE).sum()}
    if truth is not None:
        measures["frobenius_error"] = jnp.linalg.norm(params["matrix"] - truth)
    return measures
