"""Bytes counted by hand; client states, where they are kept and their size; float64 from end to end."""

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
from tests.simulation.problems import LOCAL, MODEL_BYTES, SIZES, TASK, assert_close, make_federation, run, travels
from tests.slow import slow_cases

BLOCKS = fedrax.LocalSGD(lr=0.02, steps=2, blocks=2)


@pytest.mark.parametrize(
    ("algorithm", "down", "up"),
    [
        (fedrax.FedAvg(local=LOCAL), 1, 1),  # x; Delta_i
        (fedrax.Scaffold(local=LOCAL), 2, 2),  # x, c; Delta_i, Delta c_i
        (fedrax.LoSAC(local=BLOCKS), 2, 2),  # x, phi; Delta x_i, Delta phi_i
        (fedrax.algorithms.MimeSVRG(local=LOCAL), 2, 2),  # x, then c; the full gradient, then Delta_i
        (fedrax.Episode(local=LOCAL, gamma=0.1), 2, 2),  # x, then G; G_i, then Delta_i
        (fedrax.algorithms.MIFA(local=LOCAL, memory="server"), 1, 1),  # x; Delta_i
        (fedrax.algorithms.MIFA(local=LOCAL, memory="clients"), 1, 1),  # x; the change of Delta_i
        (fedrax.algorithms.FedSaga(local=BLOCKS), 1, 1),  # x; Delta_i
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else str(value),
)
def test_bytes(algorithm: Algorithm, down: int, up: int):
    """Of one client a round, in either precision."""
    for dtype, each in (("float32", MODEL_BYTES), ("float64", 2 * MODEL_BYTES)):
        assert travels(algorithm, dtype) == (down * each, up * each)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_add_up_over_clients_and_rounds(dtype: str):
    events = run(fedrax.algorithms.MimeSVRG(local=LOCAL), dtype=dtype, rounds=3).events
    each = MODEL_BYTES * (2 if dtype == "float64" else 1)
    assert [event["bytes_down"] for event in events] == [2 * each * 3 * r for r in (1, 2, 3)]
    assert [event["bytes_up"] for event in events] == [2 * each * 3 * r for r in (1, 2, 3)]


class Tally(NamedTuple):
    """How often a client took part, and which rounds it saw."""

    times: jax.Array
    rounds: jax.Array


class TallyServer(NamedTuple):
    """What came up in the two phases."""

    params: Tree
    first: jax.Array
    second: jax.Array


@hyperparameters
class Tallying(Algorithm):
    """Counts: every number it holds is an integer known beforehand. State passes between phases and rounds."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Two."""
        return (Phase(self.broadcast, self.begin, self.middle), Phase(lambda s: s.first, self.end, self.server))

    def init(self, params: Tree, num_clients: int) -> TallyServer:
        """Zeros; one number a client in ``first``."""
        return TallyServer(params, jnp.zeros(num_clients), jnp.zeros(()))

    def init_client(self, params: Tree) -> Tally:
        """A hundred, to tell it from zero."""
        return Tally(jnp.float32(100), jnp.zeros(2))

    def begin(self, message: Tree, state: Tally, data: ClientData) -> ClientOutput:
        """Phase 1: hand over the count; keep it, doubled, for phase 2."""
        return ClientOutput(upload=(), each=state.times, state=(state, 2 * state.times))

    def middle(self, server: TallyServer, cohort: Cohort) -> tuple[TallyServer, Info]:
        """Phase 1: remember the counts by client."""
        return server._replace(first=server.first.at[cohort.clients].set(cohort.each, mode="drop")), {}

    def end(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Phase 2: count on."""
        before, doubled = state
        seen = before.rounds + jnp.stack([data.round.astype(float), doubled])
        return ClientOutput(upload=doubled, state=Tally(before.times + 1, seen.astype(jnp.float32)))

    def server(self, server: TallyServer, cohort: Cohort) -> tuple[TallyServer, Info]:
        """Phase 2: add up."""
        return server._replace(second=server.second + cohort.mean * cohort.size), {}


PLANS = [
    *({"plan": "scan", "devices": d} for d in (2, 1)),
    *({"plan": "vmap", "devices": d, "chunk": c} for d in (1, 2) for c in (1, 2, 3)),
    *({"plan": "loop", "devices": d} for d in (2, 1)),
    {"plan": "debug"},
]
TOLD_APART = [
    *(plan for plan in PLANS if plan.get("devices", 2) == 2 and plan.get("chunk", 2) == 2),
    {"plan": "vmap", "devices": 1, "chunk": 3},
]
"""Each plan, each number of devices, and chunks that divide a cohort and that do not."""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "plan", slow_cases(PLANS, TOLD_APART), ids=["-".join(str(value) for value in plan.values()) for plan in PLANS]
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


class SeenRows(NamedTuple):
    """What each round's cohort holds in its first rows, -1 beyond them."""

    params: Tree
    clients: jax.Array
    each: jax.Array
    uploads: jax.Array
    weights: jax.Array
    real: jax.Array


@hyperparameters
class Seeing(FedAvg):
    """A server that takes the first S rows to be the cohort's."""

    traits = fedrax.contract.Traits(stacked_uploads=True)

    def init(self, params: Tree, num_clients: int) -> SeenRows:
        """A row for each of five rounds."""
        return SeenRows(params, *[jnp.full((5, num_clients), -1.0)] * 5)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """The client's number, in two ways."""
        number = data.assignment.client
        return ClientOutput(upload=100.0 + number, each=number.astype(jnp.int8))

    def server(self, server: SeenRows, cohort: Cohort) -> tuple[SeenRows, Info]:
        """Note the first S rows."""
        here = jnp.arange(len(cohort.each)) < cohort.size
        found = (cohort.clients, cohort.each, cohort.uploads, cohort.weights, cohort.real)
        rows = [jnp.where(here, values, -1.0) for values in found]
        return SeenRows(
            server.params, *[t.at[cohort.round, : len(v)].set(v) for t, v in zip(server[1:], rows, strict=True)]
        ), {}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    "plan", slow_cases(PLANS, TOLD_APART), ids=["-".join(str(value) for value in plan.values()) for plan in PLANS]
)
def test_the_first_rows_are_the_cohort_in_client_order(plan: dict):
    """On two devices its clients lie in two places, with unused ones after each."""
    cohorts = [[4, 1], [5, 2, 7, 1], [0], [6, 4, 3, 2, 1], [1, 6]]
    script = fedrax.simulation.Script(cohorts=cohorts)
    seen = run(Seeing(), script=script, rounds=5, weights="samples", **plan).server
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
def test_the_store_has_a_row_for_each_client(devices: int, rows: int):
    """On every device, as long as that takes little memory."""
    script = fedrax.simulation.Script(cohorts=[[0, 1], [1, 2], [2, 0], [5, 1]])
    result = run(fedrax.Scaffold(local=LOCAL), script=script, devices=devices)
    assert set(result.homes) == {0, 1, 2, 5}
    assert {len(leaf) for leaf in jax.tree.leaves(result.store)} == {rows}


def test_a_large_federation_with_state_stays_small():
    """200,000 clients, of which 3 x 20 take part at most: no table of all of them is made."""
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
    """Parameters, states, checkpoint and resumed run are float64, and better than float32."""
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


def test_an_init_that_looks_at_its_key_cannot_be_compiled_but_runs():
    def init(key: jax.Array) -> Any:
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return {"output": {"weight": rng.normal(size=(3, 4)), "bias": np.zeros(3)}}

    task = dataclasses.replace(TASK, init=init)
    first, again, other = (run(task=task, rounds=1, seed=seed).params["output"]["weight"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_initial_parameters_are_taken_in_the_dtype_asked_for():
    start = {"output": {"weight": np.ones((3, 4), np.float64), "bias": np.zeros(3)}}
    result = run(params=start, rounds=1, federation=make_federation(test_rows=5), task=TASK)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(result.params)} == {"float32"}


def test_arrays_sent_in_an_earlier_phase_are_counted_once():
    """The second phase sends only what is new: G (EPISODE), the mean gradient (MimeSVRG), also s (Mime), but not x."""
    model, _ = travels(FedAvg(LOCAL))
    assert travels(fedrax.Episode(LOCAL)) == (2 * model, 2 * model)
    assert travels(fedrax.algorithms.MimeSVRG(LOCAL)) == (2 * model, 2 * model)
    assert travels(fedrax.algorithms.Mime(LOCAL))[0] == 3 * model


def test_arrays_that_jitted_functions_return_unchanged_are_counted_once():
    @hyperparameters
    class Compiled(fedrax.Episode):
        def center(self, server: Any, cohort: Any) -> tuple[Any, dict]:
            return jax.jit(jax.jit(super().center))(server, cohort)

        def broadcast(self, server: Any) -> Any:
            return jax.jit(super().broadcast)(server)

    assert travels(Compiled(LOCAL)) == travels(fedrax.Episode(LOCAL))


def test_gradient_counts_exceed_32_bits():
    """One client takes many full-batch steps over many samples."""

    @hyperparameters
    class ShapeTracer(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            zero = jax.tree.map(jnp.zeros_like, message)
            return ClientOutput(upload=zero, info={"gradients": self.local.samples(data, 5000)})

    rows = 500_000
    large = Federation.from_arrays(np.zeros((rows, 4), np.float32), np.arange(rows) % 3, offsets=np.array([0, rows]))
    made = run(ShapeTracer(LocalSGD(batch_size="full", steps=5000)), large, rounds=1, cohort_size=1)
    assert made.events[0]["gradients"] == 2_500_000_000
