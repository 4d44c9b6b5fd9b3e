"""Client-level differential privacy: what a whole client adds to a round is bounded, and covered in noise."""

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
from fedrax.privacy.mechanisms.noise import floats_sent, only_bookkeeping, with_noise
from fedrax.privacy.releases import Release
from fedrax.tree import Tree


class Message(NamedTuple):
    """What ``inner`` sends, and the bound that clients keep to."""

    inner: Tree
    bound: Array

    @property
    def params(self) -> Tree:
        """The model in it, for wrappers outside that look for it."""
        return getattr(self.inner, "params", self.inner)


class Upload(NamedTuple):
    """What ``inner``'s client sends, within the bound, and b_i - 1/2."""

    inner: Tree
    within: Array


@hyperparameters
class ClientDP(Wrapper):
    """``inner`` with client-level differential privacy: updates clipped and noised (DP-FedAvg; McMahan et al. 2018).

    All that a client sends in a round, every leaf of every phase, is one vector of length at most C; N(0, (z C)^2)
    falls on each number of the sum over the cohort ("server", the central model) or of what each client sends
    ("client", the local model). A round of P phases gives each a bound of C / sqrt(P). The server divides by the number
    of clients that it expects, which for a Poisson cohort is not how many came. What stays on a client is exact; of
    what clients report beside their uploads nothing is kept but the count of gradients.

    Example:
        >>> clip = fedrax.privacy.Flat(bound=0.5)
        >>> fedrax.privacy.ClientDP(clip=clip, noise=2.0).releases()[0].seen
        'public'
    """

    inner: Algorithm = FedAvg()
    clip: Clipping = Flat()
    """How the bound C is kept."""
    noise: NonNegative = 1.0
    """z, the noise multiplier: standard deviation over C."""
    at: Literal["server", "client"] = "server"
    """Who adds the noise: a server that is trusted with the sum, or each client."""
    bands: PositiveInt = 1
    """b: above 1 the server's noise is that of a banded matrix mechanism, in which a round's takes back part of that of
    the b - 1 rounds before it (DP-FTRL; Kairouz et al. 2021), for clients that take part b rounds apart or more."""

    def check(self) -> None:
        """Refuse what no noise covers."""
        name = type(self.inner).__name__
        if self.at == "server" and any(phase.stacked for phase in self.inner.phases):
            raise FedraxError(
                f"{name} looks at uploads one by one, which noise on their sum does not hide: at = 'client'"
            )
        if self.bands > 1 and (self.at == "client" or isinstance(self.clip, Adaptive) or len(self.inner.phases) > 1):
            raise FedraxError("noise in bands is the server's, for rounds of one phase and a bound that does not move")
        if isinstance(self.clip, Adaptive):
            if len(self.inner.phases) > 1:
                raise FedraxError(f"an adaptive bound is for rounds of one phase, and {name} has several: clip flat")
            if not 0 <= float(self.noise) < 2 * float(self.clip.count_noise):
                raise FedraxError(
                    f"the count that leads the bound spends more than all of a noise multiplier of {self.noise:g}:"
                    f" count_noise must be above {self.noise / 2:g}"
                )

    @property
    def own_traits(self) -> Traits:
        """Weights by samples would reveal how many there are; statistics would be sent without noise."""
        statistics = not self.inner.traits.personal_statistics
        return Traits(uniform_weights=True, no_statistics=statistics, plain_sum=self.at == "server")

    def releases(self) -> tuple[Release, ...]:
        """One Gaussian answer a round: phases and the adaptive bound's count share the multiplier z.

        Noise on the sum has sensitivity C to a client's presence; one client's own message can be any within C, which
        others of its data move by up to 2 C. With bands a round of a client moves b answers, by c_0 C to c_{b-1} C, and
        no answer is moved by two of them as long as they are b rounds apart.
        """
        if self.at == "server":
            noise = float(self.noise) / float(np.linalg.norm(band_coefficients(self.bands)))
            return (
                Release(noise=noise, seen="public", apart=self.bands, remembers=uploads_depend_on_state(self.inner)),
            )
        return (Release(noise=float(self.noise) / 2, neighbors="replacement"),)

    @property
    def _keeps(self) -> bool:
        """A bound that moves is kept on the server, and so is the noise of other rounds."""
        return isinstance(self.clip, Adaptive) or self.bands > 1

    def init_own(self, params: Tree, num_clients: int) -> Tree:
        """The bound, where it moves; with bands the noise of the last b - 1 rounds, the latest first."""
        if self.bands > 1:
            return jax.tree.map(lambda a: jnp.zeros((self.bands - 1, *a.shape), summed_dtype(a.dtype)), params)
        return jnp.asarray(self.clip.bound, jnp.result_type(*jax.tree.leaves(params))) if self._keeps else ()

    def _phase(self, phase: Phase, last: bool) -> Phase:
        """With uploads decoded at the client: what is bounded there is then what is summed."""

        def client(message: Any, state: Any, data: ClientData) -> ClientOutput:
            output = phase.client(message, state, data)
            return output._replace(upload=phase.receive(output.upload))

        return super()._phase(phase._replace(client=client, receive=unchanged), last)

    def _in_phase(self, bound: Any) -> tuple[Any, Any]:
        """(bound, standard deviation) in each of P phases, for a bound over all of them."""
        multiplier = self.clip.multiplier(self.noise) if isinstance(self.clip, Adaptive) else self.noise
        return bound / len(self.inner.phases) ** 0.5, multiplier * bound

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """As ``inner``, with the bound where it moves."""
        return Message(broadcast(state), own) if isinstance(self.clip, Adaptive) else broadcast(state)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """What is sent, within the bound, with noise where clients add it."""
        message, bound = message if isinstance(self.clip, Adaptive) else (message, self.clip.bound)
        output = client(message, state, data)
        sent = floats_sent(output, "ClientDP", self.inner, summed_only=self.at == "server")
        most, deviation = self._in_phase(bound)
        sent, within = self.clip(sent, most)
        if self.at == "client":
            sent = with_noise(data.key("noise"), sent, deviation)
        output = output._replace(**sent, info=only_bookkeeping(output.info))
        if isinstance(self.clip, Adaptive):
            count = within.astype(jnp.float32) - 0.5
            if self.at == "client":
                count = with_noise(data.key("count"), count, self.clip.count_noise)
            output = output._replace(upload=Upload(output.upload, count))
        return output, own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """``inner``'s step on what the noise has covered; then the bound moves, where it does."""
        bound = own if isinstance(self.clip, Adaptive) else self.clip.bound
        if self.at == "server" and self.bands > 1:
            cohort, own = self._covered_in_bands(cohort, bound, own)
        elif self.at == "server":
            cohort = self._covered(cohort, bound)
        if not isinstance(self.clip, Adaptive):
            state, info = server(state, cohort)
            return state, own, info
        within = cohort.mean.within + 0.5
        uploads = cohort.uploads.inner if isinstance(cohort.uploads, Upload) else ()
        state, info = server(state, cohort._replace(mean=cohort.mean.inner, uploads=uploads))
        own = own * jnp.exp(-self.clip.lr * (within - self.clip.quantile)).astype(own.dtype)
        return state, own, {**info, "clip_bound": jnp.asarray(bound), "within_bound": within}

    def _covered(self, cohort: Cohort, bound: Any) -> Cohort:
        """The noised sum over the number of clients expected; ``inner`` is not told who was there, or how many."""
        expected = cohort.size if cohort.expected is None else cohort.expected
        mean = tree.scale(cohort.size / expected, cohort.mean)
        deviation, key = self._in_phase(bound)[1] / expected, cohort.key("noise")
        if isinstance(self.clip, Adaptive):
            count = with_noise(cohort.key("count"), mean.within, self.clip.count_noise / expected)
            mean = Upload(with_noise(key, mean.inner, deviation), count)
        else:
            mean = with_noise(key, mean, deviation)
        nobody = jnp.full_like(cohort.clients, cohort.num_clients)
        return cohort._replace(mean=mean, clients=nobody, weights=jnp.zeros_like(cohort.weights), size=expected)

    def _covered_in_bands(self, cohort: Cohort, bound: Any, past: Tree) -> tuple[Cohort, Tree]:
        """The same, with n_t = z_t - sum_j c_j n_{t-j} in the place of z_t on the sum; and the past with n_t in it."""
        like = jax.tree.map(lambda a: a[0], past)
        if jax.tree.map(jnp.shape, cohort.mean) != jax.tree.map(jnp.shape, like):
            raise FedraxError(
                f"noise in bands is for methods whose clients send one vector of the parameters' shape, and those of"
                f" {type(self.inner).__name__} send more"
            )
        past_share = lambda a: jnp.tensordot(jnp.asarray(band_coefficients(self.bands)[1:], a.dtype), a, 1)  # noqa: E731
        fresh = with_noise(cohort.key("noise"), jax.tree.map(jnp.zeros_like, like), self._in_phase(bound)[1])
        noise = tree.sub(fresh, jax.tree.map(past_share, past))
        exact = dataclasses.replace(self, noise=0.0)._covered(cohort, bound)
        covered = tree.add_scaled(exact.mean, 1 / exact.size, noise)
        past = jax.tree.map(lambda new, old: jnp.concatenate([new[None], old[:-1]]), noise, past)
        return exact._replace(mean=covered), past


def band_coefficients(bands: int) -> np.ndarray:
    """c_0 = 1, c_1, ... c_{b-1} of the factorization, float [b]: (2j choose j) / 4^j.

    The first b diagonals of the square root C of the matrix of prefix sums (Fichtenberger et al. 2023; Kalinin and
    Lampert 2024). Noise C^-1 z on the rounds then hides C times what is summed, whose columns have length |c|.
    """
    j = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])
