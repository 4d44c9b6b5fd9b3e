"""GradMA: its memory of updates, its fixed points, and its precision for ill-conditioned projections."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import fedrax
from fedrax.algorithms.gradma import GradMAS
from tests import reference, reference_methods
from tests.algorithms.problems import Case, expected, make_algorithm, make_problem, server_vectors, simulate
from tests.slow import slow_cases

LOCAL = {"lr": 0.1, "steps": 2, "batch_size": 3}


# Evictions from a memory of three clients by Algorithm 4, derived by hand

SCRIPT = [
    ([2, 1], {1, 2}, "there is room"),
    ([1, 0], {0, 1, 2}, "there is room; 1 has counted to two"),
    ([3], {0, 1, 3}, "0 and 2 have counted to one: 2 came first"),
    ([4, 0], {0, 1, 4}, "0 is safe in the cohort; 3 has counted to one, 1 to two"),
    ([2], {0, 1, 2}, "4 has counted to one; 2 is back, and counts from one again"),
    ([6, 5], {0, 5, 6}, "2 has counted to one; of 0 and 1, both at two, 1 came first"),
    ([3], {0, 3, 6}, "5 and 6 have counted to one and came together: 5 is the smaller number"),
    ([6, 1], {0, 1, 6}, "3 has counted to one; 6 counts to two"),
    ([4], {0, 4, 6}, "1 has counted to one"),
    ([5, 4], {4, 5, 6}, "4 is safe; 0 and 6 have counted to two: 0 came first"),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rounds", range(1, len(SCRIPT) + 1))
def test_memory_evicts_clients_as_in_algorithm_4(rounds: int):
    cohorts, kept = [cohort for cohort, _, _ in SCRIPT[:rounds]], SCRIPT[rounds - 1][1]
    problem, options = make_problem(), {"local": LOCAL, "memory": 3}
    clients = problem.clients(reference.Local(**LOCAL))
    by_paper: Any = reference_methods.build(clients, problem.x0, "GradMAS", options)
    reference_methods.run(by_paper, cohorts)
    assert set(by_paper.buffer) == kept
    algorithm: Any = make_algorithm("GradMAS", options)
    result = run(algorithm, problem, cohorts)
    assert set(algorithm.remembered(result.server)) == kept
    actual, desired = server_vectors(problem.problem, algorithm, result.server), by_paper.server_state()
    assert actual.keys() == desired.keys()
    for name, value in desired.items():
        np.testing.assert_allclose(actual[name], value, atol=1e-12, err_msg=name)


def run(algorithm: Any, problem: Any, cohorts: list, dtype: str = "float64") -> fedrax.Result:
    """Run with the given cohorts."""
    settings: dict[str, Any] = {
        "rounds": len(cohorts),
        "dtype": dtype,
        "plan": "scan",
        "devices": 1,
        "eval_every": 10_000,
    }
    script = fedrax.simulation.Script(cohorts=cohorts)
    return fedrax.simulate(
        algorithm, problem.task, problem.federation, params=problem.params, script=script, **settings
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rounds", [1, 3, 6])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_server_step_has_no_negative_product_with_a_stored_update(rounds: int, dtype: str):
    case = Case("GradMAS", {"local": LOCAL, "beta1": 0.9, "beta2": 0.9}, varying_cohorts=True, rounds=rounds)
    problem = make_problem().problem
    state = server_vectors(problem, case.algorithm(), simulate(case, dtype=dtype).server)
    momentum = state.pop("momentum")
    cosines = [d @ momentum / np.linalg.norm(d) / np.linalg.norm(momentum) for d in state.values()]
    assert min(cosines) > (-1e-9 if dtype == "float64" else -1e-4)
    assert len(cosines) == (4, 6, 6)[(1, 3, 6).index(rounds)]


# Client 0 pulls to 1, client 1 to -1; client 0 takes part in the first round only


TUG_OF_WAR = fedrax.Task(
    init=lambda key: {"x": jnp.zeros(())}, loss=lambda params, batch, key: (params["x"] - batch.x) ** 2 / 2
)


def tug_of_war(beta2: float, rounds: int) -> float:
    """x, in float32, after client 0's round and ``rounds`` rounds of client 1."""
    federation = fedrax.Federation.from_arrays(np.array([1.0, -1.0]), np.zeros(2), offsets=np.arange(3), shuffle=False)
    algorithm = GradMAS(fedrax.LocalSGD(lr=0.1, steps=1), beta1=0.0, beta2=beta2)
    script = fedrax.simulation.Script(cohorts=[[0]] + [[1]] * rounds)
    settings: dict[str, Any] = {"rounds": rounds + 1, "eval_every": 10_000, "devices": 1}
    return float(fedrax.simulate(algorithm, TUG_OF_WAR, federation, script=script, **settings).params["x"])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("beta2", [0.1, 0.5, 0.9])
def test_direction_of_a_long_absent_client_is_kept(beta2: float):
    """|D[0]| decays below the smallest float32, but no direction agrees with both updates, so that x does not move."""
    assert beta2**1000 < np.finfo(np.float32).smallest_subnormal
    np.testing.assert_allclose(tug_of_war(beta2, 1000), 0.1, atol=1e-5)


def test_without_memory_the_absent_client_has_no_effect():
    np.testing.assert_allclose(tug_of_war(0.0, 200), -1, atol=1e-5)


# Fixed points


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("beta1", [0.0, 0.5])
def test_server_stops_where_the_cone_is_empty(beta1: float):
    """With full participation GradMA-S converges to a point, not the optimum, where a positive combination of the
    clients' updates is zero, so that no direction agrees with all of them.
    """
    local = {"lr": 0.1, "steps": 4, "batch_size": "full"}
    problem = make_problem("quadratic", (9,) * 7)
    result = run(make_algorithm("GradMAS", {"local": local, "beta1": beta1}), problem, [list(range(7))] * 600)
    x = reference.join(problem.problem, result.params)
    clients = problem.clients(reference.Local(**local))
    updates = np.array([x - client.descend(x, reference.Part(i, 1.0, 0)).params for i, client in enumerate(clients)])
    assert np.linalg.norm(updates.mean(0)) > 1e-3
    scale = np.linalg.norm(updates, axis=1).max()
    # min |updates' w| subject to w >= 0, sum w = 1
    target = np.append(np.zeros(updates.shape[1]), 1.0)
    _, rest = scipy.optimize.nnls(np.vstack([updates.T / scale, np.ones(7)]), target)
    assert rest < 1e-6


# Full batches: the columns of the second step are opposite, and those of later steps almost


FULL_BATCHES = list(product(("float64", "float32"), ("GradMAW", "GradMA"), ("vector", "leaf")))
IN_MAKE_TEST = [("float64", "GradMA", "leaf")]
"""GradMA has the workers of GradMA-W; ``test_gradma_compiled`` tests the scope "vector"."""


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize(("dtype", "method", "scope"), slow_cases(FULL_BATCHES, IN_MAKE_TEST))
def test_full_batches_agree_with_numpy_to_the_resolution_of_the_dtype(dtype: str, method: str, scope: str):
    """A cone between columns at an angle s to opposite has width s, and their inner products resolve s^2: float64
    resolves s down to 1e-7, where a step along the projection has length s eta; float32 down to 3e-3.
    """
    case = Case(method, {"local": {"lr": 0.1, "steps": 6, "batch_size": "full"}, "scope": scope})
    problem, exact = make_problem(), expected(case)
    actual = reference.join(problem.problem, simulate(case, dtype=dtype).params)
    assert np.abs(exact.x - problem.x0).max() > 0.05
    np.testing.assert_allclose(actual, exact.x, rtol=0, atol=1e-6 if dtype == "float64" else 5e-4)
