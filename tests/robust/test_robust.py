"""Robust aggregation and attacks: their values, effective defenses, and rejected combinations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import (
    FedAvg,
    Federation,
    FedraxError,
    LocalSGD,
    Result,
    Scaffold,
    Upcycled,
    classification,
    hyperparameters,
    simulate,
    sweep,
    tree,
)
from fedrax.algorithms import MIFA, Scaffnew
from fedrax.compression import Quantized
from fedrax.contract import binary_classification
from fedrax.contract.algorithm import Algorithm, Cohort
from fedrax.models import Linear, Logistic
from fedrax.prng.keys import NamedKeys
from fedrax.robust import Attacked, Robust
from fedrax.robust.attacked_clients import ALittle, Gaussian, LabelFlip, Scaling
from fedrax.robust.rules import GeometricMedian, Krum, Median, NormBound, TrimmedMean
from fedrax.simulation import Script
from tests.simulation.problems import FEDERATION, LOCAL, MODEL_BYTES, TASK, assert_close, bytes_per_client, run
from tests.slow import slow_cases
from tests.wrappers.own_methods import SecureAggregation

FEDAVG = FedAvg(local=LOCAL)


ROWS = 7


def cohort_of(uploads: Any, rows: int = ROWS) -> Cohort:
    """A cohort of clients 0, 1, ... with uploads in the first of ``rows`` and zeros in the others."""
    size = len(jax.tree.leaves(uploads)[0])

    def put(values: Any, empty: float = 0) -> Any:
        values = np.asarray(values)
        padded = np.concatenate([values, np.full((rows - size, *values.shape[1:]), empty, values.dtype)])
        return jnp.asarray(padded, jnp.float32 if values.dtype == float else None)

    facts = {"size": jnp.float32(size), "num_clients": 99, "round": jnp.int32(0), "keys": NamedKeys(jax.random.key(0))}
    clients, weights = put(np.arange(size, dtype=np.int32), 99), put(np.full(size, 1 / size))
    return Cohort((), (), (), clients, weights, **facts, uploads=jax.tree.map(put, uploads))  # type: ignore[arg-type]


aggregate = jax.jit(lambda rule, cohort: rule(cohort))


# -- rules ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("size", [1, 2, 5, 6])
@pytest.mark.parametrize(
    "rule",
    [Median(), TrimmedMean(0.2), NormBound(0.5), GeometricMedian(), Krum(keep=2)],
    ids=lambda r: type(r).__name__,
)
def test_rules_ignore_padding_rows(rule: Any, size: int):
    """Padding rows contain zeros, which would attract any average."""
    rng = np.random.default_rng(size)
    uploads = {"a": 5 + rng.normal(size=(size, 3, 2)), "b": rng.normal(size=(size, 4))}
    padded, alone = aggregate(rule, cohort_of(uploads)), aggregate(rule, cohort_of(uploads, rows=size))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), padded, alone)


def test_geometric_median_is_a_stationary_point():
    """The gradient of sum |z - u_k|, a sum of unit vectors, is zero."""
    points = np.random.default_rng(0).normal(size=(7, 3)) + np.array([40, 0, 0])
    points[0] = [-900, 5, 5]
    z = np.asarray(aggregate(GeometricMedian(iterations=200), cohort_of({"z": points}))["z"])
    ways = (points - z) / np.linalg.norm(points - z, axis=1, keepdims=True)
    assert np.linalg.norm(ways.sum(0)) < 1e-2
    assert abs(z[0] - 40) < 2


def test_krum_breaks_ties_by_client_number():
    """n - f - 2 = 1 neighbor counts: of the two closest clients, whose scores are equal, the smaller number is
    selected.
    """
    points = np.array([[9.0, 0], [0, 0.1], [0, 0.2], [5, 5], [-7, 3]])
    chosen = aggregate(Krum(attackers=2), cohort_of({"z": points}))["z"]
    np.testing.assert_allclose(chosen, points[1], rtol=1e-6)


HONEST = np.random.default_rng(3).normal(size=(5, 4)) + np.array([2.0, 0, 0, 0])


@pytest.mark.parametrize("outlier", [1e9, 1e25, 3e38, np.inf, np.nan], ids=str)
@pytest.mark.parametrize(
    "rule", [Median(), TrimmedMean(0.2), NormBound(9.0), GeometricMedian(), Krum(), Krum(keep=3)], ids=repr
)
def test_one_outlier_of_any_size_has_bounded_influence(rule: Any, outlier: float):
    """Also if its square overflows or it is NaN; the attacker has the smallest number and wins ties."""
    uploads = np.concatenate([np.full((1, 4), outlier), HONEST])
    z = np.asarray(aggregate(rule, cohort_of({"z": uploads}))["z"])
    assert np.linalg.norm(z - HONEST.mean(0)) < 3.0
    if isinstance(rule, Krum):
        alone = np.asarray(aggregate(rule, cohort_of({"z": np.concatenate([np.full((1, 4), 1e3), HONEST])}))["z"])
        np.testing.assert_array_equal(z, alone)


def test_trimmed_mean_of_the_two_middle_values():
    """Trimming half of an even cohort keeps the two middle values."""
    uploads = {"z": np.array([[1.0, 2.0], [3.0, 6.0]])}
    np.testing.assert_allclose(aggregate(TrimmedMean(0.49999), cohort_of(uploads))["z"], [2.0, 4.0])
    np.testing.assert_allclose(aggregate(GeometricMedian(), cohort_of(uploads))["z"], [2.0, 4.0])


# -- defenses ------------------------------------------------------------------------------------------------------

CLIENTS = 20


def clean_federation() -> Federation:
    """Clients with the same distribution, whose labels are linear."""
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(1000, 6)).astype(np.float32), rng.normal(size=(6, 3))
    y, owner = (x @ weight).argmax(1), np.arange(600) % CLIENTS
    return Federation.from_arrays(x[:600], y[:600], owner, test=(x[600:], y[600:]), num_classes=3)


CLEAN = clean_federation()


def accuracy(method: Algorithm) -> float:
    """Accuracy after ten rounds of full participation."""
    task = classification(Logistic().build((6,), 3))
    result = simulate(method, task, CLEAN, rounds=10, cohort_size=CLIENTS, eval_every=10, devices=2)
    assert result.events[-1].get("malicious", 0.2) == pytest.approx(0.2)
    return float(result.events[-1]["test_accuracy"])


@pytest.mark.slow
def test_sign_flipping_by_a_fifth_of_clients_breaks_the_mean_only():
    """Flipped and scaled by five: 0.8 - 5 * 0.2 < 0, so that the mean points uphill."""
    inner, attack = FedAvg(local=LocalSGD(lr=0.3, steps=5, batch_size=10)), Scaling(-5.0)
    assert accuracy(inner) > 0.9
    assert accuracy(Attacked(inner, attack)) < 0.34
    for rule in (Median(), Krum(attackers=4, keep=5)):
        assert accuracy(Attacked(Robust(inner, rule), attack)) > 0.88


def test_noise_is_independent_and_colluders_upload_the_same():
    uploads = {"a": np.random.default_rng(2).normal(size=(6, 4))}
    cohort, malicious = cohort_of(uploads), jnp.arange(ROWS) < 3
    attack = jax.jit(lambda attack, cohort: attack(cohort, malicious)["a"])
    drawn = np.asarray(attack(Gaussian(2.0), cohort))
    backwards = np.asarray(attack(Gaussian(2.0), cohort._replace(clients=cohort.clients[::-1])))
    np.testing.assert_array_equal(backwards[::-1], drawn)
    assert len(np.unique(drawn[:6])) == 24
    honest, sent = uploads["a"][:3], np.asarray(attack(ALittle(z=1.5), cohort))
    np.testing.assert_allclose(sent, np.broadcast_to(honest.mean(0) - 1.5 * honest.std(0), (ROWS, 4)), rtol=1e-5)


def test_z_of_a_little_is_enough_for_24_of_50_clients():
    """Baruch et al. 2019, section 3.2: two more clients are needed, Phi(z) = 24 / 26 and z = 1.43."""
    rng = np.random.default_rng(3)
    uploads, malicious = {"a": rng.normal(size=(50, 2))}, jnp.arange(50) < 24
    honest = uploads["a"][:24]
    z = (honest.mean(0) - np.asarray(ALittle()(cohort_of(uploads, rows=50), malicious)["a"][0])) / honest.std(0)
    np.testing.assert_allclose(z, 1.426, atol=2e-3)


@pytest.mark.parametrize(("share", "clients", "count"), [(0.2, (), 20), (0.5, (), 50), (0.9, (3, 98), 2)])
def test_number_of_malicious_clients(share: float, clients: tuple[int, ...], count: int):
    wrapper = Attacked(FEDAVG, share=share, clients=clients)
    bad = np.asarray(wrapper.malicious(jnp.arange(100), 100))
    assert bad.sum() == count
    assert not np.asarray(wrapper.malicious(jnp.arange(100, 120), 100))[1:].any()
    if clients:
        assert bad[list(clients)].all()
    else:
        other = Attacked(FEDAVG, share=share, seed=1)
        assert (bad != np.asarray(other.malicious(jnp.arange(100), 100))).any()
        assert bool(wrapper.malicious(jnp.int32(7), 100)) == bad[7]


# -- other features -------------------------------------------------------------------------------------------------


ATTACKED = Attacked(Robust(Quantized(FEDAVG, bits=8), TrimmedMean(0.3)), ALittle(), share=0.5)
SHORT: dict[str, Any] = {"rounds": 2, "cohort_size": 5}


@pytest.fixture(scope="module")
def one_device() -> Result:
    """The run on one device, to which plans are compared."""
    return run(ATTACKED, **SHORT, devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases([{"plan": "vmap", "chunk": 2}, {"plan": "loop"}]), ids=["vmap", "loop"])
def test_plans_agree(plan: dict[str, Any], one_device: Result):
    """Decoded uploads, colluding attackers, and two devices with different numbers of clients."""
    assert_close(run(ATTACKED, **SHORT, **plan), one_device)


def test_bytes_are_those_of_the_inner_method():
    assert bytes_per_client(Attacked(Robust(FEDAVG))) == bytes_per_client(FEDAVG) == (MODEL_BYTES, MODEL_BYTES)


@pytest.mark.slow
def test_grid_of_bounds_is_vectorized():
    methods = [Attacked(Robust(FEDAVG, NormBound(bound)), Scaling(-3.0), share=0.4) for bound in (0.05, 0.5)]
    options: dict[str, Any] = {"rounds": 2, "cohort_size": 4, "eval_every": 100}
    together = sweep(methods, TASK, FEDERATION, mode="vectorized", **options)
    for method, (one,) in zip(methods, together, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            one.params,
            run(method, **options).params,
        )
    assert tree.norm(tree.sub(together[0][0].params, together[1][0].params)) > 1e-4


def test_labels_are_flipped_at_malicious_clients_only():
    flip = LabelFlip(classes=3)
    np.testing.assert_array_equal(flip.flipped(jnp.array([[0, 2], [1, -1]])), [[2, 0], [1, -1]])
    honest = run(Attacked(FEDAVG, flip, clients=(7,)), rounds=1, cohort_size=8)
    flipped = run(Attacked(FEDAVG, flip, share=1.0), rounds=1, cohort_size=8)
    for result, same in ((honest, 7 / 8), (flipped, 0.0)):
        assert result.events[-1]["malicious"] == pytest.approx(1 - same)
    assert tree.norm(tree.sub(honest.params, flipped.params)) > 1e-3


@hyperparameters
class First:
    """A user-defined rule."""

    def __call__(self, cohort: Cohort) -> Any:
        """The upload of the client with the smallest number."""
        return jax.tree.map(lambda u: u[jnp.argmin(cohort.clients)], cohort.uploads)


def test_labels_of_two_classes_are_exchanged():
    """Labels remain those of the loss, {0, 1} or {-1, 1}."""
    rng = np.random.default_rng(0)
    data = Federation.from_arrays(rng.normal(size=(24, 4)), rng.integers(0, 2, 24), np.arange(24) % 4)
    task = binary_classification(Linear().build((4,), 1))
    with pytest.raises(FedraxError, match="and the task has 2"):
        simulate(Attacked(FEDAVG, LabelFlip(classes=3)), task, data, rounds=1)
    assert simulate(Attacked(FEDAVG, LabelFlip(classes=2)), task, data, rounds=1).events


def test_weights_of_malicious_uploads_are_warned_of():
    sizes = FEDERATION.sizes
    found = run(Attacked(FEDAVG, clients=(7,)), rounds=1, cohort_size=8, weights="samples")
    assert found.events[-1]["malicious"] == pytest.approx(sizes[7] / sizes.sum())


def test_user_defined_aggregation_rule():
    one = run(Robust(FEDAVG, First()), rounds=1, script=Script(cohorts=[[5, 2, 4]]))  # type: ignore[arg-type]
    alone = run(FEDAVG, rounds=1, script=Script(cohorts=[[2]]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one.params, alone.params)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Robust(SecureAggregation(local=LOCAL)), "server of SecureAggregation receives only the sum"),
        (Robust(MIFA(local=LOCAL, memory="server")), "server of MIFA receives updates that it stores by client"),
        (Attacked(SecureAggregation(local=LOCAL)), "Attacked wraps methods whose clients send uploads only"),
        (Robust(Upcycled(Attacked(FEDAVG))), "put Attacked around Robust"),
        (Robust(FEDAVG, TrimmedMean(0.5)), "rule.trim must be less than 0.5"),
        (Attacked(FEDAVG, clients=(2, 2)), "must be different numbers from 0"),
        (Attacked(FEDAVG, clients=(8,)), "must be numbers from 0 to 7"),
        (Attacked(FEDAVG, LabelFlip()), "LabelFlip.classes is 10, and the task has 3 classes"),
    ],
    ids=["sums", "stored by client", "attacked sums", "order", "trim", "twice", "out of range", "classes"],
)
def test_misuse_raises_a_clear_error(method: Algorithm, message: str):
    with pytest.raises(FedraxError, match=message):
        run(method, rounds=1)


def test_rules_without_weights_reject_weights():
    with pytest.raises(FedraxError, match="Robust is defined for uniform aggregation weights only"):
        run(Attacked(Robust(FEDAVG)), rounds=1, weights="samples")
    run(Robust(FEDAVG, GeometricMedian()), rounds=1, weights="samples")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "inner", [Scaffold(local=LOCAL), Scaffnew(local=LocalSGD(lr=0.05, batch_size=2))], ids=["Scaffold", "Scaffnew"]
)
def test_uploads_of_several_parts_and_phases_that_upload_nothing(inner: Algorithm):
    honest, attacked = (run(m, rounds=2) for m in (inner, Attacked(Robust(inner, GeometricMedian()), share=0.0)))
    assert attacked.events[-1]["bytes_up"] == honest.events[-1]["bytes_up"]
    assert tree.norm(tree.sub(attacked.params, honest.params)) > 0
