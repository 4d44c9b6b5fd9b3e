"""Work that goes on beside its caller's."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def begun(work: Callable[..., T], *args: Any) -> Future[T]:
    """What ``work`` gives, which is begun in a thread of its own.

    Executors take no work once a program's main thread has ended, though its other threads may well go on.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # handed to who waits
            future.set_exception(error)

    threading.Thread(target=run, name="fedrax-background").start()
    return future
