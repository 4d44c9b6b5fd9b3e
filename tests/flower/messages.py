"""Six clients of three sizes, and a grid that serializes messages between them and can drop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flwr.app import Context, Error, Message
from flwr.common.serde import message_from_proto, message_to_proto

from fedrax import Algorithm, FedraxError, Result, Task, classification
from fedrax.data import Federation
from fedrax.flower import LocalGrid, client_app, federate
from fedrax.models import Logistic

SIZES = (3, 7, 7, 12, 3, 12)  # a client compiles a program for each number of samples
ROUNDS, COHORT = 4, 3
TASK = classification(Logistic().build((4,), 3))


def random_params(task: Task) -> Any:
    """Random initial parameters without equal arrays."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: a + 0.1 * rng.normal(size=a.shape).astype(a.dtype), task.init(jax.random.key(0)))


INITIAL_PARAMS = random_params(TASK)


def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples of six clients, and their owners."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(owner), 4)).astype(np.float32)
    return x, (x @ rng.normal(size=(4, 3))).argmax(1), owner


X, Y, OWNER = samples()
FEDERATION = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)


def client_samples(context: Context) -> Any:
    """Samples of the client."""
    mine = int(context.node_config["partition-id"]) == OWNER
    return X[mine], Y[mine]


class SerializingGrid(LocalGrid):
    """A grid that serializes messages as a network does; ``lose`` selects replies that never arrive."""

    nodes_may_join = True
    lose: Callable[[Message, int], bool] = staticmethod(lambda message, client: False)
    change: Callable[[Message, int], None] = staticmethod(lambda reply, client: None)
    """Modifies replies on the way."""

    def _reply(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 2
        try:
            reply = super()._reply(message_from_proto(message_to_proto(message)))
        except FedraxError as error:  # a SuperNode replies with the error of the app
            app_error = error.__cause__
            return Message(Error(2, f"{type(app_error)}:<'{app_error}'>"), reply_to=message)
        self.change(reply, client)
        if self.lose(message, client):
            return Message(Error(3, "it took too long"), reply_to=message)
        return message_from_proto(message_to_proto(reply))


def run_federation(algorithm: Algorithm, grid: Any = None, task: Task = TASK, **changes: Any) -> Result:
    """A short run over messages."""
    grid = grid or SerializingGrid(client_app(algorithm, task, client_samples, seed=0), len(SIZES))
    settings = {"rounds": ROUNDS, "cohort_size": COHORT, "test": (X, Y), "seed": 0, "timeout": 30.0, "wait": 30.0}
    return federate(grid, algorithm, task, clients=len(SIZES), **(settings | changes))  # type: ignore[arg-type]


def assert_close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    """Assert equality of two trees up to rounding."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)
