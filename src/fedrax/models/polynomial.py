"""Polynomial objectives: each sample holds the coefficients of a polynomial in a scalar parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError
from fedrax.models.architecture import Architecture, Shape


@dataclass(frozen=True)
class Polynomial(Architecture):
    """A scalar parameter x whose loss on a sample a [degree] is sum_k a[k] x^(k + 1).

    It is the model of the data set quartic_pair. The value is the loss; labels are ignored. The model reports x as a
    measure. Inputs have the shape (degree,), and there is one output.

    Example:
        >>> model = fedrax.models.Polynomial(initial=2.0).build(input_shape=(2,), num_outputs=1)
        >>> model.apply(model.init(jax.random.key(0)), jnp.array([[1.0, 3.0]])).tolist()
        [14.0]
    """

    initial: float = 1.0
    """Initial value of x."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        if len(input_shape) != 1 or num_outputs != 1:
            raise FedraxError(
                f"polynomial takes coefficients (degree,) and has one output, not inputs of shape {tuple(input_shape)}"
                f" and {num_outputs} outputs"
            )

        def init(key: Array) -> Params:
            return {"x": jnp.asarray(self.initial, float)}

        def apply(params: Params, x: Array, key: Array | None = None) -> Array:
            return x @ params["x"] ** jnp.arange(1, input_shape[0] + 1)

        def measures(params: Params, truth: Any) -> dict[str, Any]:
            return dict(params)

        return Model(init, apply, name="polynomial", measures=measures, loss="value", reads_amounts=True)
