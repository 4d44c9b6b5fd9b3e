"""Setting up JAX for simulation: every CPU core a device, compiled programs kept between processes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
from jax.sharding import Mesh

from fedrax.errors import FedraxError
from fedrax.simulation.engine import AXIS


def cache_directory() -> Path:
    """Where fedrax keeps what it can make again: $FEDRAX_CACHE, else ~/.cache/fedrax."""
    return Path(os.environ.get("FEDRAX_CACHE") or Path.home() / ".cache" / "fedrax")


def use_all_cores() -> None:
    """Make each CPU core a JAX device of one thread, and keep compiled programs in the cache directory.

    The process also returns to the system the memory that compilations have freed.

    ``simulate`` calls this; it has an effect only before JAX first touches a device, so a program that uses JAX
    before its first simulation calls it at its start. Settings of the user's own (``XLA_FLAGS``,
    ``jax_num_cpu_devices``, ``jax_compilation_cache_dir``) are left alone.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
    asked_for = jax.config.jax_num_cpu_devices > 0  # pyright: ignore[reportAttributeAccessIssue]
    if not asked_for and "host_platform_device_count" not in flags:
        try:
            jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
        except RuntimeError:  # JAX has started; its devices stay as they are
            os.environ["XLA_FLAGS"] = flags
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    give_back_memory_of_compilations()


_COMPILED = "/jax/core/compile/backend_compile_duration"
_LONG = 0.05
"""Seconds of a compilation that leaves memory worth giving back."""


@cache
def give_back_memory_of_compilations() -> None:
    """From now on return to the system what a long compilation has freed, before its program runs.

    glibc keeps freed memory for later, and the next large arrays rarely fit into what LLVM leaves: a process would
    peak at the sum of both. Loading a program from the cache counts as a compilation. Other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is None:
        return
    trim.argtypes = [ctypes.c_size_t]

    def compiled(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED and duration_secs >= _LONG:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(compiled)


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of the first ``devices`` devices (all of them by default) along the clients axis."""
    found = jax.devices()
    if devices is not None and devices > len(found):
        raise FedraxError(f"{devices} devices are asked for, but JAX has {len(found)} ({found[0].platform})")
    return Mesh(np.array(found[:devices]), (AXIS,))
