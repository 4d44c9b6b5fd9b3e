"""Mechanisms of client-level privacy that are broken on purpose, for audits to detect."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from fedrax import hyperparameters
from fedrax.contract.algorithm import ClientOutput, Cohort
from fedrax.contract.client_data import ClientData
from fedrax.privacy.mechanisms.client_level import ClientDP
from fedrax.privacy.mechanisms.noise import with_noise
from fedrax.tree import Tree


@hyperparameters
class Broken(ClientDP):
    """Base class: clips correctly, and adds its noise incorrectly, at the server or at the client."""

    @abstractmethod
    def noisy(self, key: Array, exact: Tree, deviation: Any) -> Tree:
        """``exact``, which is clipped, with noise."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Upload the clipped update with the incorrect noise."""
        output, own = ClientDP.around_client(self._exact, client, message, state, own, data, last)
        if self.at == "server":
            return output, own
        upload = self.noisy(data.key("noise"), output.upload, self._per_phase(self.clip.bound)[1])
        return output._replace(upload=upload), own

    def _with_independent_noise(self, cohort: Cohort, bound: Any) -> Cohort:
        """The mean of clipped uploads with the incorrect noise."""
        exact = ClientDP._with_independent_noise(self._exact, cohort, bound)
        deviation = self._per_phase(bound)[1] / exact.size
        return exact._replace(mean=self.noisy(cohort.key("noise"), exact.mean, deviation))

    @property
    def _exact(self) -> Broken:
        return dataclasses.replace(self, noise=0.0)


@hyperparameters
class HalfVariance(Broken):
    """Noise with half of the variance."""

    def noisy(self, key: Array, exact: Tree, deviation: Any) -> Tree:
        """The standard deviation is too small by the square root of two."""
        return with_noise(key, exact, deviation / 2**0.5)


@hyperparameters
class UnprotectedLeaf(Broken):
    """One leaf gets no noise."""

    def noisy(self, key: Array, exact: Tree, deviation: Any) -> Tree:
        """The last leaf is exact."""
        leaves, structure = jax.tree.flatten(with_noise(key, exact, deviation))
        return structure.unflatten([*leaves[:-1], jax.tree.leaves(exact)[-1]])


@hyperparameters
class SameKeyTwice(Broken):
    """Leaves of equal shape get the same noise."""

    def noisy(self, key: Array, exact: Tree, deviation: Any) -> Tree:
        """All leaves use one key."""
        return jax.tree.map(lambda leaf: with_noise(key, leaf, deviation), exact)


BROKEN: dict[str, type[Broken]] = {
    "noise too small by √2": HalfVariance,
    "a leaf left out": UnprotectedLeaf,
    "the same key twice": SameKeyTwice,
}
"""Broken mechanisms by their fault."""
