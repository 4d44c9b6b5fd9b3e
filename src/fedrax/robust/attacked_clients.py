"""Malicious clients, for tests of defenses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import Fraction, NonNegativeInt, Positive, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.task import Batch, Task
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapper
from fedrax.errors import FedraxError
from fedrax.prng.permutation import shuffled_index
from fedrax.robust.rules import expand_rows, weighted_sum
from fedrax.tree import Tree


@hyperparameters
class Scaling:
    """Malicious clients multiply their uploads by ``factor``: -1 flips the sign, -5 or 10 dominates the mean.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Scaling(factor=-5.0))
        >>> method.attack.factor
        -5.0
    """

    factor: float = -1.0
    """Factor by which malicious clients multiply their uploads."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """Return the uploads of the malicious clients.

        Args:
            cohort: The cohort with its honest uploads, [K, ...].
            malicious: bool [K], which clients are malicious.

        Returns:
            Uploads [K, ...]; rows of honest clients are ignored.
        """
        return jax.tree.map(lambda u: self.factor * u, cohort.uploads)


@hyperparameters
class Gaussian:
    """Malicious clients replace each entry of their uploads by noise from N(0, sigma^2).

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Gaussian(sigma=2.0))
        >>> method.attack.sigma
        2.0
    """

    sigma: Positive = 1.0
    """Standard deviation of the noise."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """Return the uploads of the malicious clients, as :meth:`Scaling.__call__`."""
        key = cohort.key("attack")
        own = jax.vmap(lambda client: jax.random.fold_in(key, client))(cohort.clients)

        def noise(key: Array, upload: Tree) -> Tree:
            leaves, structure = jax.tree.flatten(upload)
            keys = jax.random.split(key, len(leaves))
            drawn = [jax.random.normal(k, u.shape, u.dtype) for k, u in zip(keys, leaves, strict=True)]
            return tree.scale(self.sigma, structure.unflatten(drawn))

        return jax.vmap(noise)(own, cohort.uploads)


@hyperparameters
class ALittle:
    """Malicious clients upload mu - z s: "A little is enough" (Baruch, Baruch and Goldberg 2019, Algorithm 3).

    mu and s are the coordinate-wise mean and standard deviation of their honest uploads. By default z satisfies
    Phi(z) = (n - m - r) / (n - m) for m attackers of n clients and r = floor(n / 2 + 1) - m, the honest clients that
    the attackers need for a majority. Phi(z) is clipped to [0.5, 0.999]; it is 0.999 where the attackers are the
    majority. A single attacker sends its honest upload.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.ALittle(z=1.5))
        >>> method.attack.z
        1.5
    """

    z: Positive | None = None
    """Number of standard deviations; None for that of the paper."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """Return the uploads of the malicious clients, as :meth:`Scaling.__call__`."""
        uploads, n, m = cohort.uploads, jnp.sum(cohort.real), jnp.sum(malicious)
        honest = jnp.maximum(n - m, 1)
        further = (honest - (n // 2 + 1 - m)) / honest
        z = jnp.maximum(jax.scipy.special.ndtri(jnp.clip(further, 0.5, 0.999)), 0) if self.z is None else self.z
        share = malicious / jnp.maximum(m, 1)
        mean = weighted_sum(uploads, share)
        variance = weighted_sum(jax.tree.map(lambda u, mu: (u - mu) ** 2, uploads, mean), share)
        sent = jax.tree.map(lambda mu, v: mu - z * jnp.sqrt(v), mean, variance)
        return jax.tree.map(lambda s, u: jnp.broadcast_to(s, u.shape), sent, uploads)


@hyperparameters
class LabelFlip:
    """Malicious clients train with label y replaced by classes - 1 - y (Fang et al. 2020).

    Example:
        >>> attack = fedrax.robust.LabelFlip(classes=3)
        >>> attack.flipped(jnp.array([0, 1, 2])).tolist()
        [2, 1, 0]
    """

    classes: PositiveInt = 10
    """Number of classes of the task."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """Return the uploads unchanged: the labels are attacked."""
        return cohort.uploads

    def flipped(self, labels: Any) -> Array:
        """Replace label y in 0..classes - 1 by classes - 1 - y; other labels, such as padding, stay.

        Args:
            labels: integer labels of any shape.

        Returns:
            The flipped labels, in the shape of ``labels``.
        """
        inside = (labels >= 0) & (labels < self.classes)
        return jnp.where(inside, self.classes - 1 - labels, labels)


Attack = Scaling | Gaussian | ALittle | LabelFlip
"""Built-in attacks; a user-defined attack is a class of hyper-parameters with the ``__call__`` of :class:`Scaling`."""


@hyperparameters
class Attacked(Wrapper):
    """``inner`` with malicious clients, whose uploads or labels are changed by ``attack``.

    The same clients are malicious in all rounds: the list ``clients``, or round(share N) of the N clients, drawn with
    ``seed``. Decoded uploads are attacked, so that a wrapper :class:`Robust` belongs inside. Running statistics of
    batch norm are not attacked. The event of a round has the aggregation weight of malicious uploads, the sum of their
    p_i, as ``malicious``.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Scaling(), clients=(1,))
        >>> method.malicious(jnp.arange(3), num_clients=3).tolist()
        [False, True, False]
    """

    inner: Algorithm = FedAvg()
    attack: Attack = Scaling()
    """What malicious clients do."""
    share: Fraction = 0.2
    """Fraction of clients that are malicious; ignored if ``clients`` is set."""
    clients: tuple[int, ...] = ()
    """Numbers of the malicious clients; empty to draw them."""
    seed: NonNegativeInt = 0
    """Seed of the draw of malicious clients."""

    def check(self) -> None:
        """Raise FedraxError for client numbers that are negative or repeated."""
        if min(self.clients, default=0) < 0 or len(set(self.clients)) < len(self.clients):
            raise FedraxError(f"Attacked.clients must be different numbers from 0, not {self.clients}")

    @property
    def own_traits(self) -> Traits:
        """Attacks on uploads need all uploads of the cohort."""
        return Traits(stacked_uploads=not isinstance(self.attack, LabelFlip))

    def malicious(self, clients: Array, num_clients: int) -> Array:
        """Return which of ``clients`` are malicious; numbers from ``num_clients`` on are padding.

        Args:
            clients: int32 client numbers.
            num_clients: N, the number of clients of the federation.

        Returns:
            bool, in the shape of ``clients``.
        """
        if self.clients:
            if max(self.clients) >= num_clients:
                raise FedraxError(f"Attacked.clients must be numbers from 0 to {num_clients - 1}, not {self.clients}")
            return jnp.isin(clients, jnp.array(self.clients, jnp.int32))
        words = jax.random.key_data(jax.random.key(self.seed))
        rank = shuffled_index(words, 0, jnp.atleast_1d(clients), num_clients).reshape(jnp.shape(clients))
        return (rank < jnp.round(self.share * num_clients)) & (clients < num_clients)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run the client of ``inner``, with flipped labels if they are the attack."""
        malicious = self.malicious(data.assignment.client, data.num_clients)
        if isinstance(self.attack, LabelFlip):
            flip = self.attack

            def with_flipped(losses: Callable) -> Callable:
                def loss(params: Tree, batch: Batch, key: Array) -> Array:
                    _check_classes(flip.classes, data.task, data.variables(params), batch.x)
                    return losses(params, batch._replace(y=jnp.where(malicious, flip.flipped(batch.y), batch.y)), key)

                return loss

            data = data.with_loss(with_flipped)
        output = client(message, state, data)
        if self.own_traits.stacked_uploads:
            check_uploads_only(self.inner, output, "Attacked")
        return output._replace(info={**output.info, "malicious": malicious.astype(jnp.float32)}), own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """Run the server of ``inner`` on the attacked uploads."""
        if jax.tree.leaves(cohort.uploads):
            malicious = self.malicious(cohort.clients, cohort.num_clients)
            sent = self.attack(cohort, malicious)

            def attacked(s: Array, u: Array) -> Array:
                return jnp.where(expand_rows(malicious, u), s, u).astype(u.dtype)

            uploads = jax.tree.map(attacked, sent, cohort.uploads)
            cohort = cohort._replace(uploads=uploads, mean=weighted_sum(uploads, cohort.weights))
        state, info = server(state, cohort)
        return state, own, info


def _check_classes(classes: int, task: Task, variables: Tree, x: Any) -> None:
    """Raise FedraxError if flipped labels exceed the task's classes: their losses would be finite and wrong."""
    known = None
    if task.labels_within is not None:
        known = int(task.labels_within[1]) + 1
    elif task.one_output_a_class and task.outputs is not None:
        known = jax.eval_shape(task.outputs, variables, x).shape[-1]
    if known is not None and classes > known:
        raise FedraxError(f"LabelFlip.classes is {classes}, and the task has {known} classes: set classes={known}")


def check_uploads_only(inner: Algorithm, output: ClientOutput, who: str) -> None:
    """Raise FedraxError if a client of ``inner`` sends anything beside its upload."""
    fields = {"total": "only the sum of the clients' updates", "each": "updates that it stores by client"}
    for name, what in fields.items():
        if jax.tree.leaves(getattr(output, name)):
            raise FedraxError(
                f"{who} wraps methods whose clients send uploads only: the server of {type(inner).__name__} receives"
                f" {what}, ClientOutput({name}=...)"
            )
