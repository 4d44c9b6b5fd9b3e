"""The model: a pair of pure functions, here a network with one hidden layer."""

import jax
import jax.numpy as jnp

from fedrax.models import Model


def network(input_shape: tuple[int, ...], num_outputs: int, width: int = 16) -> Model:
    """A network for features of ``input_shape``. ``width`` is a key of [model] in experiment.toml."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "hidden": {"w": jax.random.normal(first, (*input_shape, width)) * 0.5, "b": jnp.zeros(width)},
            "output": {"w": jax.random.normal(second, (width, num_outputs)) * 0.1, "b": jnp.zeros(num_outputs)},
        }

    def apply(params, x, key=None):
        hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
        return hidden @ params["output"]["w"] + params["output"]["b"]

    return Model(init, apply)
