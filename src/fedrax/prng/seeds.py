"""Random keys of a seed: one for each purpose, so that no two of them share their numbers."""

from __future__ import annotations

import jax
from jax import Array

START, RUN, FINETUNING, DIAGNOSIS, CURVATURE, WATCHING = range(6)
"""What a seed decides: starting parameters; rounds; fine-tuned copies; what is measured of gradients and of curvature;
runs of a client that is watched."""


def seeded(seed: int, purpose: int) -> Array:
    """The key of a seed for one purpose.

    A key's splits are what folding numbers into it gives, so of a seed's own key nothing else is made.
    """
    return jax.random.fold_in(jax.random.key(seed), purpose)
