"""FedMLB: multi-level branched regularization (Kim, Kim and Han 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import NonNegative, Positive, hyperparameters
from fedrax.contract.algorithm import ClientOutput
from fedrax.contract.averaging import Averaging
from fedrax.contract.client_data import ClientData
from fedrax.contract.task import Batch, weighted
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError
from fedrax.tree import Tree


@hyperparameters
class FedMLB(Averaging):
    """FedAvg on CE(main) + lambda1 mean_k CE(hybrid_k) + lambda2 mean_k KL(hybrid_k || main), sample by sample.

    main is the local network. hybrid_k runs its blocks 1..k and then the blocks k+1.. of the global one, which are
    frozen: gradients flow through them into the local blocks before. There is a hybrid for each k but the last; a
    network of one block has none, and trains as in FedAvg. KL(p || q) = sum p log(p / q) of the two softmax outputs at
    the temperature. Neither argument is held fixed, as in the authors' code: hybrids and main move towards each
    other. FedMLBM is this with momentum on the server. For classification.

    Example:
        >>> method = fedrax.algorithms.FedMLB(local=fedrax.LocalSGD(lr=0.1, steps=5), temperature=2.0)
        >>> method.temperature
        2.0
    """

    lambda1: NonNegative = 1.0
    """Weight of the hybrids' own loss."""
    lambda2: NonNegative = 1.0
    """Weight of the divergence between the hybrids and the main network."""
    temperature: Positive = 1.0
    """Divides the logits in the divergence, which is not rescaled by its square."""

    traits = Traits(blocks=True)
    """Hybrid networks are composed of blocks."""

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD on the loss with the terms of the hybrids."""

        def with_hybrids(losses: Callable) -> Callable:
            def loss(params: Tree, batch: Batch, key: Array) -> Array:
                return losses(params, batch, key) + self._branches(data, params, message, batch, key)

            return loss

        result = self.local.run(data.with_loss(with_hybrids), message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)

    def _branches(self, data: ClientData, own: Tree, start: Tree, batch: Batch, key: Array) -> Array:
        """The terms of the hybrids, [B]."""
        if data.task.loss_of_outputs is None:
            raise FedraxError("FedMLB needs the loss of a network's outputs: give Task(..., loss_of_outputs=...)")
        *hybrids, main = outputs(data.task.blocks, data.variables(own), data.variables(start), batch.x, key)
        if main.ndim < 2 or main.shape[-1] == 1:
            raise FedraxError(
                "FedMLB compares networks by the softmax of their outputs, but this model has one output per sample:"
                " it supports classification only"
            )
        if not hybrids:
            return jnp.zeros(len(batch.y), main.dtype)
        own_loss = jnp.stack([data.task.loss_of_outputs(hybrid, batch.y) for hybrid in hybrids]).mean(0)
        own_loss = weighted(own_loss, data.task.sample_weights, batch)
        apart = jnp.stack([divergence(hybrid, main, self.temperature) for hybrid in hybrids]).mean(0)
        return self.lambda1 * own_loss + self.lambda2 * apart


def outputs(blocks: tuple[Callable, ...], own: Tree, frozen: Tree, x: Any, key: Array) -> list[Array]:
    """Outputs with the first k blocks of ``own`` and the others of ``frozen``, for k = 1, 2, ..., all."""
    found = []
    for k, block in enumerate(blocks, start=1):
        branch = x = block(own, x, key)
        for above in blocks[k:]:
            branch = above(frozen, branch, key)
        found.append(branch)
    return found


def divergence(p: Array, q: Array, temperature: Array | float) -> Array:
    """KL(softmax(p / temperature) || softmax(q / temperature)) [B]; of outputs at many positions, the mean."""
    log_p, log_q = (jax.nn.log_softmax(logits / temperature) for logits in (p, q))
    values = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return values.reshape(len(values), -1).mean(-1)
