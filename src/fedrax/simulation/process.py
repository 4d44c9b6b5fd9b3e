"""Process-wide state of a run: JAX's numeric configuration, several processes, the machine's description."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from threadpoolctl import threadpool_limits

from fedrax.devices import disconnect_processes
from fedrax.errors import FedraxError
from fedrax.files import atomic_write
from fedrax.version import VERSION


def answer_of_any_process(answer: bool) -> bool:
    """Whether ``answer`` is true in any of the processes of the run."""
    if jax.process_count() == 1:
        return answer
    return bool(np.any(multihost_utils.process_allgather(np.int32(answer))))


def answer_of_first_process(answer: bool) -> bool:
    """The value of ``answer`` in the first process of the run."""
    if jax.process_count() == 1:
        return answer
    return bool(multihost_utils.broadcast_one_to_all(np.int32(answer)))


@contextmanager
def runtime_errors_explained(alone: bool, directory: Path | None, side_by_side: int) -> Iterator[None]:
    """Turn runtime errors of devices into FedraxErrors: too little memory, or the end of another process of the run.

    Args:
        alone: whether the run has a single process.
        directory: of the run.
        side_by_side: clients in one vmap; 0 where they run one after another.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        cause, kept = str(error).splitlines()[0], f"{directory} holds the last checkpoint"
        if "RESOURCE_EXHAUSTED" in cause:
            less = 'set a smaller batch, samples="streamed" or states="spilled"'
            less = f"set chunk below {side_by_side}, the clients side by side" if side_by_side > 1 else less
            message = f"the memory of a device is too small ({cause}): {less}"
            raise FedraxError(f"{message}; {kept}" if directory is not None else message) from error
        if alone:
            raise
        disconnect_processes()
        message = f"another process of this run has ended or cannot be reached ({cause}): start all of them again"
        raise FedraxError(message if directory is None else f"{message} with resume=True; {kept}") from error


@contextmanager
def numeric_context(dtype: str) -> Iterator[None]:
    """Context with fedrax's numeric configuration of JAX, whatever user code or the environment has configured.

    Arithmetic is in ``dtype``, matrix products have full precision, and LAPACK uses only the calling thread. The random
    generator is fixed, so that a seed gives the same draws. Type promotion and NaN checks have JAX's defaults: the
    user's settings are for the user's own code.
    """
    with (
        jax.enable_x64(dtype == "float64"),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        _lapack,
    ):
        yield


class _SharedContext:
    """A context that concurrent runs share: the first run enters it, and the last one exits it."""

    def __init__(self, make: Callable[[], AbstractContextManager]):
        self._make, self._inside = make, 0
        self._entered, self._lock = ExitStack(), threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._entered.enter_context(self._make())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._entered.close()


_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def _one_lapack_thread() -> Iterator[None]:
    """Limit LAPACK to one thread, because its threads would compete with those of the devices.

    On CPU, XLA computes singular values by LAPACK. On small matrices, synchronizing its threads takes many times as
    long as the work itself. XLA loads the library (SciPy's OpenBLAS) with the first program that needs it, and OpenBLAS
    then reads the environment variable. Both settings hold for the whole process.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        if before is None:
            os.environ.pop(_THREADS, None)
        else:
            os.environ[_THREADS] = before


_lapack = _SharedContext(_one_lapack_thread)


def write_environment(directory: Path) -> None:
    """Write versions and devices as ``environment.json``."""
    devices = jax.devices()
    facts = {
        "fedrax": VERSION,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [str(device) for device in devices],
        "device_kind": devices[0].device_kind,
    }
    with atomic_write(directory / "environment.json") as file:
        file.write((json.dumps(facts, indent=1) + "\n").encode())
