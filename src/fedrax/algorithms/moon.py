"""MOON: model-contrastive federated learning (Li, He and Song 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import NonNegative, Positive, hyperparameters
from fedrax.contract.algorithm import ClientOutput
from fedrax.contract.averaging import Averaging
from fedrax.contract.client_data import ClientData
from fedrax.contract.task import Batch
from fedrax.contract.traits import Traits
from fedrax.tree import Tree


class Client(NamedTuple):
    """The local model after the client's last participation."""

    previous: Tree


@hyperparameters
class MOON(Averaging):
    """FedAvg on the loss plus mu times -log(exp(s+ / tau) / (exp(s+ / tau) + exp(s- / tau))), sample by sample.

    s+ and s- are the cosine similarities of the sample's penultimate features under x_i with those under the global
    parameters and under the client's previous local model (at first the initial parameters). Gradients flow into x_i
    alone; the two other models run in evaluation mode. MOONM is this with momentum on the server. Algorithm 1.

    Example:
        >>> method = fedrax.algorithms.MOON(local=fedrax.LocalSGD(lr=0.1, steps=5), mu=0.5)
        >>> method.mu
        0.5
    """

    mu: NonNegative = 1.0
    """Weight of the contrastive term."""
    temperature: Positive = 0.5
    """tau."""

    traits = Traits(features=True)
    """Needs a model with features."""

    def init_client(self, params: Tree) -> Client:
        """The initial parameters."""
        return Client(params)

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """Local SGD on the loss with the contrastive term."""

        def with_contrast(losses: Callable) -> Callable:
            def loss(params: Tree, batch: Batch, key: Array) -> Array:
                contrast = self._contrast(data, params, message, state.previous, batch, key)
                return losses(params, batch, key) + self.mu * contrast

            return loss

        result = self.local.run(data.with_loss(with_contrast), message)
        delta = tree.sub(result.params, message)
        return ClientOutput(upload=delta, state=Client(result.params), info=result.info)

    def _contrast(self, data: ClientData, own: Tree, start: Tree, previous: Tree, batch: Batch, key: Array) -> Array:
        """The contrastive term of each sample, [B]."""
        features = data.task.features
        z = features(data.variables(own), batch.x, key)
        positive = cosine(z, features(data.variables(start), batch.x))
        negative = cosine(z, features(data.variables(previous), batch.x))
        return jax.nn.softplus((negative - positive) / self.temperature)


def cosine(a: Array, b: Array) -> Array:
    """Cosines between the rows of a and b, [B]; 0 where a row is zero, with slope 0 there."""

    def unit(z: Array) -> Array:
        square = jnp.sum(z * z, axis=-1, keepdims=True)
        return jnp.where(square > 0, z / jnp.sqrt(jnp.where(square > 0, square, 1)), 0)

    return jnp.sum(unit(a) * unit(b), axis=-1)
