"""Trace regression: a matrix seen through its inner products with sample matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError

VISIBLE = 1e-3
"""Singular values from which on they count for the rank (LoSAC, section 5.5)."""


@dataclass(frozen=True)
class TraceRegression:
    """y = <X, D> for samples D of the same shape as the matrix X, with no bias (Negahban and Wainwright 2010).

    It measures its rank (singular values above 1e-3) and, where the true matrix is known, the Frobenius norm of the
    difference. With ``NuclearNorm`` as the proximal operator it estimates matrices of low rank.
    """

    deviation: float = 0.0
    """Standard deviation of the entries that X starts with; at 0 it starts at zero."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> Model:
        """The model on matrices of ``input_shape``."""
        if len(input_shape) != 2 or num_outputs != 1:
            raise FedraxError(
                "trace_regression maps matrices to one number each, "
                f"not inputs of shape {tuple(input_shape)} to {num_outputs} outputs."
            )
        if self.deviation < 0:
            raise FedraxError(f"the deviation of trace_regression must be 0 or more, not {self.deviation}.")

        def init(key: Array) -> Params:
            return {"matrix": self.deviation * jax.random.normal(key, input_shape)}

        def apply(params: Params, x: Array, key: Array | None = None) -> Array:
            return jnp.tensordot(x, params["matrix"], 2)

        return Model(init, apply, name="trace_regression", measures=_measures, reads_amounts=True)


def _measures(params: Params, truth: Any) -> dict[str, Array]:
    found = {"rank": (jnp.linalg.svd(params["matrix"], compute_uv=False) > VISIBLE).sum()}
    if truth is not None:
        found["frobenius_error"] = jnp.linalg.norm(params["matrix"] - truth)
    return found
