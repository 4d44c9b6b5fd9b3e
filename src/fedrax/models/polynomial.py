"""A number whose loss on a sample is the value of the sample's polynomial there: objectives written down as data."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class Polynomial:
    """One number x; the loss on a sample [degree] is sum_k sample[k] x^(k + 1). For the data set quartic_pair."""

    start: float = 1.0
    """Where x starts."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> Model:
        """The model on polynomials of shape ``input_shape``, whose y counts for nothing; it measures x."""
        if len(input_shape) != 1 or num_outputs != 1:
            raise FedraxError(
                f"polynomial reads coefficients (degree,) for one output, not inputs of shape {tuple(input_shape)} "
                f"for {num_outputs}."
            )

        def init(key: Array) -> Params:
            return {"x": jnp.asarray(self.start, float)}

        def apply(params: Params, x: Array, key: Array | None = None) -> Array:
            return x @ params["x"] ** jnp.arange(1, input_shape[0] + 1)

        measures = lambda params, truth: dict(params)  # noqa: E731
        return Model(init, apply, name="polynomial", measures=measures, loss="value", reads_amounts=True)
