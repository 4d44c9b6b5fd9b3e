"""Background work in threads that outlive the main thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_background(work: Callable[..., T], *args: Any) -> Future[T]:
    """The future result of ``work(*args)``, which runs in a new thread.

    ``concurrent.futures`` executors accept no work after the main thread has ended, while other threads may still run.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name="fedrax-background").start()
    return future
