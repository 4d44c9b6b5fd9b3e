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
from fedrax.inputs import has_several
from fedrax.privacy.mechanisms.noise import clip_by_norm, gradient_count_only, with_noise
from fedrax.privacy.mechanisms.taint import find_leak
from fedrax.privacy.releases import Release
from fedrax.tree import Tree


@hyperparameters
class _LocalModelWrapper(Wrapper):
    """Base of mechanisms around methods whose uploads depend on the data only through the final local model.

    Such methods are FedAvg, FedProx and SCAFFOLD with plain local steps (option II).
    """

    @property
    def own_traits(self) -> Traits:
        """Uniform weights, because sample counts have no noise; no statistics, which would be sent without noise."""
        return Traits(uniform_weights=True, no_statistics=not self.inner.traits.personal_statistics)

    def _run(self, client: Callable, message: Any, state: Any, data: ClientData, change: Callable) -> ClientOutput:
        """Run ``client`` with ``change`` applied to its local model; FedraxError if it releases other private data."""
        leak = self._leak(client, message, state, data)
        if leak is not None:
            local = self.inner.local_steps
            in_epochs = local is not None and local.steps is None and data.assignment.steps is None
            by_steps = in_epochs and self._leak(client, message, state, data.with_steps(jnp.int32(1))) is None
            hint = ": epochs depend on the number of samples, so set local.steps instead" if by_steps else ""
            raise FedraxError(f"{self._requirement} also sends {leak}, computed from data without noise{hint}")
        local_models = []

        def changed(x: Tree) -> Tree:
            local_models.append(x)
            return change(x)

        output = client(message, state, data.with_result(changed))
        if len(local_models) != 1:
            raise FedraxError(
                f"{self._requirement} runs local training {len(local_models)} times a round, and once is needed"
            )
        return output._replace(info=gradient_count_only(output.info))

    def _leak(self, client: Callable, message: Any, state: Any, data: ClientData) -> str | None:
        """The first uploaded leaf that depends on the data other than through the local model, or None."""
        return find_leak(client, message, state, data, lambda hidden: hidden.with_result(tree.zeros_like))

    @property
    def _requirement(self) -> str:
        """Start of the messages that reject a method."""
        return f"{type(self).__name__} needs a method that sends only its local model: {type(self.inner).__name__}"


@hyperparameters
class OutputPerturbation(_LocalModelWrapper):
    """Output perturbation: each local model is clipped to norm tau and noised by N(0, sigma^2) before the upload.

    This is private Upcycled-FL (Yin et al. 2024, Section 6), for any method whose uploads are functions of the local
    model; the noised model replaces it in all of them. The clipped model is in a ball of radius tau, so that replacing
    a client's data changes it by up to 2 tau. Theorem 6.2 uses tau / n_i instead, which holds for a model that is the
    mean of one term per sample, but not for the result of local steps.

    Example:
        >>> (release,) = fedrax.privacy.OutputPerturbation(tau=1.0, sigma=4.0).releases()
        >>> release.noise, release.neighbors
        (2.0, 'replacement')
    """

    inner: Algorithm = FedAvg()
    tau: Positive = 1.0
    """Clipping bound on the norm of a local model."""
    sigma: NonNegative = 1.0
    """Standard deviation of the noise."""

    def releases(self) -> tuple[Release, ...]:
        """One Gaussian release a phase, of sensitivity 2 tau to a replacement of the client's data."""
        ratio = float(self.sigma) / float(self.tau)
        times = len(self.inner.phases)
        return (Release(noise=ratio / 2, times=times, neighbors="replacement", paper_noise=ratio),)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """The client step of ``inner`` with the local model clipped and noised."""

        def released(x: Tree) -> Tree:
            return with_noise(data.key("noise"), clip_by_norm(x, self.tau)[0], self.sigma)

        return self._run(client, message, state, data, released), own


@hyperparameters
class ObjectivePerturbation(_LocalModelWrapper):
    """Objective perturbation: each client adds a random linear term <n, x> to its local loss.

    The density of n is proportional to exp(-alpha |n|): |n| is Gamma(d, 1 / alpha) for d parameters, and its direction
    is uniform. This is private Upcycled-FL (Yin et al. 2024, Section 6) after Chaudhuri et al. (2011). Theorem 6.3
    claims pure differential privacy for exact minimizers of strongly convex local losses of generalized linear models
    with features of norm at most 1. SGD only approximates these minimizers, so that no sound guarantee is reported; see
    ``releases``.

    Example:
        >>> inner = fedrax.algorithms.FedProx(mu=1.0)
        >>> fedrax.privacy.ObjectivePerturbation(inner=inner, alpha=10.0).releases()[0].noise
        0.0
    """

    inner: Algorithm = FedProx()
    alpha: Positive = 10.0
    """Rate of the noise density; larger values give less noise."""
    guarantee: Literal["paper", "none"] = "paper"
    """"paper" rejects models outside Theorem 6.3; "none" accepts all models and claims no guarantee."""

    def check(self) -> None:
        """Reject methods outside the theorem."""
        if self.guarantee == "paper" and not self._mu > 0:
            raise FedraxError(
                "objective perturbation needs strongly convex local losses: wrap FedProx with mu above 0, or"
                " set guarantee = 'none'"
            )
        local = self.inner.local_steps
        if self.guarantee == "paper" and (len(self.inner.phases) > 1 or (local and local.reduction == "sum")):
            raise FedraxError(
                "objective perturbation is proven for one minimization of the mean loss a round: use a method of one"
                " phase and local.reduction = 'mean', or set guarantee = 'none'"
            )

    @property
    def _mu(self) -> float:
        """Strong convexity of the proximal term; 0 for methods whose mu means something else."""
        return float(self.inner.mu or 0) if isinstance(self.inner, FedProx | FedNova) else 0.0

    def releases(self) -> tuple[Release, ...]:
        """A release without sound guarantee, with the paper's claim for the logistic loss.

        The loss has |F'| <= u_1 and |F''| <= u_2. With a bias the features are (x, 1), of squared norm at most 2, so
        that u_1 = sqrt 2 and u_2 = 2 / 4. The theorem excludes clients with fewer than 2 u_2 / mu samples.
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
        """Local training on the perturbed loss; with guarantee = "paper", features are scaled to norm at most 1."""
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
                    raise FedraxError(
                        "ObjectivePerturbation needs a broadcast message that is the parameters or has them as its"
                        " field params"
                    )
                dots = (jnp.vdot(n, x) for n, x in zip(*map(jax.tree.leaves, (noise, params)), strict=True))
                return values + (share * sum(dots, jnp.zeros(()))).astype(values.dtype)

            return loss

        return self._run(client, message, state, data.with_loss(perturbed), lambda x: x), own

    @staticmethod
    def _check_task(data: ClientData) -> None:
        """Reject tasks other than binary classification by a linear model."""
        name = data.task.name
        if name not in ("binary/logistic", "binary/linear"):
            raise FedraxError(
                f"objective perturbation is proven for one logit that is linear in the features, not for {name}: use"
                " binary_classification(Logistic()...), or set guarantee = 'none'"
            )


def linear_noise(key: Array, model: Tree, alpha: Any) -> Tree:
    """Noise n with the shapes of ``model`` and density proportional to exp(-alpha |n|)."""
    zeros = jax.tree.map(jnp.zeros_like, model)
    size = sum(leaf.size for leaf in jax.tree.leaves(zeros))
    along, length = jax.random.split(key)
    direction = with_noise(along, zeros, 1.0)
    norm = jnp.sqrt(sum(jnp.sum(a.astype(jnp.float32) ** 2) for a in jax.tree.leaves(direction)))
    radius = jax.random.gamma(length, size, dtype=jnp.float32) / alpha
    return jax.tree.map(lambda a: (a * (radius / norm)).astype(a.dtype), direction)


def unit_features(x: Any) -> Any:
    """Features x [B, ...] with each sample divided by its norm if that is above 1."""
    if has_several(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise FedraxError(
            "objective perturbation needs one array of floating-point features: convert them, or set guarantee = 'none'"
        )
    length = jnp.sqrt(jnp.sum(x.reshape(len(x), -1) ** 2, axis=1))
    return x / jnp.maximum(length, 1).reshape(-1, *[1] * (x.ndim - 1))
