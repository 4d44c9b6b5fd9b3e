"""Message sizes computed by hand, client states and their placement, and float64 from end to end."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, Federation, LocalSGD
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.errors import FedraxError
from fedrax.models import Logistic
from fedrax.tree import Tree
from tests.simulation.problems import (
    LOCAL,
    MODEL_BYTES,
    SIZES,
    TASK,
    assert_close,
    bytes_per_client,
    make_federation,
    run,
)
from tests.slow import slow_cases

BLOCKS = fedrax.LocalSGD(lr=0.02, steps=2, blocks=2)


@pytest.mark.parametrize(
    ("algorithm", "down", "up"),
    [
        (fedrax.FedAvg(local=LOCAL), 1, 1),  # x; Delta_i
        (fedrax.Scaffold(local=LOCAL), 2, 2),  # x, c; Delta_i, Delta c_i
        (fedrax.LoSAC(local=BLOCKS), 2, 2),  # x, phi; Delta x_i, Delta phi_i
        (fedrax.algorithms.MimeSVRG(local=LOCAL), 2, 2),  # x, then c; full gradient, then Delta_i
        (fedrax.Episode(local=LOCAL, gamma=0.1), 2, 2),  # x, then G; G_i, then Delta_i
        (fedrax.algorithms.MIFA(local=LOCAL, memory="server"), 1, 1),  # x; Delta_i
        (fedrax.algorithms.MIFA(local=LOCAL, memory="clients"), 1, 1),  # x; the change of Delta_i
        (fedrax.algorithms.FedSaga(local=BLOCKS), 1, 1),  # x; Delta_i
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else str(value),
)
def test_bytes_per_client(algorithm: Algorithm, down: int, up: int):
    """In both precisions."""
    for dtype, each in (("float32", MODEL_BYTES), ("float64", 2 * MODEL_BYTES)):
        assert bytes_per_client(algorithm, dtype) == (down * each, up * each)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_summed_over_clients_and_rounds(dtype: str):
    events = run(fedrax.algorithms.MimeSVRG(local=LOCAL), dtype=dtype, rounds=3).events
    each = MODEL_BYTES * (2 if dtype == "float64" else 1)
    assert [event["bytes_down"] for event in events] == [2 * each * 3 * r for r in (1, 2, 3)]
    assert [event["bytes_up"] for event in events] == [2 * each * 3 * r for r in (1, 2, 3)]


class Tally(NamedTuple):
    """Number of participations of a client, and the rounds it has seen."""

    times: jax.Array
    rounds: jax.Array


class TallyServer(NamedTuple):
    """Uploads of the two phases."""

    params: Tree
    first: jax.Array
    second: jax.Array


@hyperparameters
class Tallying(Algorithm):
    """All numbers are integers that are known in advance. State is passed between phases and rounds."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.broadcast, self.begin, self.middle), Phase(lambda s: s.first, self.end, self.server))

    def init(self, params: Tree, num_clients: int) -> TallyServer:
        """Zeros, with one number per client in ``first``."""
        return TallyServer(params, jnp.zeros(num_clients), jnp.zeros(()))

    def init_client(self, params: Tree) -> Tally:
        """A hundred, to distinguish it from zero."""
        return Tally(jnp.float32(100), jnp.zeros(2))

    def begin(self, message: Tree, state: Tally, data: ClientData) -> ClientOutput:
        """Phase 1: upload the count, and keep it doubled for phase 2."""
        return ClientOutput(upload=(), each=state.times, state=(state, 2 * state.times))

    def middle(self, server: TallyServer, cohort: Cohort) -> tuple[TallyServer, Info]:
        """Phase 1: store the counts by client."""
        return server._replace(first=server.first.at[cohort.clients].set(cohort.each, mode="drop")), {}

    def end(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Phase 2: increment the count."""
        before, doubled = state
        seen = before.rounds + jnp.stack([data.round.astype(float), doubled])
        return ClientOutput(upload=doubled, state=Tally(before.times + 1, seen.astype(jnp.float32)))

    def server(self, server: TallyServer, cohort: Cohort) -> tuple[TallyServer, Info]:
        """Phase 2: add the uploads."""
        return server._replace(second=server.second + cohort.mean * cohort.size), {}


PLANS = [
    *({"plan": "scan", "devices": d} for d in (2, 1)),
    *({"plan": "vmap", "devices": d, "chunk": c} for d in (1, 2) for c in (1, 2, 3)),
    *({"plan": "loop", "devices": d} for d in (2, 1)),
    {"plan": "debug"},
]
IN_MAKE_TEST = [
    *(plan for plan in PLANS if plan.get("devices", 2) == 2 and plan.get("chunk", 2) == 2),
    {"plan": "vmap", "devices": 1, "chunk": 3},
]
"""Each plan and number of devices, with chunks that divide the cohort size and others."""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "plan", slow_cases(PLANS, IN_MAKE_TEST), ids=["-".join(str(value) for value in plan.values()) for plan in PLANS]
)
def test_state_across_phases_rounds_and_devices(plan: dict):
    cohorts = [[4, 1], [1, 2, 4], [0], [6, 4, 2, 1, 0], [1, 6]]  # 3, 5 and 7 never take part
    result = run(Tallying(), script=fedrax.simulation.Script(cohorts=cohorts), rounds=5, **plan)
    times, rounds, doubled, first, second = [100] * 8, [0] * 8, [0] * 8, [0] * 8, 0
    for r, cohort in enumerate(cohorts):
        for c in cohort:
            first[c], rounds[c], doubled[c] = times[c], rounds[c] + r, doubled[c] + 2 * times[c]
            second += 2 * times[c]
            times[c] += 1
    np.testing.assert_array_equal(result.server.first, first)
    np.testing.assert_allclose(result.server.second, second, rtol=1e-6)
    for c in range(8):
        state = result.client_state(c)
        np.testing.assert_array_equal(state.times, times[c])
        np.testing.assert_array_equal(state.rounds, [rounds[c], doubled[c]])


class FirstRows(NamedTuple):
    """The first rows of each round's cohort, -1 beyond them."""

    params: Tree
    clients: jax.Array
    each: jax.Array
    uploads: jax.Array
    weights: jax.Array
    real: jax.Array


@hyperparameters
class ReadsFirstRows(FedAvg):
    """A server that reads the first S rows as those of the cohort."""

    traits = fedrax.contract.Traits(stacked_uploads=True)

    def init(self, params: Tree, num_clients: int) -> FirstRows:
        """A row for each of five rounds."""
        return FirstRows(params, *[jnp.full((5, num_clients), -1.0)] * 5)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """The client's number, as upload and as row."""
        number = data.assignment.client
        return ClientOutput(upload=100.0 + number, each=number.astype(jnp.int8))

    def server(self, server: FirstRows, cohort: Cohort) -> tuple[FirstRows, Info]:
        """Store the first S rows."""
        here = jnp.arange(len(cohort.each)) < cohort.size
        found = (cohort.clients, cohort.each, cohort.uploads, cohort.weights, cohort.real)
        rows = [jnp.where(here, values, -1.0) for values in found]
        return FirstRows(
            server.params, *[t.at[cohort.round, : len(v)].set(v) for t, v in zip(server[1:], rows, strict=True)]
        ), {}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    "plan", slow_cases(PLANS, IN_MAKE_TEST), ids=["-".join(str(value) for value in plan.values()) for plan in PLANS]
)
def test_the_first_rows_are_the_cohort_in_client_order(plan: dict):
    """On two devices the clients are at two positions, each followed by padding."""
    cohorts = [[4, 1], [5, 2, 7, 1], [0], [6, 4, 3, 2, 1], [1, 6]]
    script = fedrax.simulation.Script(cohorts=cohorts)
    seen = run(ReadsFirstRows(), script=script, rounds=5, weights="samples", **plan).server
    for r, cohort in enumerate(cohorts):
        row = lambda values: np.concatenate([values, np.full(len(SIZES) - len(values), -1.0)])  # noqa: E731
        clients, sizes = np.sort(cohort), np.array(SIZES)[np.sort(cohort)]
        for name in ("clients", "each"):
            np.testing.assert_array_equal(getattr(seen, name)[r], row(clients), err_msg=name)
        np.testing.assert_array_equal(seen.uploads[r], row(100 + clients))
        np.testing.assert_array_equal(seen.real[r], row(np.ones(len(cohort))))
        np.testing.assert_allclose(seen.weights[r], row(sizes / sizes.sum()), rtol=1e-6)


def test_clients_that_never_took_part_have_the_initial_state():
    result = run(fedrax.LoSAC(local=BLOCKS), cohort_size=2, rounds=2)
    absent = set(range(len(SIZES))) - set(result.homes)
    assert absent and len(absent) >= 4
    for client in range(len(SIZES)):
        leaves = jax.tree.leaves(result.client_state(client))
        assert all(leaf.shape[0] == 2 for leaf in leaves)  # M blocks
        assert any(np.any(leaf) for leaf in leaves) == (client not in absent)


@pytest.mark.parametrize(("devices", "rows"), [(1, 8), (2, 16)])
def test_store_has_a_row_for_each_client(devices: int, rows: int):
    """On every device, if that takes little memory."""
    script = fedrax.simulation.Script(cohorts=[[0, 1], [1, 2], [2, 0], [5, 1]])
    result = run(fedrax.Scaffold(local=LOCAL), script=script, devices=devices)
    assert set(result.homes) == {0, 1, 2, 5}
    assert {len(leaf) for leaf in jax.tree.leaves(result.store)} == {rows}


def test_store_of_a_large_federation_contains_participating_clients_only():
    """200,000 clients, of which at most 3 x 20 take part."""
    n, features = 200_000, 50
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, features)).astype(np.float32), rng.integers(0, 10, n)
    federation = fedrax.Federation.from_arrays(x, y, offsets=np.arange(n + 1), shuffle=False)
    task = fedrax.classification(Logistic().build((features,), 10))
    result = run(fedrax.Scaffold(local=LOCAL), federation, task=task, cohort_size=20, rounds=3)
    rows = {len(leaf) for leaf in jax.tree.leaves(result.store)}
    assert len(result.homes) <= max(rows) <= 64 * 9 / 8
    assert not np.any(result.client_state(next(c for c in range(n) if c not in result.homes)).control["output"]["bias"])


def test_float64_from_end_to_end(tmp_path):
    """Parameters, states, checkpoint and resumed run, with a more precise result than in float32."""
    algorithm, options = fedrax.Scaffold(local=LOCAL), {"dtype": "float64", "directory": tmp_path, "rounds": 3}
    run(algorithm, **options)
    result = run(algorithm, **(options | {"rounds": 5}), resume=True)
    leaves = jax.tree.leaves((result.params, result.server, [result.client_state(c) for c in range(8)]))
    assert {str(leaf.dtype) for leaf in leaves} == {"float64"}
    assert_close(result, run(algorithm, dtype="float64", rounds=5, devices=1), 1e-14)
    with pytest.raises(AssertionError):
        assert_close(result, run(algorithm, rounds=5), 1e-12)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"output": {"weight": np.ones((4, 3)), "bias": np.zeros(3)}}, r"weight is of shape \(4, 3\), .* \(3, 4\)"),
        ({"output": {"weight": np.ones((3, 4))}}, r"output/bias is missing, should be of shape \(3,\)"),
        ({"output": {"weight": np.ones((3, 4)), "bias": np.zeros(3)}, "b": 1.0}, r"b is of shape \(\), .* missing"),
    ],
)
def test_initial_parameters_that_do_not_fit_are_rejected(start, message):
    with pytest.raises(FedraxError, match=message):
        run(params=start, rounds=1)


def test_init_that_branches_on_its_key_runs_uncompiled():
    def init(key: jax.Array) -> Any:
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return {"output": {"weight": rng.normal(size=(3, 4)), "bias": np.zeros(3)}}

    task = dataclasses.replace(TASK, init=init)
    first, again, other = (run(task=task, rounds=1, seed=seed).params["output"]["weight"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_initial_parameters_are_converted_to_the_dtype_of_the_run():
    start = {"output": {"weight": np.ones((3, 4), np.float64), "bias": np.zeros(3)}}
    result = run(params=start, rounds=1, federation=make_federation(test_rows=5), task=TASK)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(result.params)} == {"float32"}


def test_arrays_sent_in_an_earlier_phase_are_counted_once():
    """The second phase adds G (EPISODE), the mean gradient (MimeSVRG), also s (Mime), but not x."""
    model, _ = bytes_per_client(FedAvg(LOCAL))
    assert bytes_per_client(fedrax.Episode(LOCAL)) == (2 * model, 2 * model)
    assert bytes_per_client(fedrax.algorithms.MimeSVRG(LOCAL)) == (2 * model, 2 * model)
    assert bytes_per_client(fedrax.algorithms.Mime(LOCAL))[0] == 3 * model


def test_arrays_that_jitted_functions_return_unchanged_are_counted_once():
    @hyperparameters
    class Compiled(fedrax.Episode):
        def center(self, server: Any, cohort: Any) -> tuple[Any, dict]:
            return jax.jit(jax.jit(super().center))(server, cohort)

        def broadcast(self, server: Any) -> Any:
            return jax.jit(super().broadcast)(server)

    assert bytes_per_client(Compiled(LOCAL)) == bytes_per_client(fedrax.Episode(LOCAL))


def test_gradient_counts_exceed_32_bits():
    """One client with many full-batch steps over many samples."""

    @hyperparameters
    class ShapeTracer(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            zero = jax.tree.map(jnp.zeros_like, message)
            return ClientOutput(upload=zero, info={"gradients": self.local.samples(data, 5000)})

    rows = 500_000
    large = Federation.from_arrays(np.zeros((rows, 4), np.float32), np.arange(rows) % 3, offsets=np.array([0, rows]))
    made = run(ShapeTracer(LocalSGD(batch_size="full", steps=5000)), large, rounds=1, cohort_size=1)
    assert made.events[0]["gradients"] == 2_500_000_000
