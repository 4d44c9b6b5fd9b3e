"""Memory budget of a device, from which samples, client states and training clients reserve parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.data.federation import ALIGNMENT
from fedrax.errors import FedraxError
from fedrax.host_memory import host_memory
from fedrax.tree import Tree

_DEFAULT_BYTES = 16 << 30
"""Bytes assumed for a device that does not report its memory."""


@dataclass
class MemoryBudget:
    """Memory budget of a device: each reservation may take at most half of what is free."""

    total: int
    """Bytes of memory."""
    on_cpu: bool
    reserved: int = 0
    """Bytes already reserved."""

    @classmethod
    def of(cls, mesh: Mesh) -> MemoryBudget:
        """The budget of each device of a mesh; over several processes, the smallest one of any process."""
        device = mesh.local_devices[0]
        on_cpu = device.platform == "cpu"
        if on_cpu:  # CPU devices share the memory
            memory = host_memory() // len(mesh.local_devices)
        else:
            memory = (device.memory_stats() or {}).get("bytes_limit", _DEFAULT_BYTES)
        if jax.process_count() > 1:
            unit = 1 << 20  # in MiB, since bytes exceed an int32
            memory = int(np.min(multihost_utils.process_allgather(np.int32(min(memory // unit, 1 << 30))))) * unit
        return cls(memory, on_cpu)

    def has_room(self, size: float) -> bool:
        """Whether ``size`` bytes are at most half of what is free."""
        return size <= max(0, self.total - self.reserved) / 2

    def reserve(self, size: int) -> None:
        """Reserve ``size`` bytes."""
        self.reserved += size

    def check_server(self, algorithm: Algorithm, params: Tree, num_clients: int, devices: int) -> None:
        """Raise FedraxError for a server state that exceeds the memory of all devices, before it is allocated."""
        state = jax.eval_shape(lambda x: algorithm.init(x, num_clients), params)
        needed, there = tree.num_bytes(state), devices * self.total
        if needed > there:
            raise FedraxError(
                f"the server state of {type(algorithm).__name__} takes {needed / 1e9:.3g} GB for {num_clients:,}"
                f" clients, more than the {there / 1e9:.3g} GB of memory: reduce its memory, or choose another method"
            )

    def device_bytes(self, samples: Tree) -> int:
        """Bytes that arrays of the host need on the device.

        CPU devices use aligned arrays without a copy, from memory or, if memory-mapped, through the page cache. Others
        are copied.
        """
        return sum(
            0 if self.on_cpu and _is_zero_copy(a) else a.size * _dtype(a).itemsize for a in jax.tree.leaves(samples)
        )

    def clients_that_fit(self, size: int) -> int:
        """Number of clients, of ``size`` bytes each, that fit into a quarter of the memory; at least one.

        Reservations do not reduce it: sums over another number of clients at a time are rounded differently.
        """
        return max(1, self.total // 4 // max(size, 1))


def _dtype(array: Any) -> np.dtype:
    return jax.dtypes.canonicalize_dtype(array.dtype)


def _is_zero_copy(array: np.ndarray) -> bool:
    return _dtype(array) == array.dtype and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
