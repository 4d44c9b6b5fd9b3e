"""Measured peak rates of all devices together: matrix products and memory bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax.xla import CLIENT_AXIS, OperandFormat, with_operand_format


class MachineLimits(NamedTuple):
    """Measured peak rates of all devices together.

    Example:
        >>> fedrax.profiling.MachineLimits(gflops=100.0, gigabytes=20.0).gflops
        100.0
    """

    gflops: float
    """GFLOP/s in large square matrix products."""
    gigabytes: float
    """GB/s, read and written, of arrays that are larger than caches and updated in place."""


def measure(
    mesh: Mesh, dtype: str = "float32", precision: OperandFormat = "highest", budget: float = 0.5
) -> MachineLimits:
    """Measure the limits of the mesh's devices, for products in a run's precision, ``budget`` seconds each.

    Arrays are updated in place: writing new ones would also measure the page faults of the operating system.
    """
    devices, on_cpu = mesh.devices.size, mesh.devices.flat[0].platform == "cpu"
    size = max(2**29 // devices, 2**25) if on_cpu else 2**30  # bytes on each device
    n, columns = 1024 if on_cpu else 8192, 4096 // np.dtype(dtype).itemsize
    product = _best_seconds(with_operand_format(lambda a: a @ a, precision), (n, n), dtype, mesh, budget, donate=())
    streaming = _best_seconds(jnp.negative, (size // 4096, columns), dtype, mesh, budget, donate=(0,))
    return MachineLimits(2 * n**3 * devices / product / 1e9, 2 * devices * size / streaming / 1e9)


def _best_seconds(
    function: Callable, shape: tuple[int, int], dtype: str, mesh: Mesh, budget: float, donate: tuple[int, ...]
) -> float:
    """Shortest time to replace an array of this shape on each device by a function of it, after a warm-up.

    All entries are 1 / columns: the square of such a matrix is the matrix itself, so that values stay finite.
    """
    rows, columns = shape
    whole = (rows * mesh.devices.size, columns)
    fill = jax.jit(lambda: jnp.full(whole, 1 / columns, dtype), out_shardings=NamedSharding(mesh, P(CLIENT_AXIS)))
    run = jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P(CLIENT_AXIS), out_specs=P(CLIENT_AXIS)), donate_argnums=donate
    )
    held, best, times, end = run(fill()).block_until_ready(), math.inf, 0, time.perf_counter() + budget
    while times < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        held = run(held).block_until_ready()
        best, times = min(best, time.perf_counter() - start), times + 1
    return best
