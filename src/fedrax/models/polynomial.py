"""A number whose loss on a sample is the value of the sample's polynomial there: objectives written down as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class Polynomial:
    """One number x; the loss on a sample [degree] is sum_k sample[k] x^(k + 1). For the data set quartic_pair."""

    start: float = 1.0
    """Where x starts."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> Task:
        """The task on polynomials of shape ``input_shape``, whose y counts for nothing; it measures x."""
        if len(input_shape) != 1 or num_outputs != 1:
            raise FedraxError(f"polynomial reads coefficients (degree,), not inputs of shape {tuple(input_shape)}.")
        degree = input_shape[0]

        def init(key: Array) -> dict[str, Array]:
            return {"x": jnp.asarray(self.start, float)}

        def values(params: dict[str, Any], batch: Batch, key: Array | None = None) -> Array:
            powers = params["x"] ** jnp.arange(1, degree + 1)
            return jnp.asarray(batch.x) @ powers.astype(batch.x.dtype)

        return Task(init, values, name="polynomial", measures=lambda params: {"x": params["x"]})
