"""Named random streams of clients and the server, in phases and nested wrappers."""

from itertools import combinations
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fedrax import FedAvg, Wrapper, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.tree import Tree
from tests.simulation.problems import run

ROUNDS, COHORT = 2, 3


class Server(NamedTuple):
    """Parameters, and the recorded keys of two phases."""

    params: Tree
    clients: jax.Array
    server: jax.Array


@hyperparameters
class RecordingKeys(Algorithm):
    """A method with two phases whose server records each client's keys and its own."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The same phase twice."""
        return tuple(Phase(self.broadcast, self.client, lambda s, c, p=p: self.record(s, c, p)) for p in (0, 1))

    def init(self, params: Tree, num_clients: int) -> Server:
        """No keys recorded."""
        none = np.zeros((ROUNDS, 2, num_clients, 4, 2), np.uint32)
        return Server(params, jax.numpy.asarray(none), jax.numpy.zeros((ROUNDS, 2, 2, 2), "uint32"))

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Keys of two streams, of a fresh batch's stream, and of the first step."""
        keys = [data.key("a"), data.key("b"), data.resampled().key("a"), data.dropout_key(0)]
        return ClientOutput(upload=(), each=jax.numpy.stack([jax.random.key_data(key) for key in keys]))

    def record(self, server: Server, cohort: Cohort, p: int) -> tuple[Server, Info]:
        clients = server.clients.at[cohort.round, p, cohort.clients].set(cohort.each, mode="drop")
        mine = jax.numpy.stack([jax.random.key_data(cohort.key(name)) for name in "ab"])
        return Server(server.params, clients, server.server.at[cohort.round, p].set(mine)), {}


@hyperparameters
class Identity(Wrapper):
    """A wrapper without effect."""

    inner: Algorithm = FedAvg()


def keys_of(result: Any) -> tuple[np.ndarray, np.ndarray]:
    """(keys of clients, keys of the server)."""
    return np.asarray(result.server.clients), np.asarray(result.server.server)


@pytest.fixture(scope="module")
def keys() -> tuple[np.ndarray, np.ndarray]:
    """All keys of two rounds."""
    return keys_of(run(RecordingKeys(), rounds=ROUNDS, cohort_size=COHORT))


def test_keys_differ_between_purposes_clients_phases_and_rounds(keys: tuple):
    clients, server = keys
    taken = clients[(clients != 0).any(-1)].reshape(-1, 4, 2)
    assert len(taken) == ROUNDS * 2 * COHORT
    drawn = {tuple(key) for key in taken[:, :3].reshape(-1, 2)} - {(0, 0)}
    fresh_by_phase = taken[:, 2]
    assert len(drawn) == 3 * len(taken) and len({tuple(key) for key in fresh_by_phase}) == len(taken)
    assert len({tuple(key) for key in server.reshape(-1, 2)}) == ROUNDS * 2 * 2
    steps = {tuple(key) for key in taken[:, 3]}
    assert len(steps) == ROUNDS * COHORT  # both phases have the same keys for batches and dropout
    assert not drawn & (steps | {tuple(key) for key in server.reshape(-1, 2)})


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["vmap", "loop", "debug"])
def test_keys_are_the_same_on_every_plan(keys: tuple, plan: str):
    for actual, desired in zip(
        keys_of(run(RecordingKeys(), rounds=ROUNDS, cohort_size=COHORT, plan=plan)), keys, strict=True
    ):
        np.testing.assert_array_equal(actual, desired)


def test_nested_wrappers_have_different_streams(keys: tuple):
    wrapped = [
        keys_of(run(method, rounds=ROUNDS, cohort_size=COHORT))
        for method in (Identity(RecordingKeys()), Identity(Identity(RecordingKeys())))
    ]
    for (clients, server), (others, other_server) in combinations([keys, *wrapped], 2):
        streams, other = ({tuple(key) for key in found[..., :3, :].reshape(-1, 2)} for found in (clients, others))
        assert streams & other == {(0, 0)}  # clients that did not take part
        np.testing.assert_array_equal(
            clients[..., 3, :], others[..., 3, :]
        )  # local steps have the same keys as without wrappers
        assert not {tuple(k) for k in server.reshape(-1, 2)} & {tuple(k) for k in other_server.reshape(-1, 2)}


def test_streams_depend_on_seed_round_and_client_only():
    """Not on the method, the task or the cohort size."""
    few, many = (keys_of(run(RecordingKeys(), rounds=1, script=None, cohort_size=size))[0][0, 0] for size in (3, 8))
    taken = (few != 0).any((-1, -2))
    assert taken.sum() == 3
    np.testing.assert_array_equal(few[taken], many[taken])
