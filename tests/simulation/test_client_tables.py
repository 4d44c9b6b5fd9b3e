"""Tables of vectors in client states: as values, and in the array of all clients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.table import VectorTable, set_state, state_in
from fedrax.models import MLP
from fedrax.simulation.executors.compiled import Engine
from tests.simulation.problems import CLASSES, FEATURES, assert_close, make_federation, run
from tests.slow import slow_cases

CLIENTS, M = 4, 3


def client_states() -> tuple[jax.Array, VectorTable]:
    """A vector and a table of trees for each client."""
    rng = np.random.default_rng(0)
    vectors = {
        "w": jnp.asarray(rng.normal(size=(CLIENTS, M, 2, 5))),
        "b": jnp.asarray(rng.normal(size=(CLIENTS, M, 5))),
    }
    return jnp.asarray(rng.normal(size=(CLIENTS, 7))), VectorTable(vectors)


def run_loop(state: tuple[jax.Array, VectorTable]) -> tuple[jax.Array, VectorTable]:
    """In a loop, read a row, write another one, and read the written one."""

    def body(k: jax.Array, state: tuple[jax.Array, VectorTable]) -> tuple[jax.Array, VectorTable]:
        vector, table = state
        moved = tree.scale(2.0, table[k % M])
        table = table.put((k + 1) % M, moved)
        return vector + table[(k + 1) % M]["b"].sum(), table

    return jax.lax.fori_loop(0, 2 * M + 1, body, state)


def test_table_updated_in_place_equals_the_table_as_a_value():
    for client in range(CLIENTS):
        whole = client_states()
        alone = run_loop(jax.tree.map(lambda a: a[client], whole))  # noqa: B023
        expected = jax.tree.map(lambda all, new: all.at[client].set(new), whole, alone)  # noqa: B023

        @jax.jit
        def in_place(whole: tuple[jax.Array, VectorTable], slot: jax.Array) -> tuple[jax.Array, VectorTable]:
            return set_state(whole, slot, run_loop(state_in(whole, slot)))

        found = in_place(whole, jnp.int32(client))
        assert jax.tree.structure(found) == jax.tree.structure(whole)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(a, b)


def test_new_table_of_a_client_replaces_the_old_one():
    whole = client_states()
    new = VectorTable(jax.tree.map(lambda a: jnp.ones(a.shape[1:], a.dtype), whole[1].rows))
    found = set_state(whole, jnp.int32(2), (whole[0][2], new))[1]
    assert np.all(found.rows["w"][2] == 1) and np.all(found.rows["b"][2] == 1)
    assert np.array_equal(found.rows["w"][1], whole[1].rows["w"][1])


class State(NamedTuple):
    """Client state of the method below."""

    current: VectorTable
    previous: VectorTable


@hyperparameters
class TwoTables(fedrax.FedAvg):
    """FedAvg whose clients copy one table to another and use all rows of it."""

    def init_client(self, params: Any) -> State:
        rows = jax.tree.map(lambda a: jnp.zeros((M, *a.shape), a.dtype), params)
        return State(VectorTable(rows), VectorTable(rows))

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        out = super().client(message, state, data)
        new = state.current.put(data.round % M, out.upload).put(M + 7, message).put(-M, state.previous[-1])
        upload = jax.tree.map(lambda u, a: u + 0.1 * a.sum(0), out.upload, new.rows)
        return out._replace(upload=upload, state=State(new, state.current))


OTHER_OPTIONS = ({"plan": "vmap"}, {"plan": "loop"}, {"plan": "debug"}, {"states": "spilled"})


@pytest.mark.parametrize("options", slow_cases(OTHER_OPTIONS), ids=str)
def test_tables_agree_on_every_plan(options):
    """A table that replaces another one is copied for this client only; indices out of range are clamped."""
    algorithm = TwoTables(local=fedrax.LocalSGD(lr=0.1, steps=2, batch_size=2))
    one = run(algorithm, plan="scan", rounds=6)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(one.client_state(next(iter(one.homes))).previous))
    assert_close(one, run(algorithm, rounds=6, **({"plan": "scan"} | options)), 2e-5)


@hyperparameters
class UploadsTable(TwoTables):
    """Uploads a table."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        return super().client(message, state, data)._replace(each=state.current)


def test_uploaded_table_is_rejected():
    with pytest.raises(fedrax.FedraxError, match=r"UploadsTable\.client uploads a VectorTable: send its rows"):
        run(UploadsTable())


def test_reading_and_writing_rows():
    table = VectorTable({"a": jnp.arange(6.0).reshape(3, 2)})
    changed = table.put(1, {"a": jnp.array([7, 8])})
    assert np.array_equal(changed[1]["a"], [7, 8]) and np.array_equal(table[1]["a"], [2, 3])
    assert changed.rows["a"].dtype == table.rows["a"].dtype


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("algorithm", [fedrax.LoSAC, fedrax.algorithms.FedSaga])
def test_simulation_does_not_copy_tables(algorithm, monkeypatch):
    """The scratch memory of a round is smaller than one client's table, of which few rows are used."""
    sizes = []

    def measured(self, algorithm, carry, key, xs, rounds):
        compiled = self.block(algorithm).lower(algorithm, carry, self.samples, key, xs, np.int32(rounds)).compile()
        table = max(a.nbytes // a.shape[0] for a in jax.tree.leaves(carry.store))
        sizes.append((compiled.memory_analysis().temp_size_in_bytes, table))
        return original(self, algorithm, carry, key, xs, rounds)

    original = Engine.run
    monkeypatch.setattr(Engine, "run", measured)
    task = fedrax.classification(MLP((64,)).build((FEATURES,), CLASSES))
    local = fedrax.LocalSGD(lr=1e-3, steps=2, blocks=200)
    run(algorithm(local=local), make_federation((200,) * 6), task=task, plan="scan")
    scratch, table = sizes[0]
    assert table == 200 * 4 * FEATURES * 64 and scratch < table / 2
