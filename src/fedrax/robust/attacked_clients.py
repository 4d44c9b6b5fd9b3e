"""Malicious clients, so that a defense can be seen to work."""

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
from fedrax.robust.rules import weighted
from fedrax.tree import Tree


@hyperparameters
class Scaling:
    """Uploads times ``factor``: -1 flips their signs, -5 and 10 overwhelm the others'.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Scaling(factor=-5.0))
        >>> method.attack.factor
        -5.0
    """

    factor: float = -1.0
    """Factor by which malicious clients multiply their uploads."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """What the malicious clients send, in their rows [K, ...]; other rows do not count. malicious: bool [K]."""
        return jax.tree.map(lambda u: self.factor * u, cohort.uploads)


@hyperparameters
class Gaussian:
    """Noise from N(0, sigma^2) in place of each number.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Gaussian(sigma=2.0))
        >>> method.attack.sigma
        2.0
    """

    sigma: Positive = 1.0
    """Standard deviation of the noise."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """As of :class:`Scaling`."""
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
    """All send mu - z s, with mu and s the mean and deviation of their own honest uploads, number by number.

    z is the greatest at which more of the honest clients than the attackers need for a majority lie further out:
    Phi(z) = (n - m - r) / (n - m) with m attackers of n and r = floor(n / 2 + 1) - m (Baruch, Baruch and Goldberg 2019,
    Algorithm 3). Phi(z) is kept within 0.5 and 0.999, its value where attackers are the majority. A single attacker
    sends its honest upload.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.ALittle(z=1.5))
        >>> method.attack.z
        1.5
    """

    z: Positive | None = None
    """Another z."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """As of :class:`Scaling`."""
        uploads, n, m = cohort.uploads, jnp.sum(cohort.real), jnp.sum(malicious)
        honest = jnp.maximum(n - m, 1)
        further = (honest - (n // 2 + 1 - m)) / honest
        z = jnp.maximum(jax.scipy.special.ndtri(jnp.clip(further, 0.5, 0.999)), 0) if self.z is None else self.z
        share = malicious / jnp.maximum(m, 1)
        mean = weighted(uploads, share)
        variance = weighted(jax.tree.map(lambda u, mu: (u - mu) ** 2, uploads, mean), share)
        sent = jax.tree.map(lambda mu, v: mu - z * jnp.sqrt(v), mean, variance)
        return jax.tree.map(lambda s, u: jnp.broadcast_to(s, u.shape), sent, uploads)


@hyperparameters
class LabelFlip:
    """Data, not uploads: of ``classes`` classes label y is taken for classes - 1 - y (Fang et al. 2020).

    Example:
        >>> attack = fedrax.robust.LabelFlip(classes=3)
        >>> attack.flipped(jnp.array([0, 1, 2])).tolist()
        [2, 1, 0]
    """

    classes: PositiveInt = 10
    """Number of classes of the task."""

    def __call__(self, cohort: Cohort, malicious: Array) -> Tree:
        """As of :class:`Scaling`: honest uploads, of dishonest labels."""
        return cohort.uploads

    def flipped(self, labels: Any) -> Array:
        """Labels from 0 to classes - 1, the other way round; others, as those of padding, stay.

        Args:
            labels: integer labels of any shape.

        Returns:
            The flipped labels, in the shape of ``labels``.
        """
        inside = (labels >= 0) & (labels < self.classes)
        return jnp.where(inside, self.classes - 1 - labels, labels)


Attack = Scaling | Gaussian | ALittle | LabelFlip
"""Attacks by name; one of your own is a class of hyper-parameters with the ``__call__`` of :class:`Scaling`."""


@hyperparameters
class Attacked(Wrapper):
    """``inner`` with malicious clients, whose uploads or labels are what ``attack`` makes of them.

    Who is malicious depends on a client's number alone: round(share N) of the N clients, drawn by ``draw``, or the list
    ``clients``. ``inner``'s server sees their uploads as it would receive them, so that a wrapper ``Robust`` belongs
    inside. Statistics of batch norm are not attacked. Events hold as ``malicious`` what the malicious uploads of the
    round weigh, the sum of their p_i: with uniform weights their share.

    Example:
        >>> method = fedrax.robust.Attacked(inner=fedrax.FedAvg(), attack=fedrax.robust.Scaling(), clients=(1,))
        >>> method.malicious(jnp.arange(3), num_clients=3).tolist()
        [False, True, False]
    """

    inner: Algorithm = FedAvg()
    attack: Attack = Scaling()
    """What the malicious do."""
    share: Fraction = 0.2
    """Of all clients, where no list is given."""
    clients: tuple[int, ...] = ()
    """The malicious clients."""
    draw: NonNegativeInt = 0
    """Another number, others are malicious."""

    def check(self) -> None:
        """Refuse clients that cannot be."""
        if min(self.clients, default=0) < 0 or len(set(self.clients)) < len(self.clients):
            raise FedraxError("the list of malicious clients must hold different numbers from 0")

    @property
    def own_traits(self) -> Traits:
        """Attacks on uploads see all of them."""
        return Traits(stacked_uploads=not isinstance(self.attack, LabelFlip))

    def malicious(self, clients: Array, num_clients: int) -> Array:
        """Which of ``clients``, by number, are malicious; numbers from ``num_clients`` on are nobody's.

        Args:
            clients: int32 client numbers.
            num_clients: N, the number of clients of the federation.

        Returns:
            bool, in the shape of ``clients``.
        """
        if self.clients:
            if max(self.clients) >= num_clients:
                raise FedraxError(f"the list of malicious clients must hold numbers from 0 to {num_clients - 1}")
            return jnp.isin(clients, jnp.array(self.clients, jnp.int32))
        words = jax.random.key_data(jax.random.key(self.draw))
        place = shuffled_index(words, 0, jnp.atleast_1d(clients), num_clients).reshape(jnp.shape(clients))
        return (place < jnp.round(self.share * num_clients)) & (clients < num_clients)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Flipped labels, where those are the attack."""
        malicious = self.malicious(data.place.client, data.num_clients)
        if isinstance(self.attack, LabelFlip):
            flip = self.attack

            def with_flipped(losses: Callable) -> Callable:
                def loss(params: Tree, batch: Batch, key: Array) -> Array:
                    _refuse_new_classes(flip.classes, data.task, data.variables(params), batch.x)
                    return losses(params, batch._replace(y=jnp.where(malicious, flip.flipped(batch.y), batch.y)), key)

                return loss

            data = data.with_loss(with_flipped)
        output = client(message, state, data)
        if self.own_traits.stacked_uploads:
            refuse_other_ways(self.inner, output, "Attacked")
        return output._replace(info={**output.info, "malicious": malicious.astype(jnp.float32)}), own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """The malicious uploads in the places of the honest ones."""
        if jax.tree.leaves(cohort.uploads):
            malicious = self.malicious(cohort.clients, cohort.num_clients)
            sent = self.attack(cohort, malicious)
            over = lambda u: malicious.reshape(-1, *[1] * (u.ndim - 1))  # noqa: E731
            uploads = jax.tree.map(lambda s, u: jnp.where(over(u), s, u).astype(u.dtype), sent, cohort.uploads)
            cohort = cohort._replace(uploads=uploads, mean=weighted(uploads, cohort.weights))
        state, info = server(state, cohort)
        return state, own, info


def _refuse_new_classes(classes: int, task: Task, variables: Tree, x: Any) -> None:
    """Refuse to make labels of classes that the task has not: their losses would be numbers, and wrong."""
    known = None
    if task.labels_within is not None:
        known = int(task.labels_within[1]) + 1
    elif task.one_output_a_class and task.outputs is not None:
        known = jax.eval_shape(task.outputs, variables, x).shape[-1]
    if known is not None and classes > known:
        raise FedraxError(f"LabelFlip turns labels of {classes} classes round, and the task has {known}: set classes")


def refuse_other_ways(inner: Algorithm, output: ClientOutput, who: str) -> None:
    """FedraxError where updates reach the server otherwise than as uploads."""
    ways = {"total": "sums, whose parts nobody sees (as under secure masks)", "each": "updates that it remembers"}
    for name, what in ways.items():
        if jax.tree.leaves(getattr(output, name)):
            raise FedraxError(
                f"{who} goes around methods whose clients upload: {type(inner).__name__} hands its server {what},"
                f" ClientOutput({name}=...)"
            )
