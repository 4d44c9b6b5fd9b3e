"""User-defined methods that test the expressiveness of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import Averaging, FedAvg, Wrapper, hyperparameters, tree
from fedrax.config.hyperparameters import NonNegative
from fedrax.contract import Positive
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.tree import Tree


def normal_like(key: Array, like: Tree) -> Tree:
    """Independent standard normal numbers in the shapes of a tree, drawn in float32."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return structure.unflatten(drawn)


@hyperparameters
class NoisyUploads(Wrapper):
    """Clips uploads to norm ``clip`` over all leaves and adds N(0, sigma^2) noise."""

    inner: Algorithm = FedAvg()
    clip: Positive = 1.0
    sigma: NonNegative = 0.0

    own_traits = Traits(no_statistics=True)
    """Statistics would be uploaded without noise."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Clip, then add the noise."""
        output = client(message, state, data)
        length = tree.norm(output.upload)
        shrink = jnp.where(length > self.clip, self.clip / jnp.where(length > 0, length, 1), 1)
        noise = normal_like(data.key("noise"), output.upload)
        return output._replace(upload=tree.add_scaled(tree.scale(shrink, output.upload), self.sigma, noise)), own


@hyperparameters
class Ridge(Wrapper):
    """Adds ``strength`` / 2 |x|^2 to the local loss of every sample."""

    inner: Algorithm = FedAvg()
    strength: NonNegative = 0.1

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Train with the additional term."""

        def with_ridge(losses: Callable) -> Callable:
            return lambda params, batch, key: losses(params, batch, key) + self.strength / 2 * tree.dot(params, params)

        return client(message, state, data.with_loss(with_ridge)), own


@hyperparameters
class PerSample(Wrapper):
    """Per-sample clipping to norm ``clip`` and N(0, (sigma clip)^2) noise on the sum, as in DP-SGD."""

    inner: Algorithm = FedAvg()
    clip: Positive = 1.0
    sigma: NonNegative = 0.0

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Train with the clipped gradients."""
        stream = data.key("samples")

        def clipped(losses: Callable, params: Tree, batch: Tree, weights: Array | None, key: Array) -> tuple:
            def one(sample: Tree) -> tuple[Array, Tree]:
                alone = jax.tree.map(lambda a: a[None], sample)
                loss, gradient = jax.value_and_grad(lambda p: losses(p, alone, key)[0])(params)
                length = tree.norm(gradient)
                return loss, tree.scale(jnp.minimum(1, self.clip / jnp.maximum(length, 1e-12)), gradient)

            loss, gradients = jax.vmap(one)(batch)
            counts = jnp.ones(len(loss)) if weights is None else weights.astype(float)
            summed = jax.tree.map(lambda g: jnp.tensordot(counts.astype(g.dtype), g, 1), gradients)
            drawn = jax.random.fold_in(stream, jax.random.key_data(key)[-1])
            noisy = tree.add_scaled(summed, self.sigma * self.clip, normal_like(drawn, summed))
            return jnp.sum(counts * loss).astype(loss.dtype), noisy

        return client(message, state, data.with_gradient(clipped)), own


@hyperparameters
class SignDirections(Wrapper):
    """Local steps along the signs of the directions."""

    inner: Algorithm = FedAvg()

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Train with the signs."""
        return client(message, state, data.with_direction(lambda d, x, step: jax.tree.map(jnp.sign, d))), own


@hyperparameters
class CountsRounds(Wrapper):
    """Stores the numbers of rounds that the server and each client have seen."""

    inner: Algorithm = FedAvg()

    def init_own(self, params: Tree, num_clients: int) -> Tree:
        return jnp.int32(0)

    def init_client_own(self, params: Tree) -> Tree:
        return jnp.int32(0)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Increment the client's count."""
        return client(message, state, data), own + last

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """Increment the server's count."""
        state, info = server(state, cohort)
        return state, own + last, info


class Server(NamedTuple):
    """Global parameters."""

    params: Tree


@hyperparameters
class NoisyServer(FedAvg):
    """FedAvg whose server adds noise to the mean."""

    sigma: NonNegative = 0.1

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """Add noise from the server's random stream."""
        noise = normal_like(cohort.key("noise"), cohort.mean)
        return super().server(server, cohort._replace(mean=tree.add_scaled(cohort.mean, self.sigma, noise)))


@hyperparameters
class PersonalNorm(Averaging):
    """FedBN (Li et al. 2021): normalization layers and their statistics are personal, the rest is FedAvg."""

    traits = Traits(personal_statistics=True)

    def init_client(self, params: Tree) -> dict[str, Array]:
        """The initial normalization."""
        return self._norm(params)

    def client(self, message: Tree, state: dict[str, Array], data: ClientData) -> ClientOutput:
        """Local steps with the personal normalization, which is uploaded as a zero change."""
        result = self.local.run(data, self.personal(message, state))
        ends = self._norm(result.params)
        upload = tree.sub(self._placed(result.params, self._norm(message)), message)
        return ClientOutput(upload=upload, state=ends, info=result.info)

    def personal(self, params: Tree, state: dict[str, Array]) -> Tree:
        """The global model with the personal normalization."""
        return self._placed(params, state)

    def _norm(self, params: Tree) -> dict[str, Array]:
        named = zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True)
        return {name: leaf for name, leaf in named if "norm" in name.lower()}

    def _placed(self, params: Tree, norm: dict[str, Array]) -> Tree:
        named = zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True)
        return jax.tree.structure(params).unflatten([norm.get(name, leaf) for name, leaf in named])


@hyperparameters
class SecureAggregation(Algorithm):
    """Secure aggregation: fixed-point updates with pairwise masks that cancel in the sum, with full participation."""

    local: LocalSGD = LocalSGD()
    masks: bool = True
    bits: int = 20

    def init(self, params: Tree, num_clients: int) -> Server:
        return Server(params)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """The fixed-point update plus masks shared with later clients, minus those with earlier ones."""
        result = self.local.run(data, message)
        fixed = jax.tree.map(
            lambda a, b: jnp.round((a - b) * 2**self.bits).astype(jnp.int32).astype(jnp.uint32), result.params, message
        )
        total = self._masked(fixed, data) if self.masks else fixed
        return ClientOutput(upload=(), total=total, info=result.info)

    def _masked(self, fixed: Tree, data: ClientData) -> Tree:
        me, shared = data.assignment.client, jax.random.fold_in(jax.random.key(0), data.round)

        def add(other: Array, total: Tree) -> Tree:
            pair = jax.random.fold_in(jax.random.fold_in(shared, jnp.minimum(me, other)), jnp.maximum(me, other))
            sign = jnp.where(other == me, 0, jnp.where(other > me, 1, -1)).astype(jnp.uint32)
            keys = jax.random.split(pair, len(jax.tree.leaves(total)))
            drawn = [
                leaf + sign * jax.random.bits(key, leaf.shape, jnp.uint32)
                for key, leaf in zip(keys, jax.tree.leaves(total), strict=True)
            ]
            return jax.tree.structure(total).unflatten(drawn)

        return jax.lax.fori_loop(0, data.num_clients, add, fixed)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """The mean of the updates, of which the server only receives the sum."""
        scale = 2**self.bits * cohort.size
        mean = jax.tree.map(lambda t, x: t.astype(jnp.int32).astype(x.dtype) / scale, cohort.total, server.params)
        return Server(tree.add_scaled(server.params, 1, mean)), {}
