"""Small networks of tests that compile programs."""

from typing import Any

import flax.linen as nn
import jax


class EveryLayer(nn.Module):
    """A convolution, attention over the rows of its result, and a recurrent cell."""

    width: int
    """Features of each layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(self.width, (3, 3))(x[..., None])).reshape(*x.shape[:2], -1)
        x = nn.MultiHeadDotProductAttention(2, qkv_features=self.width)(x)
        hidden: Any = nn.RNN(nn.GRUCell(self.width))(x)
        return nn.Dense(3)(hidden[:, -1])
