"""Cluster schedulers as executors: ``dask://HOST:PORT`` and ``ray://HOST:PORT`` (the extras dask and ray).

Workers execute a function of this package with strings as arguments, so they need fedrax and the file system of the
process that starts the comparison. A client of a scheduler can run any code on its workers: use it in a trusted network
only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from fedrax.errors import FedraxError, unknown

TIMEOUT = 30
"""Seconds to wait for a connection to a scheduler."""


def executor_factory(address: str) -> Callable[[], Executor]:
    """A function that connects to the scheduler at ``address``; raises FedraxError for a malformed address."""
    kind, separator, place = address.partition("://")
    if not separator or not place:
        raise FedraxError(f"{address!r} is not the address of a scheduler, such as dask://localhost:8786.")
    if kind not in SCHEDULERS:
        raise unknown("scheduler", kind, SCHEDULERS)
    module, connect = SCHEDULERS[kind]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise FedraxError(f"{kind}:// needs the package {module}: pip install '{EXTRAS[kind]}'") from error

    def make() -> Executor:
        try:
            return connect(found, place)
        except Exception as error:  # the libraries raise many types
            cause = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise FedraxError(f"cannot connect to a {kind} scheduler at {place}: {cause}") from error

    return make


class ClusterExecutor(Executor):
    """An executor from two functions: one submits a call, the other closes the connection."""

    def __init__(self, submit: Callable[..., Future], close: Callable[[], Any]):
        self._submit, self._close = submit, close

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Submit a call; raises BrokenExecutor if the connection is lost."""
        try:
            return self._submit(fn, *args, **kwargs)
        except Exception as error:
            raise BrokenExecutor(f"lost the connection to the scheduler: {error}") from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Close the connection, which cancels unfinished calls."""
        self._close()


def _dask(distributed: Any, place: str) -> Executor:
    """Connect to Dask, which retries the call of a lost worker itself, up to its ``allowed-failures`` times."""
    client = distributed.Client(f"tcp://{place}", timeout=TIMEOUT, set_as_default=False)
    executor = client.get_executor(pure=False)  # pure: Dask would return the result of an equal earlier call
    return ClusterExecutor(executor.submit, client.close)


def _ray(ray: Any, place: str) -> Executor:
    """Connect to Ray, which reports a lost worker; the call is then submitted again here."""
    ray.init(address=f"ray://{place}", log_to_driver=False)

    def submit(fn: Callable[..., Any], *args: Any) -> Future:
        return ray.remote(max_retries=0)(fn).remote(*args).future()

    return ClusterExecutor(submit, ray.shutdown)


SCHEDULERS: dict[str, tuple[str, Callable[[Any, str], Executor]]] = {
    "dask": ("distributed", _dask),
    "ray": ("ray", _ray),
}
"""For each scheduler the module it needs, and the function that connects."""
EXTRAS = {"dask": "distributed", "ray": "ray[client]"}
"""For each scheduler the package to install."""
