"""Random keys by purpose and by name, so that different uses have independent random numbers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial

import jax
from jax import Array

INITIALIZATION, RUN, FINETUNING, DIAGNOSIS, CURVATURE, AUDIT = range(6)
"""Purposes of a seed: initial parameters, rounds, fine-tuning, measurements of gradients and of curvature, and the runs
of a privacy audit."""

RESAMPLED, STREAMS = 0x7FFFFFFF, 0x7FFFFFFE
"""Numbers folded into a client's key for a mini-batch outside the local steps and for all named keys; no local step has
such an index."""


def purpose_key(seed: int, purpose: int) -> Array:
    """The key of a seed for one purpose.

    The seed's own key is used for nothing else, because splitting a key may give the same keys as folding numbers in.
    """
    return jax.random.fold_in(jax.random.key(seed), purpose)


@partial(jax.tree_util.register_dataclass, data_fields=["base"], meta_fields=["depth", "phase"])
@dataclass(frozen=True)
class NamedKeys:
    """The random keys of one client, or of the server, in one phase of a round: ``keys(name)``."""

    base: Array
    """The key of the client or server in this round, the same in all phases."""
    depth: int = 0
    """Number of wrappers around the method or wrapper that uses the key."""
    phase: int = 0
    """Phase of the round; an adversary could subtract noise that is the same in two phases."""

    def __call__(self, name: str) -> Array:
        """The key for the purpose ``name``."""
        named = jax.random.fold_in(jax.random.fold_in(self.base, STREAMS), self.depth)
        named = jax.random.fold_in(named, self.phase) if self.phase else named
        return jax.random.fold_in(named, zlib.crc32(name.encode()))

    def inside(self) -> NamedKeys:
        """The keys of the method inside a wrapper."""
        return replace(self, depth=self.depth + 1)

    def resampled(self) -> NamedKeys:
        """Keys that are independent of these."""
        return replace(self, base=jax.random.fold_in(self.base, RESAMPLED))
