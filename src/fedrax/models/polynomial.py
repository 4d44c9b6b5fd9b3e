"""Objectives given as data: the loss of a scalar parameter on a sample is the value of the sample's polynomial."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class Polynomial:
    """A scalar parameter x whose loss on a sample a [degree] is sum_k a[k] x^(k + 1). For the data set quartic_pair.

    Example:
        >>> model = fedrax.models.Polynomial(start=2.0).build(input_shape=(2,), num_outputs=1)
        >>> model.apply(model.init(jax.random.key(0)), jnp.array([[1.0, 3.0]])).tolist()
        [14.0]
    """

    start: float = 1.0
    """Initial value of x."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> Model:
        """Build the model, which reports x as a measure and ignores labels.

        Args:
            input_shape: Number of coefficients of a sample, (degree,).
            num_outputs: Must be 1.

        Returns:
            The model.
        """
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
