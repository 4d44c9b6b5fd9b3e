"""What the devices can do, all of them at once: matrix products and streaming through memory."""

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

from fedrax.simulation.engine import AXIS


class Limits(NamedTuple):
    """Measured on the spot."""

    gflops: float
    """10^9 floating-point operations a second in large square matrix products, all devices together."""
    gigabytes: float
    """10^9 bytes a second, read and written, of arrays too large for caches, changed in place."""


def measure(mesh: Mesh, dtype: str = "float32", budget: float = 0.5) -> Limits:
    """The limits of the mesh's devices; ``budget`` seconds for each, and the time to compile."""
    return Limits(product_gflops(mesh, dtype, budget), streamed_gigabytes(mesh, dtype, budget))


def product_gflops(mesh: Mesh, dtype: str = "float32", budget: float = 0.5) -> float:
    """``Limits.gflops`` alone."""
    n = 1024 if _on_cpu(mesh) else 8192
    square = _full(0.5, (mesh.devices.size * n, n), dtype, mesh)
    product = _on_each(lambda a: a @ a, mesh)
    fastest = best_seconds(lambda: product(square).block_until_ready(), budget)
    return 2 * n**3 * mesh.devices.size / fastest / 1e9


def streamed_gigabytes(mesh: Mesh, dtype: str = "float32", budget: float = 0.5) -> float:
    """``Limits.gigabytes`` alone.

    Arrays are changed in place: into new ones, the operating system's work for fresh pages is measured instead.
    """
    devices = mesh.devices.size
    size = max(2**29 // devices, 2**25) if _on_cpu(mesh) else 2**30  # bytes on each device
    held = [_full(1.0, (devices * size // 4096, 4096 // np.dtype(dtype).itemsize), dtype, mesh)]
    stream = _on_each(lambda x: -x, mesh, donate=True)

    def pass_over() -> None:
        held[0] = stream(held[0]).block_until_ready()

    return 2 * devices * size / best_seconds(pass_over, budget) / 1e9


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def best_seconds(run: Callable[[], object], budget: float) -> float:
    """The shortest of the runs that fit into ``budget`` seconds, after one to warm up; at least three."""
    run()
    best, times, end = math.inf, 0, time.perf_counter() + budget
    while times < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best, times = min(best, time.perf_counter() - start), times + 1
    return best


def _on_each(function: Callable, mesh: Mesh, donate: bool = False) -> Callable:
    sharded = jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(sharded, donate_argnums=(0,) if donate else ())


def _full(value: float, shape: tuple[int, int], dtype: str, mesh: Mesh) -> jax.Array:
    return jax.jit(lambda: jnp.full(shape, value, dtype), out_shardings=NamedSharding(mesh, P(AXIS)))()
