"""JAX set-up: one device for each CPU core, and the compilation cache on disk."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax._src import distributed, xla_bridge

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError, warn
from fedrax.files import cache_directory

_forked: list[int] = []
"""The id of this process if it was forked after JAX had started: fork() does not copy the threads of JAX."""


def _record_fork() -> None:
    """Record a fork after the start of JAX."""
    if xla_bridge.backends_are_initialized():
        _forked.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_record_fork)

_NO_TIMEOUT = "2000000000"
"""Seconds; 63 years."""

_XLA_FLAGS = {
    "xla_cpu_multi_thread_eigen": "false",
    "xla_cpu_collective_call_terminate_timeout_seconds": _NO_TIMEOUT,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": _NO_TIMEOUT,
    "xla_cpu_collective_timeout_seconds": _NO_TIMEOUT,
}
"""Each device has one thread. Devices wait for each other without limit: by default XLA aborts the process after 40
seconds, but one client may take that much longer than the others, or a laptop may have been asleep."""


@checked_arguments
def use_all_cores() -> None:
    """Make each CPU core a JAX device of one thread, and enable the compilation cache in the cache directory.

    The process also returns memory that compilations have freed to the system, and its devices wait for each other
    without limit.

    ``simulate`` calls this. It has an effect only before JAX first uses a device, so that a program that uses JAX
    before its first simulation must call it at its start (otherwise there is a warning). Settings of the user
    (``XLA_FLAGS``, ``jax_num_cpu_devices``, ``jax_compilation_cache_dir``) are not changed.

    Raises:
        FedraxError: The process was forked from one in which JAX had started; it would hang.

    Example:
        >>> fedrax.simulation.use_all_cores()
    """
    if _forked:
        raise FedraxError(
            'JAX does not survive fork(): start worker processes with the "spawn" method,'
            ' multiprocessing.get_context("spawn"), or with joblib'
        )
    flags = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in _XLA_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()
    asked_for = jax.config.jax_num_cpu_devices > 0  # pyright: ignore[reportAttributeAccessIssue]
    if not asked_for and "host_platform_device_count" not in flags:
        try:
            jax.config.update("jax_num_cpu_devices", available_cores())
        except RuntimeError:  # JAX has started with the devices that it has
            os.environ["XLA_FLAGS"] = flags
            _warn_about_one_core()
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        _enable_compilation_cache(os.environ.get("FEDRAX_CACHE"))
    trim_memory_after_compilation()


@cache
def _enable_compilation_cache(_: str | None) -> None:
    """Enable JAX's persistent compilation cache, or warn once per cache directory that it cannot be written."""
    try:
        folder = cache_directory() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (FedraxError, OSError) as error:
        cause = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        warn(
            f"the compilation cache is off, so that each process compiles its programs again ({cause}): set"
            " FEDRAX_CACHE to a writable folder"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_platform() -> None:
    """Raise FedraxError where JAX finds no device of the platform that it was asked for; starts JAX."""
    if not (platforms := jax.config.jax_platforms):  # pyright: ignore[reportAttributeAccessIssue]
        return
    try:
        jax.devices()
    except Exception as cause:  # JAX may also raise an AssertionError
        why = f" ({str(cause).splitlines()[0]})" if str(cause) else ""
        raise FedraxError(
            f"JAX finds no device of JAX_PLATFORMS={platforms}{why}: unset it, or set it to cpu"
        ) from cause


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@checked_arguments
def join_processes(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Make this process one of several, on one host or many, whose devices run one simulation together.

    Every process calls it before any other use of JAX and then runs the same program. All arguments are optional where
    Slurm, Kubernetes or Open MPI provide them to JAX. It calls ``jax.distributed.initialize``; devices wait for each
    other without limit.

    Args:
        coordinator: ``host:port`` of process 0, reachable by the other processes.
        processes: Number of processes.
        process: Index of this process, from 0.

    Example:
        >>> fedrax.simulation.join_processes("10.0.0.1:1234", processes=2, process=0)  # doctest: +SKIP
    """
    use_all_cores()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process)


def disconnect_processes() -> None:
    """Detach from the other processes after one of them has failed.

    At exit JAX waits for all processes and then aborts. It has no public way to leave without them, so that its
    connections are leaked: they stay open until the process ends.
    """
    state = distributed.global_state
    for connection in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    state.client = state.service = None


@cache
def _warn_about_one_core() -> None:
    """Warn once that the other cores are idle."""
    if available_cores() > 1 and len(jax.devices()) == 1 and jax.default_backend() == "cpu":
        warn(
            f"JAX was in use before fedrax, so simulations run on one of {available_cores()} cores: call"
            " fedrax.simulation.use_all_cores() before the program's first use of JAX",
        )


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_MIN_COMPILE_SECONDS = 0.05
"""Compilations from this duration on free enough memory to return it to the system."""


@cache
def trim_memory_after_compilation() -> None:
    """After each long compilation, return the memory that it freed to the system before the program runs.

    glibc keeps freed memory, and large arrays rarely fit into the fragments that LLVM leaves, so that the peak memory
    of a process would be the sum of both. Loading a program from the cache counts as a compilation. Only glibc has
    malloc_trim; with other C libraries nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is None:
        return
    trim.argtypes = [ctypes.c_size_t]

    def on_compiled(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT and duration_secs >= _MIN_COMPILE_SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(on_compiled)


def unplaced(values: Any) -> Any:
    """A pytree whose arrays are on no particular devices.

    JAX rejects programs that combine arrays of two meshes, so that a model could not close over the parameters of an
    earlier run on all cores.
    """

    def free(leaf: Any) -> Any:
        committed = isinstance(leaf, jax.Array) and getattr(leaf, "committed", False)  # False for tracers
        is_key = committed and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jnp.asarray(np.asarray(leaf)) if committed and not is_key else leaf

    return jax.tree.map(free, values)
