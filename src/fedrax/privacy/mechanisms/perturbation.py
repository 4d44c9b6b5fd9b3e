"""Output and objective perturbation of local models (Chaudhuri et al. 2011), as private Upcycled-FL uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg, FedProx
from fedrax.algorithms.fednova import FedNova
from fedrax.config.hyperparameters import NonNegative, Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.client_data import ClientData
from fedrax.contract.task import Batch
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapper
from fedrax.errors import FedraxError
from fedrax.privacy.mechanisms.noise import only_bookkeeping, shortened, with_noise
from fedrax.privacy.mechanisms.taint import uncovered
from fedrax.privacy.releases import Release
from fedrax.tree import Tree


@hyperparameters
class _LocalModels(Wrapper):
    """Base for methods whose uploads depend on the data only through the end of the local steps.

    These are FedAvg, FedProx and SCAFFOLD with plain steps (option II).
    """

    @property
    def own_traits(self) -> Traits:
        """Weights by samples would reveal how many there are; statistics would be sent without noise."""
        return Traits(uniform_weights=True, no_statistics=not self.inner.traits.personal_statistics)

    def _run(self, client: Callable, message: Any, state: Any, data: ClientData, change: Callable) -> ClientOutput:
        """``client`` with ``change`` of where its local steps end; what else depends on its data is refused."""
        leak = self._leak(client, message, state, data)
        if leak is not None:
            local = self.inner.local_steps
            in_epochs = local is not None and local.steps is None and data.place.steps is None
            by_number = in_epochs and self._leak(client, message, state, data.with_steps(jnp.int32(1))) is None
            hint = (
                ": epochs are more steps where there are more samples, local.steps are as many everywhere" * by_number
            )
            raise FedraxError(f"{self._words} also sends {leak}, computed from data that no noise has covered{hint}")
        ends = []

        def changed(x: Tree) -> Tree:
            ends.append(x)
            return change(x)

        output = client(message, state, data.with_result(changed))
        if len(ends) != 1:
            raise FedraxError(f"{self._words} takes local steps {len(ends)} times in a round: once is needed")
        return output._replace(info=only_bookkeeping(output.info))

    def _leak(self, client: Callable, message: Any, state: Any, data: ClientData) -> str | None:
        return uncovered(client, message, state, data, lambda hidden: hidden.with_result(tree.zeros_like))

    @property
    def _words(self) -> str:
        return (
            f"{type(self).__name__} goes around methods that send their local model alone: {type(self.inner).__name__}"
        )


@hyperparameters
class OutputPerturbation(_LocalModels):
    """Each client's local model, clipped to length tau, with noise from N(0, sigma^2) on each number, goes up.

    Private Upcycled-FL (Yin et al. 2024, section 6), around any method whose clients send what follows from their local
    model: the noised one takes its place in all of it. Whatever the data, the clipped model lies in a ball of radius
    tau, so that other data of a client move it by up to 2 tau. (Theorem 6.2 counts tau / n_i, for models that are means
    of one term for each of n_i samples. Local steps do not make such.)

    Example:
        >>> (release,) = fedrax.privacy.OutputPerturbation(tau=1.0, sigma=4.0).releases()
        >>> release.noise, release.neighbors
        (2.0, 'replacement')
    """

    inner: Algorithm = FedAvg()
    tau: Positive = 1.0
    """The greatest length of a local model."""
    sigma: NonNegative = 1.0
    """Standard deviation of the noise."""

    def releases(self) -> tuple[Release, ...]:
        """One Gaussian answer a phase, of sensitivity 2 tau to other data of the client."""
        ratio = float(self.sigma) / float(self.tau)
        times = len(self.inner.phases)
        return (Release(noise=ratio / 2, times=times, neighbors="replacement", paper_noise=ratio),)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """The local model, clipped and noised."""

        def released(x: Tree) -> Tree:
            return with_noise(data.key("noise"), shortened(x, self.tau)[0], self.sigma)

        return self._run(client, message, state, data, released), own


@hyperparameters
class ObjectivePerturbation(_LocalModels):
    """Each client adds <n, x_i> to its local loss for a round, with n of density proportional to exp(-alpha |n|).

    |n| is Gamma(d, 1 / alpha) for d parameters, its direction uniform. Private Upcycled-FL (Yin et al. 2024, section 6)
    after Chaudhuri et al. (2011). Theorem 6.3 claims pure differential privacy for exact minima of strongly convex
    local losses of generalized linear models with features of length at most 1, which steps of SGD only come near;
    nothing that holds in the worst case is claimed here, see ``releases``.

    Example:
        >>> inner = fedrax.algorithms.FedProx(mu=1.0)
        >>> fedrax.privacy.ObjectivePerturbation(inner=inner, alpha=10.0).releases()[0].noise
        0.0
    """

    inner: Algorithm = FedProx()
    alpha: Positive = 10.0
    """The greater, the less noise."""
    guarantee: Literal["paper", "none"] = "paper"
    """Whether models outside of Theorem 6.3 are refused; "none" runs any, and claims nothing."""

    def check(self) -> None:
        """Refuse methods outside of the theorem."""
        if self.guarantee == "paper" and not self._mu > 0:
            raise FedraxError(
                "objective perturbation needs strongly convex local losses: put it around FedProx with mu above 0, or"
                " set guarantee = 'none'"
            )
        local = self.inner.local_steps
        if self.guarantee == "paper" and (len(self.inner.phases) > 1 or (local and local.reduction == "sum")):
            raise FedraxError(
                "objective perturbation is proven for one minimum a round of the mean loss: take a method of one phase"
                " and local.reduction = 'mean', or set guarantee = 'none'"
            )

    @property
    def _mu(self) -> float:
        """The strong convexity that a proximal term gives; other methods' mu is something else."""
        return float(self.inner.mu or 0) if isinstance(self.inner, FedProx | FedNova) else 0.0

    def releases(self) -> tuple[Release, ...]:
        """Nothing that holds for local steps. The paper's claim is for logistic loss: |F'| <= u_1, |F''| <= u_2.

        With a bias the features are (x, 1), of squared length at most 2: u_1 = sqrt 2 and u_2 = 2 / 4. Clients of
        fewer than 2 u_2 / mu samples are outside of the theorem.
        """
        none = Release(noise=0.0, neighbors="replacement", unit="sample")
        if self.guarantee == "none":
            return (none,)
        u1, u2 = 2**0.5, 0.5
        claim = 2 * float(self.alpha) * u1 + 2.8 * u2 / self._mu
        return (dataclasses.replace(none, paper_epsilon=claim, paper_samples=2 * u2 / self._mu),)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Local steps on the perturbed loss, of features of length at most 1 where the paper's claim is wanted."""
        if self.guarantee == "paper":
            self._check_task(data)
        model = getattr(message, "params", message)
        noise = linear_noise(data.key("noise"), model, self.alpha)
        local = self.inner.local_steps
        share = 1 / data.size if local is not None and local.reduction == "sum" else 1.0

        def perturbed(losses: Callable) -> Callable:
            def loss(params: Tree, batch: Batch, key: Array) -> Array:
                if self.guarantee == "paper":
                    batch = batch._replace(x=unit_features(batch.x))
                values = losses(params, batch, key)
                if jax.tree.structure(params) != jax.tree.structure(noise):
                    raise FedraxError("ObjectivePerturbation needs parameters, or a field params of them, sent down")
                dots = (jnp.vdot(n, x) for n, x in zip(*map(jax.tree.leaves, (noise, params)), strict=True))
                return values + (share * sum(dots, jnp.zeros(()))).astype(values.dtype)

            return loss

        return self._run(client, message, state, data.with_loss(perturbed), lambda x: x), own

    @staticmethod
    def _check_task(data: ClientData) -> None:
        name = data.task.name
        if name not in ("binary/logistic", "binary/linear"):
            raise FedraxError(
                f"objective perturbation is proven for one logit that is linear in the features, not for {name}: use"
                " binary_classification(Logistic()...), or set guarantee = 'none'"
            )


def linear_noise(key: Array, model: Tree, alpha: Any) -> Tree:
    """n in the shapes of ``model``, of density proportional to exp(-alpha |n|)."""
    zeros = jax.tree.map(jnp.zeros_like, model)
    size = sum(leaf.size for leaf in jax.tree.leaves(zeros))
    along, length = jax.random.split(key)
    direction = with_noise(along, zeros, 1.0)
    norm = jnp.sqrt(sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in jax.tree.leaves(direction)))
    radius = jax.random.gamma(length, size, dtype=jnp.float32) / alpha
    return jax.tree.map(lambda a: (a * (radius / norm)).astype(a.dtype), direction)


def unit_features(x: Any) -> Any:
    """Each sample's features x [B, ...], divided by their length where it is above 1."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise FedraxError("objective perturbation bounds features that are floats: set guarantee = 'none' for others")
    length = jnp.sqrt(jnp.sum(x.reshape(len(x), -1) ** 2, axis=1))
    return x / jnp.maximum(length, 1).reshape(-1, *[1] * (x.ndim - 1))
