"""What a run shares with its process: Ctrl-C, and the description of the machine."""

from __future__ import annotations

import json
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax.errors import FedraxError


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run was checkpointed (where it has a directory) and can be resumed."""


@contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; a second one interrupts at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


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
    part = directory / ".environment.json.part"
    try:
        part.write_text(json.dumps(facts, indent=1) + "\n")
        part.replace(directory / "environment.json")
    except OSError as error:
        raise FedraxError(f"cannot write {directory / 'environment.json'}: {error.strerror}") from error
