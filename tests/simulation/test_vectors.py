"""Vectors in the server state: their operations, whole and sharded, and runs that shard them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fedrax
from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract import vectors as module
from fedrax.contract.vectors import (
    Changes,
    ServerVectors,
    exchanged,
    fetched,
    is_vectors,
    on_axis,
    padded,
    settled,
    watched,
)
from fedrax.simulation import NonFiniteError
from fedrax.simulation.executors.compiled import Engine, server_specs
from fedrax.xla.microbatch import CLIENT_AXIS
from tests.simulation.problems import LOCAL, assert_close, assert_identical, run

K, S = 5, 4
SHAPES = {"a": (3, 3), "b": (1,), "c": (4,)}
"""Leaves of nine, one and four entries, of which two devices cannot share two evenly."""
ROWS = jnp.array([4, 1, K, 0])
"""The third index is out of range."""
KEPT_ROWS = jnp.array([0.5, 0.0, 2.0, 1.0])


def tables(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(count, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def vectors(values: dict[str, np.ndarray]) -> ServerVectors:
    """Uploads as the simulator stacks them."""
    rows = [ServerVectors.of({name: jnp.asarray(v[k]) for name, v in values.items()}) for k in range(len(values["a"]))]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


HELD, UPDATES, ONE = tables(K, 0), tables(S, 1), {name: v[0] for name, v in tables(1, 2).items()}
FACTORS = np.random.default_rng(3).normal(size=(len(SHAPES), K)).astype(np.float32)


def apply_operations(held: ServerVectors, updates: ServerVectors) -> tuple[Any, ...]:
    """All operations that an algorithm may use."""
    new = held.accumulate(ROWS, KEPT_ROWS, updates)
    return new, *new.products(ROWS, ONE), new.combine(FACTORS), new.combine(FACTORS[0])


def numpy_operations() -> tuple[Any, ...]:
    """The same in NumPy, leaf by leaf and entry by entry."""
    new = {name: v.copy() for name, v in HELD.items()}
    for j, k in enumerate(ROWS.tolist()):
        if k < K:
            for name in SHAPES:
                new[name][k] = KEPT_ROWS[j] * HELD[name][k] + UPDATES[name][j]
    products = np.zeros((len(SHAPES), S + 1, K))
    for leaf, name in enumerate(SHAPES):
        for k in range(K):
            for j, row in enumerate(ROWS.tolist()):
                products[leaf, j, k] = np.sum(new[name][min(row, K - 1)] * new[name][k])
            products[leaf, S, k] = np.sum(ONE[name] * new[name][k])
    by_leaf = {name: sum(FACTORS[i, k] * new[name][k] for k in range(K)) for i, name in enumerate(SHAPES)}
    alike = {name: sum(FACTORS[0, k] * new[name][k] for k in range(K)) for name in SHAPES}
    return new, products[:, :-1], products[:, -1], by_leaf, alike


def assert_agrees_with_numpy(found: tuple[Any, ...]) -> None:
    new, *rest = found
    expected, *others = numpy_operations()
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (new.rows, rest), (expected, others))


def test_operations_on_whole_vectors():
    assert len(vectors(HELD)) == K
    assert_agrees_with_numpy(jax.jit(apply_operations)(vectors(HELD), vectors(UPDATES)))


@pytest.mark.parametrize("few", [2, 1])
def test_operations_on_sharded_vectors(few: int, monkeypatch):
    """Two devices with a shard of the stored and half of the new vectors, exchanged as for few or many rows."""
    monkeypatch.setattr(module, "_FEW_DEVICES", few)
    mesh = Mesh(jax.devices()[:2], (CLIENT_AXIS,))
    held = padded(vectors(HELD), 2)
    specs = server_specs(held, mesh)

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(CLIENT_AXIS)), out_specs=(specs, *[P()] * 4), check_vma=False)
    def shared(held: ServerVectors, mine: ServerVectors) -> tuple[Any, ...]:
        assert held._parts[0].shape == (K, 5) and mine._parts[0].shape == (S // 2, 9)
        new, *rest = apply_operations(on_axis(held, CLIENT_AXIS), exchanged(mine, CLIENT_AXIS))
        return on_axis(new, None), *rest

    new, *rest = jax.jit(shared)(held, vectors(UPDATES))
    assert_agrees_with_numpy((fetched(new), *rest))


METHODS_WITH_VECTORS = (
    fedrax.GradMA(local=LOCAL, memory=4),
    fedrax.algorithms.GradMAS(local=LOCAL, memory=6, scope="leaf"),
    fedrax.algorithms.MIFA(local=LOCAL, memory="server"),
)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("algorithm", METHODS_WITH_VECTORS, ids=lambda a: type(a).__name__)
def test_devices_shard_the_vectors_of_the_server(algorithm, monkeypatch):
    """Each device has a shard; results are whole."""
    shares = []

    def seen(self, algorithm, carry, key, xs, rounds):
        carry, records = original(self, algorithm, carry, key, xs, rounds)
        held = carry.server.memory if isinstance(carry.server.memory, ServerVectors) else carry.server.memory.vectors
        shares.append([(part.shape[1], part.addressable_shards[0].data.shape[1]) for part in held._parts])
        return carry, records

    original = Engine.run
    monkeypatch.setattr(Engine, "run", seen)
    one, two = run(algorithm, devices=1), run(algorithm, devices=2)
    sizes = [part.size for part in jax.tree.leaves(one.params)]
    assert shares[0] == [(n, n) for n in sizes] and any(n % 2 for n in sizes)
    assert shares[-1] == [(n + n % 2, (n + 1) // 2) for n in sizes]
    assert jax.tree.structure(one.server) == jax.tree.structure(two.server)
    assert_close(one, two)


def test_sharded_vectors_resume_from_a_checkpoint(tmp_path):
    """Which contains whole vectors."""
    often = partial(run, METHODS_WITH_VECTORS[0], eval_every=3, devices=2)
    often(rounds=3, directory=tmp_path)
    assert_identical(often(rounds=6, directory=tmp_path, resume=True), often(rounds=6))


class UnusedUpdates(NamedTuple):
    """Parameters, and updates that are not used."""

    params: Any
    memory: ServerVectors


@hyperparameters
class StoresUpdates(fedrax.FedAvg):
    """Stores updates; from round 3 on, the first entry of each is NaN."""

    def init(self, params: Any, num_clients: int) -> UnusedUpdates:
        return UnusedUpdates(params, ServerVectors.zeros(num_clients, params))

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        out = super().client(message, state, data)
        spoilt = jnp.where(data.round < 2, 0.0, jnp.nan)
        return out._replace(each=ServerVectors.of(jax.tree.map(lambda u: u.at[(0,) * u.ndim].add(spoilt), out.upload)))

    def server(self, server: UnusedUpdates, cohort: fedrax.Cohort) -> tuple[UnusedUpdates, dict]:
        memory = server.memory.accumulate(cohort.clients, jnp.zeros(len(cohort.clients)), cohort.each)
        return UnusedUpdates(tree.add(server.params, cohort.mean), memory), {}


@pytest.mark.parametrize("sound", [True, False])
def test_accumulated_vectors_are_restored_bitwise(sound: bool):
    """Also if accumulated twice in one call, in two calls, and out of range."""
    twice = jnp.array([1, 1, 0, K])

    def both(held: ServerVectors, number: jax.Array, sound: jax.Array) -> tuple[Any, Any]:
        old = watched((held, number))
        new = (
            old[0].accumulate(ROWS, KEPT_ROWS, vectors(UPDATES)).accumulate(twice, KEPT_ROWS, vectors(UPDATES)),
            number + 1,
        )
        return settled(old, new, lambda made: sound & tree.all_finite(made))[0], new

    found, new = jax.jit(both)(vectors(HELD), jnp.float32(3), jnp.bool_(sound))
    assert_identical_leaves(found, new if sound else (vectors(HELD), jnp.float32(3)))
    spoilt = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), vectors(UPDATES))
    old = watched(vectors(HELD))
    found, same = settled(old, old.accumulate(ROWS, KEPT_ROWS, spoilt), tree.all_finite)
    assert not same
    assert_identical_leaves(found, vectors(HELD))


def assert_identical_leaves(one: Any, two: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", [fedrax.algorithms.GradMAS, fedrax.GradMA])
def test_accumulation_is_in_place(kind, monkeypatch):
    """Otherwise all stored vectors would be copied twice."""
    found = []

    def seen(before: Any, after: Any) -> Changes | None:
        changes = original(before, after)
        found.extend([changes] if is_vectors(after) else [])
        return changes

    original = module._accumulated
    monkeypatch.setattr(module, "_accumulated", seen)
    run(kind(local=LOCAL, memory=6), rounds=2)  # a value that no other test has, so that it is traced
    assert found and all(changes is not None and len(changes.rows) == 1 for changes in found)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
def test_divergence_in_one_shard_stops_all_devices(plan, tmp_path):
    """The state written for diagnosis is that before the round."""
    with pytest.raises(NonFiniteError, match=r"^StoresUpdates, round 3, client \d+: each/output/bias is not finite"):
        run(StoresUpdates(local=LOCAL), rounds=5, plan=plan, directory=tmp_path)
    healthy = run(StoresUpdates(local=LOCAL), rounds=2, plan=plan)
    with np.load(tmp_path / "failure" / "state.npz") as file:
        kept = [file[name] for name in sorted(file.files) if "server" in name]
    for actual, desired in zip(kept, jax.tree.leaves(healthy.server), strict=True):
        np.testing.assert_array_equal(actual, desired)


@hyperparameters
class BroadcastsVectors(StoresUpdates):
    """Broadcasts a function of its stored vectors, or the vectors themselves."""

    wrongly: bool = False

    def broadcast(self, server: UnusedUpdates) -> Any:
        if self.wrongly:
            return server
        return tree.add(server.params, server.memory.combine(jnp.full(len(server.memory), 0.1)))


@pytest.mark.slow
def test_server_may_broadcast_functions_of_its_vectors():
    one, *others = [
        run(BroadcastsVectors(local=LOCAL), rounds=2, devices=n, plan=p)
        for n, p in ((1, "scan"), (2, "scan"), (2, "loop"))
    ]
    for other in others:
        assert_close(other, one)
    with pytest.raises(
        fedrax.FedraxError, match="BroadcastsVectors broadcasts ServerVectors: send arrays computed from them"
    ):
        run(BroadcastsVectors(local=LOCAL, wrongly=True))


def test_vectors_not_created_by_zeros_are_rejected():
    held, other = vectors(HELD), vectors({"a": UPDATES["a"]})
    with pytest.raises(TypeError, match=r"accumulates the ServerVectors of cohort\.each"):
        held.accumulate(ROWS, KEPT_ROWS, other)
