"""A batch of six samples, a federation of two clients and two random keys for tests of module adapters."""

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import Federation

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


Y = np.array([0, 1, 2, 0, 1, 2])


FEDERATION = Federation.from_arrays(np.asarray(X), Y, np.arange(6) % 2, num_classes=3)


KEY, OTHER = jax.random.key(3), jax.random.key(4)
