"""Schedulers of a cluster as executors: ``dask://HOST:PORT`` and ``ray://HOST:PORT`` (the extras dask and ray).

What runs there is a function of this package, known by its name, with texts as arguments: workers need fedrax and the
file system of whoever starts the comparison. Whoever may speak to a scheduler may run any program on its workers, so
it belongs into a trusted network.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from fedrax.errors import FedraxError, unknown

SECONDS = 30
"""Until a scheduler that does not answer is given up."""


def engine(address: str) -> Callable[[], Executor]:
    """A function that connects to the scheduler at an address. Raises FedraxError for an address that is none."""
    kind, separator, place = address.partition("://")
    if not separator or not place:
        raise FedraxError(f"{address!r} is no address of a scheduler, such as dask://localhost:8786.")
    if kind not in ENGINES:
        raise unknown("scheduler", kind, ENGINES)
    module, connect = ENGINES[kind]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise FedraxError(f"{kind}:// needs the package {module}: pip install '{EXTRAS[kind]}'") from error

    def make() -> Executor:
        try:
            return connect(found, place)
        except Exception as error:  # whatever the network and the libraries come up with
            said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise FedraxError(f"there is no {kind} scheduler to be reached at {place}: {said}") from error

    return make


class ClusterExecutor(Executor):
    """An executor of two functions: one that hands a call over, and one that ends the connection."""

    def __init__(self, hand_over: Callable[..., Future], close: Callable[[], Any]):
        self._hand_over, self._close = hand_over, close

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Hand a call over; BrokenExecutor where the connection is lost."""
        try:
            return self._hand_over(fn, *args, **kwargs)
        except Exception as error:
            raise BrokenExecutor(f"the scheduler is lost: {error}") from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the connection; what is not finished is canceled with it."""
        self._close()


def _dask(distributed: Any, place: str) -> Executor:
    """Dask gives the call of a lost worker to another by itself, as often as its ``allowed-failures`` say."""
    client = distributed.Client(f"tcp://{place}", timeout=SECONDS, set_as_default=False)
    executor = client.get_executor(pure=False)  # the same call again is another attempt
    return ClusterExecutor(executor.submit, client.close)


def _ray(ray: Any, place: str) -> Executor:
    """Ray says that a worker was lost; the call is then handed over again."""
    ray.init(address=f"ray://{place}", log_to_driver=False)

    def hand_over(fn: Callable[..., Any], *args: Any) -> Future:
        return ray.remote(max_retries=0)(fn).remote(*args).future()

    return ClusterExecutor(hand_over, ray.shutdown)


ENGINES: dict[str, tuple[str, Callable[[Any, str], Executor]]] = {
    "dask": ("distributed", _dask),
    "ray": ("ray", _ray),
}
EXTRAS = {"dask": "distributed", "ray": "ray[client]"}
