"""Client-level differential privacy: each client's update is clipped, and noise is added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import NonNegative, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase, summed_dtype, unchanged
from fedrax.contract.client_data import ClientData
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapper, uploads_depend_on_state
from fedrax.errors import FedraxError
from fedrax.privacy.mechanisms.clipping import Adaptive, Clipping, Flat
from fedrax.privacy.mechanisms.noise import floats_sent, gradient_count_only, with_noise
from fedrax.privacy.releases import Release
from fedrax.tree import Tree


class Message(NamedTuple):
    """Broadcast message of ``inner``, with the clipping bound."""

    inner: Tree
    bound: Array

    @property
    def params(self) -> Tree:
        """The model in the message, which outer wrappers may read."""
        return getattr(self.inner, "params", self.inner)


class Upload(NamedTuple):
    """Clipped upload of ``inner``, and b_i - 1/2 for the adaptive bound."""

    inner: Tree
    within: Array


@hyperparameters
class ClientDP(Wrapper):
    """``inner`` with client-level differential privacy: updates clipped and noised (DP-FedAvg; McMahan et al. 2018).

    Everything that a client sends in a round, all leaves of all phases, is one vector that is clipped to L2 norm C.
    Noise from N(0, (z C)^2) is added to each entry of the sum over the cohort ("server", the central model) or of each
    client's upload ("client", the local model). In a round of P phases, each phase has the bound C / sqrt(P). The
    server divides by the expected number of clients, not by the size of a Poisson cohort. Client state is exact. Of the
    clients' info only the count of gradients is reported. In methods that add uploads up over the rounds, such as the
    control variates of SCAFFOLD or a momentum, the noise adds up too.

    Example:
        >>> clip = fedrax.privacy.Flat(bound=0.5)
        >>> fedrax.privacy.ClientDP(clip=clip, noise=2.0).releases()[0].seen
        'public'
    """

    inner: Algorithm = FedAvg()
    clip: Clipping = Flat()
    """How uploads are clipped to the bound C."""
    noise: NonNegative = 1.0
    """Noise multiplier z: the standard deviation of the noise divided by C."""
    at: Literal["server", "client"] = "server"
    """Who adds the noise: a server that is trusted with the sum, or each client."""
    bands: PositiveInt = 1
    """Number of bands b of the matrix mechanism. Above 1, the server's noise cancels part of the noise of the b - 1
    rounds before (DP-FTRL; Kairouz et al. 2021). Participations of a client must be at least b rounds apart."""

    def check(self) -> None:
        """Reject methods and options for which the noise gives no guarantee."""
        name = type(self.inner).__name__
        if self.at == "server" and any(phase.stacked for phase in self.inner.phases):
            raise FedraxError(
                f"{name} uses individual uploads, which noise on their sum does not protect: set at = 'client'"
            )
        if self.bands > 1 and (self.at == "client" or isinstance(self.clip, Adaptive) or len(self.inner.phases) > 1):
            raise FedraxError(
                "bands above 1 need at = 'server', a fixed clipping bound and a method with one phase a round"
            )
        if isinstance(self.clip, Adaptive):
            if len(self.inner.phases) > 1:
                raise FedraxError(
                    f"adaptive clipping needs a method with one phase a round, not {name}: set clip to Flat()"
                )
            if not 0 <= float(self.noise) < 2 * float(self.clip.count_noise):
                raise FedraxError(
                    f"the count for adaptive clipping alone exceeds the budget of noise multiplier {self.noise:g}:"
                    f" count_noise must be above {self.noise / 2:g}"
                )

    @property
    def own_traits(self) -> Traits:
        """Uniform weights, because sample counts have no noise; no statistics, which would be sent without noise."""
        statistics = not self.inner.traits.personal_statistics
        return Traits(uniform_weights=True, no_statistics=statistics, plain_sum=self.at == "server")

    def releases(self) -> tuple[Release, ...]:
        """One Gaussian release a round: all phases and the adaptive count together have noise multiplier z.

        The sum over a cohort has sensitivity C to a client's presence. A single client's upload can be any vector of
        norm at most C, so that replacing its data changes it by up to 2 C. With bands, a client's participation changes
        b releases, by c_0 C to c_{b-1} C; participations at least b rounds apart change different releases.
        """
        if self.at == "server":
            noise = float(self.noise) / float(np.linalg.norm(band_coefficients(self.bands)))
            return (
                Release(noise=noise, seen="public", apart=self.bands, remembers=uploads_depend_on_state(self.inner)),
            )
        return (Release(noise=float(self.noise) / 2, neighbors="replacement"),)

    @property
    def _has_state(self) -> bool:
        """Whether the wrapper has server state: an adaptive bound, or the noise of earlier rounds."""
        return isinstance(self.clip, Adaptive) or self.bands > 1

    def init_own(self, params: Tree, num_clients: int) -> Tree:
        """The adaptive bound, or the noise of the last b - 1 rounds, latest first."""
        if self.bands > 1:
            return jax.tree.map(lambda a: jnp.zeros((self.bands - 1, *a.shape), summed_dtype(a.dtype)), params)
        return jnp.asarray(self.clip.bound, jnp.result_type(*jax.tree.leaves(params))) if self._has_state else ()

    def _phase(self, phase: Phase, last: bool) -> Phase:
        """A phase whose clients decode their uploads, so that the clipped vector is the one that is summed."""

        def client(message: Any, state: Any, data: ClientData) -> ClientOutput:
            output = phase.client(message, state, data)
            return output._replace(upload=phase.receive(output.upload))

        return super()._phase(phase._replace(client=client, receive=unchanged), last)

    def _per_phase(self, bound: Any) -> tuple[Any, Any]:
        """(bound, standard deviation of the noise) of one phase, given the bound over all phases."""
        multiplier = self.clip.multiplier(self.noise) if isinstance(self.clip, Adaptive) else self.noise
        return bound / len(self.inner.phases) ** 0.5, multiplier * bound

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """The message of ``inner``, with the adaptive bound."""
        return Message(broadcast(state), own) if isinstance(self.clip, Adaptive) else broadcast(state)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """The client step of ``inner`` with its upload clipped and, with at = "client", noised."""
        message, bound = message if isinstance(self.clip, Adaptive) else (message, self.clip.bound)
        output = client(message, state, data)
        sent = floats_sent(output, "ClientDP", self.inner, summed_only=self.at == "server")
        phase_bound, deviation = self._per_phase(bound)
        sent, within = self.clip(sent, phase_bound)
        if self.at == "client":
            sent = with_noise(data.key("noise"), sent, deviation)
        output = output._replace(**sent, info=gradient_count_only(output.info))
        if isinstance(self.clip, Adaptive):
            count = within.astype(jnp.float32) - 0.5
            if self.at == "client":
                count = with_noise(data.key("count"), count, self.clip.count_noise)
            output = output._replace(upload=Upload(output.upload, count))
        return output, own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """The server step of ``inner`` on the noised mean; then the adaptive bound is updated."""
        bound = own if isinstance(self.clip, Adaptive) else self.clip.bound
        if self.at == "server" and self.bands > 1:
            cohort, own = self._with_banded_noise(cohort, bound, own)
        elif self.at == "server":
            cohort = self._with_independent_noise(cohort, bound)
        if not isinstance(self.clip, Adaptive):
            state, info = server(state, cohort)
            return state, own, info
        within = cohort.mean.within + 0.5
        uploads = cohort.uploads.inner if isinstance(cohort.uploads, Upload) else ()
        state, info = server(state, cohort._replace(mean=cohort.mean.inner, uploads=uploads))
        own = own * jnp.exp(-self.clip.lr * (within - self.clip.quantile)).astype(own.dtype)
        return state, own, {**info, "clip_bound": jnp.asarray(bound), "within_bound": within}

    def _with_independent_noise(self, cohort: Cohort, bound: Any) -> Cohort:
        """The noised sum divided by the expected cohort size; client numbers, weights and true size are hidden."""
        expected = cohort.size if cohort.expected is None else cohort.expected
        mean = tree.scale(cohort.size / expected, cohort.mean)
        deviation, key = self._per_phase(bound)[1] / expected, cohort.key("noise")
        if isinstance(self.clip, Adaptive):
            count = with_noise(cohort.key("count"), mean.within, self.clip.count_noise / expected)
            mean = Upload(with_noise(key, mean.inner, deviation), count)
        else:
            mean = with_noise(key, mean, deviation)
        hidden = jnp.full_like(cohort.clients, cohort.num_clients)
        return cohort._replace(mean=mean, clients=hidden, weights=jnp.zeros_like(cohort.weights), size=expected)

    def _with_banded_noise(self, cohort: Cohort, bound: Any, past: Tree) -> tuple[Cohort, Tree]:
        """The cohort with noise n_t = z_t - sum_j c_j n_{t-j} on its sum, and the updated past noise."""
        like = jax.tree.map(lambda a: a[0], past)
        if jax.tree.map(jnp.shape, cohort.mean) != jax.tree.map(jnp.shape, like):
            raise FedraxError(
                f"bands above 1 need a method whose clients upload one vector with the shapes of the parameters;"
                f" {type(self.inner).__name__} uploads something else: set bands to 1"
            )
        past_share = lambda a: jnp.tensordot(jnp.asarray(band_coefficients(self.bands)[1:], a.dtype), a, 1)  # noqa: E731
        fresh = with_noise(cohort.key("noise"), jax.tree.map(jnp.zeros_like, like), self._per_phase(bound)[1])
        noise = tree.sub(fresh, jax.tree.map(past_share, past))
        exact = dataclasses.replace(self, noise=0.0)._with_independent_noise(cohort, bound)
        covered = tree.add_scaled(exact.mean, 1 / exact.size, noise)
        past = jax.tree.map(lambda new, old: jnp.concatenate([new[None], old[:-1]]), noise, past)
        return exact._replace(mean=covered), past


def band_coefficients(bands: int) -> np.ndarray:
    """Coefficients c_0 = 1, c_1, ... c_{b-1} of the banded factorization, float [b]: c_j = (2j choose j) / 4^j.

    They are the first b diagonals of the square root C of the prefix-sum matrix (Fichtenberger et al. 2023; Kalinin
    and Lampert 2024). The noise C^-1 z corresponds to the Gaussian mechanism on C times the rounds' sums, whose
    sensitivity is |c| times that of one sum.
    """
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])
