"""Two CPU devices for every test, set before anything touches JAX."""

import jax

jax.config.update("jax_num_cpu_devices", 2)
