"""A minimal private method, for tests that count its releases."""

from __future__ import annotations

from typing import Literal

import jax

import fedrax
from fedrax import hyperparameters
from fedrax.contract import NonNegative
from fedrax.privacy.releases import Release


@hyperparameters
class Noisy(fedrax.FedAvg):
    """FedAvg whose clients clip their uploads to norm 1 and add noise."""

    noise: NonNegative = 1.0
    """Standard deviation of the noise divided by the clipping norm."""
    seen: Literal["server", "public"] = "server"
    neighbors: Literal["presence", "replacement"] = "presence"

    def client(self, message, state, data):
        output = super().client(message, state, data)
        size = fedrax.tree.norm(output.upload)
        leaves, structure = jax.tree.flatten(output.upload)
        keys = jax.random.split(data.key("noise"), len(leaves))
        noisy = [
            x / jax.numpy.maximum(size, 1) + self.noise * jax.random.normal(k, x.shape)
            for x, k in zip(leaves, keys, strict=True)
        ]
        return output._replace(upload=jax.tree.unflatten(structure, noisy))

    def releases(self) -> tuple[Release, ...]:
        """One release about a client."""
        return (Release(float(self.noise), seen=self.seen, neighbors=self.neighbors, paper_noise=self.noise / 2),)
