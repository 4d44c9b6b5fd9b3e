"""Clients whose batches all devices share: results as on one device, and only if it shortens a round."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Scaffold, classification, simulate
from fedrax.algorithms import MimeSVRG
from fedrax.compression import EFSign
from fedrax.contract.algorithm import Algorithm
from fedrax.experiments.method_registry import algorithms
from fedrax.models import Logistic
from fedrax.optim import Optax
from fedrax.participation import Poisson
from fedrax.privacy import ObjectivePerturbation
from fedrax.robust import Robust
from fedrax.simulation import MessageSelection, Result, Script
from fedrax.simulation.executors.data_parallel import clients_to_share
from fedrax.xla import Limits, Options, use_options
from tests.slow import slow_cases

SIZES = (9, 10, 8, 12, 10, 11, 9)
LOCAL = LocalSGD(lr=0.1, epochs=2, batch_size=8)
NOT_SHARED = {"losac", "fedsaga", "sampledp"}
"""Methods whose clients are not shared: gradient tables are on one device, and private gradients are per sample."""
IN_MAKE_TEST = {"fedsgd", "scaffold", "mimesvrg", "efsign", "gradma", "episode", "ditto"}


@pytest.fixture(scope="module", autouse=True)
def small_microbatches() -> Iterator[None]:
    """Split the batches of this small model into microbatches of two samples."""
    with use_options(Options(limits=Limits(microbatch_bytes=2 * 3 * 4, microbatch_weight_ratio=0))):
        yield


def federation() -> Federation:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = (rng.normal(size=(len(owner), 4)) + 0.5 * rng.normal(size=(len(SIZES), 4))[owner]).astype(np.float32)
    y = ((x @ rng.normal(size=(4, 3))).argmax(1) + owner % 2) % 3
    return Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)


TASK, FEDERATION = classification(Logistic().build((4,), 3)), federation()


def run(algorithm: Algorithm, **changes: Any) -> Result:
    settings: dict[str, Any] = {"rounds": 3, "cohort_size": 3, "plan": "scan", "eval_every": 3}
    return simulate(algorithm, TASK, FEDERATION, **(settings | changes))


def assert_agrees(actual: Result, desired: Result, shared: bool = True) -> None:
    """Assert equality up to rounding, because batch sums are split in halves."""
    assert ("left over on all of them together" in actual.plan) == shared
    assert "left over" not in desired.plan
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(near, (actual.params, actual.server), (desired.params, desired.server))
    for one, other in zip(actual.events, desired.events, strict=True):
        numbers = [name for name, value in other.items() if isinstance(value, float) and "seconds" not in name]
        near([one[name] for name in numbers], [other[name] for name in numbers])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", slow_cases(algorithms(), IN_MAKE_TEST))
def test_methods_agree_with_one_device(name: str):
    kind = algorithms()[name]
    algorithm = ObjectivePerturbation(guarantee="none") if kind is ObjectivePerturbation else kind()
    local = getattr(algorithm, "local", None)
    if local is not None:
        algorithm = dataclasses.replace(algorithm, local=dataclasses.replace(local, lr=0.05))  # type: ignore[call-arg]
    assert_agrees(run(algorithm), run(algorithm, devices=1), shared=name not in NOT_SHARED)


def test_gradient_is_traced_once_for_all_programs():
    seen: list[int] = []

    def loss(params: Any, batch: Any, key: Any) -> Any:
        seen.append(len(batch.x))
        return TASK.loss(params, batch, key)

    task = dataclasses.replace(TASK, loss=loss, outputs=None)
    actual = simulate(FedAvg(local=LOCAL), task, FEDERATION, rounds=1, cohort_size=3, plan="scan")
    assert "left over on all of them together" in actual.plan
    assert seen.count(2) == 1 and len(set(seen)) == len(seen)  # a microbatch; and once for all other checks


COHORTS = [[0, 1, 2, 3, 4], [2], [5, 0, 6]]
SETTINGS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "cohorts of other sizes, steps given": (
        FedAvg(local=LOCAL),
        {"script": Script(cohorts=COHORTS, steps=np.arange(3 * 7).reshape(3, 7) % 4 + 1)},
    ),
    "stragglers": (FedAvg(local=LOCAL), {"cohort_size": 5, "stragglers": 0.5}),
    "Poisson sampling": (FedAvg(local=LOCAL), {"participation": Poisson()}),
    "carried optimizer": (
        FedAvg(local=dataclasses.replace(LOCAL, optimizer=Optax.of(optax.adam), carry=True, lr=0.01)),
        {},
    ),
    "stacked uploads": (Robust(inner=Scaffold(local=LOCAL)), {"cohort_size": 5}),
    "bfloat16 products": (FedAvg(local=LOCAL), {"precision": "bfloat16"}),
    "float64": (MimeSVRG(local=LOCAL), {"dtype": "float64"}),
}


def test_stacked_uploads_of_shared_clients():
    """A median of uploads, of a cohort of which devices share some clients."""
    algorithm, changes = Robust(inner=FedAvg(local=LOCAL)), {"cohort_size": 5, "rounds": 2}
    assert_agrees(run(algorithm, **changes), run(algorithm, devices=1, **changes))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_agree_with_one_device(name: str):
    algorithm, changes = SETTINGS[name]
    assert_agrees(run(algorithm, **changes), run(algorithm, devices=1, **changes))


@pytest.mark.slow
def test_messages_of_shared_clients_are_recorded():
    record = MessageSelection(clients=range(len(SIZES)))
    actual, desired = (run(EFSign(inner=FedAvg(local=LOCAL)), record=record, devices=d) for d in (2, 1))
    assert [(e.round, e.client) for e in actual.exchanges] == [(e.round, e.client) for e in desired.exchanges]
    for one, other in zip(actual.exchanges, desired.exchanges, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), one.sent, other.sent)


def test_resumed_run_is_bitwise_equal(tmp_path: Path):
    algorithm = Scaffold(local=LOCAL)
    uninterrupted = run(algorithm, rounds=4)
    run(algorithm, rounds=2, directory=tmp_path)
    actual = run(algorithm, rounds=4, directory=tmp_path, resume=True)
    jax.tree.map(
        np.testing.assert_array_equal, (actual.params, actual.server), (uninterrupted.params, uninterrupted.server)
    )


@pytest.mark.slow
def test_diverged_client_is_named():
    x, y = np.array(FEDERATION.train[0]), FEDERATION.train[1]
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x[owner == 4] = 3e38
    broken = Federation.from_arrays(x, y, owner, num_classes=3)
    with pytest.raises(FedraxError, match="client 4"):
        simulate(FedAvg(local=LOCAL), TASK, broken, rounds=3, cohort_size=7, plan="scan", devices=2)


def test_no_client_is_shared_if_no_device_would_wait():
    equal = Federation.from_arrays(FEDERATION.train[0][:64], FEDERATION.train[1][:64], np.arange(64) // 8)
    plan = lambda size: simulate(FedAvg(local=LOCAL), TASK, equal, rounds=1, cohort_size=size).plan  # noqa: E731
    assert ["left over" in plan(size) for size in (3, 4)] == [True, False]


def round_duration(assigned: list[list[int]], cost: list[float], speed: float, shared: set[int]) -> float:
    """Duration of a round."""
    alone = max(sum(cost[p] for p in places if p not in shared) for places in assigned)
    return alone + 1.05 * sum(cost[p] for p in shared) / speed


def test_equal_clients_are_shared_optimally():
    for counts in itertools.product(range(4), repeat=3):
        places = iter(range(sum(counts)))
        assigned = [[next(places) for _ in range(n)] for n in counts]
        if not any(counts):
            continue
        cost = [1.0] * sum(counts)
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(len(cost)), n) for n in range(len(cost) + 1)
        )
        best = min(round_duration(assigned, cost, 3.0, set(subset)) for subset in subsets)
        assert round_duration(assigned, cost, 3.0, clients_to_share(assigned, cost, 3.0)) <= best / 0.95


def test_unequal_clients_are_shared_only_for_a_gain():
    rng = np.random.default_rng(0)
    for _ in range(200):
        owner, cost = rng.integers(0, 4, 9), rng.lognormal(sigma=1.5, size=9).tolist()
        assigned = [np.flatnonzero(owner == d).tolist() for d in range(4)]
        shared = clients_to_share(assigned, cost, 4.0)
        before = round_duration(assigned, cost, 4.0, set())
        assert round_duration(assigned, cost, 4.0, shared) <= (0.95 if shared else 1) * before
    assert 0 in clients_to_share([[0], [1]], [20_000.0, 10.0], 2.0)
    assert clients_to_share([[0], [1]], [1.0, 1.0], 1.0) == set()
    # as many as make the loads equal
    shared = clients_to_share([[0, 1, 2, 3], [4, 5]], [1.0] * 6, 2.0)
    assert len(shared) == 2 and shared < {0, 1, 2, 3}
