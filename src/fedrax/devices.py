"""Setting JAX up: every CPU core a device, compiled programs kept between processes."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

import jax
import jax.monitoring
from jax._src import distributed, xla_bridge

from fedrax.errors import FedraxError, warn
from fedrax.files import cache_directory

_forked: list[int] = []
"""This process, where it was forked from one whose devices had started: a fork copies no threads but its own."""


def _note_fork() -> None:
    if xla_bridge.backends_are_initialized():
        _forked.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)

_FOR_EVER = "2000000000"
"""Seconds; 63 years."""


_FLAGS = {
    "xla_cpu_multi_thread_eigen": "false",
    "xla_cpu_collective_call_terminate_timeout_seconds": _FOR_EVER,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": _FOR_EVER,
    "xla_cpu_collective_timeout_seconds": _FOR_EVER,
}
"""Each core is a device of one thread; and devices wait for each other as long as it takes, where XLA would end the
process after 40 seconds: one client may have that much more to do than the others, or a laptop be asleep."""


def use_all_cores() -> None:
    """Make each CPU core a JAX device of one thread, and keep compiled programs in the cache directory.

    The process also returns to the system the memory that compilations have freed, and its devices wait for each
    other without limit.

    ``simulate`` calls this; it has an effect only before JAX first touches a device, so a program that uses JAX
    before its first simulation calls it at its start (a warning says so). Settings of the user (``XLA_FLAGS``,
    ``jax_num_cpu_devices``, ``jax_compilation_cache_dir``) are left alone.

    Raises:
        FedraxError: in a process that was forked from one whose JAX had started; it would wait forever.

    Example:
        >>> fedrax.simulation.use_all_cores()
    """
    if _forked:
        raise FedraxError(
            "this process was forked from one that had used JAX, whose threads it has not: start it another way"
            ' (multiprocessing.get_context("spawn"), or joblib, whose processes are of their own)'
        )
    flags = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={value}" for name, value in _FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *ours]).strip()
    asked_for = jax.config.jax_num_cpu_devices > 0  # pyright: ignore[reportAttributeAccessIssue]
    if not asked_for and "host_platform_device_count" not in flags:
        try:
            jax.config.update("jax_num_cpu_devices", cores())
        except RuntimeError:  # JAX has started; its devices stay as they are
            os.environ["XLA_FLAGS"] = flags
            _warn_of_one_core()
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        _keep_programs(os.environ.get("FEDRAX_CACHE"))
    give_back_memory_of_compilations()


@cache
def _keep_programs(_: str | None) -> None:
    """Have JAX keep compiled programs, or say once for each cache directory that it cannot."""
    try:
        folder = cache_directory() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (FedraxError, OSError) as error:
        cause = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        warn(
            f"compiled programs are not kept, so that each process compiles its own ({cause}): set FEDRAX_CACHE to a"
            " folder that can be written"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # of Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def join_processes(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Make this process one of several, on one host or many, whose devices run a simulation together.

    Every process calls it before any other use of JAX and then runs the same program. All arguments may be left out
    where Slurm, Kubernetes or Open MPI provide them to JAX. It calls ``jax.distributed.initialize``, and devices wait
    for each other without limit.

    Args:
        coordinator: ``host:port`` of process 0, which the other processes can reach.
        processes: the number of processes.
        process: the number of this process, from 0.

    Example:
        >>> fedrax.simulation.join_processes("10.0.0.1:1234", processes=2, process=0)  # doctest: +SKIP
    """
    use_all_cores()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, process)


def abandon_processes() -> None:
    """Forget the others, one of which is gone: at its end JAX would wait for all of them, and abort the process.

    JAX has no public way to leave without them: its ends of the connections stay open until the process is gone.
    """
    state = distributed.global_state
    for end in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))
    state.client = state.service = None


@cache
def _warn_of_one_core() -> None:
    """Say once that the other cores are idle."""
    if cores() > 1 and len(jax.devices()) == 1 and jax.default_backend() == "cpu":
        warn(
            f"JAX was in use before fedrax, so simulations run on one of {cores()} cores: call"
            " fedrax.simulation.use_all_cores() before the program's first use of JAX",
        )


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
