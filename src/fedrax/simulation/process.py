"""What a run shares with its process: Ctrl-C, arithmetic, and the description of the machine."""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from threadpoolctl import threadpool_limits

from fedrax.files import replacing


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run was checkpointed (where it has a directory) and can be resumed."""


@contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; a second one interrupts at once.

    Ctrl-C stays ignored where the process ignores it, as one in the background of a shell script does.
    """
    flag = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    ignored = before is None or before is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handler(number: int, frame: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def arithmetic(dtype: str) -> Iterator[None]:
    """Numbers of ``dtype`` and products in full precision, singular values and the like on the calling thread alone."""
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"), _one_lapack_thread():
        yield


_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def _one_lapack_thread() -> Iterator[None]:
    """On CPU, XLA takes singular values from LAPACK, whose own threads would compete with the devices'.

    On small matrices they take many times as long to meet as the work itself does. XLA loads the library (SciPy's
    OpenBLAS) with the first program that needs it; it then reads the variable.
    """
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


def write_environment(directory: Path) -> None:
    """What the run ran on, as ``environment.json``."""
    import fedrax

    devices = jax.devices()
    facts = {
        "fedrax": fedrax.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [str(device) for device in devices],
        "device_kind": devices[0].device_kind,
    }
    with replacing(directory / "environment.json") as file:
        file.write((json.dumps(facts, indent=1) + "\n").encode())
